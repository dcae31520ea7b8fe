"""`./dev evidence [MINUTES [CLAIM...]]`: runs what docs/evidence.toml lists, the stalest first.

A claim is a command and the sources that it speaks of. Tests are run one by one, in the order of their files, and go on
where they were; each result is in docs/evidence.json when it is there. Where a claim's sources have changed since its
last whole run, it is stale, and the page says so. A claim that is run anew keeps its last whole run until then. With 0
minutes only docs/evidence.md is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from assay.runtime.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: written by ./dev evidence -->"
END = "<!-- end -->"
_STALE = "Older than the code, or never run whole: "
_SUFFIXES = {".py", ".toml", ".txt", ".safetensors", ".json"}
_LINES = 30  # of what a script printed
_NAMED = 5  # failed tests


@dataclass(frozen=True)
class Claim:
    """What is claimed; the tests or the script that show it, and the sources that it speaks of."""

    name: str
    says: str
    sources: Sequence[str]
    tests: Sequence[str] = ()
    script: Sequence[str] = ()

    @property
    def command(self) -> str:
        """What a reader types."""
        if self.tests:
            return " ".join(("./dev test", *(f'"{word}"' if " " in word else word for word in self.tests)))
        return " ".join(self.script)


class Book:
    """The claims below ``root``, what is recorded of them, and the page that tells it."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, docs = root, root / "docs"
        self.record_path, self.page_path = docs / "evidence.json", docs / "evidence.md"
        table = tomllib.loads((docs / "evidence.toml").read_text(encoding="utf-8"))
        self.claims = {row["name"]: Claim(**row) for row in table["claim"]}

    def record(self) -> dict[str, Any]:
        """By name of a claim: its last ``whole`` run, and the one that is ``under_way``."""
        found = json.loads(self.record_path.read_text(encoding="utf-8")) if self.record_path.exists() else {}
        return {name: found.get(name, {}) for name in self.claims}

    def put(self, name: str, entry: Mapping[str, Any]) -> None:
        """Replace what is recorded of one claim, at once."""
        content = json.dumps(self.record() | {name: entry}, indent=1, sort_keys=True)
        write_text_atomically(self.record_path, content + "\n")

    def digest(self, name: str) -> str:
        """Of the sources of a claim, by content."""
        found = hashlib.sha256()
        for source in self.claims[name].sources:
            place = self.root / source
            paths = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix in _SUFFIXES)
            for path in paths:
                found.update(f"{path.relative_to(self.root)}\0".encode() + path.read_bytes())
        return found.hexdigest()[:12]

    def stale(self, names: Sequence[str] = ()) -> list[str]:
        """The claims (of these ``names``) whose last whole run isn't of the sources as they are, the stalest first."""
        record = self.record()
        asked = names or self.claims
        old = [name for name in asked if record[name].get("whole", {}).get("digest") != self.digest(name)]
        return sorted(old, key=lambda name: tuple(record[name].get(run, {}).get("ended", "") for run in _RUNS))

    def begun(self, name: str) -> dict[str, Any]:
        """The run of a claim that is under way, or a new one where the sources are others by now."""
        run: dict[str, Any] = self.record()[name].get("under_way", {})
        if run.get("digest") == self.digest(name):
            return run
        return {"digest": self.digest(name), "commit": _commit(self.root), "done": 0, "of": 0, "seconds": 0.0,
                "failed": [], "skipped": 0, "said": "", "ended": ""}  # fmt: skip

    def keep(self, name: str, run: dict[str, Any]) -> None:
        """Write a run down; it is the last whole one when all is done."""
        run["ended"] = datetime.now().isoformat(" ", timespec="seconds")
        before = self.record()[name]
        whole = run["of"] and run["done"] >= run["of"]
        kept = {"whole": run} if whole else {**before, "under_way": run}
        self.put(name, kept)

    def write(self) -> None:
        """The page's part between the marks, as the record has it."""
        page = self.page_path.read_text(encoding="utf-8")
        write_text_atomically(self.page_path, self.written(page, self.stale()))

    def written(self, page: str, stale: Sequence[str]) -> str:
        """The page, its part between the marks made of the record, and of which claims are ``stale``."""
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        names = ", ".join(name for name in self.claims if name in stale) or "none"
        record = self.record()
        rows = [_row(self.claims[name], record[name]) for name in self.claims]
        parts = [_STALE + names + ".", "\n".join((_HEAD, *rows))]
        parts += [
            f"`{self.claims[name].command}`, {whole['ended'][:10]}:\n\n```\n{whole['said']}\n```"
            for name in self.claims
            if (whole := record[name].get("whole", {})).get("said")
        ]
        return "\n\n".join((before + BEGIN, *parts, END)) + after


_RUNS = ("whole", "under_way")
_HEAD = "| claim | command | run | commit | result |\n|---|---|---|---|---|"


def stale_on(page: str) -> list[str]:
    """The claims that a page calls stale."""
    found = re.search(re.escape(_STALE) + r"(.*)\.$", page, re.MULTILINE)
    return [] if found is None or found[1] == "none" else found[1].split(", ")


