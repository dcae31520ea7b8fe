"""What the processes of these tests do."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from assay.golden.errors import InputError
from assay.runtime.pool import Heartbeat
from assay.runtime.process import Parent, Process


def behave(word: str, heartbeat: Heartbeat) -> str:
    """Do what the word says, and come back with it if that can be."""
    heartbeat(f"about to {word}")
    match word.split():
        case ["abort"]:
            os.write(2, b"first line\nlast words\n")
            os.kill(os.getpid(), signal.SIGABRT)
        case ["exit"]:
            os._exit(3)
        case ["hang"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
            time.sleep(600)
        case ["complain"]:
            raise InputError("mend this")
        case ["stumble"]:
            raise ZeroDivisionError("oops")
        case ["sleep", seconds, "after", "asking", "for", asked]:
            heartbeat(f"about to {word}", float(asked))
            time.sleep(float(seconds))
    return word


def answer_by_echo(parent: Parent, *arguments: str) -> None:
    """Every message comes back; beforehand the arguments."""
    import json  # what a start takes

    parent.serve(lambda message: message + json.dumps(arguments).encode())


def lose_the_first_thread(parent: Parent, size: str) -> None:
    """Fork a process that holds memory, and whose first thread ends while another one runs; answer with its number."""
    child = os.fork()
    if child == 0:
        os.setsid()
        held = bytearray(int(size))
        threading.Thread(target=lambda: time.sleep(600 + len(held))).start()
        ctypes.CDLL(None).pthread_exit(None)
    while Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    parent.serve(lambda message: str(child).encode() if message else time.sleep(600) or b"")


def leave_a_child(parent: Parent, folder: str) -> None:
    """Start a process, note its number and this one's, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "pids").write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
    parent.heartbeat()
    parent.serve(bytes)


def start_both_kinds(folder: str) -> None:
    """A fork and a new interpreter, asked and left alone; the numbers of all that run."""
    processes = [Process.fork(hang), Process.start(hang)]
    for process in processes:
        process.submit(b"", 600)
    numbers = " ".join(str(process.pid) for process in processes)
    Path(folder, "new").write_text(numbers, encoding="ascii")
    Path(folder, "new").rename(Path(folder, "pids"))
    time.sleep(600)


def hang(parent: Parent) -> None:
    """Never look at the pipe again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    time.sleep(600)
