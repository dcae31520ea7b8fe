"""Records that need no evaluation, and a store of every kind."""

import math
import os
from collections.abc import Sequence

import fsspec
import torch

from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.recipe import recipe
from assay.golden.store import Store
from assay.golden.store.record import Record, fingerprint, versions

SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.0 + 2.0**-52, -1e308)


def file_of(key: str) -> str:
    return f"records/{key[:2]}/{key}.safetensors"


def read_file(store: Store, name: str) -> bytes:
    system, root = fsspec.url_to_fs(store.url, **store.options)
    return bytes(system.cat_file(f"{root}/{name}"))


def write_file(store: Store, name: str, data: bytes) -> None:
    system, root = fsspec.url_to_fs(store.url, **store.options)
    system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
    system.pipe_file(f"{root}/{name}", data)


def golden_of(values: Sequence[float], radius: float = 2.0**-60, low: bool = False) -> Golden:
    value = torch.tensor([list(values)], dtype=torch.float64)
    return Golden(value, torch.full_like(value, radius), torch.zeros_like(value) if low else None)


def record_of(seed: int, golden: Golden | None = None, digits: int | None = None, columns: int = 3) -> Record:
    inputs = recipe("softmax", {"R": 1, "N": columns}, seed=seed)
    goldens = (golden or golden_of([float(seed)] * columns),)
    return Record(inputs, digits, goldens, versions(inputs), fingerprint(inputs.tensors(), inputs.keywords()))


def bits(golden: Golden) -> list[list[int] | None]:
    parts = (golden.value, golden.radius, golden.low)
    return [None if part is None else part.reshape(-1).view(torch.int64).tolist() for part in parts]


def write(url: str, log: str, count: int, options: dict[str, str], worker: int = 0) -> None:
    """Write records one after the other, each told to the file ``log`` when it is stored."""
    store = Store(url, options)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for seed in range(count):
        record = record_of(seed, golden_of([float(seed), *[1.5] * 200]))
        if record.key not in store:
            os.write(descriptor, f"begin {seed} {worker}\n".encode())
            store.put(record)
            os.write(descriptor, f"done {seed} {worker}\n".encode())
