"""The JSON Schema of a verdict, made from its dataclasses: ``python -m assay.verify.report.schema`` writes the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from assay.verify.findings import EDGES, Findings

FILE = Path(__file__).parents[1] / "verdict.schema.json"


def schema() -> dict[str, Any]:
    """Return the schema of `assay.verify.Verdict.to_json`.

    Records have exactly the listed keys; a case has only those that differ from their defaults.
    """
    records = _mended(msgspec.json.schema(Findings)["$defs"])
    for name, record in records.items():
        record["additionalProperties"] = False
        record["required"] = ["spec", "sizes", "dtypes"] if name == "Case" else list(record["properties"])
        record["description"] = record["description"].partition("\n")[0]
    case = records["Case"]["properties"]
    case["edits"]["items"]["prefixItems"][2] = {"type": "string"}  # numbers are written as text
    case |= {
        "memory": {"enum": ["plain", "nan", "huge"]},
        "unused": {"enum": ["plain", "nan"]},
        "out_dtype": {"type": "string"},
    }
    verdict = records.pop("Findings")
    full = len(EDGES) + 1
    verdict["properties"]["histogram"]["oneOf"] = [{"maxItems": 0}, {"minItems": full, "maxItems": full}]
    verdict["properties"] |= {name: records["Aspect"]["properties"][name] for name in ("failure", "repro")}
    verdict["properties"]["coverage"] = {"type": "number", "minimum": 0, "maximum": 1}
    verdict["required"] += ["coverage", "failure", "repro"]
    records["Aspect"] |= _where("status", {"enum": ["broken", "suspect"]})
    failed = _where("outcome", {"enum": ["FAIL", "WARN"]})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A verdict of assay"}
    return {**head, **verdict, **failed, "$defs": records}


def _where(name: str, value: Any) -> dict[str, Any]:
    """Require a failure and its repro line for this value of the property, and forbid them for others."""
    return {
        "if": {"properties": {name: value}},
        "then": {"properties": {"failure": {"type": "object"}, "repro": {"minLength": 1}}},
        "else": {"properties": {"failure": {"type": "null"}}},
    }


def _mended(part: Any) -> Any:
    """Return the schema without titles and defaults; a number with a pattern may also be a string such as "inf"."""
    if isinstance(part, list):
        return [_mended(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {name: _mended(item) for name, item in part.items() if name not in ("title", "default")}
    return kept | {"type": ["number", "string"]} if "pattern" in kept else kept


def text() -> str:
    """Return the schema file's content."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
