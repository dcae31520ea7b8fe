"""The Triton paged decode: arguments, registration, and a few cases against torch in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import attention_decode as module
from assay.kernels.triton.attention_decode import (
    MAX_SPLITS,
    attention_decode,
    choose_num_splits,
    empty_partials,
    merge_splits,
)
from tests.kernels.conftest import distinct
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

Inputs = dict[str, Tensor]
WIDE = module._prune_configs(module._CONFIGS, {"q_ptr": torch.zeros(1)}, KEY_AXIS=1)
NARROW = [config for config in module._CONFIGS if config not in WIDE]


def shape_of(config: Any) -> str:
    return f"{config.kwargs['BLOCK_N']} keys, {config.num_warps} warps, {config.num_stages} stages"


def page_table(lengths: list[int], page: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a table of shuffled pages, with stale entries to an unused page, and the mask of unused slots."""
    most = max(1, *(-(-length // page) for length in lengths))
    pages = most * len(lengths) + 1
    table = torch.randperm(pages - 1, generator=drawn).reshape(len(lengths), most).int()
    free = torch.ones(pages, page, dtype=torch.bool)
    for b, length in enumerate(lengths):
        used = torch.arange(length)
        free[table[b, used // page], used % page] = False
        table[b, -(-length // page) :] = pages - 1
    return table, free


def paged(
    lengths: list[int],
    heads: int = 4,
    groups: int = 2,
    width: int = 24,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> Inputs:
    """Draw inputs with NaN in every unused slot."""
    drawn = torch.Generator().manual_seed(sum(lengths) + heads + page)
    table, free = page_table(lengths, page, drawn)
    k, v = (
        torch.randn(*free.shape, groups, width, generator=drawn)
        .masked_fill(free[..., None, None], math.nan)
        .to(cache or dtype)
        for _ in range(2)
    )
    q = torch.randn(len(lengths), heads, width, generator=drawn).to(dtype)
    return {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "seq_lens": torch.tensor(lengths).int()}


def assert_right(inputs: Inputs, **options: float) -> None:
    """Within what rounded probabilities and one rounded store leave."""
    out = attention_decode(*inputs.values(), **options)
    assert out.dtype == inputs["q"].dtype
    loose = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(
        out.double(), reference("attention_decode")(**inputs, **options)[0], rtol=loose, atol=loose
    )


WRONG: dict[str, tuple[Inputs, type[Exception], str]] = {
    "a query of doubles": ({"q": torch.zeros(3, 4, 24).double()}, TypeError, "q"),
    "a query that is no tensor": ({"q": [[[0.0]]]}, TypeError, "q"),  # type: ignore[dict-item]
    "a query of four dimensions": ({"q": torch.zeros(3, 4, 1, 24)}, ValueError, "q"),
    "heads too wide": (paged([3], width=264), ValueError, "q"),
    "keys of another dtype": ({"k_cache": torch.zeros(4, 16, 2, 24).half()}, TypeError, "k_cache"),
    "keys of another width": ({"k_cache": torch.zeros(4, 16, 2, 32)}, ValueError, "k_cache"),
    "heads that share nothing": (paged([3], heads=3), ValueError, "k_cache"),
    "no key heads": (paged([3], heads=4, groups=0), ValueError, "k_cache"),
    "values of another dtype": ({"v_cache": torch.zeros(4, 16, 2, 24).to(torch.float8_e5m2)}, TypeError, "v_cache"),
    "values of fewer pages": ({"v_cache": torch.zeros(1, 16, 2, 24)}, ValueError, "v_cache"),
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
        attention_decode(**{**paged([3, 0, 16]), **changed})


def test_the_operator_is_well_registered() -> None:
    operator = torch.ops.assay.attention_decode.default
    for inputs in (paged([3, 300, 0]), paged([17], dtype=torch.bfloat16)):
        clean = [torch.where(x.isnan(), 0, x) for x in inputs.values()]
        torch.library.opcheck(operator, (*clean, 0.2, 1.0, 0.5))
    coded = paged([16], dtype=torch.bfloat16, cache=torch.float8_e4m3fn)  # the other checks multiply, which torch can't
    torch.library.opcheck(operator, (*coded.values(), 0.2, 1.0, 0.5), test_utils="test_faketensor")


def test_compiled_code_gives_the_same_bits() -> None:
    inputs = paged([3, 300, 0])
    compiled = torch.compile(lambda *x: attention_decode(*x, k_scale=0.5) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs.values()), attention_decode(*inputs.values(), k_scale=0.5) + 1)


@pytest.mark.parametrize("config", distinct(NARROW), ids=shape_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_configuration(dtype: torch.dtype, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._decode_kernel, "configs", [config])
    monkeypatch.setattr(module._decode_kernel, "early_config_prune", None)
    assert_right(paged([129, 1, 0, 64], dtype=dtype))
    assert_right(paged([700, 3], dtype=dtype))
    assert_right(paged([700, 3], heads=66, groups=1, dtype=dtype))


@pytest.mark.parametrize("config", distinct(WIDE), ids=shape_of)
def test_every_configuration_of_float32(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._decode_kernel, "configs", [config])
    assert_right(paged([129, 1, 0, 64]))
    assert_right(paged([700, 3]))


@pytest.mark.parametrize("page", [1, 5, 16, 300])
def test_pages_of_any_size(page: int) -> None:
    assert_right(paged(sorted({1, page - 1, page, page + 1, 2 * page, 37}), page=page))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (17, 1), (6, 3), (70, 1), (40, 2)])
def test_any_number_of_heads_shares_a_key_head(heads: int, groups: int, dtype: torch.dtype) -> None:
    assert_right(paged([33, 0], heads=heads, groups=groups, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 8, 80, 256])
def test_heads_of_any_width(width: int, dtype: torch.dtype) -> None:
    assert_right(paged([33, 5], width=width, dtype=dtype))
    assert_right(paged([33, 5], heads=33, groups=1, width=width, dtype=dtype))


def test_keys_that_are_rows_fill_matrix_instructions_and_fit_shared_memory() -> None:
    """They are 64 or 128, and 64 where heads are wide: two stages of 128 would take more than 227 KiB."""
    half = {"q_ptr": torch.zeros(1, dtype=torch.bfloat16)}
    for block_d, most in ((128, 128), (256, 64)):
        kept = {c.kwargs["BLOCK_N"] for c in module._prune_configs(module._CONFIGS, half, KEY_AXIS=0, BLOCK_D=block_d)}
        assert kept == {64, most}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_eight_bits(dtype: torch.dtype, cache: torch.dtype) -> None:
    """Codes are exact in the query's dtype, and their scales multiply scores and output, in one part or in several."""
    assert_right(paged([5, 600, 0], dtype=dtype, cache=cache), k_scale=0.3, v_scale=1.7, scale=0.2)
    assert_right(paged([5, 60], dtype=dtype, cache=cache), k_scale=-2.0, v_scale=0.7)


def test_any_strides() -> None:
    inputs = paged([40, 16, 0])
    strided = {
        "q": inputs["q"].transpose(0, 1).contiguous().transpose(0, 1),
        "k_cache": torch.stack([inputs["k_cache"], torch.zeros_like(inputs["k_cache"])], -1)[..., 0],
        "v_cache": inputs["v_cache"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "block_table": torch.stack([torch.full_like(inputs["block_table"], -1), inputs["block_table"]], -1)[..., 1],
        "seq_lens": torch.stack([inputs["seq_lens"], inputs["seq_lens"] + 9], -1)[:, 0],
    }
    assert torch.equal(attention_decode(*strided.values()), attention_decode(*inputs.values()))
    expanded = {**inputs, "q": inputs["q"][:1].expand(3, 4, 24), "block_table": inputs["block_table"][:1].expand(3, -1)}
    expanded["seq_lens"] = torch.tensor([40]).int().expand(3)
    assert_right(expanded)


@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
def test_what_the_table_says_behind_the_last_page_is_not_used(entry: int) -> None:
    """Stale entries may be no pages at all."""
    inputs = paged([40, 16, 0, 300])
    out = attention_decode(*inputs.values())
    stale = torch.arange(inputs["block_table"].shape[1]) * 16 >= inputs["seq_lens"][:, None]
    inputs["block_table"] = torch.where(stale, entry, inputs["block_table"])
    assert torch.equal(attention_decode(*inputs.values()), out)


def test_all_parts_of_an_empty_sequence_are_empty() -> None:
    """Merged they give zero, not the NaN of -inf - (-inf); so does a part that others follow."""
    inputs = paged([0, 1, 1500, 0])
    assert_right(inputs)
    assert not attention_decode(*inputs.values())[[0, 3]].any()


def test_nan_and_infinity_that_are_seen_come_out() -> None:
    """A NaN key spoils its sequence's heads, a NaN or infinite value its column, in whatever part they lie."""
    inputs = paged([700, 20], heads=2, groups=2)
    pages = inputs["block_table"].long()
    inputs["v_cache"][pages[0, 40], 3, 0, 5] = torch.inf
    inputs["v_cache"][pages[0, 2], 3, 0, 6] = torch.nan
    inputs["k_cache"][pages[1, 1], 3, 1] = torch.nan
    out = attention_decode(*inputs.values())
    assert out[0, 0, 5] == torch.inf
    assert out[0, 0].isnan().nonzero().tolist() == [[6]]
    assert out[0, 1].isfinite().all()
    assert out[1, 0].isfinite().all()
    assert out[1, 1].isnan().all()


@pytest.mark.parametrize(
    ("batch", "heads", "width", "pages", "page", "most"),
    [
        *((0, 4, 8, 3, 16, 2), (2, 0, 8, 3, 16, 2), (2, 4, 0, 3, 16, 2)),
        *((2, 4, 8, 0, 16, 2), (2, 4, 8, 3, 0, 2), (2, 4, 8, 3, 16, 0)),
    ],
)
def test_nothing_to_attend_to(batch: int, heads: int, width: int, pages: int, page: int, most: int) -> None:
    """Without sequences, heads or width the output is empty; without pages, slots or a table it is zero."""
    cache = torch.full((pages, page, 2, width), torch.nan, dtype=torch.float16)
    table, lengths = torch.full((batch, most), -1).int(), torch.zeros(batch).int()
    out = attention_decode(torch.ones(batch, heads, width, dtype=torch.float16), cache, cache, table, lengths)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.zeros(batch, heads, width, dtype=torch.float16))


@pytest.mark.parametrize("splits", [1, 2, 3, 17, 33, MAX_SPLITS])
@pytest.mark.parametrize("width", [5, 128, 512])
def test_splits_are_weighted_by_their_sums(splits: int, width: int) -> None:
    """However many there are: some without keys, and rows that have no key at all, which are zero."""
    out, lse = torch.full((2, 3, width), math.nan), torch.full((2, 3), math.nan)
    partial_out, partial_lse = empty_partials(out, splits)
    partial_out.copy_(torch.randn(partial_out.shape))
    partial_lse.copy_(8.0 * torch.randn(partial_lse.shape))
    partial_lse[0, :, 1::2] = -math.inf
    partial_lse[1, 1] = -math.inf
    merge_splits(partial_out, partial_lse, out, lse, 0.5)
    base_e = partial_lse.double() * math.log(2.0)
    expected = (base_e.softmax(-1).nan_to_num()[..., None] * partial_out.double()).sum(2) * 0.5
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), base_e.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_few_sequences_are_split_and_many_are_not() -> None:
    splits = choose_num_splits
    assert splits(1000, 10**6, 2) == 1
    assert splits(8, 100, 2) == 1
    assert splits(8, 4096, 2) == 16
    assert splits(8, 10**6, 2) == 33
    assert splits(8, 10**6, 1) == 17
    assert splits(1, 10**6, 2) == MAX_SPLITS
    assert splits(1, 0, 2) == 1
