"""How the launches of a case run: in which configuration where they are tuned, and their programs in which order.

In an examination no autotuner times anything.

An `Assignment` belongs to one kernel. The configuration of a launch is a function of its tuning key, as in the
interpreter (`assay.interpreter.configurations.pick_config`), so that calls of one kind agree, and CPU and GPU with each
other. A case may pin others by name: those that no key gives, and that of a failure which is repeated. A configuration
that a device's compiler refuses gives way to the next.

Triton isn't imported here; `assay.interpreter.configurations` asks for the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Configs = Mapping[str, tuple[str, ...]]
"""Configurations by kernel, in words, in the order in which tuning keys first come up in a case."""


@dataclass(frozen=True)
class Choice:
    """The configuration of a kernel's launches with one tuning key, and those that its tuner's pruning left."""

    kernel: str
    config: str
    candidates: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A configuration that can't be compiled or loaded, and the first line of the error."""

    kernel: str
    config: str
    message: str


class Assignment:
    """The configurations of one case after the other; ``on_device``: autotuners would time them otherwise.

    ``order`` is that of the programs of interpreted launches: 0 ascending, 1 descending, else shuffled by this seed.
    ``most_programs`` are the most of a launch that run (`assay.interpreter.races.sampled`); 0: all.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.order = 0
        self.most_programs = 0
        self.refused: dict[str, Refusal] = {}
        """Refusals by a digest of the program."""
        self.choices: dict[Any, Choice] = {}
        """The choices of the current case, by tuning key."""
        self.launched: tuple[str, str, str] | None = None
        """The program that is being launched, its kernel and configuration; None if no tuner chose it."""
        self._pinned: Configs = {}
        self._restores: dict[int, Callable[[], None]] = {}

    @property
    def is_active(self) -> bool:
        """Whether it chooses at all."""
        return self.on_device or bool(self._pinned)

    @property
    def used(self) -> dict[str, tuple[str, ...]]:
        """The configurations of the current case."""
        results: dict[str, tuple[str, ...]] = {}
        for choice in self.choices.values():
            results[choice.kernel] = (*results.get(choice.kernel, ()), choice.config)
        return results

    @property
    def refusals(self) -> dict[str, str]:
        """The messages of refused configurations, by kernel and configuration in words."""
        return {f"{refusal.kernel}, {refusal.config}": refusal.message for refusal in self.refused.values()}

    def begin(self, pinned: Configs) -> None:
        """Begin a case, which pins these configurations."""
        self._pinned, self.choices = pinned, {}

    def chosen(
        self,
        key: Any,
        kernel: str,
        candidates: Sequence[str],
        usual: Callable[[], int],
        program: Callable[[int], str],
    ) -> int:
        """Return the index of the configuration of a launch with this tuning key.

        ``usual()`` is the index if nothing is pinned, ``program(index)`` the digest of a candidate's program.
        """
        before = self.choices.get(key)
        pinned = self._pinned.get(kernel, ())
        order = sum(choice.kernel == kernel for choice in self.choices.values())
        if before is not None and before.config in candidates:
            first = candidates.index(before.config)
        elif before is None and order < len(pinned) and pinned[order] in candidates:
            first = candidates.index(pinned[order])
        else:
            first = usual()
        turns = [(first + step) % len(candidates) for step in range(len(candidates))]
        index = next((turn for turn in turns if program(turn) not in self.refused), first) if self.refused else first
        self.choices[key] = Choice(kernel, candidates[index], tuple(candidates))
        return index

    def refuse(self, program: str, kernel: str, config: str, message: str) -> bool:
        """Note that a program can't be compiled or loaded; return whether that is new."""
        is_new = program not in self.refused
        self.refused.setdefault(program, Refusal(kernel, config, message))
        return is_new

    def as_data(self) -> dict[str, Any]:
        """Return the current case's choices, and all refusals, as plain data for `take`."""
        return {
            "choices": [[choice.kernel, choice.config, choice.candidates] for choice in self.choices.values()],
            "refused": {name: [each.kernel, each.config, each.message] for name, each in self.refused.items()},
        }

    def take(self, data: Mapping[str, Any]) -> None:
        """Take over the choices and refusals of an assignment in another process."""
        choices = [Choice(kernel, config, tuple(names)) for kernel, config, names in data.get("choices", ())]
        self.choices = dict(enumerate(choices))
        self.refused |= {name: Refusal(*parts) for name, parts in data.get("refused", {}).items()}

    def restoring(self, tuner: object, restorer: Callable[[], Callable[[], None]]) -> None:
        """Call ``restorer()`` now, at the first launch of ``tuner``, and its result when `current` ends."""
        if id(tuner) not in self._restores:
            self._restores[id(tuner)] = restorer()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, tuners ask this assignment."""
        _current.append(self)
        try:
            yield
        finally:
            _current.remove(self)
            for restore in self._restores.values():
                restore()
            self._restores.clear()


_current: list[Assignment] = []


def current() -> Assignment | None:
    """Return the assignment that tuners ask now."""
    return _current[-1] if _current and _current[-1].is_active else None


def program_order() -> int:
    """Return the order (`Assignment.order`) in which programs are interpreted now."""
    return _current[-1].order if _current else 0


def most_programs() -> int:
    """Return the most programs of a launch that are interpreted now (`Assignment.most_programs`)."""
    return _current[-1].most_programs if _current else 0


__all__ = ["Assignment", "Choice", "Configs", "Refusal", "current", "most_programs", "program_order"]
