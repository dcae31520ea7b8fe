"""`assay golden`: the small campaign from end to end, and one line with exit status 2 for every mistake."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from assay import configs
from assay.cli.main import main
from assay.golden import specs
from assay.golden.jobs.campaign import Campaign, parse_campaign, read_campaign
from assay.golden.store import Store
from tests.golden.jobs.here import SMALL, built

pytestmark = pytest.mark.usefixtures("in_process")
CONFIGS = Path(configs.__file__).parent / "campaigns"


def bundled(name: str) -> Campaign:
    """A campaign that comes along."""
    return parse_campaign((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"), name)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the small campaign, built by the command."""
    folder = str(tmp_path_factory.mktemp("small"))
    assert main(("golden", "build", "small", "--store", folder, "--workers", "2")) == 0
    return folder


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good store, and with what no command can use."""
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "other").mkdir()
    (folder / "other" / "file").touch()
    (folder / "bad.toml").write_text(SMALL.replace("seeds", "\nsedes"))
    (folder / "broken.py").write_text("raise ValueError('oh\\nno')", encoding="utf-8")
    built(folder / "good")
    return folder


def test_the_small_campaign_has_every_spec_of_the_full_one() -> None:
    """What is built at length is built and checked in CI; any other op's frozen calls are (tests/golden/store)."""
    small, full = ({entry.spec for entry in bundled(name).entries} for name in ("small", "llm"))
    assert full <= small <= set(specs())


def test_the_full_campaign_can_be_read() -> None:
    campaign = bundled("llm")
    assert campaign.count > 500
    sizes = {size for task in map(campaign.task, range(0, campaign.count, 7)) for size in task.recipe.sizes.values()}
    assert {4096, 14336, 128256, 2048, 768, 151936, 7168, 18432, 129280} <= sizes


def test_the_small_campaign_is_built_and_checked(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("golden", "check", small, "--sample", "80")) == 0
    out = capsys.readouterr().out
    assert re.search(
        rf"{bundled('small').count} records read, 80 derived again by mpmath \(\d+ elements\); no prob", out
    )
    assert main(("golden", "build", "small", "--store", small, "--workers", "1")) == 0
    assert re.match(r"small: 0 records made, \d+ were there, 0 failed; ", capsys.readouterr().out)


def test_a_store_is_shown(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("golden", "show", small, "--limit", "3")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["key", "spec", "sizes", "dtype"]
    assert f"3 records shown, and {bundled('small').count - 3} more (--limit); {small}" in lines
    assert lines[-1] == f"campaign small: {bundled('small').count} tasks, built, 0 failed"
    assert main(("golden", "show", small, "--spec", "rope")) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "  rope  " in line]
    assert len(rows) == sum(entry.count for entry in bundled("small").entries if entry.spec == "rope")
    key = rows[0].split()[0]
    assert main(("golden", "show", small, key)) == 0
    text = capsys.readouterr().out
    parts = ("spec        rope", "input cos", "seed", "result y", "largest radius", "torch 2")
    assert all(part in text for part in (f"key         {key}", *parts)), text


def test_two_stores_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built(tmp_path / "a")
    built(tmp_path / "b", SMALL.replace("seeds = 3", "seeds = 2"))
    assert main(("golden", "diff", str(tmp_path / "a"), str(tmp_path / "a"))) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(("golden", "diff", str(tmp_path / "a"), str(tmp_path / "b"))) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("only in A  ")
    assert out.splitlines()[-1] == "2 only in A"
    path = next((tmp_path / "a").glob("records/*/*"))
    path.write_bytes(b"")
    assert main(("golden", "diff", str(tmp_path / "a"), str(tmp_path / "a"))) == 1
    assert "1 damaged" in capsys.readouterr().out


