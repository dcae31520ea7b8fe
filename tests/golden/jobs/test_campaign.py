"""Campaigns: what a file means, and one line with file, line and mend for whatever is wrong with it."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.errors import CampaignError
from assay.golden.jobs.campaign import Campaign, parse_campaign, read_campaign, shuffled

HEAD = 'dtypes = ["float32"]\n'
SOFTMAX = HEAD + '[[golden]]\nspec = "softmax"\nshapes = [{ R = 2, N = 3 }]\n'
ATTENTION = HEAD + '[[golden]]\nspec = "attention"\n'

ONE = "shapes = [{ B=1, H=4, Hkv=4, Sq=1, Sk=1, D=8, Dv=8 }]\n"

BAD: list[tuple[str, str]] = [
    ("", "expected at least one [[golden]] table"),
    ('golden = "softmax"\n', "golden: expected a list, got 'softmax'"),
    ('dtypes = ["float32"\n[[golden]]\n', "2: is no TOML ("),
    (SOFTMAX + "seeds = \n", "5: is no TOML (Invalid value at column 9); mend what stands there"),
    (SOFTMAX + 'digits = "', "5: is no TOML ("),
    ('distributions = ["gauss"]\n' + SOFTMAX, "distributions[0]: unknown distribution 'gauss'"),
    ("dtype = 1\n" + SOFTMAX, "unknown key 'dtype'; did you mean 'dtypes'?"),
    (SOFTMAX + "\n# seeds\nseed = 3\n", "golden[0]: unknown key 'seed'; did you mean 'seeds'?"),
    (
        HEAD + "[[golden]]\nspec = 'softmax'\n",
        "golden[0]: this [[golden]] table has no shapes; add e.g. shapes = [{ R = 4, N = 64 }]",
    ),
    (HEAD + "[[golden]]\nshapes = []\n", 'golden[0]: this [[golden]] table has no spec; add e.g. spec = "softmax"'),
    (
        SOFTMAX.replace('"softmax"', '[\n"gemm",\n"sofmax"]').replace("R = 2", "M = 2, K = 1"),
        "golden[0].spec[1]: unknown spec 'sofmax'; did you mean 'softmax'?",
    ),
    (SOFTMAX.replace('"softmax"', "7"), "golden[0].spec: expected text or a list, got 7"),
    (
        SOFTMAX + 'dtypes = ["float32", "bfloat17"]\n',
        "golden[0].dtypes[1]: unknown number format 'bfloat17'; did you mean 'bfloat16'?",
    ),
    (
        SOFTMAX + 'dtypes = ["float32",\n "int8"]\n',
        "golden[0].dtypes[1]: dtype 'int8' is that of integers; expected a floating-point dtype",
    ),
    (
        SOFTMAX + 'dtypes = ["float32", "float32"]\n',
        "golden[0].dtypes[1]: 'float32' gives the same inputs as an earlier one",
    ),
    (SOFTMAX + 'dtypes = [{ y = "float16" }]\n', "golden[0].dtypes[0]: softmax: dtype of unknown tensor 'y'"),
    (SOFTMAX + "dtypes = [16]\n", "golden[0].dtypes[0]: expected text or a table, got 16"),
    (SOFTMAX + "dtypes = []\n", "golden[0].dtypes: expected a list of length >= 1, got []"),
    (SOFTMAX.removeprefix(HEAD), 'golden[0]: softmax needs dtypes; add e.g. dtypes = ["bfloat16"]'),
    (
        SOFTMAX + 'distributions = ["normal", "gaussian"]\n',
        "golden[0].distributions[1]: softmax: unknown distribution 'gaussian'",
    ),
    (
        SOFTMAX + 'distributions = [{ x = "normal" },\n{ y = "normal" }]\n',
        "golden[0].distributions[1]: softmax: distribution of unknown tensor 'y'",
    ),
    (
        SOFTMAX + 'distributions = ["normal", { x = "normal" }]\n',
        "golden[0].distributions[1]: {'x': 'normal'} gives the same inputs as an earlier one",
    ),
    (SOFTMAX + "options = { causal = ['none'] }\n", "golden[0].options: unknown option of softmax 'causal'"),
    (SOFTMAX + "options = ['none']\n", "golden[0].options: expected a table, got ['none']"),
    (SOFTMAX + "seeds = 0\n", "golden[0].seeds: expected a whole number >= 1, got 0"),
    (SOFTMAX + "seeds = [1, 2,\n 1]\n", "golden[0].seeds[2]: 1 is listed twice"),
    (SOFTMAX + "digits = [20, 0]\n", "golden[0].digits[1]: expected a whole number >= 1, got 0"),
    (SOFTMAX + "sample = -3\n", "golden[0].sample: expected a whole number >= 1, got -3"),
    (SOFTMAX.replace("N = 3", "N = -3"), "golden[0].shapes[0].N: expected a whole number >= 0, got -3"),
    (SOFTMAX.replace("N = 3", "N = 2.5"), "golden[0].shapes[0].N: expected a whole number, text or a list, got 2.5"),
    (SOFTMAX.replace(", N = 3", ""), "golden[0].shapes[0]: softmax: no size for N; expected sizes for R, N"),
    (SOFTMAX.replace("N = 3", "N = 3, M = 1"), "golden[0].shapes[0].M: softmax: unknown dimension 'M'"),
    (
        SOFTMAX.replace("N = 3", "N = [3, 4]").replace("}]", "}, \n { R = 2, N = 4 }]"),
        "golden[0].shapes[1]: the shape R=2, N=4 is listed twice",
    ),
    (
        SOFTMAX.replace("N = 3", 'N = "llama.hiden"') + "[sizes.llama]\nhidden = 4\n",
        "golden[0].shapes[0].N: N: unknown size 'llama.hiden'; did you mean 'llama.hidden'?",
    ),
    (SOFTMAX + "[sizes]\nhidden = -4\n", "sizes.hidden: expected a whole number >= 0, got -4"),
    (SOFTMAX.replace("{ R = 2, N = 3 }", "7"), "golden[0].shapes[0]: expected a table, got 7"),
    (
        ATTENTION + "[golden.shapes]\nB = 1\nH = 6\nHkv = 4\nSq = 1\nSk = 1\nD = 8\nDv = 8\n",
        "golden[0].shapes.H: attention: H=6 must be a multiple of Hkv=4",
    ),
    (
        ATTENTION + ONE + "[golden.options]\nsoftcap = [30.0,\n -1.0]\n",
        "golden[0].options.softcap[1]: attention: option softcap=-1.0; expected a positive number or None",
    ),
    (ATTENTION + ONE + "options = { alibi = [true, true] }\n", "golden[0].options.alibi[1]: True is listed twice"),
    (
        HEAD + '[[golden]]\nspec = "gemm_int4"\nshapes = [{ M = 1, N = 8, K = 100, g = 64 }]\n',
        "golden[0].shapes[0].K: gemm_int4: K=100 must be a multiple of g=64",
    ),
    (
        HEAD + '[[golden]]\nspec = "moe_route"\nshapes = [{ T = 1, E = 2 }]\noptions = { top_k = [1, 4] }\n',
        "golden[0].shapes[0].E: moe_route: E=2 must be at least top_k=4",
    ),
    (
        HEAD + '[[golden]]\nspec = "gemm_int8"\ndtypes = ["float32"]\nshapes = [{ M = 1, N = 1, K = 1 }]\n',
        "golden[0].dtypes: gemm_int8 fixes the dtype of every tensor; leave dtypes out",
    ),
    (
        SOFTMAX + 'name = "a"\n' + SOFTMAX.removeprefix(HEAD) + 'name = "a"\n',
        "golden[1].name: golden[0] has the name 'a' already; choose another",
    ),
    (SOFTMAX + "about = 3\n", "golden[0]: unknown key 'about'"),
    ("about = 3\n" + SOFTMAX, "about: expected text, got 3"),
    (
        SOFTMAX.replace("R = 2, N = 3", f"R = {list(range(400))}, N = {list(range(400))}"),
        "golden[0].shapes[0]: more than 100000 combinations of sizes and options; split the table",
    ),
]


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
