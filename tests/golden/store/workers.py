"""What other processes do to a store: they write records one after the other, each told to a file when it is stored."""

from __future__ import annotations

import os
import signal
import sys
import time

from assay.golden.store import Store
from tests.golden.store.sample import golden_of, record_of


def write(url: str, log: str, count: int, options: dict[str, str], worker: int = 0) -> None:
    """Make the records 0..count-1 that aren't there, each under a claim; a line for each goes to ``log``."""
    store = Store(url, options)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for seed in range(count):
        record = record_of(seed, golden_of([float(seed), *[1.5] * 200]))
        while record.key not in store:
            with store.claim(record.key) as mine:
                if mine:
                    os.write(descriptor, f"begin {seed} {worker}\n".encode())
                    store.put(record)
                    os.write(descriptor, f"done {seed} {worker}\n".encode())
            if not mine:
                time.sleep(0.002)


def hold(url: str, key: str, flag: str, lease: float) -> None:
    """Claim ``key``, say so in the file ``flag``, and sleep until told to end, which ends the claim as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with Store(url, lease=lease).claim(key) as mine, open(flag, "w", encoding="utf-8") as file:
        file.write(str(mine))
        file.flush()
        while True:  # one long sleep would go on if the signal came to the thread that keeps the claim up
            time.sleep(0.1)
