"""Values of the options of `assay audit`: its effort, sizes, formats of exports, files of assignments."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from assay.cli.progress import note
from assay.formats.errors import UnknownOption
from assay.precision.errors import BadAssignment, CannotExport, UntrustedModel
from assay.runtime.files import read_text
from assay.runtime.records import from_json

if TYPE_CHECKING:
    import torch

    from assay.precision.auditing import Audit
    from assay.precision.export import Exported
    from assay.precision.loading import Loaded
    from assay.precision.prediction.measuring import Curve

CONTEXT = 4096
"""Default tokens in the KV cache."""
_LONG = 8
"""Largest number of sequences of the context's length over which errors by position are measured."""

Context = Annotated[
    int | None,
    Option(
        min=1,
        help=f"Tokens in the KV cache, for its bytes and for times, {CONTEXT} if not given; where given, the error "
        "over the positions of sequences of that length is measured too.",
    ),
]

Device = Annotated[str, Option(metavar="NAME", help="Where the model runs, as torch names it: cpu, cuda, cuda:1.")]

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)(?:e(\d+))? *([kmgt]?)(i?)b?", re.IGNORECASE)


def assignment_of(path: Path) -> dict[str, str]:
    """Return site names to scheme names from a file with such a mapping or from an audit.json."""
    expected = "expected a JSON object of site names to scheme names, or an audit.json"
    content = from_json(
        read_text(path, BadAssignment, expected), str(path), lambda words: BadAssignment(f"{words}; {expected}")
    )
    if isinstance(content, dict) and isinstance(content.get("recommended"), dict):
        content = content["recommended"].get("assignment")
    if not isinstance(content, dict) or not all(isinstance(scheme, str) for scheme in content.values()):
        raise BadAssignment(f"{path}: {expected}")
    return content


