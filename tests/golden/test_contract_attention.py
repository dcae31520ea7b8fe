"""The default contract's radius holds honest attention kernels, and neither coarser nor wrong ones.

Largest share of the radius used, over ten times as many cases as here: 0.79 in float32 inside, 0.99 with probabilities
rounded to bfloat16, 0.99 to float16.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden import spec
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.verify.contract import Contract
from tests.golden.allowance import Use, by_thirds, report, uses, worst
from tests.golden.float32 import Functions
from tests.golden.honest_attention import SCORES, Problem, attentions, full, online

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": "bottom_right"},
    {"softcap": 5.0},
    {"alibi": True, "slopes": torch.tensor([0.5, 0.77])},
    {"sinks": torch.tensor([0.5, 30.0])},
    {"causal": "top_left", "window": (3, 1)},
    {"scale": 1.0},
    {"softcap": 30.0, "sinks": torch.tensor([-5.0, 100.0]), "alibi": True, "slopes": torch.tensor([1.0, 0.01])},
)
KINDS = (
    "normal", "wide", "steep", "steeper", "ascending", "steeply ascending", "descending", "values with a large mean",
    "zero queries", "equal keys", "cancelling", "tiny values", "huge values", "queries with a large mean",
    "nearly equal keys", "cancelling values", "exact ramp",
)  # fmt: skip


def operands(kind: str, queries: int, keys: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, 2, Sq, D], k [1, 1, Sk, D], v [1, 1, Sk, 2] of one kind."""
    rng = np.random.default_rng([queries, keys, width, *kind.encode()])
    q, k = rng.standard_normal((1, 2, queries, width)), rng.standard_normal((1, 1, keys, width))
    v = rng.standard_normal((1, 1, keys, 2))
    place, flip = np.arange(keys)[:, None], np.where(np.arange(keys) % 2, 1, -1)[:, None]
    changed: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
        "normal": lambda: (q, k, v),
        "wide": lambda: (q * 6, k * 3, v),
        "steep": lambda: (q * 30, k * 5, v),
        "steeper": lambda: (q * 300, k * 50, v),
        "ascending": lambda: (np.abs(q), np.sort(k, axis=2), v),
        "steeply ascending": lambda: (np.abs(q) * 4, np.sort(k, axis=2) * 4, v),
        "descending": lambda: (np.abs(q), -np.sort(-k, axis=2), v),
        "values with a large mean": lambda: (q, k, v + 1000),
        "zero queries": lambda: (q * 0, k, v),
        "equal keys": lambda: (q, k[:, :, :1] + 0 * k, v),
        "cancelling": lambda: (np.abs(q) + 100, k * np.where(np.arange(width) % 2, 50, -50), v),
        "tiny values": lambda: (q, k, v * 1e-38),
        "huge values": lambda: (q, k, v * 1e37),
        "queries with a large mean": lambda: (q + 50, k, v),
        "nearly equal keys": lambda: (q, 10 * k[:, :, :1] + 0.01 * k, v),
        "cancelling values": lambda: (q, k, flip * (1 + 1e-3 * v)),
        "exact ramp": lambda: (q * 0 + 1, 0 * k + 0.37 * place, v),
    }
    return tuple(torch.from_numpy(np.ascontiguousarray(part)).float() for part in changed[kind]())  # type: ignore[return-value]


