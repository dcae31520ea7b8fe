"""Provenance of a verdict: date, device, versions and the source of the kernel."""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch

from assay.runtime.results import installed_version
from assay.verify.harness.target import source_of

_PACKAGES = {"assay": "kernel-assay", "torch": "torch", "triton": "triton"}


def about(kernel: Callable[..., Any], device: str, pretend: str = "") -> dict[str, str]:
    """Return the facts of an examination made now, by name; the kernel's source if it is Python.

    ``pretend`` is the device that the kernel is told it runs on.
    """
    source = source_of(kernel)
    return {
        **({"source": source} if source else {}),
        "device": _device(device) + (f", pretending to be {pretend}" if pretend else ""),
        "versions": ", ".join(_versions()),
        "date": datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    }


def _device(name: str) -> str:
    device = torch.device(name)
    if device.type == "cuda":
        return f"{name}, {torch.cuda.get_device_name(device)}"
    return f"{name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _versions() -> list[str]:
    found = {name: installed_version(package) for name, package in _PACKAGES.items()}  # Triton isn't everywhere
    return [f"Python {platform.python_version()}", *(f"{name} {number}" for name, number in found.items() if number)]
