"""Sites of a model: where a format can be chosen, found by watching one forward pass over the calibration data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from assay.configs import architectures
from assay.precision.errors import BadModel
from assay.precision.observation.running import rows_kept
from assay.precision.observation.streaming import Weights
from assay.precision.observation.tracer import LookUp, Product, Visitor, tensors_of
from assay.precision.schemes import Moments
from assay.precision.schemes.scheme import SiteType


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How an engine groups a model's sites; by default as most engines do, with any scheme at any site."""

    unfused: bool = False
    """No linears run as one product."""
    one_cache: bool = False
    """The KV caches of all layers share one scheme."""
    tied: bool = True
    """A table that is also the head's weight may be quantised."""
    allows: Callable[[Any, str, bool], bool] = lambda site, scheme, head: True
    """Whether a `Site` may have a scheme made for its type; the last argument: the site gives the logits."""


ANY_SCHEME = EngineRules()
"""The rules without an engine."""


_ROWS = 64  # Rows of a linear's input to keep as a sample, eight of each of the first batches
_ROUTED = 256  # Rows of a batch whose router logits are kept

_LEAST = 1e-12  # Lower bound of a column's importance, as a share of the largest

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:[.:]|$)")


class Site(str):
    """A tensor of the model that may take another format: its name, as in assignments, with its properties.

    A linear is named by its module or parameter; other sites carry a suffix: `model.layers.0.self_attn:scores`.
    """

    def __new__(
        cls,
        name: str,
        site_type: SiteType,
        role: str,
        shape: tuple[int, ...] = (),
        unit: str = "",
        tied: str = "",
        source: str = "",
    ) -> Site:
        site = super().__new__(cls, name)
        site.type, site.role, site.shape = site_type, role, shape
        site.unit, site.tied, site.source = unit or name, tied, source
        return site

    def __getnewargs__(self) -> tuple[str, SiteType, str]:  # type: ignore[override] # for copies and pickles
        return str(self), self.type, self.role

    type: SiteType
    """The type of tensor, for which schemes are made."""
    role: str
    """linear, convolution, recurrence, router, experts, embedding, or the suffix."""
    shape: tuple[int, ...]
    """Of the weight: [N, K], [E, N, K] or [V, D]; empty without one."""
    unit: str
    """What takes one scheme together in a serving engine: q, k and v; gate and up; the experts of a layer."""
    tied: str
    """Name of the site that holds the same weight and its scheme; mostly empty."""
    source: str
    """Name of the site whose output is this one's unchanged input, such as a norm's output in a linear; mostly
    empty."""

    @property
    def in_attention(self) -> bool:
        """Whether it is a stage of attention or a KV cache: not the linears around it."""
        return self.type == "kv_cache" or self.role in ("q", "k", "v", "scores", "probabilities")

    @property
    def parameters(self) -> int:
        return math.prod(self.shape) if self.shape else 0


def layer_and_kind(name: str) -> tuple[int | None, str]:
    """Return the layer of a site or a unit, None outside of the stack, and its name within the layer: of
    "model.layers.3.mlp.up_proj" 3 and "mlp.up_proj"."""
    match = _LAYER.search(name)
    if match is None:
        return None, name
    return int(match[1]), name[match.end() :] or name[: match.start()] or "layer"


def heads_among(sites: Collection[Site]) -> frozenset[str]:
    """Return the names of the linears that give the logits: of the shape of an embedding table, outside of the stack of
    layers or the only one of that shape (an MLP's linears may have the shape of a table of positions)."""
    tables = {site.shape for site in sites if site.type == "embedding"}
    alike = [site for site in sites if site.role == "linear" and site.shape in tables]
    shapes = Counter(site.shape for site in alike)
    return frozenset(str(site) for site in alike if layer_and_kind(site)[0] is None or shapes[site.shape] == 1)


