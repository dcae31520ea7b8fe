"""Time and memory of an assignment on a device: the roofline.

Each op takes max(operations / rate, bytes / bandwidth), ops run one after another, elementwise work is fused into them.
Source: S. Williams, A. Waterman, D. Patterson, *Roofline*, CACM 52(4), 2009. Bytes are a serving engine's traffic:
weights with their scales, activations in and out, the KV cache, and a dynamic scheme's reads and writes to store a
linear's input. Peaks and bandwidths are the vendors', so times are lower bounds; their ratios are a scheme's gain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

import torch

from assay.configs import architectures
from assay.formats.devices import Device
from assay.formats.devices import devices as all_devices
from assay.precision.errors import UnknownDevice, WrongShape
from assay.precision.observation.sites import Site, heads_among
from assay.precision.observation.tracer import tensors_of
from assay.precision.schemes import Quantizer, Scheme, scheme_named
from assay.runtime.errors import unknown


@dataclass(frozen=True, slots=True)
class Running:
    """The arithmetic of a scheme's product on a device."""

    arithmetic: str
    """A key of the device's rates."""
    native: bool
    note: str = ""
    """The substitute, where it isn't native."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The served workload: a prefill of ``batch`` prompts, and decode steps with ``context`` tokens in the cache of
    each."""

    batch: int
    prompt: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    """Attention layers, including those without a KV-cache site; 0 for a model without attention."""
    top_k: int = 1
    """Experts for each token."""
    causal: bool = True
    decodes: bool = True
    """Whether texts grow token by token; else nothing is cached, and there are no decode steps."""

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "context", "heads", "kv_heads", "head_dim", "layers", "top_k"):
            least = 0 if name == "layers" else 1
            if getattr(self, name) < least:
                raise WrongShape(f"expected {name} of at least {least}, got {getattr(self, name)}")

    @classmethod
    def of(cls, model: object) -> Shape:
        """Return one prompt of 2048 tokens, a context of 4096, and heads and layers of the model's configuration; one
        head of 64 without a configuration."""
        config = getattr(model, "config", None)

        def value(*names: str, default: int) -> int:
            values = (getattr(config, name, None) for name in names)
            return next((each for each in values if isinstance(each, int) and each > 0), default)

        heads = value("num_attention_heads", "n_head", default=1)
        return cls(
            batch=1,
            prompt=2048,
            context=4096,
            heads=heads,
            kv_heads=value("num_key_value_heads", default=heads),
            head_dim=value("head_dim", default=max(value("hidden_size", "n_embd", default=64) // heads, 1)),
            layers=value("num_hidden_layers", "n_layer", default=0),
            top_k=value("num_experts_per_tok", "top_k", default=1),
            decodes=bool(getattr(model, "can_generate", lambda: True)()),
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of weights and of KV cache at the context length; seconds of a prefill and of one decode step."""

    bytes: float = 0.0
    kv_bytes: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def devices() -> tuple[str, ...]:
    """Return the names of devices."""
    return tuple(name for name, device in all_devices().items() if device.rates)


def device_named(name: str) -> Device:
    """Return the device of this name, in any case. Raises UnknownDevice with the nearest names."""
    if name.lower() not in devices():
        raise UnknownDevice(unknown("device", name.lower(), devices()))
    return all_devices()[name.lower()]


def running(device: Device, scheme: Scheme) -> Running:
    """Return how a device runs a scheme: in its own arithmetic; weight-only in 16 bits; unsupported schemes fall back
    to 16 bits.

    Weights of a scheme that falls back stay small in memory and are dequantised on the fly, activations stay in 16
    bits, as in serving engines: this differs from the audit's simulation.
    """
    used = [quantizer for quantizer in (scheme.weight, scheme.activation) if quantizer is not None]
    if scheme.weight is not None and scheme.activation is None:
        return Running("bf16", True)
    if scheme.compute not in device.rates:
        return Running("bf16", False, f"{device.name} has no {scheme.compute} products: {scheme.name} runs in bf16")
    fine = any(quantizer.scale_format in ("float8_e8m0fnu", "float8_e4m3fn") for quantizer in used)
    if fine and not device.microscaling:
        return Running("bf16", False, f"{device.name} has no scales in its products: {scheme.name} runs in bf16")
    return Running(scheme.compute, True)


def stored_bits(
    model: torch.nn.Module, sites: Collection[Site], bits: int | None, usual: int
) -> tuple[dict[str, int], float]:
    """Return the bits of an element of each weight, by the name of its site, and the bytes of parameters in no site.

    bits: of every weight, where the model is given in another dtype than it is stored in; None: each weight's own, and
    ``usual`` for one not known by its site's name.
    """
    stored = {name.removesuffix(".weight"): bits or 8 * each.element_size() for name, each in tensors_of(model)}
    whole = sum(each.numel() * (bits or 8 * each.element_size()) for each in model.parameters())
    buffers = {name for name, _ in model.named_buffers()}
    held = [site for site in sites if site.parameters and not site.tied and str(site) not in buffers]
    rest = whole - sum(site.parameters * stored.get(str(site), usual) for site in held)
    return stored, max(rest, 0) / 8


class Roofline:
    """Costs of a model's sites on a device. Sites without a scheme ("") are in the model's own dtype of ``bits`` bits.

    Costs of sites add up to the model's, so a choice may be made by them. device: None gives times of zero. stored:
    bits of an element of each weight by its site's name, where not ``bits``. rest: bytes of weights in no site, such as
    those of norms and biases.
    """

    def __init__(
        self,
        device: Device | None,
        sites: Iterable[Site],
        shape: Shape,
        bits: int = 16,
        stored: Mapping[str, int] | None = None,
        rest: float = 0.0,
    ) -> None:
        self.device = device
        self.shape = shape
        self.sites = {str(site): site for site in sites}
        self._own = bits / 8
        self._stored = stored or {}
        self._rest = rest
        self._own_arithmetic = "fp32" if bits > 16 and device and "fp32" in device.rates else "bf16"
        self._heads = heads_among(self.sites.values())
        experts: dict[str, set[str]] = defaultdict(set)
        for name in self.sites:
            if expert := architectures.expert_of(name):
                experts[expert[0]].add(expert[1])
        self._experts = {layer: len(numbers) for layer, numbers in experts.items()}

    def cost(self, name: str, scheme: str = "") -> Cost:
        """Return the cost of one site under a scheme, "" for none. Raises KeyError for an unknown site,
        UnknownScheme."""
        site = self.sites[name]
        chosen = scheme_named(scheme) if scheme else None
        if site.type == "kv_cache":
            return self._attention(chosen)
        if site.type not in ("embedding", "linear"):
            return Cost()
        # The output's product with the vocabulary is of the last position only.
        decoded, prompt = self.shape.batch, self.shape.batch * self.shape.prompt
        counts = (decoded if site in self._heads else prompt, decoded)
        if site.type == "linear":
            times = [self._product(site, chosen, count) for count in counts]
        else:
            width, stored = site.shape[-1], chosen.weight if chosen else None
            row = self._own_bytes(site) * width if stored is None else _bits(stored, (1, width)) / 8
            times = [self._time(0.0, self._own_arithmetic, count * (row + self._own * width)) for count in counts]
        return Cost(0.0 if site.tied else self._weight(site, chosen), 0.0, *times)

    def rest(self) -> Cost:
        """Return the cost outside of sites, in the model's own dtype: attention of layers without a KV-cache site, and
        weights in no site."""
        seen = sum(site.type == "kv_cache" for site in self.sites.values())
        attention = [self._attention(None)] * max(self.shape.layers - seen, 0)
        return sum(attention, Cost(bytes=self._rest))

    def total(self, assignment: Mapping[str, str]) -> Cost:
        """Return the cost of the model under an assignment, site name to scheme name. A tied weight has the scheme of
        its owner."""
        costs = (self.cost(name, assignment.get(site.tied or name, "")) for name, site in self.sites.items())
        return sum(costs, Cost()) + self.rest()

    def cost_of(self, assignment: Mapping[str, str]) -> Cost:
        """Return the same, with NaN for times without a device."""
        cost = self.total(assignment)
        cost = cost if self.shape.decodes else replace(cost, decode=math.nan)
        return cost if self.device else replace(cost, prefill=math.nan, decode=math.nan)

    def _product(self, site: Site, scheme: Scheme | None, tokens: int) -> float:
        """Return the seconds of x [tokens, K] times the weight; of experts, of those in a layer that the tokens
        select."""
        rows, columns = site.shape[-2:]
        share, touched = self._routed(site, tokens)
        passed = tokens * share
        how = running(self.device, scheme) if scheme and self.device else Running(self._own_arithmetic, True)
        read, extra = self._own * passed * columns, 0.0
        activation = scheme.activation if scheme and how.native else None
        if activation is not None:
            wide, read = read, _bits(activation, (math.ceil(passed), columns)) / 8
            extra = wide + read if activation.per != "element" and activation.dynamic else 0.0
        moved = touched * self._weight(site, scheme) + read + self._own * passed * rows
        return self._time(2.0 * passed * rows * columns, how.arithmetic, moved) + self._seconds(extra)

    def _routed(self, site: Site, tokens: int) -> tuple[float, float]:
        """Return the rows of the products with a site's weights per token, and the expected share of these weights that
        is read.

        Each token selects k of E experts, independently and evenly: one is read with probability 1 - (1 - k/E)^tokens.
        """
        held = site.shape[0] if len(site.shape) == 3 else 1
        expert = architectures.expert_of(site)
        experts = self._experts[expert[0]] if expert else held
        if experts <= 1:
            return 1.0, 1.0
        chosen = min(self.shape.top_k / experts, 1.0)
        return chosen * held, 1.0 - (1.0 - chosen) ** tokens

    def _attention(self, scheme: Scheme | None) -> Cost:
        """Return the cost of one layer without the projections: scores and probabilities stay on chip, products run in
        16 bits unless queries are stored as the cache is."""
        s, stored = self.shape, scheme.activation if scheme else None
        arithmetic = self._own_arithmetic
        if scheme and scheme.queries and self.device:
            arithmetic = running(self.device, scheme).arithmetic
        wide = self._own * s.batch * s.head_dim

        def cache(tokens: int) -> float:
            shape = (s.batch * tokens * s.kv_heads, s.head_dim)
            return 2 * (self._own * shape[0] * shape[1] if stored is None else _bits(stored, shape) / 8)

        pairs = s.prompt * (s.prompt + 1) / 2 if s.causal else float(s.prompt**2)
        each = 4.0 * s.batch * s.heads * s.head_dim
        # Queries and output, keys and values before they are stored.
        fresh = 2 * wide * s.prompt * (s.heads + s.kv_heads)
        return Cost(
            kv_bytes=cache(s.context) if s.decodes else 0.0,
            prefill=self._time(each * pairs, arithmetic, fresh + cache(s.prompt)),
            decode=self._time(each * s.context, arithmetic, 2 * wide * s.heads + cache(s.context)),
        )

    def _weight(self, site: Site, scheme: Scheme | None) -> float:
        """Bytes of a weight, scales included; each expert has scales of its own."""
        if scheme is None or scheme.weight is None:
            return self._own_bytes(site) * site.parameters
        held = site.shape[0] if len(site.shape) == 3 else 1
        return held * _bits(scheme.weight, site.shape[-2:]) / 8

    def _own_bytes(self, site: Site) -> float:
        """Return the bytes of an element of an unquantised weight."""
        bits = self._stored.get(site.tied or str(site))
        return self._own if bits is None else bits / 8

    def _time(self, operations: float, arithmetic: str, moved: float) -> float:
        if self.device is None:
            return 0.0
        rate = self.device.rates[arithmetic] * self.device.achievable
        return max(operations / rate, self._seconds(moved)) + self.device.launch

    def _seconds(self, moved: float) -> float:
        return 0.0 if self.device is None else moved / (self.device.bandwidth * self.device.achievable)


def _bits(quantizer: Quantizer, shape: tuple[int, ...]) -> float:
    """As `Quantizer.bits`, but TF32's 19 bits take 32 of memory."""
    return 32.0 * math.prod(shape) if quantizer.format == "tf32" else quantizer.bits(shape)
