"""Sizes that hang on each other: one as large as another, and lists of which some fit together."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.cli.settings import shapes
from assay.golden.registry import spec
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.errors import SettingError
from assay.verify.settings import Settings
from tests.zoo.attention import attention_rows

SELF = {"Sk": "Sq", "Dv": "D", "D": [8, 16], "B": [1]}


def self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only takes as many keys as queries."""
    assert q.shape[2] == k.shape[2], f"{q.shape[2]} queries, {k.shape[2]} keys"
    assert v.shape[3] == q.shape[3]
    out = attention_rows(q, k, v)
    assert isinstance(out, Tensor)
    return out


def wrong_from_nine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last of nine keys or more is left out."""
    if k.shape[2] < 9:
        return self_attention(q, k, v)
    return self_attention(q, torch.cat([k[:, :, :-1], k[:, :, -2:-1]], 2), v)


def verdict_of(kernel: Any, sizes: Mapping[str, Any]) -> Verdict:
    """What a short examination with these shapes says."""
    return examine(kernel, "attention", dtype="float32", shapes=sizes, effort="quick", examples=4)


def test_equal_lengths_are_equal_in_every_case() -> None:
    """A kernel for self-attention passes, and without the tie it fails."""
    assert verdict_of(self_attention, SELF).outcome == "PASS"
    untied = verdict_of(self_attention, {**SELF, "Sk": range(1, 40)})
    assert untied.failure is not None
    assert "keys" in untied.failure.message


def test_a_shrunk_case_is_tied_too() -> None:
    """The failure comes down to the least sizes at which it is one, and these are equal."""
    verdict = verdict_of(wrong_from_nine, SELF)
    assert verdict.failure is not None
    assert verdict.failure.kind == "contract"
    assert verdict.failure.case.sizes["Sk"] == verdict.failure.case.sizes["Sq"] == 9


def sizes_of(op: str, given: Mapping[str, Sequence[int]], **options: Any) -> list[dict[str, int]]:
    """The sizes of fifty cases."""
    sampler = Sampler(spec(op), "bfloat16", shapes=given, options={name: [value] for name, value in options.items()})
    cases: list[Case] = [sampler.case(seeded(seed)) for seed in range(50)]
    return [dict(case.sizes) for case in cases]


def test_lists_that_hang_on_each_other_are_combined() -> None:
    """Heads are a multiple of groups of heads, whatever is drawn first; what fits nothing is never drawn."""
    found = {(sizes["H"], sizes["Hkv"]) for sizes in sizes_of("attention_varlen", {"H": [1, 2], "Hkv": [1, 2]})}
    assert found == {(1, 1), (2, 1), (2, 2)}
    found = {(sizes["H"], sizes["Hkv"]) for sizes in sizes_of("attention", {"H": [4, 6], "Hkv": [2, 5, 3]})}
    assert found == {(4, 2), (6, 2), (6, 3)}
    rows = sizes_of("gemm_int4", {"K": [32, 64]})
    assert {sizes["K"] for sizes in rows} == {32, 64}
    assert all(sizes["K"] % sizes["g"] == 0 for sizes in rows)


@pytest.mark.parametrize(
    ("op", "given", "words"),
    [
        ("attention", {"H": [3, 5], "Hkv": [2, 4]}, "H=3, 5, Hkv=2, 4; attention needs H to be a multiple of Hkv"),
        ("gemm_int4", {"K": [33]}, r"K=33; gemm_int4 needs a multiple of 32 or 64 or 128 \(g\)"),
    ],
)
def test_what_fits_nothing_is_told_with_the_other(op: str, given: dict[str, list[int]], words: str) -> None:
    """The message names both symbols."""
    with pytest.raises(SettingError, match=words):
        sizes_of(op, given)


def test_ties_are_settings() -> None:
    """Through tables and the command line; a symbol that isn't there, or a chain, is refused."""
    settings = Settings("attention", dtype="float32", shapes=SELF)
    assert settings.ties == {"Sk": "Sq", "Dv": "D"}
    assert Settings.from_table(settings.as_table()) == settings
    assert shapes(["Sk=Sq", "D=8"]) == {"Sk": "Sq", "D": [8]}
    with pytest.raises(SettingError, match="did you mean 'Sq'"):
        Settings("attention", dtype="float32", shapes={"Sk": "Sqq"})
    with pytest.raises(SettingError, match="expected a symbol that has sizes of its own"):
        Settings("attention", dtype="float32", shapes={"Sk": "Sq", "Sq": "Sk"})


def test_a_symbol_left_out_of_at_is_as_large_as_its_other() -> None:
    """Sizes of production follow the tie."""
    at = {"B": 1, "H": 1, "Hkv": 1, "Sq": 300, "D": 8}
    assert Settings("attention", dtype="float32", shapes=SELF, at=[at]).at[0]["Sk"] == 300