def _row(claim: Claim, entry: Mapping[str, Any]) -> str:
    whole, now = entry.get("whole"), entry.get("under_way")
    said = [_result(claim, whole)] if whole else ["never run whole"]
    if now:
        said.append(f"being run at {now['commit']}: {_result(claim, now)}")
    date, commit = (whole["ended"][:10], whole["commit"]) if whole else ("", "")
    command = claim.command.replace("|", "\\|")
    return f"| {claim.name}: {claim.says} | `{command}` | {date} | {commit} | {'; '.join(said)} |"


def _result(claim: Claim, run: Mapping[str, Any]) -> str:
    """What came out of a run, in words."""
    failed: list[str] = run["failed"]
    if not claim.tests:
        return ", ".join([f"{run['seconds']:.0f} s", *(failed or ["ran to its end"])])
    words = [f"{run['done'] - len(failed) - run['skipped']} of {run['of']} passed", f"{run['seconds']:.0f} s"]
    words += [f"{run['skipped']} skipped"] if run["skipped"] else []
    words += [f"{run['of'] - run['done']} not run yet"] if run["done"] < run["of"] else []
    if failed:
        named = ", ".join(f"`{each.rpartition('::')[2]}`" for each in failed[:_NAMED])
        words.append(f"{len(failed)} failed: {named}{' and more' if len(failed) > _NAMED else ''}")
    return ", ".join(words)


def _commit(root: Path) -> str:
    """The commit, with a plus where files that git tracks differ from it."""
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


class Recorder:
    """A plugin of pytest: begins at the first test that isn't done, writes each result, stops when time is up."""

    def __init__(self, book: Book, name: str, until: float) -> None:
        self.book, self.name, self.until, self.run = book, name, until, book.begun(name)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Those that are done are left out."""
        self.run["of"] = len(items)
        del items[: self.run["done"]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that takes the process down is known."""
        self.run["test"] = nodeid
        self.book.keep(self.name, self.run)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Time counts in each of a test's three phases; one that failed in any has failed."""
        self.run["seconds"] = round(self.run["seconds"] + report.duration, 1)
        if report.failed and report.nodeid not in self.run["failed"]:
            self.run["failed"].append(report.nodeid)
        self.run["skipped"] += report.skipped

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The result of a test is written down when it is there."""
        self.run.pop("test", None)
        self.run["done"] += 1
        self.book.keep(self.name, self.run)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """After this test no other is begun when the time is up."""
        if time.time() >= self.until:
            item.session.shouldstop = "the time is up"


def run_tests(book: Book, name: str, until: float) -> None:
    """A claim's tests until the moment ``until`` (`time.time`), in a process of its own; what ends that has failed."""
    child = [sys.executable, "-P", __file__, "--tests", str(book.root), name, str(until)]
    status = subprocess.run(child, cwd=book.root, check=False).returncode
    run = book.begun(name)
    if "test" in run and status not in (0, 1, 2):
        run["failed"].append(run.pop("test"))
        run["done"] += 1
        book.keep(name, run)


def run_script(book: Book, name: str, until: float) -> None:
    """A claim's script, which is ended when the time is up."""
    run, began, words = book.begun(name), time.monotonic(), list(book.claims[name].script)
    command = [sys.executable, *words[1:]] if words[0] == "python" else words
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    left = max(until - time.time(), 0)
    try:
        done = subprocess.run(command, cwd=book.root, env=environment, capture_output=True, text=True, timeout=left)
        run["failed"] = [f"ended with {done.returncode}"] if done.returncode else []
        run["said"] = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines()[-_LINES:])
        run |= {"done": 1, "of": 1}
    except subprocess.TimeoutExpired:
        run["failed"] = [f"did not end within {left / 60:.0f} minutes"]
    run["seconds"] = round(time.monotonic() - began, 1)
    book.keep(name, run)


def main(minutes: float, names: Sequence[str], book: Book) -> None:
    """Run what is stale (of these ``names``) until so many minutes are used up, in equal shares of what is left."""
    if strange := [name for name in names if name not in book.claims]:
        sys.exit(f"evidence: no claim {strange[0]!r}; there are: {', '.join(book.claims)}")
    until, before = time.time() + 60 * minutes, None
    while time.time() < until and (todo := book.stale(names)) and (before != (before := book.record())):
        for place, name in enumerate(todo):
            left = until - time.time()
            if left <= 0:
                break
            print(f"evidence: {name}: {book.claims[name].command}", flush=True)
            if book.claims[name].tests:
                run_tests(book, name, time.time() + left / (len(todo) - place))
            else:
                run_script(book, name, until)
            book.write()
    book.write()
    words = "are older than the code, or were never run whole"
    print(f"evidence: {len(book.stale())} of {len(book.claims)} claims {words}; {book.page_path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tests"]:
        owner = Book(Path(sys.argv[2]))
        arguments = ["-q", "-p", "no:cacheprovider", *owner.claims[sys.argv[3]].tests]
        sys.exit(pytest.main(arguments, plugins=[Recorder(owner, sys.argv[3], float(sys.argv[4]))]))
    try:
        main(float(sys.argv[1]) if sys.argv[1:] else 10.0, sys.argv[2:], Book())
    except KeyboardInterrupt:
        Book().write()
        sys.exit("evidence: interrupted; what was done by then is kept, and the same command goes on from there")
