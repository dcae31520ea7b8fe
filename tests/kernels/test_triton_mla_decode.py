"""The Triton MLA decode: arguments, registration, and a few cases against torch in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import mla_decode as module
from assay.kernels.triton.mla_decode import mla_decode
from tests.kernels.conftest import distinct
from tests.kernels.test_triton_attention_decode import page_table
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

Inputs = dict[str, Tensor]
BF16 = torch.bfloat16


def latent(
    lengths: list[int],
    heads: int = 3,
    width: int = 24,
    rope: int = 8,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Draw inputs whose latents and rope keys are views of one cache, with NaN in every unused slot."""
    drawn = torch.Generator().manual_seed(sum(lengths) + heads + page)
    table, free = page_table(lengths, page, drawn)
    cache = torch.randn(*free.shape, width + rope, generator=drawn).masked_fill(free[..., None], math.nan).to(dtype)
    q, q_rope = (torch.randn(len(lengths), heads, columns, generator=drawn).to(dtype) for columns in (width, rope))
    lens = torch.tensor(lengths).int()
    both = {"cache": cache[..., :width], "rope_cache": cache[..., width:]}
    return {"q": q, "q_rope": q_rope, **both, "block_table": table, "seq_lens": lens}


def assert_right(inputs: Inputs, **options: Any) -> None:
    """Within what rounded probabilities and one rounded store leave; the log-sum-exp is float32."""
    out, lse = mla_decode(*inputs.values(), return_lse=True, **options)
    assert out.dtype == inputs["q"].dtype
    right, level = reference("mla_decode")(**inputs, return_lse=True, **options)
    loose = {torch.float32: 2e-6, BF16: 2e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(out.double(), right, rtol=loose, atol=loose)
    torch.testing.assert_close(lse.double(), level, rtol=4e-6, atol=4e-6)


WRONG: dict[str, tuple[Inputs, type[Exception], str]] = {
    "a query of doubles": ({"q": torch.zeros(3, 3, 24).double()}, TypeError, "q"),
    "a query that is no tensor": ({"q": [[[0.0]]]}, TypeError, "q"),  # type: ignore[dict-item]
    "a query of two dimensions": ({"q": torch.zeros(3, 24)}, ValueError, "q"),
    "latent vectors too wide": (latent([3], width=513), ValueError, "q"),
    "positions in another dtype": ({"q_rope": torch.zeros(3, 3, 8).half()}, TypeError, "q_rope"),
    "positions for other heads": ({"q_rope": torch.zeros(3, 2, 8)}, ValueError, "q_rope"),
    "positions too wide": (latent([3], rope=65), ValueError, "q_rope"),
    "a cache in another dtype": ({"cache": torch.zeros(5, 16, 24).to(torch.float8_e4m3fn)}, TypeError, "cache"),
    "a cache of heads": ({"cache": torch.zeros(5, 16, 1, 24)}, ValueError, "cache"),
    "a cache of another width": ({"cache": torch.zeros(5, 16, 32)}, ValueError, "cache"),
    "fewer pages of positions": ({"rope_cache": torch.zeros(1, 16, 8)}, ValueError, "rope_cache"),
    "a table of 64 bits": ({"block_table": torch.zeros(3, 1).long()}, TypeError, "block_table"),
    "a table for other sequences": ({"block_table": torch.zeros(2, 1).int()}, ValueError, "block_table"),
    "lengths of 64 bits": ({"seq_lens": torch.zeros(3).long()}, TypeError, "seq_lens"),
    "lengths in a column": ({"seq_lens": torch.zeros(3, 1).int()}, ValueError, "seq_lens"),
    "lengths elsewhere": ({"seq_lens": torch.zeros(3, device="meta").int()}, ValueError, "seq_lens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    changed, error, argument = WRONG[name]
    with pytest.raises(error, match=rf"^{argument}: expected "):
        mla_decode(**{**latent([3, 0, 16]), **changed})


def test_the_operator_is_well_registered() -> None:
    operator = torch.ops.assay.mla_decode.default
    for inputs in (latent([3, 300, 0]), latent([17], dtype=BF16)):
        clean = [torch.where(x.isnan(), 0, x) for x in inputs.values()]
        torch.library.opcheck(operator, (*clean, 0.2))


def test_compiled_code_gives_the_same_bits() -> None:
    inputs = latent([3, 300, 0])

    def block(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = mla_decode(*tensors, return_lse=True)
        return out + 1, lse.exp()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs.values()), block(*inputs.values()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("config", distinct(module._CONFIGS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_every_configuration(dtype: torch.dtype, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._mla_kernel, "configs", [config])
    monkeypatch.setattr(module._mla_kernel, "early_config_prune", None)
    assert_right(latent([129, 1, 0, 64], dtype=dtype))
    assert_right(latent([700, 3], heads=2, page=64, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("heads", [1, 16, 17, 40])
def test_any_number_of_heads(heads: int, dtype: torch.dtype) -> None:
    assert_right(latent([33, 0], heads=heads, dtype=dtype))


@pytest.mark.parametrize("page", [1, 5, 64, 192])
def test_pages_of_any_size(page: int) -> None:
    assert_right(latent(sorted({1, page - 1, page, page + 1, 2 * page, 37}), heads=1, page=page))


@pytest.mark.parametrize(("width", "rope"), [(1, 1), (16, 0), (0, 8), (80, 40), (512, 64)])
def test_columns_of_any_number(width: int, rope: int) -> None:
    assert_right(latent([33, 5], heads=1, width=width, rope=rope, dtype=BF16), scale=0.1)


def test_the_scale_counts_all_columns() -> None:
    """Left out, it is 1 / sqrt of latent columns and those with positions; it may be negative."""
    inputs = latent([40, 7])
    assert torch.equal(mla_decode(*inputs.values()), mla_decode(*inputs.values(), scale=1 / math.sqrt(32)))  # type: ignore[arg-type]
    assert_right(inputs, scale=-0.3)


def test_any_strides() -> None:
    inputs = latent([40, 16, 0])
    strided = {
        "q": inputs["q"].transpose(0, 1).contiguous().transpose(0, 1),
        "q_rope": torch.stack([inputs["q_rope"], torch.zeros_like(inputs["q_rope"])], -1)[..., 0],
        "cache": inputs["cache"].permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "rope_cache": inputs["rope_cache"].contiguous(),
        "block_table": torch.stack([torch.full_like(inputs["block_table"], -1), inputs["block_table"]], -1)[..., 1],
        "seq_lens": torch.stack([inputs["seq_lens"], inputs["seq_lens"] + 9], -1)[:, 0],
    }
    for found, right in zip(
        mla_decode(*strided.values(), return_lse=True), mla_decode(*inputs.values(), return_lse=True), strict=True
    ):
        assert torch.equal(found, right)


@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
@pytest.mark.parametrize("page", [16, 64])
def test_what_the_table_says_behind_the_last_page_is_not_used(page: int, entry: int) -> None:
    """Stale entries may be no pages at all."""
    inputs = latent([40, 16, 0, 300], page=page)
    out = mla_decode(*inputs.values())
    stale = torch.arange(inputs["block_table"].shape[1]) * page >= inputs["seq_lens"][:, None]
    inputs["block_table"] = torch.where(stale, entry, inputs["block_table"])
    assert torch.equal(mla_decode(*inputs.values()), out)  # type: ignore[arg-type]


def test_all_parts_of_an_empty_sequence_are_empty() -> None:
    """Merged they give zero and -inf, not the NaN of -inf - (-inf); so does a part that others follow."""
    inputs = latent([0, 1, 1500, 0], heads=2)
    assert_right(inputs)
    out, lse = mla_decode(*inputs.values(), return_lse=True)
    assert not out[[0, 3]].any()
    assert bool((lse[[0, 3]] == -math.inf).all())


def test_nan_that_is_seen_comes_out() -> None:
    """As a latent vector is key and value, a NaN in it spoils all of its sequence, and nothing else."""
    inputs = latent([700, 20])
    right = mla_decode(*inputs.values())
    pages = inputs["block_table"].long()
    inputs["cache"][pages[0, 40], 3, 5] = torch.nan
    out = mla_decode(*inputs.values())
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1], right[1])


@pytest.mark.parametrize(
    ("batch", "heads", "pages", "page", "most"),
    [(0, 4, 3, 16, 2), (2, 0, 3, 16, 2), (2, 4, 0, 16, 2), (2, 4, 3, 0, 2), (2, 4, 3, 16, 0)],
)
def test_nothing_to_attend_to(batch: int, heads: int, pages: int, page: int, most: int) -> None:
    """Without sequences or heads the output is empty; without pages, slots or a table it is zero."""
    cache, rope = (torch.full((pages, page, width), torch.nan, dtype=torch.float16) for width in (16, 8))
    table, lengths = torch.full((batch, most), -1).int(), torch.zeros(batch).int()
    q, q_rope = (torch.ones(batch, heads, width, dtype=torch.float16) for width in (16, 8))
    out, lse = mla_decode(q, q_rope, cache, rope, table, lengths, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((batch, heads), -math.inf))
