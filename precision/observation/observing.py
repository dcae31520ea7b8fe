"""What one forward pass over the calibration data shows: sites, their menus, statistics, reference outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.formats.errors import UnknownOption
from assay.precision.errors import BadAssignment, BadModel, NoData
from assay.precision.metrics import Metric, at_valid, padding_of
from assay.precision.observation.operations import traced
from assay.precision.observation.qparams import QParams, menu_of
from assay.precision.observation.running import batch_size, call, evaluating, mapping
from assay.precision.observation.sites import ANY_SCHEME, EngineRules, Observer, Site, Statistics, heads_among
from assay.precision.observation.streaming import Weights, streamed_parameters
from assay.precision.observation.tracer import HEAD, Tracer, Visitor
from assay.precision.schemes import SCHEMES, scheme_named
from assay.runtime.tensors import TensorCache

_REPORTED = 3  # Parameters that are named in a line


@dataclass(frozen=True, slots=True)
class UnauditedParameter:
    """A parameter of two dimensions or more in no site."""

    name: str
    parameters: int
    why: str
    """The module or reason that hides it, in words."""


@dataclass(frozen=True, slots=True)
class Unaudited:
    """The model's parameters in no site, without vectors (weights of norms) and biases of experts."""

    shut: tuple[UnauditedParameter, ...] = ()
    whole: int = 0
    """Elements of all of the model's parameters, vectors included."""

    @property
    def parameters(self) -> int:
        """Elements in no site."""
        return sum(each.parameters for each in self.shut)

    @property
    def share(self) -> float:
        """Share of all elements, from 0 to 1."""
        return self.parameters / self.whole if self.whole else 0.0

    @property
    def clause(self) -> str:
        """The same as a clause for the end of a sentence; empty where all is audited."""
        return f"; {self}" if self.shut else ""

    def __str__(self) -> str:
        if not self.shut:
            return ""
        largest = ", ".join(f"{each.name} ({each.parameters:,}; {each.why})" for each in self.shut[:_REPORTED])
        more = f" and {len(self.shut) - _REPORTED} more" if len(self.shut) > _REPORTED else ""
        share = f"{100 * self.share:.2g}" if self.share < 0.995 else "100"
        return f"{share} % of the parameters have no site and keep their format: {largest}{more}"


def unaudited(
    model: torch.nn.Module, sites: Mapping[str, Site], ran: Collection[str], given: Collection[int]
) -> Unaudited:
    """Return the parameters in no site; ``ran``: names of the modules that ran; ``given``: identities of the parameters
    that functions of torch received."""
    streamed = streamed_parameters(model)
    names: dict[object, list[str]] = {}
    parameters: dict[str, torch.nn.Parameter] = {}
    for name, values in model.named_parameters(remove_duplicate=False):
        names.setdefault(streamed.get(name) or id(values), []).append(name)
        parameters[name] = values
    held = {str(site).removesuffix(HEAD) for site in sites.values() if site.shape}
    shut, whole = [], 0
    for several in names.values():
        values, first = parameters[several[0]], several[0]
        whole += values.numel()
        audited = any(name.removesuffix(".weight") in held for name in several)
        if values.dim() > 1 and not first.endswith("bias") and not audited:
            shut.append(UnauditedParameter(first, values.numel(), _why(model, first, ran, id(values) in given)))
    return Unaudited(tuple(sorted(shut, key=lambda each: (-each.parameters, each.name))), whole)


def _why(model: torch.nn.Module, name: str, ran: Collection[str], given: bool) -> str:
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner) if owner else model
    if isinstance(module, torch.jit.ScriptModule):
        return "in TorchScript"
    if owner not in ran and not given:
        return "didn't run on this data"
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return f"a {type(module).__name__}"
    if isinstance(module, torch.nn.RNNBase):
        return f"packed sequences of {type(module).__name__}"
    return f"in {type(module).__name__}, the weight of no product that can be seen into"


