"""Tuning: a wrong configuration never wins, the fastest right one does, and a record answers and can be run again."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from assay.bench.tuning import Choice, searching, tuned
from assay.bench.tuning.record import Candidate, Question, Record, Winner, bucket, read
from assay.bench.tuning.searching import changed, front, not_told_apart
from assay.bench.tuning.space import Space, combined, read_space
from assay.cli.main import main
from assay.verify.errors import TuneError

KERNELS = """
import time
import torch

calls = 0

def softmax(x, way="right"):
    global calls
    calls += 1
    if way == "scaled":
        return torch.softmax(x, -1) * 1.01
    if way == "one block":
        y = torch.softmax(x, -1)
        y[:, 256:] = 0
        return y
    if way == "overwrites":
        y = torch.empty_like(x)
        y.as_strided((y.numel() + 1,), (1,), y.storage_offset()).zero_()
        return y.copy_(torch.softmax(x, -1))
    y = torch.softmax(x, -1)
    if way == "late" and x.shape == (192, 256) and calls > 7:
        y[3] *= 1.01
    if way == "slow":
        time.sleep(0.01)
    return y
"""
SIZES = ["--at", "R=192,N=256", "--dtype", "float32", "--seconds", "0.05", "--rounds", "2", "--jobs", "1"]


WAYS = "slow,scaled,one block,overwrites,late,right"
COMMAND = ["tune", "ways:softmax", "--spec", "softmax", *SIZES, "--choice", f"way={WAYS}", "--out", "kept.json"]


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current folder one that holds a user's module."""
    (folder / "ways.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another beside other tests take any time


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current folder."""
    enter(tmp_path, monkeypatch)
    return "ways:softmax"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a search among all ways."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter(folder, monkeypatch)
        assert main(COMMAND) == 0
    return folder / "kept.json"


def test_wrong_configurations_never_win(
    searched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong values, an overwritten neighbour, right at one shape alone, right once and wrong when timed: each is
    refused where it shows, and the fastest of the right ones wins. The record answers the same question at once, and a
    wrapper reads its keywords."""
    record = read(searched)
    found = {str(one.choice): one for one in record.candidates}
    assert [str(winner.choice) for winner in record.winners] == ["way=right"]
    assert record.winners[0].measured
    assert found["way=slow"].time > found["way=right"].time
    for way, where in (*((way, "examined") for way in ("scaled", "one block", "overwrites")), ("late", "timed")):
        one = found[f"way={way}"]
        assert one.outcome == "FAIL", one
        assert one.why.startswith(where), one
        assert not one.front
    assert tuned(searched, R=180, N=255) == {"way": "right"}

    enter(searched.parent, monkeypatch)
    began = time.monotonic()
    assert main(COMMAND) == 0
    assert time.monotonic() - began < 2
    assert "holds the answer" in capsys.readouterr().err
    other = ["tune", "ways:other", "--spec", "softmax", *SIZES, "--choice", "way=slow,right", "--out", "kept.json"]
    assert main(other) == 2
    assert "holds a search of ways:softmax; name another file" in capsys.readouterr().err


@pytest.mark.usefixtures("module")
def test_a_record_holds_until_the_kernel_is_another(
    searched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(searching, "find_spec", lambda name: None)  # no Triton: no kernel of its is looked for
    record = read(searched)
    question = dataclasses.replace(record.question, space=Space({"way": ["slow", "right"]}))
    two = tuple(one for one in record.candidates if one.choice.keywords["way"] in ("slow", "right"))
    dataclasses.replace(record, question=question, candidates=two).save(Path("two.json"))
    assert main(["tune", "--replay", "two.json"]) == 0
    assert "holds: every candidate" in capsys.readouterr().out
    Path("ways.py").write_text(KERNELS.replace('if way == "scaled"', 'if way in ("scaled", "right")'), encoding="utf-8")
    assert main(["tune", "--replay", "two.json"]) == 1
    told = capsys.readouterr().out
    assert "way=right: PASS then, now FAIL" in told
    assert "way=right won, now way=slow" in told


def test_an_autotuners_configurations_are_pruned_by_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a Triton kernel without a GPU: what has no room, and what its own pruning leaves out, never runs; a wrong
    configuration is out by its examination; the model orders the rest, and nothing is said to be measured."""
    pytest.importorskip("triton")
    (tmp_path / "tiles.py").write_text(
        """
import torch, triton, triton.language as tl

def leaves_out(configs, arguments, **keywords):
    return [config for config in configs if config.kwargs["TILE"] != 32]

@triton.autotune(
    [triton.Config({"TILE": tile}, num_warps=4) for tile in (32, 64, 128, 256)],
    key=["n"], prune_configs_by={"early_config_prune": leaves_out},
)
@triton.jit
def _double(x, y, n, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if TILE == 128:
        tl.store(y + places, tl.load(x + places, mask=places < n), mask=places < n)
    else:
        tl.store(y + places, tl.load(x + places, mask=places < n) / (1 + tl.exp(-tl.load(x + places, mask=places < n))),
                 mask=places < n)

def silu(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _double[lambda meta: (triton.cdiv(x.numel(), meta["TILE"]),)](x, y, x.numel())
    return y
""",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    shape = ["--at", "R=64,N=1024"]
    command = ["tune", "tiles:silu", "--spec", "silu", "--dtype", "float32", *shape, "--jobs", "1", "--json"]
    assert main(command) == 0
    content = json.loads(capsys.readouterr().out)
    found = {one["choice"]["configs"]["_double"]["TILE"]: one for one in content["candidates"]}
    assert found[32]["outcome"] == "PRUNED"
    assert "own pruning" in found[32]["why"]
    assert found[128]["outcome"] == "FAIL"
    assert all(one["seconds"] is None for one in found.values())
    assert found[64]["modelled"] > 0
    assert found[64]["work"] == found[256]["work"]
    assert content["winners"] == []  # the modelled times differ by the number of warps alone


def test_candidates_of_the_same_modelled_work_are_not_told_apart() -> None:
    def one(name: int, work: float | None, seconds: float | None = None) -> Candidate:
        return Candidate("c", Choice({"a": name}), "PASS", work=work, modelled=work, seconds=seconds)

    best, same, more, unknown = one(1, 1.0), one(2, 1.005), one(3, 1.5), one(4, None)
    assert not_told_apart(best, [best, same, more, unknown]) == [same]
    assert not_told_apart(best, [best, more, unknown]) == []
    assert not_told_apart(one(1, 1.0, seconds=0.1), [same]) == []
    assert not_told_apart(unknown, [same, more, unknown]) == [same, more]


def test_the_front_holds_what_no_other_beats() -> None:
    def one(seconds: float | None, worst: float | None) -> Candidate:
        return Candidate("c", Choice(), "PASS", seconds=seconds, worst=worst)

    fast, sharp, both, slow, unknown = one(1.0, 0.9), one(3.0, 0.1), one(2.0, 0.5), one(3.0, 0.9), one(None, 0.05)
    assert front([fast, sharp, both, slow, unknown]) == [fast, sharp, both, unknown]


def test_spaces_are_products_less_what_is_left_out(tmp_path: Path) -> None:
    """A file's lists are combined, its `without` doesn't count, and a tuner's configurations multiply them."""
    path = tmp_path / "space.toml"
    path.write_text('without = [{ a = 1, b = "x" }]\n[choices]\na = [1, 2]\nb = ["x", "y"]\n', encoding="utf-8")
    space = read_space(path)
    assert [choice.keywords for choice in space] == [{"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert len(combined(space, {"k": [{"T": 1}, {"T": 2}]})) == 6
    assert combined(Space(), {}) == [Choice()]
    for text, told in [
        ("[choices]\na = 3\n", "expected a list"),
        ("[choices]\na = []\n", "list of values"),
        ("without = [{ c = 1 }]\n[choices]\na = [1]\n", "unknown choice 'c'"),
        ("x = 1\n", "unknown key"),
        ("without = []\n", r"expected a table \[choices\]"),
        ("[choices\n", "is no TOML"),
        (f"[choices]\na = {list(range(30))}\nb = {list(range(30))}\n", "900 candidates"),
    ]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TuneError, match=told):
            read_space(path)


def test_a_wrapper_reads_the_winner_of_its_sizes(tmp_path: Path) -> None:
    """The winner of the bucket, or of the nearest one; sizes that the record hasn't got are told."""
    assert bucket({"M": 1, "N": 129, "K": 256}) == {"M": 1, "N": 256, "K": 256}
    question = Question("ways:softmax", "softmax", Space(), ({"R": 16, "N": 64},))
    every = tuple(Candidate("c", Choice({"TILE": tile}), "PASS", seconds=1.0) for tile in (1, 2))
    record = Record("2026-01-01", question, "key", "m", {}, every, ())
    small, large = Choice({"TILE": 1}), Choice({}, {"_k": {"TILE": 2, "num_warps": 4}})
    winners = (Winner({"R": 16, "N": 64}, small, True), Winner({"R": 4096, "N": 64}, large, True))
    path = dataclasses.replace(record, winners=winners).save(tmp_path / "other.json")
    assert tuned(path, R=20, N=60) == {"TILE": 1}
    assert tuned(path, R=100_000) == {"TILE": 2, "num_warps": 4}
    with pytest.raises(TuneError, match="expected sizes of R, N, got Q"):
        tuned(path, Q=3)
    with pytest.raises(TuneError, match="no winner"):
        tuned(dataclasses.replace(record, winners=()).save(tmp_path / "none.json"), R=1)
    with pytest.raises(TuneError, match="can't be read"):
        tuned(tmp_path / "nowhere.json", R=1)
    lost = dataclasses.replace(record, candidates=record.candidates[1:])
    assert any("a new candidate" in words for words in changed(lost, record))
    assert any("no candidate any more" in words for words in changed(record, lost))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected a TARGET"),
        (["ways:softmax", "--spec", "softmax", "--dtype", "float32"], "leaves nothing to choose"),
        (["ways:softmax", "--spec", "softmax", "--choice", "way"], "--choice 'way^': expected = after way"),
        (["ways:softmax", "--spec", "softmax", "--space", "no.toml"], "can't be read"),
        (["ways:softmax", "--spec", "softmax", "--space", "no.toml", "--choice", "a=1,2"], "expected one of them"),
        (["--replay", "ways.py"], "is no JSON"),
        (["ways:softmax", "--spec", "softmax", "--choice", "way=a,b", "--device", "cuda:77"], "can't be used"),
        (
            ["ways:softmax", "--spec", "softmax", "--choice", "way=a,b", "--layout", "x"],
            "expected = after x (as in b=transposed)",
        ),
        (["ways:softmax", "--spec", "softmax", "--dtype", "float32", "--choice", "wey=1,2"], "no candidate keeps"),
    ],
)
def test_mistakes_are_told_in_a_line(
    module: str, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    shape = ["--at", "R=16,N=64", "--jobs", "1"] if arguments and "--replay" not in arguments else []
    assert main(["tune", *arguments, *shape]) in (1, 2)
    assert told in capsys.readouterr().err
