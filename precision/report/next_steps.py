"""What to do after an audit: commands to be pasted, each with what it is for."""

import math
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.precision.targets import engines
from assay.precision.units import format_error

_WIDE = 2.0
"""High over low of a measured error's interval, from which on more text is worth its time."""
_LEAST = 16
"""Sequences of which half are held out: eight tell which errors go together."""
_SERVES = {"vllm": "vllm serve {}", "sglang": "python -m sglang.launch_server --model-path {}"}
"""What serves a checkpoint; transformers and others load it in Python."""


def next_steps(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What it is for, and the command, of what audit.json holds; none where no command made it."""
    if not content["command"]:
        return []
    chosen, exports = content["recommended"], {part["format"]: part["paths"] for part in content["exports"]}
    steps = []
    if not chosen["met"] and "error" in content["settings"]["budgets"]:
        measured = float(chosen["measured"] or math.nan)  # null where the model breaks
        if math.isfinite(measured):
            allowed = _again(content, "--max-kl", format_error(1.05 * measured))
            steps.append(("allow the error that the closest assignment has", allowed))
    if not exports:
        steps.append(_exporting(content))
    if "checkpoint" in exports:
        engine = _engine(content) or "vllm"
        checkpoint, *options = map(Path, exports["checkpoint"])
        if options and engine == "vllm":  # of KV caches, in a command by itself
            command = f"cd {shlex.quote(str(checkpoint.parent))} && sh {shlex.quote(options[0].name)}"
            steps.append(("serve it", command))
        elif engine in _SERVES:
            steps.append(("serve it", _SERVES[engine].format(shlex.quote(str(checkpoint)))))
    elif "compressed-tensors" in exports:
        steps.append(("write the quantised checkpoint that it describes", _again(content, "--checkpoint")))
    if exports:
        folder = Path(next(iter(exports.values()))[0]).parent
        steps.append(("read the export as its readers do", f"assay audit --verify-export {shlex.quote(str(folder))}"))
    length = content["positions"]["steps"][-1]["end"] if content["positions"] else 0
    if length > content["data"]["tokens"] / content["data"]["sequences"]:
        steps.append(_at_length(content, length))
    interval = chosen["interval"]
    if interval is not None and float(interval["high"]) > _WIDE * float(interval["low"]):
        more = str(4 * (content["data"]["sequences"] + (content["held_out"] or {"sequences": 0})["sequences"]))
        steps.append(("narrow the error's interval by more text", _again(content, "--sequences", more)))
    return steps


def _at_length(content: Mapping[str, Any], length: int) -> tuple[str, str]:
    """The audit over sequences of that length, about as many tokens of them and no fewer than sixteen sequences."""
    tokens = sum(part["tokens"] for part in (content["data"], content["held_out"]) if part)
    given = [*shlex.split(content["command"]), ""]
    folders = [after if each == "--out" else each[6:] for each, after in pairwise(given) if each.startswith("--out")]
    out = ["--out", f"{folders[-1].rstrip('/')}-{length}"] if folders else []
    options = ("--sequence", str(length), "--sequences", str(max(tokens // length, _LEAST)), *out)
    return f"choose by, and have intervals for, sequences of {length:,} tokens", _again(content, *options)


def _exporting(content: Mapping[str, Any]) -> tuple[str, str]:
    reader = engines().get(_engine(content))
    if reader is None:
        words = "write it for every engine; what no export holds keeps its format, and the rest is chosen again"
        return words, _again(content, "--export", "all")
    words = f"write it for {reader.title}; where the export has no words for a choice, it is made again"
    form = reader.exports[0]
    return words, _again(content, *(["--checkpoint"] if form == "compressed-tensors" else ["--export", form]))


def _engine(content: Mapping[str, Any]) -> str:
    """The engine of the target, or a device, or nothing."""
    return str(content["settings"]["target"] or "").partition("@")[0]


def _again(content: Mapping[str, Any], *more: str) -> str:
    """The command that made it with more options, in the place of those that it had; what was measured is kept."""
    given = shlex.split(content["command"])
    for name, after in pairwise([*more, "--"]):
        if name.startswith("--") and name != "--export":  # which may be repeated
            given = [each for each in given if not each.startswith(f"{name}=")]
            while name in given:
                index = given.index(name)
                del given[index : index + (1 if after.startswith("--") else 2)]
    return shlex.join([*given, *more, *([] if "--resume" in given else ["--resume"])])