_SAME = 1e-3  # Relative difference of outputs that another order of summation may make
_CAST = re.compile(r"BFloat16|Half|Double")  # Dtypes in torch's messages about operands of different dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A model as observed on the calibration data."""

    by_name: Mapping[str, Site]
    """The sites with a menu."""
    menus: Mapping[str, tuple[str, ...]]
    """Names of the schemes that each site may have, by the site's name."""
    tied: Mapping[str, str]
    """The name of the site that holds the same weight, by the site's name."""
    bf16_sites: tuple[str, ...]
    """Names of the sites, with a menu or not, at which a bfloat16 model rounds."""
    sources: Mapping[str, str]
    """For each site, with a menu or not, the name of the site whose output it receives unchanged."""
    statistics: Mapping[tuple[str, str], Statistics]
    """Statistics of each site's values by its name and part (keys or values of a cache, mostly empty)."""
    weights: Mapping[str, Weights]
    qparams: QParams
    references: TensorCache
    """The outputs to compare, one for each batch."""
    sequence_weights: np.ndarray
    """[N]: each sequence's part of the divisor of the metric's sums."""
    sequences: int
    modules: tuple[str, ...]
    """Names of all modules, including those that didn't run."""
    all_sites: tuple[Site, ...]
    """All sites, with a menu or not."""
    unaudited: Unaudited
    no_gradient: tuple[Site, ...] = ()
    """Sites whose formats change the output though no gradient reaches them: they keep their own."""

    @property
    def weight(self) -> float:
        """The divisor of the metric's sums."""
        return float(self.sequence_weights.sum())

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites with a menu."""
        return tuple(self.by_name.values())

    def without_gradient(self, sites: Collection[Site]) -> Observed:
        """Return the same without the menus of these sites, which no gradient reaches."""
        by_name = {name: site for name, site in self.by_name.items() if site not in sites}
        menus = {name: self.menus[name] for name in by_name}
        return replace(self, by_name=by_name, menus=menus, no_gradient=tuple(sites))

    def limited(self, schemes: Collection[str]) -> Observed:
        """Return the same with the menus limited to these schemes."""
        shorter = {name: tuple(scheme for scheme in menu if scheme in schemes) for name, menu in self.menus.items()}
        menus = {name: menu for name, menu in shorter.items() if menu}
        return replace(self, by_name={name: self.by_name[name] for name in menus}, menus=menus)

    def largest(self, site: str) -> Tensor | None:
        """Return the largest magnitude of each channel at a site, [K], of the part with the widest range."""
        passed = {part: seen for (name, part), seen in self.statistics.items() if name == site and part != "queries"}
        parts = [seen.largest for seen in passed.values()]
        return max((part for part in parts if part is not None), key=lambda part: float(part.max()), default=None)

    def weight_site(self, name: str) -> str:
        """Return the site that holds a weight's scheme: the first that uses the weight."""
        return self.tied.get(name, str(name))

    def site(self, name: str) -> Site:
        """Return the site of this name. Raises BadAssignment where no such site can take another format."""
        if name in self.by_name:
            return self.by_name[name]
        if name in self.no_gradient:
            raise BadAssignment(
                f"no error of {name} can be predicted, since no gradient leads back to it but zero: leave it out"
            )
        near = get_close_matches(name, self.by_name)
        hint = f"did you mean {near[0]}?" if near else "see .sites"
        raise BadAssignment(f"expected a site of this model, got {name!r}: {hint}")

    def menu(self, name: str) -> tuple[str, ...]:
        """Return the names of the schemes that a site may have. Raises BadAssignment."""
        return self.menus[self.site(name)]

    def checked(self, assignment: Mapping[str, str]) -> dict[str, str]:
        """Return the assignment with its names checked and the scheme of a tied weight moved to the site that holds it.

        Raises BadAssignment, UnknownScheme.
        """
        chosen: dict[str, str] = {}
        for name, scheme in assignment.items():
            site, menu = self.site(name), self.menu(name)
            if scheme not in menu:
                scheme_named(scheme)
                raise BadAssignment(f"expected a scheme for {site} of {', '.join(menu) or 'none'}, got {scheme!r}")
            owner = site.tied or str(site)
            if chosen.get(owner, scheme) != scheme:
                raise BadAssignment(f"expected one scheme for {site} and {owner}, which share a weight, got two")
            chosen[owner] = scheme
        return chosen


