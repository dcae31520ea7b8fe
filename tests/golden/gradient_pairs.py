"""Backward definitions and their forward ones, at a few small calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.golden import Spec, spec, specs
from assay.golden.registry import gradients_of

Definition = Callable[..., Any]
RNG = np.random.default_rng(17)


def normal(*shape: int, scale: float = 1.0) -> Any:
    return RNG.standard_normal(shape) * scale


@dataclass(frozen=True)
class Pair:
    """A backward definition and its forward one: the variables that are moved, what is fixed, and the cotangent.

    ``labels`` are integers that both take behind the variables, ``fixed`` numbers that neither moves.

    ``arguments`` are the places of variables that the backward definition takes, before the cotangent (if it takes
    one); ``of_result`` says that it takes the forward result in their place.
    """

    forward: str
    variables: tuple[Any, ...]
    cotangent: Any = None
    labels: tuple[Any, ...] = ()
    fixed: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[int, ...] = (0,)
    of_result: bool = False
    order: tuple[int, ...] = ()
    """Of variables, labels and what is fixed, where both definitions take them mixed."""

    @property
    def backward(self) -> str:
        return gradients_of(self.forward)[0].name

    def given(self, xp: Any, variables: list[Any]) -> list[Any]:
        """Variables, labels and what is fixed, in order."""
        found = [*variables, *self.labels, *(xp.exact(tensor) for tensor in self.fixed)]
        return [found[place] for place in self.order] if self.order else found

    def value(self, xp: Any, variables: list[Any]) -> Any:
        """The forward definition's result."""
        definition = spec(self.forward)
        options = definition.complete(self.options)
        options |= {"sinks": None} if "sinks" in options else {}
        found = definition.definition(xp, *self.given(xp, variables), **options)
        return found[0] if isinstance(found, tuple) else found

    def loss(self, xp: Any, variables: list[Any]) -> Any:
        """sum c f(x)."""
        result = self.value(xp, variables)
        total = (result if self.cotangent is None else result * xp.exact(self.cotangent)).sum()
        return total[()] if isinstance(total, np.ndarray) else total

    def gradients(self, xp: Any, definition: Definition | None = None) -> tuple[Any, ...]:
        """The backward definition's results, one for each variable."""
        known = spec(self.backward)
        variables = [xp.exact(variable) for variable in self.variables]
        taken = [self.value(xp, variables)] if self.of_result else [variables[place] for place in self.arguments]
        given = self.given(xp, taken)
        given += [] if self.cotangent is None else [xp.exact(self.cotangent)]
        options = known.complete({name: self.options[name] for name in self.options if name in known.options})
        found = (definition or known.definition)(xp, *given, **options)
        return found if isinstance(found, tuple) else (found,)


def attention(causal: str, scale: float | None, queries: int, keys: int, shared: int = 2) -> Pair:
    q, k, v = normal(1, 2 * shared, queries, 3), normal(1, 2, keys, 3), normal(1, 2, keys, 2)
    options = {"causal": causal, "scale": scale}
    return Pair("attention", (q, k, v), normal(1, 2 * shared, queries, 2), options=options, arguments=(0, 1, 2))


def entropy(reduction: str, smoothing: float, labels: list[int], ignored: int = -100, **others: float) -> Pair:
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, **others}
    return Pair("cross_entropy", (normal(len(labels), 4, scale=2.0),), labels=(np.array(labels),), options=options)


def distilled(op: str, reduction: str = "none", **options: float) -> Pair:
    """A divergence, whose target is fixed."""
    size = (2,) if reduction == "none" else ()
    return Pair(op, (normal(2, 4),), normal(*size) if size else np.array(0.75), fixed=(normal(2, 4),),
                options={"reduction": reduction, **options})  # fmt: skip


def turned(*, interleaved: bool) -> Pair:
    angles = (normal(3, 2), normal(3, 2))
    options = {"interleaved": interleaved}
    return Pair("rope", (normal(1, 3, 2, 4),), normal(1, 3, 2, 4), fixed=angles, options=options, arguments=())