@dataclass(slots=True)
class Statistics:
    """Statistics of a site's values: largest magnitude, non-finite count, and for an input its columns."""

    nonfinite: int = 0
    largest: Tensor | None = None
    """Largest magnitude of each column, [K]."""
    total: Tensor | None = None
    square: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)
    count: int = 0
    """Rows, padding included."""
    valid_rows: int = 0
    """Rows that are no padding, as far as known; all other statistics are over these."""
    experts: dict[int, int] = field(default_factory=dict)
    """Rows of each expert of a parameter [E, N, K]; an expert without rows is missing."""
    sequence_maxima: list[Tensor] = field(default_factory=list)
    """Largest magnitude of each sequence, [B] for each batch; [1], of the batch, where its rows can't be assigned to
    sequences."""
    row_maxima: list[Tensor] = field(default_factory=list)
    """Of a residual stream: largest magnitude of each row, [B, T] for each batch."""
    logits: list[Tensor] = field(default_factory=list)
    """Of a router: a sample of its logits, [R, E] for each batch."""

    def add(self, x: Tensor, columns: bool = True, sequences: int = 1, kept: Tensor | None = None) -> None:
        """Add one batch of values of ``sequences`` sequences; ``columns``: their last dimension is the same in every
        batch; ``kept``: which of their rows are no padding, None: all."""
        if not x.numel():  # an expert without tokens
            return
        flat = x.detach().reshape(-1, x.shape[-1])
        self.count += flat.shape[0]
        if kept is not None:
            flat = torch.where(kept[:, None], flat, 0.0)
        by_sequence = torch.unflatten(flat, 0, (1 if flat.shape[0] % sequences else sequences, -1))
        by_sequence = by_sequence if columns else by_sequence.flatten(1)[..., None]
        least, most = by_sequence.amin(1), by_sequence.amax(1)  # a tenth of the time of aminmax
        self.sequence_maxima.append(torch.maximum(-least, most).amax(1))
        least, most = least.amin(0), most.amax(0)
        flat = flat if kept is None else flat[kept]
        if not flat.numel():  # padding alone
            return
        flat = flat if columns else flat.reshape(-1, 1)
        largest = torch.maximum(-least, most)
        total, square = (torch.linalg.vector_norm(flat, order, dim=0) ** order for order in (1, 2))
        if self.largest is None or self.total is None or self.square is None:
            self.largest, self.total, self.square = largest, total, square
        else:
            self.largest = torch.maximum(self.largest, largest)
            self.total, self.square = self.total + total, self.square + square
        self.valid_rows += flat.shape[0]
        if not bool(largest.isfinite().all()):
            self.nonfinite += int((~flat.isfinite()).sum())
        if len(self.rows) < _ROWS // 8:
            # At random, for rows at equal distances may all be of one position.
            generator = torch.Generator().manual_seed(len(self.rows))
            chosen = torch.randint(flat.shape[0], (min(flat.shape[0], 8),), generator=generator)
            self.rows.append(flat[chosen.to(flat.device)])

    def moments(self) -> Moments:
        if self.largest is None or self.total is None or self.square is None:
            raise ValueError("expected values that passed, got none: ask for rows first")
        count = max(self.valid_rows, 1)
        return Moments(self.total / count, self.square / count, self.largest, torch.cat(self.rows))

    def importance(self) -> tuple[Tensor, int]:
        """Return sums of squares of an input's columns [K] and the number of rows, as in an importance matrix.

        No sum is below `_LEAST` of the largest, since quantisers divide by sums of them; all are one where none is
        above zero.
        """
        if self.square is None:
            raise ValueError("expected values that passed, got none: ask for rows first")
        largest = self.square.amax()
        sums = self.square.clamp(min=float(largest) * _LEAST) if largest > 0 else torch.ones_like(self.square)
        return sums, max(self.valid_rows, 1)


