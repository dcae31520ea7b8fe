"""Every tensor of every op is drawn over its whole domain, and no op-specific list narrows it without a reason."""

import math
from functools import cache

import pytest
import torch

from assay.golden import spec, specs
from assay.golden.inputs.distributions import KINDS, REAL, names_of
from assay.golden.inputs.values import draw, dtype_of
from assay.golden.signature import TensorSpec

POSITIVE = {
    "weight": "a share, from 0 to 1",
    "slope": "ALiBi's slopes are positive",
}
BOUNDED = {"angle": "a sine or cosine", "lse": "a logarithm: its values and -inf, not its binades"}
LISTED_SIZES = {
    "g": "the sizes of groups that quantised formats have",
    "D": "heads of kernels are multiples of 8",
    "Dv": "heads of kernels are multiples of 8",
    "Dr": "heads of kernels are multiples of 8",
    "S": "a scan's state is held in registers, as a power of two",
    "H": "heads of linear recurrences, each of which takes as much time; to as many as models have",
    "k": "experts of a token, to as many as models have",
    "B": "sequences of a ragged batch, which definitions go through one by one",
    "W": "taps of a causal convolution",
}
LARGEST_LISTED = {"B": 129, "W": 7, "g": 128, "D": 256, "Dv": 256, "Dr": 64, "S": 128, "H": 32, "k": 10}
OWN = [
    pytest.param(op, tensor, id=f"{op}-{tensor.name}")
    for op in specs()
    for tensor in spec(op).tensors
    if tensor.inputs and not tensor.is_integer
]
ROLES = ("real", "scale", "weight", "angle", "slope", "lse")


@cache
def numbers(tensor: TensorSpec, names: tuple[str, ...], dtype: str) -> torch.Tensor:
    """Numbers of the tensor, from each of its distributions at two seeds."""
    sizes = {"R": 32, "N": 32}
    plain = TensorSpec(tensor.name, ("R", "N"), None, tensor.role, "", inputs=tensor.inputs)
    drawn = [draw(plain, sizes, dtype, name, seed).double().flatten() for name in names for seed in (0, 1)]
    return torch.cat(drawn)


def binades(values: torch.Tensor) -> int:
    """How many powers of two the magnitudes of finite numbers other than zero lie between."""
    magnitudes = values[values.isfinite() & (values != 0)].abs()
    return len(torch.frexp(magnitudes).exponent.unique())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_drawn_over_its_domain(role: str, dtype: str) -> None:
    """Both signs, zero, ties and a wide range of magnitudes; of real numbers both ends of the format."""
    tensor = TensorSpec("x", ("R", "N"), None, role)
    values = numbers(tensor, names_of(tensor), dtype)
    assert len(values.unique()) < len(values)
    assert bool((values > 0).any())
    assert bool((values < 0).any()) == (role not in POSITIVE)
    assert bool((values == 0).any()) or role in ("weight", "slope", "lse")
    if role not in BOUNDED:
        assert binades(values) >= 12
    if role == "real":
        limits = torch.finfo(getattr(torch, dtype))
        assert values.abs().max() > 0.9 * limits.max
        assert values[values != 0].abs().min() < limits.smallest_normal
    if role == "lse":
        assert bool((values == -math.inf).any())


@pytest.mark.parametrize(("op", "tensor"), OWN)
def test_an_ops_own_inputs_do_not_narrow_the_domain(op: str, tensor: TensorSpec) -> None:
    """Both signs, zero, and magnitudes from far below one to beyond it."""
    dtype = dtype_of(tensor, "float32")
    values = numbers(tensor, tuple(tensor.inputs), dtype)
    assert bool((values > 0).any())
    assert bool((values < 0).any())
    assert bool((values == 0).any())
    assert binades(values) >= 12
    assert values.abs().max() >= 1


def test_every_distribution_of_real_numbers_has_one_kind() -> None:
    kinds = [name for names in KINDS.values() for name in names]
    assert sorted(kinds) == sorted({*REAL, "midpoints"})


@pytest.mark.parametrize("op", specs())
def test_sizes_that_an_op_lists_have_a_reason_and_reach_those_of_models(op: str) -> None:
    """Any other symbol may have any size."""
    for symbol, sizes in spec(op).sizes.allowed.items():
        assert symbol in LISTED_SIZES, f"{op} restricts {symbol}"
        assert max(sizes) >= LARGEST_LISTED[symbol]
