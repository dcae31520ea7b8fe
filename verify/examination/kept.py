"""Verdicts kept in a folder, by a key of all that they depend on.

The key is a digest of the question, of the sources and versions that answer it (`assay.runtime.results`), of the
sources of the kernel and of its reference, and of the device. A verdict of other sources is not reused.
``docs/checks.md`` lists what the key does not cover.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from assay.runtime.files import read_text, write_text_atomically
from assay.runtime.records import from_json
from assay.runtime.results import result_key
from assay.verify.errors import ReproError
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

_ANSWERED_BY = "assay.verify.campaign.survey"


def key_of(name: str, target: str, settings: Settings) -> str:
    """Return the key of the verdict of a kernel called ``name``, in 12 hexadecimal digits."""
    settings = settings if settings.isolate else replace(settings, memory=Settings.memory)
    question = [name, target, settings.as_table()]
    references = settings.spec.partition("(")[0].split("|")  # of an op just its name
    targets = target, *references, f"{settings.definition.definition.__module__}:"
    return result_key(question, _ANSWERED_BY, targets=targets, device=_machine(settings.device))[:12]


def file_name(name: str, settings: Settings, key: str) -> str:
    """Return the name of a verdict's files, without their suffix."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{name}-{settings.dtype_name}").strip("-")[:100]
    return f"{words}-{key}"


def verdict_in(path: Path) -> Verdict | None:
    """Return the verdict in a file, if there is one that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, ReproError):
        return Verdict.from_dict(from_json(read_text(path, ValueError), "", ValueError))
    return None


def kept_or_made(folder: Path, target: str, settings: Settings, make: Callable[[], Verdict]) -> Verdict:
    """Return the verdict that the folder keeps of a kernel, or else make it, and keep it if it passed.

    A verdict that didn't pass, or that a budget cut short, isn't kept. Neither is one of a kernel or a reference that
    can't be imported by its name: the key would not cover what it closes over. Raises `OSError` if the folder can't be
    written.
    """
    if not target or "<" in settings.spec:
        return make()
    unlimited = replace(settings, budget=None)  # a whole verdict is as good under any budget
    path = folder / f"{file_name(target, unlimited, key_of(target, target, unlimited))}.json"
    verdict = verdict_in(path)
    if verdict is not None:
        return replace(verdict, about={**verdict.about, "kept": str(path)})
    verdict = make()
    if verdict.passed and not verdict.cut:
        write_text_atomically(path, verdict.to_json())
    return verdict


def _machine(device: str) -> str:
    """Return the GPU's name, or the widest vector instructions of the CPU."""
    if torch.device(device).type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
