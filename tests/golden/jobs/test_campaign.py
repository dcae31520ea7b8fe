"""Campaigns: what a file means, and one line with file, line and mend for whatever is wrong with it."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.errors import CampaignError
from assay.golden.jobs.campaign import Campaign, parse_campaign, read_campaign, shuffled
from tests.golden.jobs.bad_campaigns import ATTENTION, BAD, SOFTMAX


def parsed(text: str) -> Campaign:
    return parse_campaign(text, "c", "c.toml")


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(CampaignError) as caught:
        parsed(text)
    assert str(caught.value).removeprefix("c.toml:").lstrip().startswith(message)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"none\.toml: can't be read \(No such file"):
        read_campaign(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CampaignError, match=r"bytes\.toml: byte 0 is no UTF-8"):
        read_campaign(tmp_path / "bytes.toml")


def test_lists_are_combined() -> None:
    campaign = parsed("""
distributions = ["normal", "wide"]
seeds = [7, 9]
[sizes.model]
hidden = 12
[[golden]]
spec = ["gelu", "silu"]
shapes = [{ R = [1, 2], N = "model.hidden" }, { R = 3, N = 3 }]
dtypes = ["bf16", { x = "float16" }]
digits = [20, 30]
[[golden]]
spec = "gelu"
options = { approximate = ["none", "tanh"] }
shapes = { R = 1, N = 1 }
dtypes = "float32"
""")
    tasks = list(campaign)
    assert campaign.count == len(tasks) == 2 * 3 * 2 * 2 * 2 * 2 + 2 * 2 * 2
    assert [campaign.task(place) for place in range(campaign.count)] == tasks
    assert {task.recipe.sizes["N"] for task in tasks} == {12, 3, 1}
    assert {task.recipe.dtypes["x"] for task in tasks} == {"bfloat16", "float16", "float32"}
    assert {task.recipe.values["x"] for task in tasks} == {"normal", "wide"}
    assert {task.recipe.seed for task in tasks} == {7, 9}
    assert {task.digits for task in tasks} == {20, 30, None}
    assert [task.recipe.options["approximate"] for task in tasks[-8:]] == ["none"] * 4 + ["tanh"] * 4


def test_the_example_of_the_guide_is_a_campaign() -> None:
    guide = Path(__file__).resolve().parents[3] / "docs" / "golden-jobs.md"
    text = guide.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    campaign = parsed(text)
    assert [entry.spec for entry in campaign.entries] == ["rmsnorm", "add_rmsnorm", "attention"]
    assert campaign.count == 2 * (2 * 2 * 2 * 8) + 100


def test_what_is_said_for_all_need_not_fit_all() -> None:
    campaign = parsed("""
dtypes = ["float32", "bfloat16"]
distributions = ["normal", "patterns"]
[[golden]]
spec = ["gemm_int8", "gemm_fp8"]
shapes = [{ M = 1, N = 2, K = 3 }]
""")
    assert campaign.count == 2 * 2
    assert [task.recipe.dtypes["a"] for task in campaign] == ["int8"] * 2 + ["float8_e4m3fn"] * 2


def test_options_are_written_as_toml_can() -> None:
    campaign = parsed(
        ATTENTION
        + "shapes = [{ B=1, H=2, Hkv=2, Sq=1, Sk=1, D=8, Dv=8 }]\n"
        + '[golden.options]\nsoftcap = ["none", 30]\nwindow = ["none", [3, 0]]\ncausal = ["none"]\n'
    )
    options = [task.recipe.options for task in campaign]
    assert [(found["softcap"], found["window"]) for found in options] == [
        (None, None), (None, (3, 0)), (30.0, None), (30.0, (3, 0))
    ]  # fmt: skip
    assert all(type(found["softcap"]) is not int and found["causal"] == "none" for found in options)


def test_a_thousand_million_cases_take_no_room() -> None:
    campaign = parsed(SOFTMAX + "seeds = 1000000000\n")
    assert campaign.count == 10**9
    assert campaign.task(10**9 - 1).recipe.seed == 10**9 - 1
    assert [task.recipe.seed for task in islice(campaign, 3)] == [0, 1, 2]
    with pytest.raises(IndexError, match="there is no number 1000000000"):
        campaign.task(10**9)


def test_a_sample_of_a_wide_product_is_always_the_same() -> None:
    text = SOFTMAX.replace("N = 3", "N = [3, 4, 5, 6]") + "seeds = 1000000\nsample = 200\n"
    tasks = list(parsed(text))
    assert len({task.recipe.key for task in tasks}) == 200
    assert [task.recipe.key for task in tasks] == [task.recipe.key for task in parsed(text + "# the same")]
    assert {task.recipe.sizes["N"] for task in tasks} == {3, 4, 5, 6}
    assert len({task.recipe.seed // 100_000 for task in tasks}) == 10
    assert parsed(SOFTMAX + "sample = 5\n").count == 1


@given(st.integers(1, 600), st.text(max_size=4))
@settings(deadline=None, max_examples=30)
def test_a_shuffle_is_a_permutation(count: int, salt: str) -> None:
    assert sorted(shuffled(place, count, salt) for place in range(count)) == list(range(count))


def lists(values: Any) -> Any:
    return st.lists(values, min_size=1, max_size=3, unique=True)


@settings(deadline=None, max_examples=40)
@given(
    lists(st.integers(0, 9)),
    lists(st.integers(1, 99)),
    lists(st.sampled_from(["float32", "bfloat16", "float16", "float64"])),
    lists(st.sampled_from(["normal", "wide", "ties", "subnormal"])),
    lists(st.integers(0, 10**6)) | st.integers(1, 4),
    st.none() | st.integers(1, 30),
)
def test_an_expansion_is_lazy_and_has_no_task_twice(
    rows: list[int], columns: list[int], dtypes: list[str], distributions: list[str], seeds: Any, sample: int | None
) -> None:
    text = f"""[[golden]]
spec = ["softmax", "silu"]
shapes = [{{ R = {rows}, N = {columns} }}]
dtypes = {dtypes}
distributions = {distributions}
seeds = {seeds}
""" + (f"sample = {sample}" if sample else "")
    campaign = parsed(text)
    keys = [task.recipe.key for task in campaign]
    assert len(set(keys)) == len(keys) == campaign.count
    assert keys == [task.recipe.key for task in parsed(text + "\n#")]
    assert keys == [campaign.task(place).recipe.key for place in range(campaign.count)]
    iterator = iter(campaign)
    assert next(iterator).recipe.key == keys[0]
    places = range(campaign.count // 3, campaign.count)
    assert campaign.total_milliseconds(places) == pytest.approx(sum(map(campaign.milliseconds, places)))
