"""A solution under test: built at one choice of sizes together with the reference, called and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from assay.judge.problems.problem import Problem, ProblemError, Sizes
from assay.judge.problems.sizes import Choice
from assay.judge.reference_model import ReferenceModel
from assay.judge.solution import weights
from assay.judge.solution.inputs import Kind, kinds, may_roll, one_changed, redrawn, rolled, scaled
from assay.judge.solution.solution_process import Called, SolutionError, SolutionProcess
from assay.judge.solution.trials import Observation, Trial, sizes_of
from assay.runtime.tensors import same_bits
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.findings import Failure

Tensor = torch.Tensor


class DoesNotFollow(Exception):
    """The solution can't be built or called at sizes other than the given ones."""


@dataclass
class SolutionUnderTest:
    """The solution and the reference at one choice of sizes.

    ``constructed`` is the reference with its constructor's parameters, ``model`` with those in use. ``names`` maps the
    solution's parameters to the reference's; None if they can't be matched.
    """

    problem: Problem
    process: SolutionProcess
    contract: Contract
    given: Sizes
    choice: Choice
    seed: int
    pretend: bool
    model: ReferenceModel = field(init=False)
    constructed: ReferenceModel = field(init=False)
    kinds: list[Kind] = field(init=False)
    names: dict[str, str] | None = field(init=False)
    constructor_agrees: bool = field(init=False)
    parameters: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Build the solution and the reference. Raises `ProblemError` and `SolutionError`."""
        instance = self.problem.make(self.choice.sizes, self.seed)
        self.constructed = self.model = ReferenceModel.of(instance, self.contract, self.problem.name)
        self.parameters = self.process.build(
            instance, self.seed, evaluating=self.model.evaluating, given=self.given, pretend=self.pretend
        )
        self.names = weights.shared(self.model.state, self.parameters, self.process.unbound)
        self.constructor_agrees = self.names is not None and weights.same_values(
            self.model.state, self.parameters, self.names
        )
        self.kinds = kinds(instance.draw)
        if self.names and not self.constructor_agrees:
            self.process.load(weights.handed(self.constructed.state, self.names, self.parameters))

    @property
    def can_redraw(self) -> bool:
        """Return whether the solution's parameters can be set to the reference's."""
        return bool(self.names)

    def load_redrawn(self) -> None:
        """Give both sides parameters none of which is constant. Raises `SolutionError`.

        If the solution derived tensors of its own from parameters, only the shared parameters change.
        """
        assert self.names
        state = weights.redrawn(self.constructed.state, self.seed)
        if self.process.unbound - self.names.keys():
            shared = set(self.names.values())
            state = {name: value if name in shared else self.constructed.state[name] for name, value in state.items()}
        model = self.constructed.with_state(state)
        if not model.is_finite(self.model.instance.draw(self.seed)):
            return
        self.process.load(weights.handed(state, self.names, self.parameters))
        self.model = model

    def trial(self, inputs: str, seed: int, memory: str = "new", **changes: Any) -> Trial:
        """Return a trial at these sizes with the present weights."""
        which = "constructed" if self.model is self.constructed else "redrawn"
        sizes = sizes_of(self.choice, self.given)
        return Trial(self.choice.kind, sizes, inputs, which, memory, seed, **changes)

    def arguments(self, trial: Trial) -> tuple[Any, ...]:
        """Return the arguments of a trial.

        Signs change only if the reference's results stay finite with them; if they aren't finite without a change of
        signs either, the arguments stay as drawn.
        """
        drawn = self.model.instance.draw(trial.seed)
        for signs in (True, False):
            result = redrawn(drawn, self.kinds, trial.inputs, trial.seed, signs=signs)
            if trial.inputs == "given" or self.model.is_finite(result):
                drawn = result
                break
        if trial.factor != 1.0:
            drawn = scaled(drawn, self.kinds, trial.factor)
        if trial.shift:
            drawn = rolled(drawn, may_roll(drawn, self.kinds), trial.shift)
        return one_changed(drawn, trial.change, trial.seed) if trial.change >= 0 else drawn

    def tried(self, trial: Trial, *, name: str = "a", keep: bool = False, pause: bool = False) -> Observation:
        """Call the solution once and judge its results. Raises `SolutionError` if its process is lost."""
        arguments = self.arguments(trial)
        return self.called(trial, arguments, name=name, keep=keep, pause=pause)

    def called(
        self, trial: Trial, arguments: tuple[Any, ...], *, name: str = "a", keep: bool = False, pause: bool = False
    ) -> Observation:
        """Call the solution with these arguments and judge its results. Raises `SolutionError` if it is lost."""
        self.process.store(name, arguments, trial.memory)
        try:
            like = self.model.eager(arguments)
            called = self.process.call(name, seed=trial.seed, keep=keep, pause=pause, like=like)
        except SolutionError as error:
            error.during = trial
            if error.lost:
                raise
            failure = Failure(error.kind, self.model.case(arguments), str(error))
            return Observation(trial, Result(failure.case, failure), arguments, [], error.seen)
        return self.judged(trial, arguments, called)

    def judged(self, trial: Trial, arguments: tuple[Any, ...], called: Called, *, timed: bool = False) -> Observation:
        """Judge the results of a call by numbers, shapes and dtypes."""
        try:
            result = self.model.judge(arguments, called.outputs, _nesting(called.seen))
        except ProblemError:
            if called.outputs and all(part.numel() for part in called.outputs):
                raise
            case = self.model.case(arguments)
            result = Result(case, Failure("shape", case, "expected tensors, got none"))
        return Observation(trial, result, arguments, called.outputs, called.seen, timed)

    def eager_change(self, before: Sequence[Any], after: Sequence[Any]) -> float:
        """Return the largest change of the reference's results, relative to their largest element."""
        first, second = self.model.eager(before), self.model.eager(after)
        moved = 0.0
        for a, b in zip(first, second, strict=True):
            if a.shape != b.shape:
                return 1.0
            if a.numel():
                size = float(a.double().abs().max())
                moved = max(moved, float((a.double() - b.double()).abs().max()) / (size or 1.0))
        return moved

    @property
    def tensors(self) -> list[int]:
        """Return the indices of the arguments' leaves that are floating-point tensors and may change."""
        leaves = tree_leaves(self.model.instance.draw(self.seed))
        return [
            index
            for index, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=True))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and kind.name != "fixed" and leaf.numel() > 1
        ]


def _nesting(observation: Mapping[str, Any]) -> str:
    """Return the nesting of the results in lists and tuples; empty if results were handed in."""
    result = observation.get("nesting")
    return result if isinstance(result, str) else ""


def same_outputs(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether two calls gave the same bits."""
    return len(first) == len(second) and all(map(same_bits, first, second))