def problem(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Problem:
    """The same call for the kernels, from the interface's text."""
    queries, keys = q.shape[2], k.shape[2]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    causal, window = options.get("causal", "none"), options.get("window")
    last = i + (0 if causal == "top_left" else keys - queries)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if causal != "none":
        visible &= j <= last
    if window is not None:
        visible &= (j >= last - window[0]) & (j <= last + window[1])
    bias = -options["slopes"][:, None, None] * (i + keys - queries - j).abs() if "slopes" in options else None
    sinks = options["sinks"][:, None, None] if "sinks" in options else None
    scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
    both = [part[0].float().repeat_interleave(2, 0) for part in (k, v)]
    return Problem(q[0].float(), *both, visible[None], scale, options.get("softcap"), bias, sinks)


def found_with(dtype: torch.dtype, shapes: list[tuple[int, int]], kinds: tuple[str, ...]) -> list[Use]:
    """Every kernel on every kind; options and signs of the functions' errors in turn."""
    name = str(dtype).removeprefix("torch.")
    stage: Round | None = None if dtype == torch.float32 else lambda weights: weights.to(dtype).float()
    found: list[Use] = []
    for index, (kind, (keys, width)) in enumerate((kind, shape) for kind in kinds for shape in shapes):
        tensors = tuple(part.to(dtype) for part in operands(kind, 3, keys, width))
        for turn in range(2):
            options = OPTIONS[(index + turn * 5) % len(OPTIONS)]
            kernels = attentions(Functions((index + turn) % 3 - 1), problem(*tensors, options), stage)  # type: ignore[arg-type]
            results = ((kernel, (out[None], lse[None])) for kernel, (out, lse) in kernels)
            where = f"{kind}, {keys} keys of {width}, {options}"
            found += uses("attention", tensors, {**options, "return_lse": True}, results, dtype=name, where=where)
    return found


@by_thirds
def test_honest_attention_keeps_the_contract(third: slice, record_property: Any) -> None:
    """Scale anywhere, log2 e anywhere, in blocks or parts of any size, over sorted and cancelling keys: within."""
    report("attention", found_with(torch.float32, [(2, 1), (19, 3)], KINDS[third]), record_property)


@by_thirds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_probabilities_keep_the_contract(dtype: torch.dtype, third: slice, record_property: Any) -> None:
    """The stage "probabilities" allows rounding them to the input's format, before or after normalisation."""
    kinds = tuple(kind for kind in KINDS if kind not in ("tiny values", "huge values"))
    report("attention", found_with(dtype, [(2, 1), (5, 2), (17, 3)], kinds[third]), record_property)


@pytest.mark.parametrize("block", [1, 16])
def test_a_long_ascending_row_keeps_the_contract(block: int, record_property: Any) -> None:
    """A new maximum at each of 400 keys, in blocks of one or of 16: within the contract that says so."""
    q, k, v = operands("exact ramp", 3, 400, 2)
    p = problem(q, k, v, {})
    scores = p.scores(Functions(1), SCORES["scale in q"])
    results = [(base, online(Functions(1), p, scores, block, base)[0][None]) for base in ("e", "2, fused", "2, before")]
    contract = Contract(rescale_every=block)
    report("attention", uses("attention", (q, k, v), {}, results, contract=contract), record_property)


Q, K, V = operands("normal", 3, 64, 32)


def coarse(change: str) -> Tensor:
    """Attention over 64 keys with one thing coarser than the contract says, or wrong."""
    f, p = Functions(0), problem(Q, K, V, {})
    scores = p.scores(f, SCORES["scale on scores"])
    if change == "TF32 scores":
        q, k = (round_to(part, "tf32").float() for part in (p.q, p.k))
        scores = SCORES["scale on scores"](q, k, p.scale)
    elif change == "bfloat16 scores":
        scores = scores.bfloat16().float()
    elif change == "a key dropped":
        scores = torch.cat([scores[..., :-1], torch.full_like(scores[..., :1], -math.inf)], -1)
    rounded = change == "bfloat16 probabilities"
    out, _ = full(f, p, scores, (lambda w: w.bfloat16().float()) if rounded else lambda w: w)
    return out.bfloat16().float() if change == "bfloat16 output" else out


@pytest.mark.parametrize(
    "change", ["TF32 scores", "bfloat16 scores", "bfloat16 probabilities", "bfloat16 output", "a key dropped"]
)
def test_coarser_attention_breaks_the_contract(change: str, record_property: Any) -> None:
    """For float32 inputs, what is rounded more coarsely on the way, or left out, is beyond the radius."""
    share = worst(uses("attention", (Q, K, V), {}, [(change, coarse(change)[None])])).ratio
    record_property("share", share)
    assert share > 2
    assert worst(uses("attention", (Q, K, V), {}, [("unchanged", coarse("nothing")[None])])).ratio <= 1


def test_bfloat16_scores_break_the_contract_of_bfloat16_inputs() -> None:
    """Rounded probabilities are allowed there, rounded scores are not."""
    q, k, v = (part.bfloat16() for part in operands("wide", 3, 64, 32))
    p = problem(q, k, v, {})
    scores = p.scores(Functions(0), SCORES["scale on scores"])
    outs = [full(Functions(0), p, part)[0][None] for part in (scores, scores.bfloat16().float())]
    honest, rounded = (worst(uses("attention", (q, k, v), {}, [("", out)], dtype="bfloat16")).ratio for out in outs)
    assert honest <= 1 < rounded


@pytest.mark.parametrize("overflowing", ["dq before the scale", "the difference of dP and delta"])
@pytest.mark.parametrize(("factor", "is_open"), [(1.0, True), (0.25, False)])
def test_a_gradient_is_open_where_an_honest_kernel_may_overflow(overflowing: str, factor: float, is_open: bool) -> None:
    """dq may be summed before it is scaled, and dP - delta formed before it meets P, which both overflow late."""
    q, dout = torch.ones(1, 1, 1, 8), torch.tensor([[[[4.0, -1.0]]]]) * factor
    k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 2)
    if overflowing == "dq before the scale":
        q, v[..., 0, 0] = q * 0, 7.98e37
        k[..., 0] = torch.tensor([-1.0, 4.0])
    else:
        k[..., 0, 2], v[..., 0, 0], v[..., 1, 1] = 4.0, 4.26e37, 2.56e38
    dtype = format_named("bfloat16")
    tensors = tuple(part.bfloat16() for part in (q, k, v, dout))
    model = Contract().model(spec("attention_backward"), dtype)
    ball: Any = run(spec("attention_backward"), BallArithmetic(model), tensors, {"causal": "none", "scale": None})[0]
    assert bool(ball.mid.isfinite().all())
    assert bool(ball.radius.isinf().any()) is is_open
