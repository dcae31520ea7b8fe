"""HTML reports: all that was found, escaped, in one file that needs no network."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from assay.verify.campaign.page import survey_page, tally
from assay.verify.campaign.survey import Entry, Row
from assay.verify.cases.case import Case
from assay.verify.findings import Aspect, Comparison, ErrorMap, Explanation, Failure, Numbers, Sample, broken_by
from assay.verify.power_report import PowerReport, Tried
from assay.verify.report.html import number, ratio, verdict_page
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

HOSTILE = "<script>alert('x')</script> & <b>"
VOID = {"meta", "link", "br", "img", "input", "hr"}

CASE = Case(
    spec="softmax",
    sizes={"R": 1, "N": 3},
    dtypes={"x": "bfloat16"},
    values={"x": "normal"},
    layouts={"x": "sliced"},
    seed=7,
    edits=(("x", (0, 1), float("nan")), ("x", (0, 0), 0.0)),
    memory="huge",
)
FAILURE = Failure("contract", CASE, f"broken {HOSTILE}", "y", (0, 2), 0.25, 1 / 3, 1e-3, 83.3, 1, 3)
FAILED = Verdict(
    outcome="FAIL",
    kernel=f"my.softmax {HOSTILE}",
    spec="softmax",
    dtype="bfloat16",
    contract="subnormals='flush'",
    cases=12,
    worst=83.3,
    aspects={
        "numbers": Aspect(
            "broken",
            3,
            83.3,
            FAILURE,
            explanations=(Explanation("fp16_sum", "the sum is kept in float16", 0.4),),
            map=ErrorMap(
                "y", (1, 3), (1, 1), ((0.0, None, 83.3),), f"1 of 3 elements (33 %): all of column 2 {HOSTILE}"
            ),
            sample=Sample(
                (Numbers("x", (1, 3), (0.0, float("nan"), 2.5)),),
                Comparison("y", (1, 3), 0, (0.5, 0.25, 0.25), (0.5, 0.25, 1 / 3), (0.0, None, 83.3)),
            ),
            repro=f"assay repro '{HOSTILE}'",
        ),
        "special": Aspect("kept", 4, 0.5),
        "layouts": Aspect(note="hidden by numbers"),
    },
    phases={"exact": 8, "fuzz": 4},
    elements=12345,
    histogram=(12000, *range(20), 0, 1, 154),
    unjudged=6,
    seed=0,
)
PASSED = replace(FAILED, outcome="PASS", kernel="fine", aspects={"numbers": Aspect("kept", 12, 0.5)}, worst=0.5)
POWER = PowerReport(
    "softmax",
    "float32",
    "float32 inside",
    10,
    (
        Tried("no_maximum", "overflow", "the maximum is not subtracted", "", "large logits", caught=True),
        Tried("flushed", "rounding", f"subnormals are lost {HOSTILE}", "", "tiny probabilities", caught=False),
    ),
)
ENTRY = Entry(f"my.softmax {HOSTILE}", "my:softmax", Settings("softmax"))
ROWS = (
    Row(ENTRY, "bfloat16", "FAIL", FAILED),
    Row(ENTRY, "float32", "PASS", PASSED),
    Row(ENTRY, "float16", "NOT HERE", reason=f"there is no {HOSTILE}"),
)


class Outline(HTMLParser):
    """Collects text and attributes, and insists that tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data


@pytest.fixture(params=["verdict", "survey"])
def page(request: pytest.FixtureRequest) -> str:
    return verdict_page(FAILED, POWER) if request.param == "verdict" else survey_page(ROWS, {"torch": HOSTILE})


def test_what_kernels_are_called_is_escaped_and_nothing_is_loaded(page: str) -> None:
    """Names, messages and reasons are text, and all there; no address, no source, no import."""
    outline = Outline(page)
    assert "<script>alert" not in page
    assert HOSTILE in outline.text
    assert sum(tag == "script" for tag, _ in outline.tags) == 1
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\ssrc=|<link", page)


