"""Names beside points, where they cover neither points nor one another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LETTER, _LINE, _GAP, _MARK = 6.6, 14.0, 9.0, 6.0
"""Pixels, at which a drawing is taken to be 1000 wide."""


@dataclass(frozen=True, slots=True)
class Label:
    """Words at a place (thousandths of the width, pixels from the top), ``dx`` and ``dy`` pixels from there."""

    x: float
    y: float
    dx: float
    dy: float
    anchor: str
    words: str
    tone: str


def labels_of(
    named: Sequence[tuple[float, float, str, str]],
    marks: Sequence[tuple[float, float]],
    others: Sequence[Label],
    lines: Sequence[tuple[str, float]],
    height: float,
) -> list[Label]:
    """A label for each of ``named`` (x, y, words, tone) that has room right of it, left, above or below: beside
    ``marks``, the labels ``others`` and those before it, and ``lines`` across at a place of the axis "x" or "y"."""
    results: list[Label] = []
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in marks] + [_box(label) for label in others]
    taken += [(at - 1, 0.0, at + 1, height) if axis == "x" else (0.0, at - 1, 1000.0, at + 1) for axis, at in lines]
    for x, y, words, tone in named:
        for dx, dy, anchor in (
            (_GAP, 4.0, "start"),
            (-_GAP, 4.0, "end"),
            (0.0, -_GAP, "middle"),
            (0.0, 18.0, "middle"),
        ):
            label = Label(x, y, dx, dy, anchor, words, tone)
            box = _box(label)
            inside = box[0] >= 0 and box[2] <= 1000 and box[1] >= 0 and box[3] <= height
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                results.append(label)
                break
    return results


def _box(label: Label) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label."""
    wide = _LETTER * len(label.words)
    left = label.x + label.dx - {"start": 0.0, "middle": wide / 2, "end": wide}[label.anchor]
    bottom = label.y + label.dy + 2
    return left, bottom - _LINE, left + wide, bottom


def _overlap(one: Iterable[float], other: Iterable[float]) -> bool:
    (left, top, right, bottom), (left2, top2, right2, bottom2) = one, other
    return left < right2 and left2 < right and top < bottom2 and top2 < bottom
