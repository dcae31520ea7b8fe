"""The least time that a device needs for a case: its products at the peak rate, or its tensors' bytes once at the peak
bandwidth, whichever is longer.

Source: S. Williams, A. Waterman, D. Patterson, *Roofline*, CACM 52(4), 2009. Peaks of GPUs are their vendors'
(configs/devices.toml); those of a CPU are measured here, by a copy and a product of PyTorch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from assay.bench.inspection.calls import own_bytes, own_products
from assay.formats.devices import devices
from assay.verify.cases.case import Case

_COPIED = 1 << 27  # bytes
_SIDE = 1024  # of the measured product's matrices
_TIMES = 5
_ARITHMETIC = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}


@dataclass(frozen=True)
class Peak:
    """What a device does at most: bytes/s, and operations/s by arithmetic; ``source`` says where that is from."""

    device: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str


@dataclass(frozen=True)
class Least:
    """The least seconds of a case, what bounds them ("bandwidth" or "products"), its bytes and operations."""

    seconds: float
    bound: str
    bytes: float
    products: float


def arithmetic_of(case: Case) -> str:
    """What a case's products are made in: by the dtype of its first tensor; a key of a device's rates."""
    dtype = next(iter(case.dtypes.values()))
    return _ARITHMETIC.get(dtype, "fp8" if dtype.startswith("float8") else "fp32")


def least_of(case: Case, peak: Peak | None) -> Least | None:
    """The least time of a case; None where the device, or its rate of these products, isn't known."""
    if peak is None:
        return None
    moved, products = own_bytes(case), own_products(case) or 0.0
    rate = peak.rates.get(arithmetic_of(case), 0.0)
    if products and not rate:
        return None
    by_products = products / rate if products else 0.0
    by_bytes = moved / peak.bandwidth
    bound = "products" if by_products > by_bytes else "bandwidth"
    return Least(max(by_products, by_bytes), bound, moved, products)


def peak_of(device: str, case: Case) -> Peak | None:
    """The peak of the device that is here, for what a case computes in; None for a GPU that no table knows."""
    if not device.startswith("cuda"):
        return _measured(case)
    title = torch.cuda.get_device_name(device)
    words = title.lower().replace(" ", "").replace("-", "")
    found = next((each for each in devices().values() if each.rates and each.name in words), None)
    return None if found is None else Peak(found.title, found.bandwidth, found.rates, found.source)


def _measured(case: Case) -> Peak:
    """Of this CPU: a copy's bandwidth, reading and writing, and the rate of a product in the case's dtype."""
    source = torch.ones(_COPIED // 4)
    target = torch.zeros_like(source)
    copy = _shortest(lambda: target.copy_(source))
    rates = {}
    if own_products(case):
        kind = arithmetic_of(case)
        dtype = {name: getattr(torch, long) for long, name in _ARITHMETIC.items() if name != "int8"}.get(kind)
        if dtype is not None:
            a = torch.ones(_SIDE, _SIDE, dtype=dtype)
            rates[kind] = 2.0 * _SIDE**3 / _shortest(lambda: a @ a)
    words = f"measured: a copy of {_COPIED >> 20} MiB, a product of {_SIDE} x {_SIDE} matrices by PyTorch"
    return Peak("CPU", 2 * _COPIED / copy, rates, f"{words}, {torch.get_num_threads()} threads")


def _shortest(call: Callable[[], object]) -> float:
    results = []
    for _ in range(_TIMES + 1):  # the first touches fresh memory
        began = time.perf_counter()
        call()
        results.append(time.perf_counter() - began)
    return min(results[1:])


def gap_in_words(seconds: float, least: Least | None, launch: float) -> str:
    """What bounds a call, and how far from the roofline it is, as far as the times themselves show it."""
    if launch > seconds:
        return f"launch overhead: the host takes {1e6 * launch:.3g} us for a call of {1e6 * seconds:.3g} us"
    if least is None:
        return ""
    share = least.seconds / seconds
    if share > 1:
        return "faster than the memory: its tensors lie in a cache" if least.bound == "bandwidth" else "beyond the peak"
    needed = "products" if least.bound == "products" else "bytes"
    return f"bound by {least.bound}" if share > 0.5 else f"{1 / share:.2g} times what its {needed} need"
