"""Histograms, error maps and the words beside them: what they say of an output is true."""

import json
import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from assay.kernels.libraries.pytorch import softmax
from assay.verify import examine
from assay.verify.comparison.error_map import error_map, histogram, period_of, region_in_words
from assay.verify.comparison.result import summed
from assay.verify.findings import EDGES, MAP_SHAPE, STEPS, ErrorMap
from assay.verify.report.html import LEVELS, bars, drawn, histogram_words
from assay.verify.verdict import Verdict

from .examined import fails, failure_of, quick

RATIOS = st.one_of(st.floats(0, 1), st.floats(1 + 2.0**-40, 300), st.just(math.inf), st.just(math.nan))
SHAPES = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 100), st.integers(1, 140)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 70)),
)


def wrong_from_column_5(x: torch.Tensor) -> torch.Tensor:
    """A kernel whose columns from the sixth on are too large."""
    y = torch.softmax(x, -1).clone()
    y[:, 5:] *= 1.25
    return y


@pytest.fixture(scope="module")
def failed() -> Verdict:
    return examine(wrong_from_column_5, "softmax", dtype="float32", effort="quick", examples=5)


@given(st.lists(st.one_of(st.sampled_from([*EDGES, 1 + 2.0**-40, math.inf]), st.floats(0, 20)), max_size=60))
def test_each_ratio_is_in_the_bin_that_holds_it(ratios: list[float]) -> None:
    bins = [
        math.ceil(STEPS * value) if value <= 1 else STEPS + sum(value > edge for edge in (1.0, 2.0, 10.0))
        for value in ratios
    ]
    padded = torch.tensor([*ratios, 0.0, 0.0], dtype=torch.float64)
    assert list(histogram(padded, 2)) == [bins.count(place) for place in range(len(EDGES) + 1)]
    assert [histogram(torch.tensor([edge], dtype=torch.float64), 0).index(1) for edge in EDGES] == list(range(23))


