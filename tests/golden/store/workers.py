"""What other processes do to a store: they write records one after the other, each told to a file when it is stored."""

import os

from assay.golden.store import Store
from tests.golden.store.sample import golden_of, record_of


def write(url: str, log: str, count: int, options: dict[str, str], worker: int = 0) -> None:
    store = Store(url, options)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for seed in range(count):
        record = record_of(seed, golden_of([float(seed), *[1.5] * 200]))
        if record.key not in store:
            os.write(descriptor, f"begin {seed} {worker}\n".encode())
            store.put(record)
            os.write(descriptor, f"done {seed} {worker}\n".encode())