def observe(
    model: torch.nn.Module,
    batches: Sequence[Any],
    metric: Metric,
    formats: Sequence[str],
    done: Callable[[int], None],
    served: EngineRules = ANY_SCHEME,
    opened: Callable[[int, Visitor], AbstractContextManager[Tracer]] | None = None,
) -> Observed:
    """Run the model once over the batches; ``done`` receives the number of finished ones.

    opened: the context in which a batch, by its index, runs for the visitor to see it; None: `traced`. Raises BadModel
    for outputs that aren't finite and for a model without linears, NoData where the metric compares nothing,
    UnknownOption where no format fits any site.
    """
    observer = Observer(model, served)
    references = TensorCache()
    shares: list[np.ndarray] = []
    ran: set[str] = set()
    given: set[int] = set()
    for index, batch in enumerate(batches):
        within = opened(index, observer) if opened is not None else traced(model, observer)
        observer.sequences = batch_size(batch)
        observer.mask = padding_of(batch)
        with torch.no_grad(), evaluating(model), within as tracer:
            outputs = _called(model, batch)
        ran, given = ran | tracer.ran, given | tracer.given
        reference = metric.output(outputs, mapping(batch)).detach()
        if not reference.is_floating_point() or not reference.dim():
            shape = f"{list(reference.shape)} in {str(reference.dtype).removeprefix('torch.')}"
            raise BadModel(f"expected outputs [B, ...] in floating point, got {shape}: take casts out of forward")
        if not index:
            _check(model, batch, metric, reference)
        shares.append(metric.weights(reference, mapping(batch)).numpy(force=True))
        if not bool(at_valid(reference, mapping(batch)).isfinite().all()):
            raise BadModel(f"expected finite outputs, got NaN or infinities for batch {index}: check model and inputs")
        references.add(reference)
        done(index + 1)
    if not sum(float(each.sum()) for each in shares) > 0:
        raise NoData(
            f"expected outputs to compare, got none but padding or zeros ({metric.name}): an attention_mask [B, T] is "
            "above 0 at tokens, 0 at padding; one that is added to scores has another name or shape"
        )
    if not any(site.type == "linear" for site in observer.sites.values()):
        raise BadModel(
            "expected a model with linear, convolutional or recurrent layers, got one that runs none: is it the right "
            "module? Packed sequences, TorchScript, torch.vmap, sparse and nested tensors have no sites"
        )
    sites = observer.sites
    for table in [name for name, site in sites.items() if site.tied == name + HEAD]:
        for site in sites.values():  # the weight is the table's, whatever comes first
            site.tied = table if table + HEAD in (site, site.tied) else site.tied
        sites[table].tied = ""
    tied = {name: site.tied for name, site in sites.items() if site.tied}
    heads = heads_among(sites.values())
    menus = {
        name: tuple(scheme for scheme in menu_of(site, formats) if served.allows(site, scheme, name in heads))
        for name, site in sites.items()
    }
    for name, owner in tied.items():  # a table that a linear shares takes what the linear may take
        linear = [each for each in (name, owner) if sites[each].type == "linear"]
        shared = menus[linear[0] if linear else name]
        tables = [sites[each] for each in (name, owner) if sites[each].type == "embedding"]
        allowed = shared if served.tied or not tables else ()
        menus[name] = menus[owner] = tuple(
            s for s in allowed if all(served.allows(table, s, False) for table in tables)
        )
        observer.statistics.setdefault((owner, ""), observer.statistics.get((name, ""), Statistics()))
    menus = {name: menu for name, menu in menus.items() if menu}
    # Weight scales are cached, without a bound for weights in memory, none for weights in files, a quarter of the
    # weights' bytes for weights held in 16 bits.
    streamed = streamed_parameters(model)
    keep = sum(model.get_parameter(name).numel() for name in streamed) * 2 // 4 if streamed else None
    keep = 0 if any(source.file for source in streamed.values()) else keep
    if not menus:
        raise UnknownOption(f"expected formats for sites of this model, got {', '.join(formats) or 'none'}")
    return Observed(
        by_name={name: sites[name] for name in menus},
        menus=menus,
        tied=tied,
        bf16_sites=tuple(
            name for name, site in sites.items() if not site.tied and site.type in SCHEMES["bf16"].site_types
        ),
        sources=_sources(sites, tied),
        statistics=observer.statistics,
        weights=observer.weights,
        qparams=QParams(observer.statistics, observer.weights, observer.sharing_factors(), observer.fused(), keep=keep),
        references=references,
        sequence_weights=np.concatenate(shares),
        sequences=sum(map(batch_size, batches)),
        modules=tuple(name for name, _ in model.named_modules()),
        all_sites=tuple(sites.values()),
        unaudited=unaudited(model, sites, ran, given),
    )


def _sources(sites: Mapping[str, Site], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the source of each site's values, by the names that schemes are assigned to. A head that receives rows of
    its own table unchanged has none: one scheme stores both."""
    sources = {tied.get(name, name): site.source for name, site in sites.items() if site.source}
    for owner in tied.values():
        path = [owner]
        while (before := sources.get(path[-1])) is not None and before not in path:
            path.append(before)
        if before == owner:
            del sources[owner]
    return sources


def _called(model: torch.nn.Module, batch: Any) -> Any:
    """Return the model's outputs. Raises BadModel where it casts to a 16-bit dtype that its weights no longer have, or
    where the batch has unknown arguments."""
    try:
        return call(model, batch)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise BadModel(
            f"expected batches of what the model takes, got more ({error}): what a loss of your own needs from a "
            "batch, forward takes too, and may leave unused"
        ) from error
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        if not _CAST.search(said):
            raise
        raise BadModel(
            f"expected a forward that runs in float32, as an audit does, got a cast to another dtype in it ({said}): "
            "cast to that of the weight or the input instead"
        ) from error


def _check(model: torch.nn.Module, batch: Any, metric: Metric, reference: Tensor) -> None:
    """Raise BadModel where the model alone gives other outputs than the traced one."""
    with torch.no_grad(), evaluating(model, traced=False):
        plain = metric.output(call(model, batch), mapping(batch))
    plain, traced_output = (at_valid(each, mapping(batch)).double() for each in (plain, reference))
    off = float((traced_output - plain).norm() / plain.norm().clamp(min=1e-300))
    if off > _SAME:
        raise BadModel(
            f"expected the same outputs at every call, got other ones by {off:.1%}: "
            "take out dropout, noise and state that forward keeps, or set attn_implementation='eager'"
        )
