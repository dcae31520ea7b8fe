"""Kernels of the gated delta rule: honest ones pass under the default contract, faulty ones fail and are named."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.float32 import Functions
from tests.golden.honest_delta import chunked, recurrent

from .examined import fails, first, passes, quick

FLOATS = Functions(0)
OPTIONS = {"normalized": [False, True], "scale": [None, 0.3]}


def kernel(rule: Callable[..., Tensor], *, stored: bool) -> Callable[..., Tensor]:
    """One of tests/golden/honest_delta.py on the op's own tensors; ``stored``: what products take is rounded."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *, scale: float | None, normalized: bool
    ) -> Tensor:
        dtype, factor = q.dtype, q.shape[-1] ** -0.5 if scale is None else scale
        parts = [x.float().transpose(1, 2) for x in (q, k, v, gate, beta)]
        if normalized:
            parts[:2] = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in parts[:2])
            parts[:2] = (x.to(dtype).float() for x in parts[:2]) if stored else parts[:2]
        found = rule(FLOATS, *parts, factor, **({"dtype": dtype} if stored else {}))
        return found.transpose(1, 2).to(dtype)

    return run


HONEST = {
    "recurrent": kernel(recurrent, stored=False),
    "chunks of 16": kernel(partial(chunked, width=16), stored=True),
    "chunks of 64, keys scaled": kernel(partial(chunked, width=64, keys_scaled=True), stored=True),
    "chunks of 16, substituted": kernel(partial(chunked, width=16, inverted=False), stored=True),
}


DTYPES = ("float32", "bfloat16", "float16")


def each_second(names: Iterable[str], dtypes: Sequence[str]) -> list[Any]:
    """Every name in every dtype, of which a usual run takes each second name in one, the dtypes by turns."""
    return [
        pytest.param(name, dtype, marks=() if (place % 2, turn) == (0, place % len(dtypes)) else pytest.mark.evidence)
        for place, name in enumerate(names)
        for turn, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize(("name", "dtype"), each_second(HONEST, DTYPES))
def test_an_honest_kernel_passes(name: str, dtype: str) -> None:
    """Recurrent and chunked ones alike, with what products take rounded to the tensors' format."""
    passes(quick(HONEST[name], "gated_delta_rule", dtype, options=OPTIONS, examples=4))


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    correct: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda state, decayed, key: (decayed * key).sum(-1),
    write: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda v, held, beta: beta * (v - held),
    decay: Callable[[Tensor, int], Tensor] = lambda gate, t: gate[:, t],
    carry: Callable[[Tensor, int], Tensor] = lambda state, t: state,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A kernel as serving engines write it for decoding; a fault replaces one of its parts."""
    state, out = torch.zeros(q.shape[0], q.shape[2], v.shape[3], q.shape[3]), []
    for t in range(q.shape[1]):
        key = k[:, t, :, None].float()
        state = carry(state, t)
        decayed = state * torch.exp(decay(gate, t))[..., None, None]
        update = write(v[:, t].float(), correct(state, decayed, key), beta[:, t, :, None].float())
        state = (decayed + update[..., None] * key).to(state_dtype).float()
        out.append((state * q[:, t, :, None].float()).sum(-1) * q.shape[3] ** -0.5)
    return torch.stack(out, 1).to(q.dtype)


FAULTY: dict[str, tuple[dict[str, Any], str]] = {
    "state not carried": ({"carry": lambda state, t: state * (t % 16 != 0)}, "delta_chunks_apart"),
    "decay dropped": ({"decay": lambda gate, t: 0 * gate[:, t]}, "delta_gate_ignored"),
    "decay of the place before": ({"decay": lambda gate, t: gate[:, max(t - 1, 0)]}, "delta_gate_late"),
    "beta dropped": ({"write": lambda v, held, beta: v - held}, "delta_beta_ignored"),
    "beta on values alone": ({"write": lambda v, held, beta: beta * v - held}, "delta_beta_on_values_alone"),
    "no correction": ({"write": lambda v, held, beta: beta * v}, "delta_not_corrected"),
    "corrected before the decay": (
        {"correct": lambda state, decayed, key: (state * key).sum(-1)}, "delta_state_not_decayed",
    ),
}  # fmt: skip
"""What is replaced, and the fault model that is to be named first."""


def test_a_kernel_without_a_fault_passes() -> None:
    passes(quick(step_by_step, "gated_delta_rule", "bfloat16", examples=2))


@pytest.mark.parametrize(("name", "dtype"), each_second(FAULTY, DTYPES[:2]))
def test_a_faulty_kernel_fails_and_its_fault_is_named(name: str, dtype: str) -> None:
    parts, fault = FAULTY[name]
    verdict = fails(first(partial(step_by_step, **parts), "gated_delta_rule", dtype, shrinking=True))
    assert [found.name for found in verdict.explanations][:1] == [fault], str(verdict)


def test_a_state_kept_in_bfloat16_fails_in_float32() -> None:
    """A contract of float32 inside does not hold a narrower state."""
    fails(first(partial(step_by_step, state_dtype=torch.bfloat16), "gated_delta_rule"))