def plain(forward: str) -> Pair:
    """An op and its gradient under default options, of two to four places along each symbol, as the signatures say."""
    op, gradient = spec(forward), gradients_of(forward)[0].signature()
    signature, sizes = op.signature(), {}
    for place, symbol in enumerate(sorted(signature.symbols, key=lambda name: (name in op.sizes.multiples, name))):
        step = op.step(signature, symbol, sizes)
        sizes[symbol] = -(-(4 - place % 3) // step) * step
    moved = [
        tensor for tensor in signature.tensors if f"d{tensor.name}" in {result.name for result in gradient.returns}
    ]
    taken = [tensor.name for tensor in gradient.tensors[:-1]]
    return Pair(
        forward,
        tuple(normal(*tensor.shape(sizes)) for tensor in moved),
        normal(*signature.returns[0].shape(sizes)),
        arguments=tuple(place for place, tensor in enumerate(moved) if tensor.name in taken),
        of_result=taken == [signature.returns[0].name],
    )


def is_plain(op: Spec) -> bool:
    """Whether an op has a gradient and takes real numbers alone, of which it has the one result."""
    signature = op.signature()
    real = all(tensor.role == "real" and tensor.dtype is None for tensor in signature.tensors)
    return bool(gradients_of(op.name)) and real and len(signature.returns) == 1


PAIRS: dict[str, Pair] = {op.name: plain(op.name) for op in map(spec, specs()) if is_plain(op)} | {
    "layernorm, large eps": Pair(
        "layernorm", (normal(2, 3) + 5, normal(3), normal(3)), normal(2, 3), options={"eps": 0.5}, arguments=(0, 1)
    ),
    "rmsnorm, large eps": Pair(
        "rmsnorm", (normal(1, 3), normal(3)), normal(1, 3), options={"eps": 2.0}, arguments=(0, 1)
    ),
    "cross_entropy, mean": entropy("mean", 0.0, [2, -100, 0]),
    "cross_entropy, smoothed": entropy("mean", 0.25, [1, 1, 3], ignored=3),
    "cross_entropy, sum": entropy("sum", 0.1, [0, 3, 5], ignored=5),
    "cross_entropy, each": entropy("none", 1.0, [2, -1], ignored=-1),
    "cross_entropy, capped": entropy("mean", 0.25, [1, 2, 3], softcap=1.5, z_loss=0.125),
    "kl_div": distilled("kl_div", temperature=2.0),
    "jsd": distilled("jsd", beta=0.125),
    "kl_div, mean": distilled("kl_div", "batchmean"),
    "l2norm, clamped": Pair("l2norm", (normal(2, 3),), normal(2, 3), options={"clamp": "maximum"}),
    "l2norm, below its bound": Pair("l2norm", (normal(2, 3),), normal(2, 3), options={"clamp": "maximum", "eps": 9.0}),
    "geglu, tanh": Pair(
        "geglu", (normal(1, 3), normal(1, 3)), normal(1, 3), options={"approximate": "tanh"}, arguments=(0, 1)
    ),
    **{
        f"gated_rmsnorm, {name}": Pair(
            "gated_rmsnorm",
            (normal(2, 3), normal(3), normal(2, 3)),
            normal(2, 3),
            options={name: value},
            arguments=(0, 1, 2),
        )
        for name, value in (("gate_first", True), ("activation", "sigmoid"))
    },
    "causal_conv1d, silu": Pair(
        "causal_conv1d",
        (normal(2, 1, 4), normal(1, 3), normal(1)),
        normal(2, 1, 4),
        options={"activation": "silu"},
        arguments=(0, 1, 2),
    ),
    "cumsum, back": Pair(
        "cumsum", (normal(1, 4),), normal(1, 4), options={"reverse": True, "exclusive": True}, arguments=()
    ),
    "linear_cross_entropy": Pair(
        "linear_cross_entropy",
        (normal(3, 2), normal(4, 2)),
        labels=(np.array([1, -100, 3]),),
        options={"label_smoothing": 0.25, "softcap": 1.5, "z_loss": 0.125},
        arguments=(0, 1),
    ),
    "embedding": Pair("embedding", (normal(4, 2),), normal(3, 2), labels=(np.array([2, 0, 2]),)),
    "moe": Pair(
        "moe",
        (normal(2, 2), normal(3, 4, 2), normal(3, 2, 2), normal(2, 2)),
        normal(2, 2),
        labels=(np.array([[2, 0], [2, 2]]),),
        arguments=(0, 1, 2, 3),
    ),
    **{
        f"moe_fp8, {granularity}": Pair(
            "moe_fp8",
            (normal(2, 2), normal(2, 2)),
            normal(2, 2),
            labels=(np.array([[2, 0], [2, 2]]),),
            fixed=(normal(3, 4, 2), normal(3, 2, 2), normal(3, *gate_up), normal(3, *down)),
            options={"granularity": granularity},
            arguments=(0, 1),
            order=(0, 3, 4, 5, 6, 1, 2),
        )
        for granularity, gate_up, down in (("channel", (4, 1), (2, 1)), ("block", (1, 1), (1, 1)))
    },
    **{
        f"moe_route, {scoring}{', renormalised' * renormalize}": Pair(
            "moe_route", (normal(2, 4),), normal(2, 2), options={"scoring": scoring, "renormalize": renormalize}
        )
        for scoring in ("softmax", "sigmoid")
        for renormalize in (False, True)
    },
    "rope": turned(interleaved=False),
    "rope of neighbours": turned(interleaved=True),
    "attention": attention("none", None, 2, 3),
    "attention, last keys": attention("bottom_right", 0.75, 2, 3, shared=1),
    "attention, first keys": attention("top_left", -0.5, 3, 2, shared=1),
    "attention, rows that see nothing": attention("bottom_right", None, 3, 2),
    **{
        f"selective_scan{', softplus' * softplus}": Pair(
            "selective_scan",
            (normal(2, 2, 3), normal(2, 2, 3), normal(2, 2), normal(2, 2, 3), normal(2, 2, 3), normal(2)),
            normal(2, 2, 3),
            options={"softplus": softplus},
            arguments=(0, 1, 2, 3, 4, 5),
        )
        for softplus in (False, True)
    },
    "attention of sequences": Pair(
        "attention_varlen",
        (normal(4, 2, 2), normal(4, 1, 2), normal(4, 1, 2)),
        normal(4, 2, 2),
        labels=(np.array([0, 1, 1, 3, 4]), np.array([0, 2, 3, 4, 4])),
        options={"causal": "bottom_right"},
        arguments=(0, 1, 2),
    ),
}
