"""The Triton attention over sequences end to end: arguments, registration, and a few cases against torch in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import attention as module
from assay.kernels.triton.attention import attention
from assay.kernels.triton.attention_varlen import attention_varlen
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
MIXED = [5, 0, 70, 1], [9, 3, 0, 80]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(
    queries: list[int],
    keys: list[int],
    heads: int = 4,
    groups: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(sum(queries) + heads + width)
    shapes = (sum(queries), heads, width), (sum(keys), groups, width), (sum(keys), groups, width)
    tensors = [torch.randn(shape, generator=drawn).to(dtype) for shape in shapes]
    return [*tensors, offsets(queries), offsets(keys)]


def assert_right(tensors: list[Tensor], **options: Any) -> None:
    """Within what rounded probabilities and one rounded store leave."""
    out = attention_varlen(*tensors, **options)
    assert out.dtype == tensors[0].dtype
    loose = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[out.dtype]
    right = reference("attention_varlen")(*tensors, **options)[0]
    torch.testing.assert_close(out.double(), right, rtol=loose, atol=loose)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a query of doubles": ({"q": torch.zeros(8, 4, 8).double()}, TypeError, "q"),
    "a query that is no tensor": ({"q": [0.0]}, TypeError, "q"),
    "a query of four dimensions": ({"q": torch.zeros(1, 8, 4, 8)}, ValueError, "q"),
    "heads too wide": (dict(zip(NAMES, packed([3], [4], width=257), strict=True)), ValueError, "q"),
    "keys of another dtype": ({"k": torch.zeros(9, 2, 8).half()}, TypeError, "k"),
    "keys of another width": ({"k": torch.zeros(9, 2, 9)}, ValueError, "k"),
    "heads that share nothing": (dict(zip(NAMES, packed([3], [4], heads=5), strict=True)), ValueError, "k"),
    "no key heads": (dict(zip(NAMES, packed([3], [4], groups=0), strict=True)), ValueError, "k"),
    "fewer values than keys": ({"v": torch.zeros(8, 2, 8)}, ValueError, "v"),
    "values elsewhere": ({"v": torch.zeros(9, 2, 8, device="meta")}, ValueError, "v"),
    "offsets of 64 bits": ({"cu_seqlens_q": offsets([5, 3]).long()}, TypeError, "cu_seqlens_q"),
    "queries of no sequence": ({"cu_seqlens_q": offsets([]), "cu_seqlens_k": offsets([])}, ValueError, "cu_seqlens_q"),
    "offsets of fewer sequences": ({"cu_seqlens_k": offsets([9])}, ValueError, "cu_seqlens_k"),
    "an unknown mask": ({"causal": "top_left"}, ValueError, "causal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    changed, error, argument = WRONG[name]
    with pytest.raises(error, match=rf"^{argument}: expected "):
        attention_varlen(**{**dict(zip(NAMES, packed([5, 3], [2, 7]), strict=True)), **changed})


def test_the_operator_is_well_registered() -> None:
    operator = torch.ops.assay.attention_varlen.default
    torch.library.opcheck(operator, (*packed(*MIXED), 0.3, False))
    torch.library.opcheck(operator, (*packed([7, 9], [9, 2], dtype=torch.float16), 0.3, True))


def test_compiled_code_gives_the_same_bits() -> None:
    tensors = packed(*MIXED)
    compiled = torch.compile(
        lambda *x: attention_varlen(*x, causal="bottom_right") + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*tensors), attention_varlen(*tensors, causal="bottom_right") + 1)


@pytest.mark.parametrize("config", [module.CONFIGS[0], module.CONFIGS[4], module.CONFIGS[-1]], ids=str)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_tiles_of_any_height(config: Any, causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences shorter and longer than a tile, empty ones, and ends within it and at its end."""
    monkeypatch.setattr(module._attention_kernel, "configs", [config])
    monkeypatch.setattr(module._attention_kernel, "early_config_prune", None)
    assert_right(packed(*MIXED), causal=causal)
    assert_right(packed([64, 128, 1, 63], [128, 0, 65, 130], heads=2, groups=1), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(1, 1, 1), (6, 3, 12), (7, 1, 40)])
def test_heads_of_any_width_and_number(dtype: torch.dtype, heads: int, groups: int, width: int) -> None:
    """Whether a descriptor can copy them or not, and however many share a key head."""
    assert_right(
        packed(*MIXED, heads=heads, groups=groups, width=width, dtype=dtype), causal="bottom_right", scale=-0.3
    )


def test_more_sequences_than_are_looked_through_at_once() -> None:
    lengths = [number % 3 for number in range(300)]
    assert_right(packed(lengths, lengths[::-1], heads=1, groups=1))


def test_a_sequence_has_the_bits_that_attention_gives_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._attention_kernel, "configs", module.CONFIGS[-1:])
    monkeypatch.setattr(module._attention_kernel, "early_config_prune", None)
    q, k, v, cu_q, cu_k = packed([70, 65], [80, 75])
    out = attention_varlen(q, k, v, cu_q, cu_k, causal="bottom_right")
    alone = attention(
        *(x[begin:].transpose(0, 1)[None] for x, begin in ((q, 70), (k, 80), (v, 80))), causal="bottom_right"
    )
    assert isinstance(alone, Tensor)
    assert torch.equal(out[70:], alone[0].transpose(0, 1))


def test_any_strides() -> None:
    q, k, v, cu_q, cu_k = packed(*MIXED)
    strided = [
        q.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([torch.full_like(k, math.nan), k], -1)[..., 1],
        v.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        torch.stack([cu_q, cu_q + 9], -1)[:, 0],
        torch.stack([cu_k - 9, cu_k], -1)[:, 1],
    ]
    assert_right(strided)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_lies_in_another_sequence_stays_there(bad: float) -> None:
    """A NaN or infinite key or value reaches the rows of its own sequence, and no others."""
    q, k, v, cu_q, cu_k = packed([5, 6, 7], [8, 9, 10])
    right = attention_varlen(q, k, v, cu_q, cu_k)
    v[8, :, 3] = bad
    k[12] = math.nan
    out = attention_varlen(q, k, v, cu_q, cu_k)
    assert torch.equal(out[:5], right[:5])
    assert torch.equal(out[11:], right[11:])
    assert bool(out[5:11].isnan().all())


def test_nothing_to_attend_to() -> None:
    """Without keys rows are zero; without queries, sequences or heads there are none."""
    assert bool((attention_varlen(*packed([3, 4], [0, 0])) == 0).all())
    assert attention_varlen(*packed([0, 0], [5, 2])).shape == (0, 4, 8)
    assert attention_varlen(*packed([], [])).shape == (0, 4, 8)
    assert attention_varlen(*packed([3], [2], heads=0)).shape == (3, 0, 8)
