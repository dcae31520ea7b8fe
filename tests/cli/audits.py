"""Ways to run `assay audit` on the tiny Llama of conftest.py, and to read what it gives."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from assay.cli.main import main

FEW = ("--formats", "bf16,fp8,w8a16,w4a16-g32,kv-fp8", "--sequence", "12", "--sequences", "4", "--batch", "2")
LIMITED = ("--max-kl", "0.01", "--target", "h200")


def line(models: Path, out: Path, *more: str) -> tuple[str, ...]:
    """Return the command line of an audit of the tiny Llama."""
    return "audit", str(models / "llama"), "--text", str(models / "text.txt"), "--out", str(out), *FEW, *more


def run(models: Path, out: Path, *more: str) -> int:
    return main(line(models, out, *more))


def read(folder: Path) -> dict[str, Any]:
    """Return an audit.json, which keeps its schema."""
    content = json.loads((folder / "audit.json").read_text())
    jsonschema.validate(content, json.loads((files("assay.precision.report") / "audit.schema.json").read_text()))
    return content
