"""Claims: two jobs that share a store don't both make a record.

A claim is a file that only one can create. It holds good until a time that its owner keeps putting off while it is
alive; then, or at once where its owner is a process of this machine that has ended, the next generation of the claim
may be created, again by one only. Where processes die or stand still no such lock is perfect: in rare moments a claim
may have two owners. That costs work done twice and nothing else, for a record that is there is never written again.
The clocks of machines that share a store should agree to within a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from assay.golden.errors import StoreError
from assay.golden.store.files import Files

FOLDER = "claims"
LEASE = 60.0  # seconds that a claim outlives its owner's last sign of life


@dataclass(frozen=True)
class Claims:
    """The claims of a store."""

    files: Files
    lease: float = LEASE

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether ``key`` is claimed by the caller, until the end of the block."""
        generation = self._take(key)
        if generation is None:
            yield False
            return
        over = threading.Event()
        heart = threading.Thread(target=self._beat, args=(_name(key, generation), over), daemon=True)
        heart.start()
        try:
            yield True
        finally:
            over.set()
            heart.join()
            with contextlib.suppress(StoreError):  # what stays behind expires
                self._release(key, generation)

    def sweep(self) -> None:
        """Remove claims that have expired, each as its heir would."""
        names = [name.rpartition("/")[2] for name in self.files.names(FOLDER)]
        for key in sorted({name.partition(".")[0] for name in names}):
            generation = self._take(key)
            if generation is not None:
                self._release(key, generation)

    def _take(self, key: str) -> int | None:
        """The generation of the claim that was made, or None while another's holds."""
        for generation in count():
            name = _name(key, generation)
            while not self.files.create(name, self._sign(), sync=False):
                if not self.files.exists(name):
                    continue  # released this moment
                if not self._is_free(name):
                    return None
                break
            else:
                return generation
        raise AssertionError("generations never end")

    def _is_free(self, name: str) -> bool:
        """Whether the claim has expired, or its owner has ended."""
        try:
            sign = json.loads(self.files.read(name))
            until, number = float(sign["until"]), int(sign["process"].partition(":")[0])
            ended = sign["machine"] == _machine() and sign["process"] != _process(number)
        except FileNotFoundError:
            return False  # released this moment
        except (ValueError, TypeError, KeyError, AttributeError):
            return True  # cut short by a failure of the machine
        return ended or time.time() > until

    def _sign(self) -> bytes:
        sign = {"until": time.time() + self.lease, "machine": _machine(), "process": _process(os.getpid())}
        return json.dumps(sign, sort_keys=True).encode()

    def _beat(self, name: str, over: threading.Event) -> None:
        while not over.wait(self.lease / 4):
            with contextlib.suppress(StoreError):
                self.files.write(name, self._sign(), sync=False)

    def _release(self, key: str, generation: int) -> None:
        """Remove the claim and the dead ones it took over from, unless it was itself taken over; the highest first."""
        if not self.files.exists(_name(key, generation + 1)):
            self.files.delete(_name(key, generation))
            for number in range(generation - 1, -1, -1):
                if self._is_free(_name(key, number)):  # a living one is another's, made anew
                    self.files.delete(_name(key, number))


def _name(key: str, generation: int) -> str:
    return f"{FOLDER}/{key}.{generation}"


@cache
def _machine() -> str:
    """This machine since it was started, and where its process numbers count; a word of chance if that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def _process(number: int) -> str | None:
    """A process by its number and the time at which it began; None if it has ended."""
    try:
        words = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self").exists() else f"{number}:"
    except OSError:
        return None
    return None if words[0] in "ZX" else f"{number}:{words[19]}"