def check_names(
    names: Sequence[str] | None,
    target: str,
    metric: str,
    *,
    timed: bool = False,
    exports: Sequence[str] = (),
    checkpoint: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the schemes to examine, and the ones that every export supports, to choose from.

    Raises before anything is loaded: for an unknown metric, schemes that don't exist or that the target lacks, exports
    that hold none of them, and, with ``timed``, a time budget without a device.
    """
    from assay.precision.export import offered
    from assay.precision.metrics import metric_named
    from assay.precision.targets import formats_of, target_named

    metric_named(metric or "kl")
    aimed = target_named(target or None)
    if timed and aimed.device is None:
        raise UnknownOption("--max-time is of a device, and none is assumed; name it, such as --target h200")
    try:
        menu = offered(names, target or None, exports, checkpoint)
        every = formats_of(names, target or None)
        return every if set(menu) <= set(every) else menu, menu
    except UnknownOption as error:  # in the words of the command line
        message = re.sub("^format ", "--formats ", str(error))
        raise UnknownOption(message.replace("another target", "another --target")) from None


def loaded_of(model: str, memory: float | None, device: str, *, trust: bool, checkpoint: bool) -> Loaded:
    """Return the model on its device; hold a large one as stored unless a memory limit or checkpoint is requested."""
    from assay.precision.export.checkpoint.writing import needed
    from assay.precision.loading import exceeds_limit, load
    from assay.precision.observation.streaming import streamed_parameters

    narrow = memory is None and not checkpoint and exceeds_limit(model)
    most = None if memory is None else int(memory)
    try:
        loaded = load(model, trust=trust, max_memory=most, as_stored=narrow, device=device)
    except UntrustedModel as error:
        raise UntrustedModel(str(error).replace("trust=True", "--trust")) from None
    if checkpoint:  # fails before anything is computed
        needed("compressed_tensors")
        if streamed_parameters(loaded.model):
            raise CannotExport(
                "--checkpoint is written from weights in memory; give --max-memory more, or leave it away"
            )
    return loaded


def exports_of(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the formats to export, and the ones that restrict the choice; "all" exports what each format can hold."""
    from assay.precision.export import FORMATS

    names = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if "all" in names:
        return list(FORMATS), []
    for name in names:
        if name not in FORMATS:
            raise UnknownOption(f"--export {name}; expected {', '.join(FORMATS)} or all")
    return list(dict.fromkeys(names)), list(dict.fromkeys(names))


def verified(folder: Path | None) -> None:
    """Verify an export for ``--verify-export``: print the scheme of each layer as the export's readers see it.

    Exits with 1 if a layer gets another scheme than intended, a file was changed or no reader is installed, else 0.
    """
    if folder is None:
        return
    from assay.precision.export import verify_export

    result = verify_export(folder)
    for each in result:
        print(each)
        for line in each.wrong:
            print(f"  {line}")
    raise typer.Exit(int(any(each.wrong for each in result) or not any(each.reader for each in result)))


def lacking(
    exported: Exported | None,
    exports: Sequence[str],
    most: float | None,
    bytes_of_held: Callable[[Mapping[str, str]], float],
) -> list[str]:
    """Return a line for each request that was not met, and print the lines to standard error.

    These are exports for which nothing was written, and exports that express so few sites that their weights exceed
    ``most`` bytes.
    """
    from assay.precision.units import format_bytes

    written = {part.format: part for part in exported.parts} if exported is not None else {}
    missing = [name for name in exports if name not in written]
    results = [f"--export {name} wrote nothing: it can express nothing of this assignment" for name in missing]
    for name, part in written.items():
        size = bytes_of_held(part.held) if part.bytes is None else float(part.bytes)
        if most is not None and size > most:
            results.append(f"{name}: weights of {format_bytes(size)} exceed --max-bytes of {format_bytes(most)}")
    for line in results:
        note(line)
    return results


def bytes_of(flag: str, text: str) -> float | None:
    """Parse ``800MB``, ``3.2GB`` (10^9), ``1.5GiB`` (2^30), or a number of bytes."""
    if not text:
        return None
    match = _SIZE.fullmatch(text.strip())
    number, power, prefix, binary = match.groups() if match is not None else ("1", "999", "", "")
    size = float(f"{number}e{power or 0}") * (1024 if binary else 1000) ** _PREFIXES[prefix.lower()]
    if not math.isfinite(size):
        raise UnknownOption(f"{flag} {text[:60]!r}; expected a number of bytes, or 800MB, 3.2GB, 1.5GiB")
    return size


def over_positions(
    result: Audit, chosen: Mapping[str, str], loaded: Loaded, text: Path, context: int | None
) -> Curve | None:
    """Return the error of the chosen assignment over positions, if a context was requested.

    Returns None, and prints the reason, if the model has no positions or the text is too short.
    """
    from assay.precision.errors import BadText, NoData, WrongShape

    if context is None:
        return None
    try:
        rows = loaded.batches(text, sequence=context, sequences=_LONG, batch=1)
        return result.positions(chosen, [row for row in rows if row["input_ids"].shape[1] == context])
    except (BadText, NoData, WrongShape) as error:
        note(f"no error over positions: {error}")
        return None


_SIMULATED = 1.6
"""Duration of a measurement in plain forward passes: values are rounded, and compared in float64."""
_BEFORE = 20.0
"""Duration in forward passes of the passes before the first measurement: recording, fitting and predicting."""
_CHOICE = 10
"""Approximate measurements that choose one assignment."""
_SIMPLE = 3
"""Further measurements per weight scheme: the simple assignments, over the held-out sequences."""
_LEAST, _MOST = 6, 96  # calibration measurements that a time budget may choose


@dataclass(frozen=True, slots=True)
class Effort:
    """``count``: the argument of `Audit.calibrate`. ``points``: how many assignments of the front are measured."""

    count: int
    points: int

    @property
    def measurements(self) -> int:
        """Return the approximate number of measurements over the sequences that are chosen on."""
        return self.count + _CHOICE


USUAL, QUICK = Effort(20, 16), Effort(10, 6)


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a model here: seconds of one measurement over the chosen and over the held-out sequences."""

    choice: float
    held_out: float
    simple: int = 60
    """Simple assignments that are measured besides the recommended one."""

    def left(self, effort: Effort) -> float:
        """Return the seconds of all measurements."""
        return effort.measurements * self.choice + (effort.points + self.simple) * self.held_out

    def whole(self, effort: Effort) -> float:
        """Return the seconds of the audit, to about a factor of two."""
        return _BEFORE / _SIMULATED * self.choice + self.left(effort)

    def within(self, seconds: float) -> Effort:
        """Return the largest effort that fits into ``seconds``, but at least `_LEAST`."""
        efforts = [
            Effort(count, USUAL.points if count >= USUAL.count else QUICK.points) for count in range(_LEAST, _MOST + 1)
        ]
        return max(
            (each for each in efforts if self.left(each) <= seconds), key=lambda each: each.count, default=efforts[0]
        )

    def confirmed(self, result: Audit) -> Pace:
        """Return the pace of the first measurement if that is slower; cached measurements don't count."""
        began = time.monotonic()
        sequences = len(result.noise_floor.weights)
        each = (time.monotonic() - began) / sequences
        choice, held_out = (each * count for count in (result.observed.sequences, sequences))
        return replace(self, choice=max(self.choice, choice), held_out=max(self.held_out, held_out))


def pace_of(
    model: torch.nn.Module,
    batches: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]] | None,
    menu: Collection[str],
) -> Pace:
    """Estimate the pace from one forward pass of a batch; menu: the schemes to choose from."""
    import torch

    from assay.precision.observation.running import call, evaluating, in_float32, normalised
    from assay.precision.schemes import SCHEMES

    model = in_float32(model)
    (batch,) = normalised(batches[:1], model)
    spent = 0.0
    for _ in range(2):  # the first one also warms up
        began = time.monotonic()
        with torch.no_grad(), evaluating(model):
            call(model, batch)
        spent = time.monotonic() - began
        if spent > 1:
            break
    each = _SIMULATED * spent / len(batch["input_ids"])
    choice, other = (sum(len(one["input_ids"]) for one in part or batches) for part in (batches, held_out))
    return Pace(each * choice, each * other, _SIMPLE * sum(SCHEMES[name].weight is not None for name in menu))


def span(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