def test_a_damaged_record_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, campaign = tmp_path / "store", tmp_path / "own campaign.toml"
    campaign.write_text(SMALL, encoding="utf-8")
    built(folder, SMALL, "own-campaign")
    path = next(folder.glob("records/*/*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert main(("golden", "check", "--store", str(folder))) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"FAIL  {path.name.partition('.')[0]}: ")
    assert "1 problems" in out
    assert main(("golden", "build", str(campaign), "--store", str(folder), "--workers", "1", "--recheck")) == 0
    assert "own-campaign: 1 records made, 6 were there, 0 failed" in capsys.readouterr().out
    assert main(("golden", "check", str(folder))) == 0


def test_a_failed_task_is_told_and_the_rest_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = tmp_path / "failing.toml"
    campaign.write_text(SMALL + '[[golden]]\nspec = "softmax"\nshapes = [{ R = 1, N = 1000000000000000 }]\n')
    store = str(tmp_path / "store")
    assert main(("golden", "build", str(campaign), "--store", store, "--workers", "1", "--retries", "1")) == 1
    out, err = capsys.readouterr()
    assert out.startswith("failing: 7 records made, 0 were there, 1 failed; ")
    assert "assay: task 7 (softmax: R=1, N=1000000000000000; x float32 normal; seed 0) failed after 2 attempts" in err
    (manifest,) = (tmp_path / "store" / "manifests").glob("failing-*.json")
    (failed,) = json.loads(manifest.read_text())["manifest"]["failed"]
    assert failed["task"] == 7
    assert main(("golden", "check", store)) == 1
    assert "failed when it was built" in capsys.readouterr().out


def test_parts_are_built_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = tmp_path / "parted.toml"
    campaign.write_text(SMALL)
    for part, made in (("2/2", 4), ("1/2", 3)):
        arguments = ("--store", str(tmp_path / "store"), "--workers", "1", "--part", part)
        assert main(("golden", "build", str(campaign), *arguments)) == 0
        assert f"parted: {made} records made" in capsys.readouterr().out
    names = [name.replace(read_campaign(campaign).origin, "") for name in Store(str(tmp_path / "store")).manifests()]
    assert names == ["parted-.1-of-2", "parted-.2-of-2"]
    assert main(("golden", "check", str(tmp_path / "store"))) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "smal", "--store", "x"), "campaign 'smal'; expected a TOML file, or one of: llm, small"),
        (("build", "none.toml", "--store", "x"), "none.toml: can't be read (No such file or directory)"),
        (("build", "small"), "Missing option '--store'"),
        (("build", "small", "--store", "x", "--engine", "spark"), "--engine 'spark'; expected local or ray"),
        (("build", "small", "--store", "x", "--part", "3"), "--part '3'; expected e.g. 3/10"),
        (("build", "small", "--store", "x", "--part", "4/3"), "--part '4/3'; expected e.g. 3/10"),
        (("build", "small", "--store", "nosuch://x"), "unknown protocol nosuch://"),
        (("build", "small", "--store", "x", "--import", "no.such"), "ops 'no.such': no.such can't be imported"),
        (("build", "bad.toml", "--store", "x"), "bad.toml: golden[0]: unknown key 'sedes'; did you mean 'seeds'?"),
        (("build", "small", "--store", "memory://x"), "each worker has a memory of its own; expected a path"),
        (
            ("build", "small", "--store", "x", "--import", "broken"),
            "ops 'broken': broken can't be imported (ValueError: oh no)",
        ),
        (("check",), "expected the address of one store"),
        (("check", "a", "--store", "b"), "expected the address of one store"),
        (("check", "empty"), "there is nothing; build a campaign first"),
        (("show", "empty"), "there is nothing; build a campaign first"),
        (("show", "good", "zz"), "key 'zz': no record"),
        (("show", "good", "--spec", "nope"), "--spec nope: no record of it in {folder}/good; there are records of "),
        (("build", "small", "--store", ""), "--store: empty; expected a path"),
        (("show", "empty", "zz"), "store " + "{folder}/empty: there is nothing; build a campaign first"),
        (("discard", "empty", "zz"), "there is nothing; build a campaign first"),
        (("discard", "good", ""), "key '': 7 records, "),
        (("diff", "good"), "Missing argument 'B'"),
        (("diff", "good", "god"), "there is nothing; build a campaign first"),
        (("check", "other"), "it holds file, but no assay-store.json"),
    ],
)
def test_a_mistake_is_one_line(
    mistaken: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_line: Callable[..., None],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(mistaken)
    one_line(("golden", *arguments), message.format(folder=mistaken))


def test_two_campaigns_of_one_name_are_both_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither hides what the other misses; an edited one takes its own place."""
    store, names = tmp_path / "store", ("a", "b")
    for name, seeds in zip(names, ("3", "[7]"), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.toml").write_text(SMALL.replace("seeds = 3", f"seeds = {seeds}"), encoding="utf-8")
        arguments = ("golden", "build", str(tmp_path / name / "mine.toml"), "--store", str(store), "--workers", "1")
        assert main(arguments) == 0
    opened = Store(str(store))
    assert len(list(opened.manifests())) == 2
    gone = [key for key in opened.keys() if opened.get(key).recipe.seed in (1, 7)]  # noqa: SIM118 - a Store is no dict
    for key in gone:
        opened.discard(key)
    capsys.readouterr()
    assert main(("golden", "check", str(store), "--sample", "0")) == 1
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]} == set(gone)
    (tmp_path / "b" / "mine.toml").write_text(SMALL.replace("seeds = 3", "seeds = [0]"), encoding="utf-8")
    assert main(arguments) == 0
    assert len(list(opened.manifests())) == 2
    capsys.readouterr()
    assert main(("golden", "check", str(store), "--sample", "0")) == 1
    assert "2 problems" in capsys.readouterr().out


def test_a_wrong_record_is_discarded_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, campaign = str(tmp_path / "store"), tmp_path / "own.toml"
    campaign.write_text(SMALL, encoding="utf-8")
    built(tmp_path / "store", SMALL, "own")
    store = Store(folder)
    record = store.get(next(store.keys()))
    (golden,) = record.goldens
    store.discard(record.key)
    store.put(replace(record, goldens=(replace(golden, value=golden.value + 1.0),)))
    assert main(("golden", "check", folder)) == 1
    advice = re.search(r"`assay golden discard STORE (\w+)` removes it; then build it again", capsys.readouterr().out)
    assert advice is not None
    assert main(("golden", "discard", folder, advice[1])) == 0
    assert capsys.readouterr().out == f"record {record.key} removed; {folder}\n"
    assert main(("golden", "build", str(campaign), "--store", folder, "--workers", "1")) == 0
    assert "own: 1 records made, 6 were there" in capsys.readouterr().out
    assert main(("golden", "check", folder)) == 0


def test_an_empty_key_is_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not that of a store's only one."""
    built(tmp_path / "store")
    store = Store(str(tmp_path / "store"))
    for key in list(store.keys())[1:]:
        store.discard(key)
    assert main(("golden", "discard", str(tmp_path / "store"), "")) == 2
    assert "key '': no record" in capsys.readouterr().err
    assert len(list(store.keys())) == 1


def test_a_store_with_odd_records_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built(tmp_path / "store")
    store = Store(str(tmp_path / "store"))
    record = store.get(next(store.keys()))
    store.put(replace(record, recipe=replace(record.recipe, spec="own_spec")))
    with monkeypatch.context() as patch:
        patch.setattr("assay.golden.store.record.FORMAT", 2)
        store.put(replace(record, digits=15))
    assert main(("golden", "show", store.url)) == 0
    out = capsys.readouterr().out
    assert "own_spec" in out
    assert "8 records shown, 1 damaged or of another format (assay golden check)" in out


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., None]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = ("golden", "build", "small", "--store", "x", "--engine", "ray")
    one_line(line, "--engine ray needs ray: pip install 'kernel-assay[ray]'")
