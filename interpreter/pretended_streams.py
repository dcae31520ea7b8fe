"""Streams and events of a pretended device: all work is done when it was asked for, events keep its time."""

from __future__ import annotations

import time
from typing import Any

from assay.interpreter.pretended_tensors import DEVICE


class Stream:
    """`torch.cuda.Stream`: a name, and what one may ask of it."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.device_index, self.device_type = DEVICE, 0, 1
        self.priority = priority
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> Stream:
        self._context = use(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is recorded: there are none."""
        return False

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event, recorded now."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """`torch.cuda.Event`: the time at which it was recorded."""

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self.device, self.enable_timing, self.cuda_event = DEVICE, enable_timing, 0
        self.event_id = 0
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Keep the present moment."""
        self._time = time.perf_counter()

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of this machine, more than 0, between two recorded events; RuntimeError without a record."""
        if self._time is None or end._time is None:
            raise RuntimeError("Event.elapsed_time: expected two recorded events; call record() of both first")
        return max((end._time - self._time) * 1e3, 1e-6)


class use:  # noqa: N801 - a context manager, as torch.cuda.stream is one
    """`torch.cuda.stream`: its stream is the current one inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(_current[0])
        if self.stream is not None:
            _current[0] = self.stream

    def __exit__(self, *_: object) -> None:
        _current[0] = self._before.pop()


DEFAULT = Stream()
_current = [DEFAULT]


def current_stream(device: Any = None) -> Stream:
    """The stream of the innermost `use`."""
    return _current[0]


def set_stream(stream: Stream | None) -> None:
    """Make it the current one."""
    if stream is not None:
        _current[0] = stream