def test_an_examination_counts_every_judged_element(failed: Verdict) -> None:
    """A histogram adds up to the elements judged; beyond 1 there is something just where the contract is broken."""
    passed = quick(softmax, dtype="bfloat16", examples=3)
    one = STEPS
    for verdict in (passed, failed):
        assert sum(verdict.histogram) == verdict.elements > 0
        assert (sum(verdict.histogram[one + 1 :]) > 0) == (verdict.outcome == "FAIL") == (verdict.worst > 1)
    assert summed(passed.histogram, ()) == passed.histogram


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.lists(RATIOS, min_size=1, max_size=7), st.integers(0, 2**20))
def test_a_cell_is_the_largest_ratio_of_its_block(shape: tuple[int, ...], values: list[float], seed: int) -> None:
    choice = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    ratio = torch.tensor(values, dtype=torch.float64)[choice]
    assume(bool((ratio > 1).any()))
    errors = error_map("y", ratio, ["R"] * len(shape))
    rows, columns = errors.extent
    assert (rows * columns, columns) == (ratio.numel(), shape[-1])
    assert len(errors.cells) <= MAP_SHAPE[0]
    assert len(errors.cells[0]) <= MAP_SHAPE[1]
    matrix, (tall, wide) = ratio.reshape(rows, columns), errors.block
    assert tall & (tall - 1) == wide & (wide - 1) == 0
    for i, row in enumerate(errors.cells):
        for j, cell in enumerate(row):
            block = matrix[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
            judged = block[~block.isnan()].tolist()
            if cell is None:
                assert not judged
            else:
                assert cell == pytest.approx(max(judged), rel=0.011)
                assert (cell > 1) == (max(judged) > 1)


def broken(*shape: int, at: Any) -> torch.Tensor:
    """A mask of this shape, True at an index."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[at] = True
    return mask


ALL, COUNT = slice(None), torch.arange(256)
TILES = torch.eye(3).kron(torch.ones(4, 4)).bool()
EVERYWHERE = "spread over every row and every column"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (TILES, f"48 of 144 (33 %), {EVERYWHERE}; within tiles of 4 × 4 on the diagonal"),
        (broken(4, 256, at=(ALL, slice(128, 256))), "512 of 1024 (50 %): all of columns 128 to 255 (the last 128)"),
        (broken(17, 5, at=(3, ALL)), "5 of 85 (5.9 %): all of row 3 (of 17)"),
        (
            broken(8, 64, at=(slice(2, 4), slice(3))),
            "6 of 512 (1.2 %): all of rows 2 to 3, columns 0 to 2 (the first 3)",
        ),
        (broken(6, 12, at=(ALL, slice(2, None, 4))), "18 of 72 (25 %): all of columns 2, 6, ... (one in 4)"),
        (broken(4, 256, at=(ALL, COUNT % 64 >= 48)), "256 of 1024 (25 %): all of columns 48 to 63 of each 64"),
        (broken(4, 30, at=(ALL, [1, 5, 22])), "12 of 120 (10 %): all of columns 1, 5, 22"),
        (torch.eye(8).bool(), f"8 of 64 (12 %), {EVERYWHERE}; on the diagonal"),
        (broken(3, 9, at=([0, 1, 2], [4, 0, 7])), "3 of 27 (11 %), in columns 0, 4, 7; 1 in each row"),
        (broken(5, 9, at=([0, 2], [4, 0])), "2 of 45 (4.4 %), in rows 0, 2, columns 0, 4; 1 in each of these rows"),
        (broken(2, 4, 8, 16, at=(ALL, 1)), "256 of 1024 (25 %): all of H 1 (of 4)"),
        (broken(1, 4, 8, 16, at=(0, ALL, slice(5, 8))), "192 of 512 (38 %): all of Sq 5 to 7 (the last 3)"),
        (broken(9, at=4), "1 of 9 (11 %): element 4 (of 9)"),
        (broken(3, 3, at=(ALL, ALL)), "all 9"),
    ],
)
def test_words_say_where(mask: torch.Tensor, words: str) -> None:
    """Ranges, periods, single rows, tiles on the diagonal, and names where there are more than rows and columns."""
    dims = {0: [], 1: ["R"], 2: ["R", "N"], 4: ["B", "H", "Sq", "D"]}[mask.ndim]
    assert region_in_words(mask, dims).replace(" elements", "") == words


def test_a_single_element_is_called_so() -> None:
    assert region_in_words(torch.tensor(True), []) == "the only element"


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 40))
def test_a_period_is_the_smallest_step_that_repeats_all(part: list[bool], size: int) -> None:
    hit = (part * size)[:size]
    assert period_of(hit) == next(step for step in range(1, size + 1) if hit[step:] == hit[: size - step])


def test_many_rows_are_put_into_words_in_time() -> None:
    """60,000 rows, whose first half is right, take well below a second."""
    mask = torch.zeros(60000, 3, dtype=torch.bool)
    mask[torch.randint(30000, 60000, (9000,), generator=torch.Generator().manual_seed(0)), 0] = True
    start = time.process_time()
    assert "of 60000 rows, between 300" in region_in_words(mask, ["R", "N"])
    assert time.process_time() - start < 5


@given(st.data())
def test_all_of_is_said_of_nothing_with_a_hole(data: st.DataObject) -> None:
    """A rectangle is histogram_words by its exact ends; with an inner element missing it is no longer "all of" it."""
    rows, columns = data.draw(st.integers(4, 40)), data.draw(st.integers(4, 40))
    top, left = data.draw(st.integers(0, rows - 3)), data.draw(st.integers(1, columns - 3))
    bottom, right = data.draw(st.integers(top + 2, rows - 1)), data.draw(st.integers(left + 2, columns - 1))
    mask = broken(rows, columns, at=(slice(top, bottom + 1), slice(left, right + 1)))
    words = region_in_words(mask, ["R", "N"])
    assert f"columns {left} to {right}" in words
    assert (f"rows {top} to {bottom}" in words) == (bottom - top + 1 < rows)
    assert "all of" in words
    mask[top + 1, left + 1] = False
    holed = region_in_words(mask, ["R", "N"])
    assert "all of" not in holed
    assert f"columns {left} to {right}" in holed
    assert f"{int(mask.sum())} of {rows * columns} elements" in holed


def test_the_map_is_of_the_first_failure_and_the_sample_of_the_smallest(failed: Verdict) -> None:
    """The map lies over the output as it was met; the numbers are those of the shrunk case, the wrong one included."""
    assert failed.failure is not None
    assert failed.sample is not None
    assert re.search("columns? 5 ", failed.map.words)
    assert math.prod(failed.map.shape) > failed.failure.elements
    assert failed.map.words in str(failed)
    (x,), output = failed.sample.inputs, failed.sample.output
    assert (x.name, x.shape, len(x.values)) == ("x", (1, 6), 6)
    assert [output.index(place) for place, share in enumerate(output.ratio) if share and share > 1] == [(0, 5)]
    assert output.got[5] == failed.failure.got
    assert output.golden[5] == failed.failure.golden


def test_of_a_large_output_the_neighbours_of_the_worst_are_shown() -> None:
    """Inputs of more than 64 elements are left out; of the output there are twelve around the failing one."""

    def far(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1).clone()
        y[:, 100:101] *= 2
        return y

    verdict = quick(far, shapes={"N": [300], "R": [2]}, shrinking=True)
    assert verdict.sample.inputs == ()
    output = verdict.sample.output
    assert len(output.got) == len(output.golden) == len(output.ratio) == 12
    assert failure_of(verdict).index in [output.index(place) for place in range(12)]


def test_what_is_no_matter_of_numbers_has_no_map() -> None:
    def crashes(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    verdict = quick(crashes, shrinking=True)
    assert verdict.map is None
    assert verdict.sample.output is None
    assert verdict.sample.inputs
    assert verdict.histogram == ()


def test_wrong_choices_have_a_map() -> None:
    """Ids that no exact values allow are mapped as infinitely wrong, beside a ratio of zero for the others."""

    def last(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(logits.float(), -1).topk(2)
        return weights / weights.sum(-1, keepdim=True), (ids * 0).int()

    verdict = fails(quick(last, "moe_route", shapes={"E": [4]}))
    assert verdict.map.output == "ids"
    assert {cell for row in verdict.map.cells for cell in row} <= {0.0, math.inf, None}


def test_a_verdict_comes_back_from_its_json(failed: Verdict) -> None:
    assert Verdict.from_dict(json.loads(failed.to_json())) == failed
    pictureless = replace(failed, outcome="PASS", aspects={})
    assert Verdict.from_dict(json.loads(pictureless.to_json())) == pictureless


@given(
    st.integers(1, 12).flatmap(
        lambda width: st.lists(
            st.lists(st.one_of(st.none(), st.floats(0, 300)), min_size=width, max_size=width).map(tuple),
            min_size=1,
            max_size=12,
        )
    )
)
def test_a_drawing_covers_each_cell_once_in_its_level(cells: list[tuple[float | None, ...]]) -> None:
    drawing = drawn(ErrorMap("y", (len(cells), len(cells[0])), (1, 1), tuple(cells), ""))
    painted: dict[tuple[int, int], int] = {}
    for level, path in drawing.paths:
        for x, y, length, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path):
            assert length == back
            for column in range(int(x), int(x) + int(length)):
                assert (int(y), column) not in painted
                painted[int(y), column] = level
    limits = (-math.inf, *LEVELS)
    for place, level in painted.items():
        value = cells[place[0]][place[1]]
        assert (value is None) == (level == len(LEVELS))
        assert value is None or limits[level] < value <= limits[level + 1]
    assert len(painted) == len(cells) * len(cells[0])


def test_bars_keep_the_order_of_counts() -> None:
    counts = [7, *range(20), 0, 3, 900]
    shown = bars(counts)
    assert max(bar.height for bar in shown) == shown[-1].height == 100
    assert [bar.height for bar, count in zip(shown, counts, strict=True) if count == 0] == [0, 0]
    assert [bar.kind for bar in shown] == ["exact"] + 20 * ["kept"] + 3 * ["broken"]
    assert [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", histogram_words(counts))] == [
        sum(counts), 7, 190, sum(range(10, 20)), 903,
    ]  # fmt: skip