class Observer(Visitor):
    """A visitor that collects the sites and the statistics of their values."""

    def __init__(self, model: torch.nn.Module, served: EngineRules = ANY_SCHEME) -> None:
        self._unit = architectures.any_expert if served.unfused else architectures.unit_of
        self._cache = "kv_cache" if served.one_cache else ""
        self.sites: dict[str, Site] = {}
        self.statistics: dict[tuple[str, str], Statistics] = {}
        self.weights: dict[str, Weights] = {}
        """Of each site, and of each expert that got tokens: the weight itself, [N, K] or [V, D]."""
        self.sequences = 1  # Sequences of the running batch
        self.mask: Tensor | None = None  # Which of its positions are no padding, [B, T]; None: all
        self._weights: dict[object, str] = {}
        self._modules = dict(model.named_modules())
        self._experts = {name.removesuffix(".weight"): len(p) for name, p in tensors_of(model) if p.dim() > 2}
        self._inputs: dict[str, str] = {}  # For each linear, the first linear with the same input tensor
        self._layouts: dict[tuple[str, int | None], tuple[object, ...]] = {}
        """Shape of each weight, and whether its columns are contiguous, in its first product."""
        self._producers = _TensorNames()  # The site whose unchanged output a tensor is
        self._consumers = _TensorNames()  # The first linear that a tensor was the input of

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        if name not in self.sites:
            self._note(name, "linear", weight, expert, x)
            self._inputs[name] = self._consumers[x] = self._consumers[x] or name
        self._trace(name, x)
        transposed = weight.dim() == 2 and weight.stride(0) < weight.stride(1)
        if self._layouts.setdefault((name, expert), (*weight.shape, transposed)) != (*weight.shape, transposed):
            raise BadModel(
                f"expected products with {name} from one side, got some with its transpose too: give the model a "
                "parameter of its own for these, or hand the audit a model in which it is a copy"
            )
        self._hold(name, weight, expert)
        seen = self.statistics.setdefault((name, ""), Statistics())
        steps = self.tracer.steps if self.tracer is not None else None
        for each in (x,) if steps is None else steps.joined(x):
            seen.add(each, sequences=self.sequences, kept=rows_kept(each, self.mask))
        if expert is not None:
            seen.experts[expert] = seen.experts.get(expert, 0) + x.numel() // max(x.shape[-1], 1)
        output = product(x, weight)
        if self.sites[name].role == "router":
            kept = rows_kept(output, self.mask)
            logits = output.detach().flatten(0, -2)[slice(None) if kept is None else kept]
            seen.logits.append(logits[:: max(-(-logits.shape[0] // _ROUTED), 1)].clone())
        return output

    def embedding(self, name: str, ids: Tensor, weight: Tensor, look_up: LookUp) -> Tensor:
        if name not in self.sites:
            self._note(name, "embedding", weight, None, None)
        self._hold(name, weight, None)
        rows = look_up(weight)
        self._producers[rows] = name
        return rows

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        role = name.rpartition(":")[2]
        if name not in self.sites:
            site_type: SiteType = "kv_cache" if role == "kv_cache" else "activation"
            unit = self._cache if site_type == "kv_cache" else ""
            self.sites[name] = Site(name, site_type, role, unit=unit, source=self._producers[x])
        if part != "queries":  # which a cache's other schemes leave as they are
            self._trace(name, x)
            self._producers[x] = name
        # The length of a row of scores changes with the sequence.
        seen = self.statistics.setdefault((name, part), Statistics())
        columns = role not in ("scores", "probabilities")
        seen.add(x, columns, self.sequences, rows_kept(x, self.mask))
        if role == "residual" and x.dim() == 3:
            seen.row_maxima.append(torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1))
        return x

    def fused(self, of: Callable[[str], str] = str) -> list[list[str]]:
        """Return groups of linears that serving engines run as one product of one input, whose tensor has one scale.
        ``of``: from the first linear with that input to what such linears have in common."""
        groups: dict[object, list[str]] = {}
        for name, first in self._inputs.items():
            groups.setdefault((self.sites[name].unit, self.sites[name].shape[-1], of(first)), []).append(name)
        return list(groups.values())

    def sharing_factors(self) -> list[list[str]]:
        """Return groups of linears that share column factors, absorbed by the operation before them: products of one
        input, and modules of experts that share one norm's output."""
        return self.fused(architectures.any_expert)

    def _trace(self, name: str, x: Tensor) -> None:
        """Drop the source of a site whose input comes from several sites."""
        if self.sites[name].source and self.sites[name].source != self._producers[x]:
            self.sites[name].source = ""

    def _hold(self, name: str, weight: Tensor, expert: int | None) -> None:
        held = self.weights.setdefault(name, Weights())
        if expert in held:
            return
        streamed = self.tracer.streamed(weight) if self.tracer is not None else None
        # Others were looked at before. A sum is finite of finite weights, unless it overflows.
        if streamed is not None and not bool(weight.sum().isfinite()) and not bool(weight.isfinite().all()):
            raise BadModel(f"expected finite weights, got NaN or infinities in {name}: load the model anew")
        held[expert] = streamed or weight.detach()

    def _note(self, name: str, site_type: SiteType, weight: Tensor, expert: int | None, x: Tensor | None) -> None:
        shape = tuple(weight.shape) if expert is None else (self._experts[name], *weight.shape)
        # A router gives the logits that choose experts: by its kind or name, or as a ``gate`` next to experts, unlike
        # the gate of a gated unit.
        parent, _, last = name.rpartition(".")
        routes = "router" in last or "Router" in type(self._modules.get(name)).__name__
        routes = routes or (last == "gate" and hasattr(self._modules.get(parent), "experts"))
        role: str = "experts" if expert is not None else "router" if routes else site_type
        if self.tracer is not None and site_type == "linear" and role == site_type:
            role = self.tracer.role or role
        streamed = self.tracer.streamed(weight) if self.tracer is not None else None
        same = weight.data_ptr() if streamed is None else streamed.source
        tied = self._weights.setdefault(same, name) if expert is None else name
        source = "" if x is None else self._producers[x]
        self.sites[name] = Site(name, site_type, role, shape, self._unit(name), "" if tied == name else tied, source)
        if site_type == "linear" and expert is None:
            self.sites[f"{name}:accumulator"] = Site(f"{name}:accumulator", "accumulator", "accumulator")
            if architectures.is_split(name):
                self.sites[f"{name}:all_reduce"] = Site(f"{name}:all_reduce", "all_reduce", "all_reduce")


class _TensorNames:
    """Names of tensors, while these live and are not written to. Other shapes of the same rows share a name."""

    def __init__(self) -> None:
        self._names: MutableMapping[Tensor, dict[object, tuple[str, int]]] = WeakIdKeyDictionary()

    def __setitem__(self, x: Tensor, name: str) -> None:
        if x.is_inference():  # without a count of writes
            return
        self._names.setdefault(_base(x), {})[_rows(x)] = name, x._version

    def __getitem__(self, x: Tensor) -> str:
        name, written = self._names.get(_base(x), {}).get(_rows(x), ("", 0))
        return name if name and written == x._version else ""


def _base(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _rows(x: Tensor) -> tuple[object, ...]:
    """Return which rows of its base a tensor holds: a contiguous one may have any shape."""
    layout = () if x.is_contiguous() else (x.shape, x.stride())
    return x.storage_offset(), x.numel(), x.shape[-1:], layout
