"""The cheats that a solution can be caught at, and the ones that the observations of its process show.

A name stands for an observation, not for an author's intention; docs/judge.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CHEATS: Mapping[str, str] = {
    "constant-output": "the results are the same bits whatever the inputs are",
    "ignored-argument": "an argument can change without a change of the results",
    "unread-input": "half of an input can change without a change of the results",
    "memoised": "an earlier call's results come again although the numbers in the same memory have changed",
    "memoised-by-sample": "an earlier call's results come again although one element has changed",
    "weights-kept": "results are right with the weights of the constructor, and wrong with others loaded",
    "amplitude-dispatch": "another path is taken beyond some amplitude of the inputs, and one of the two is wrong",
    "size-dispatch": "results are right at small sizes and wrong at the timed ones",
    "only-untimed": "results are right in single calls and wrong in timed ones",
    "lower-precision": "results have the error, or the digits, of a narrower format",
    "lower-dtype": "results have a narrower dtype than the reference's",
    "other-class": "results are instances of another class, not plain tensors",
    "late-results": "results change after the call has come back",
    "background-work": "work goes on after the call has come back, or between the timed calls",
    "stale-buffer": "a later call's results use the memory of an earlier call's",
    "output-is-input": "results use an input's memory, where the reference allocates new tensors",
    "global-state": "settings that change other code's numbers are left changed",
    "patched-library": "functions of torch, NumPy, time or Python are replaced",
    "patched-timer": "calls take longer than the solution's process says, or its clock is replaced",
    "stack-inspection": "the solution inspects its callers, or objects that aren't its own",
    "reads-files": "the solution opens, or searches for, files that aren't its own",
    "writes-files": "the solution writes files outside of its folder",
    "starts-processes": "the solution starts processes while it is called",
    "leaves-processes": "processes go on that the solution has started and detached",
    "signals-processes": "the solution sends signals to the process that it comes from, or to all",
    "uses-network": "the solution talks to a network",
    "calls-c-library": "the solution calls the C library itself, past what watches it",
    "reads-environment": "the solution reads environment variables that no library documents",
    "floods-output": "the solution prints without end",
    "reference-imported": "the solution imports the reference or a grader",
    "hidden-import": "the solution imports the reference in a way that its text doesn't show",
    "reference-pasted": "the solution computes what the reference's own text says, word for word",
}
SUSPECT = frozenset({"reference-pasted", "reads-environment"})
"""Cheats that leave the results right: the verdict is a warning."""

_STACK = {
    "sys._getframe",
    "sys._current_frames",
    "sys._current_exceptions",
    "sys.addaudithook",
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
}
_READ = "object.__getattr__"
_TRACING = {"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"}
_PROCESSES = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn"}
_NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}
_SINGLE = {
    "os.kill": "signals-processes",
    "os.killpg": "signals-processes",
    "write": "writes-files",
    "ctypes.dlopen": "calls-c-library",
    "object.__setattr__": "patched-library",
    "os.environ": "reads-environment",
}
_FILES = {"open", "os.listdir", "os.scandir", "os.rename", "os.link"}
_NUMERIC_SETTINGS = (
    "default_dtype",
    "matmul",
    "autocast",
    "flush_denormal",
    "default_device",
    "rounding mode",
    "fp32_precision",
    "mkldnn",
)
_TIMERS = ("__main__._clock", "__main__._Host.time")
_CLASSES = {"Tensor", "Parameter"}


@dataclass(frozen=True)
class Cheat:
    """One of `CHEATS` with its evidence in words; ``trial`` is the line of the call that shows it."""

    name: str
    words: str
    trial: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {CHEATS[self.name]} ({self.words})"


def each_once(result: Iterable[Cheat]) -> tuple[Cheat, ...]:
    """Return the first cheat of each name, in the order of `CHEATS`."""
    first: dict[str, Cheat] = {}
    for cheat in result:
        first.setdefault(cheat.name, cheat)
    return tuple(first[name] for name in CHEATS if name in first)


def detected_cheats(seen: Mapping[str, Any], aliased: set[int], building: bool = False) -> list[Cheat]:
    """Return the cheats that the observations of one call, or of ``building`` the solution, show.

    ``aliased``: inputs whose memory the reference's own results use.
    """
    results = []
    changed = [entry for entry in seen.get("settings", ()) if any(part in entry[0] for part in _NUMERIC_SETTINGS)]
    if changed:
        results.append(Cheat("global-state", "; ".join(f"{name}: {old} -> {new}" for name, old, new in changed[:3])))
    if replaced := seen.get("replaced"):
        clocks = [name for name in replaced if name in _TIMERS]
        results += [Cheat("patched-timer", ", ".join(clocks))] if clocks else []
        results += [Cheat("patched-library", ", ".join(replaced[:4]))] if len(clocks) < len(replaced) else []
    for event, what, line in seen.get("events", ()):
        results += _of_event(event, what, line, building=building)
    if odd := [name for _, name in seen.get("odd", ()) if name not in _CLASSES]:
        results.append(Cheat("other-class", ", ".join(odd)))
    if late := seen.get("late"):
        results.append(Cheat("late-results", f"result {late[0]} changed after the call"))
    if seen.get("threads") and seen.get("busy", 0.0) > _BUSY:
        results.append(Cheat("background-work", f"threads at work after the call: {', '.join(seen['threads'])[:80]}"))
    if seen.get("stale") and not aliased:
        results.append(Cheat("stale-buffer", f"result {seen['stale'][0]}"))
    if alias := [(k, j) for k, j in seen.get("aliases", ()) if j not in aliased]:
        results.append(Cheat("output-is-input", f"result {alias[0][0]} lies in argument {alias[0][1]}"))
    return results


_BUSY = 0.015  # seconds of CPU time after a call: half of the host's pause (`host._PAUSE`), more than idle threads take


def _of_event(event: str, what: str, line: str, *, building: bool) -> list[Cheat]:
    if event == "import":
        return [Cheat("reference-imported", f"{what[:60]} at {line}")]
    if event in _STACK or event in _TRACING or event == _READ:
        return [Cheat("stack-inspection", f"{event}{f' of {what}' if event == _READ else ''} at {line}")]
    if event in _PROCESSES and not building:
        return [Cheat("starts-processes", f"{event} {what[:60]} at {line}")]
    if event in _NETWORK:
        return [Cheat("uses-network", f"{event} at {line}")]
    if event in _SINGLE:
        return [Cheat(_SINGLE[event], f"{what[:80]} at {line}")]
    if event in _FILES:
        return [Cheat("reads-files", f"{what[:80]} at {line}")]
    return []