def test_both_colour_schemes_are_served(page: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = set(re.findall(r"(--[\w-]+):", light))
    assert "prefers-color-scheme: dark" in page
    assert names == set(re.findall(r"(--[\w-]+):", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= names | {"--tone", "--tone-paper"}


def luminance(colour: str) -> float:
    """The relative luminance of a colour in hexadecimal digits (WCAG 2)."""
    digits = "".join(digit * 2 for digit in colour) if len(colour) == 3 else colour
    channels = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_contrast() -> None:
    """Text on its paper reaches the contrast of 4.5 that WCAG asks for, in both schemes.

    From what is right to what is most wrong each colour of a map is darker than the one before, or each is lighter.
    """
    for scheme in re.findall(r":root \{(.*?)\}", verdict_page(PASSED), re.DOTALL):
        colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]+)", scheme))
        pairs = [(tone, f"{tone}-paper") for tone in ("good", "bad", "doubt", "quiet")]
        pairs += [(ink, paper) for ink in ("ink", "soft") for paper in ("paper", "sheet", "hover", "code")]
        for ink, paper in pairs:
            light, dark = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)
        scale = [luminance(colours[f"level-{level}"]) for level in range(6)]
        assert len(set(scale)) == 6
        assert scale in (sorted(scale), sorted(scale, reverse=True))


def test_a_verdict_page_tells_all() -> None:
    text = " ".join(Outline(verdict_page(FAILED)).text.split())
    for part in (
        "FAIL",
        "subnormals='flush'",
        "12 (8 exact, 4 fuzz)",
        "12,345",
        "y[0, 2]",
        "0.333333333",
        "±0.00100",
        "83.3",
        "R=1 N=3",
        "1 × 3",
        "sliced",
        "x[0, 1] = nan",
        "1 element set to zero",
        "fresh memory is filled with 2¹⁰⁰",
        "the sum is kept in float16",
        "assay repro",
        "1 of 3 elements (33 %): all of column 2",
        "Of 12,345 judged elements 12,000 are the golden itself",
        "0.25 0.333333333 83.3 ✗",
        "0.25 0.25 not judged",
    ):
        assert part in text, part


def test_pictures_are_told_in_words_too() -> None:
    images = [attributes for _, attributes in Outline(verdict_page(FAILED)).tags if attributes.get("role") == "img"]
    labels = [attributes["aria-label"] or "" for attributes in images]
    assert [label.split(".")[0] for label in labels] == ["Error map of y, 1 by 3 elements", "Histogram of errors"]
    assert "all of column 2" in labels[0]
    assert "155 outside" in labels[1]


def test_what_was_not_judged_is_not_drawn() -> None:
    """Neither pictures of no numbers nor power that wasn't measured; a lost process has a page without numbers."""
    bare = verdict_page(replace(FAILED, aspects=broken_by(FAILURE), histogram=(), elements=0))
    assert not [tag for tag, attributes in Outline(bare).tags if attributes.get("role") == "img"]
    assert "Known faults" not in bare
    crash = replace(FAILED, aspects=broken_by(Failure("crash", CASE, "SIGSEGV")), worst=float("inf"))
    text = Outline(verdict_page(crash)).text
    assert "SIGSEGV" in text
    assert "came" not in text


def test_power_is_told_where_it_was_measured() -> None:
    text = " ".join(Outline(verdict_page(PASSED, POWER)).text.split())
    assert "1 of 2, with 10 fuzzed cases each" in text
    assert "Not caught: flushed, subnormals are lost" in text
    assert "it would need tiny probabilities" in text


def test_a_survey_page_lists_every_row() -> None:
    """One body of the table per row, with its outcome, and details for the rows that have a verdict."""
    tags = Outline(survey_page(ROWS, {"torch": "2"})).tags
    bodies = [attributes["data-outcome"] for _, attributes in tags if "data-outcome" in attributes]
    assert bodies == ["FAIL", "PASS", "NOT HERE"]
    folds = [attributes["aria-controls"] for _, attributes in tags if "aria-controls" in attributes]
    assert folds == [attributes["id"] for tag, attributes in tags if tag == "tr" and "id" in attributes]
    assert len(folds) == 2
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in tags if tag == "th")


def test_numbers_are_shown_in_full_and_ratios_in_three_digits() -> None:
    """Nine digits tell any two float32 apart."""
    assert (number(1 / 3), number(None), number(float("nan"))) == ("0.333333333", "", "nan")
    shown = [ratio(value) for value in (0.5, 1.0, 101.0, float("inf"), 0.0, 1e-38)]
    assert shown == ["0.500", "1.00", "101", "∞", "0.00", "1.00e-38"]


def test_the_tally_begins_with_verdicts() -> None:
    """Outcomes are counted, in the order of `OUTCOMES`, other words last."""
    assert list(tally(reversed(ROWS)).items()) == [("PASS", 1), ("FAIL", 1), ("NOT HERE", 1)]
