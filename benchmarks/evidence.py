"""`./dev evidence [CLAIM...]`: run the commands of docs/evidence.toml and write docs/evidence.md.

A claim is a sentence, a command that shows it, and the sources that the result depends on. Without names, every claim
whose sources have changed since its last run is run. `./dev evidence --check` runs nothing and lists those. Exits 1
where a claim failed, or with `--check` where one is older than its sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from assay.runtime.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".toml", ".txt", ".safetensors", ".json", ".cu", ".cuh"}  # of sources; others affect no result
LIMIT = 300  # seconds of one claim; fifteen of them then fit in an hour and a quarter
LINES = 25  # of the output that the page shows
INTRO = """# Evidence

Written by `./dev evidence`, which runs each claim of [evidence.toml](evidence.toml) whose sources have changed since
its last run: at most fifteen claims, five minutes each. What only a GPU can show is in [gpu.md](gpu.md).
"""


@dataclass(frozen=True)
class Claim:
    """A sentence, the command that shows it, and the files and folders that its result depends on."""

    name: str
    says: str
    command: str
    sources: tuple[str, ...]


class Evidence:
    """The claims below ``root``, the record of their last runs, and the page made of both."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, docs = root, root / "docs"
        self.record_path, self.page_path = docs / "results" / "evidence.json", docs / "evidence.md"
        table = tomllib.loads((docs / "evidence.toml").read_text(encoding="utf-8"))
        self.claims = {row["name"]: Claim(**{**row, "sources": tuple(row["sources"])}) for row in table["claim"]}

    def record(self) -> dict[str, dict[str, Any]]:
        """Return the last run of each claim, by name; of a claim never run, an empty one."""
        runs = json.loads(self.record_path.read_text(encoding="utf-8")) if self.record_path.exists() else {}
        return {name: runs.get(name, {}) for name in self.claims}

    def digest(self, name: str) -> str:
        """Return a digest of the contents of a claim's sources and of its command."""
        digest = hashlib.sha256(self.claims[name].command.encode())
        for source in self.claims[name].sources:
            path = self.root / source
            files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
            for file in files:
                digest.update(f"{file.relative_to(self.root)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:12]

    def stale(self) -> list[str]:
        """Return the claims whose last run is not of their sources as they are."""
        return [name for name, run in self.record().items() if run.get("digest") != self.digest(name)]

    def run(self, name: str) -> bool:
        """Run a claim's command, record the result, rewrite the page; return whether the command succeeded."""
        digest, began = self.digest(name), time.monotonic()
        environment = os.environ | {"ASSAY_EVIDENCE": "1", "COLUMNS": "120", "NO_COLOR": "1"}
        words = shlex.split(self.claims[name].command)
        here = Path(sys.executable)
        words[0] = {"python": str(here), "assay": str(here.with_name("assay"))}.get(words[0], words[0])
        try:
            done = subprocess.run(words, cwd=self.root, env=environment, capture_output=True, text=True, timeout=LIMIT)
            result = "passed" if done.returncode == 0 else f"failed with exit status {done.returncode}"
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            result = f"did not end within {LIMIT} s"
            output = error.stdout.decode(errors="replace") if error.stdout else ""
        lines = [line.rstrip() for line in output.rstrip().splitlines()][-LINES:]
        run = {
            "digest": digest,
            "commit": self._commit(),
            "date": date.today().isoformat(),
            "seconds": round(time.monotonic() - began),
            "result": result,
            "output": "\n".join(lines),
        }
        content = json.dumps(self.record() | {name: run}, indent=1, sort_keys=True) + "\n"
        write_text_atomically(self.record_path, content)
        write_text_atomically(self.page_path, self.page())
        return result == "passed"

    def page(self) -> str:
        """Return the page: a table of claims, then the output of each."""
        rows = ["| claim | result | seconds | date | commit |", "|---|---|---|---|---|"]
        outputs = []
        for name, run in self.record().items():
            claim = self.claims[name]
            cells = (run.get(key, "") for key in ("seconds", "date", "commit"))
            rows.append(" | ".join((f"| {name}: {claim.says}", run.get("result", "not run"), *map(str, cells))) + " |")
            outputs.append(f"## {name}\n\n`{claim.command}`\n\n```\n{run.get('output', '')}\n```")
        return "\n".join((INTRO, *rows, "")) + "\n" + "\n\n".join(outputs) + "\n"

    def _commit(self) -> str:
        """Return the commit, with a plus where tracked files differ from it."""
        git = ["git", "-C", str(self.root)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def main(arguments: list[str], evidence: Evidence) -> int:
    """Run the claims named, or the stale ones; return the exit status."""
    check, names = "--check" in arguments, [word for word in arguments if word != "--check"]
    if unknown := [name for name in names if name not in evidence.claims]:
        sys.exit(f"evidence: no claim {unknown[0]!r}; there are: {', '.join(evidence.claims)}")
    names = names or evidence.stale()
    if check:
        print(f"evidence: older than their sources: {', '.join(names) or 'none'}")
        return int(bool(names))
    failed = []
    for name in names:
        print(f"evidence: {name}: {evidence.claims[name].command}", flush=True)
        if not evidence.run(name):
            failed.append(name)
    write_text_atomically(evidence.page_path, evidence.page())
    print(f"evidence: {len(names)} run, failed: {', '.join(failed) or 'none'}; {evidence.page_path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Evidence()))
