"""Whether attention rounds its probabilities before it multiplies them with the values.

One key has the score 0, and so the probability 1 before it is divided by the sum, all others a score -s. The values are
chosen so that both parts nearly cancel, and the result is what rounding exp(-s) has left; it is held against what each
way of rounding would give.
"""

import math

import torch

from assay.formats.format import Format
from assay.formats.rounding import Mode, round_to
from assay.verify.fingerprint.subject import Subject, Unseen

Tensor = torch.Tensor

_OTHERS, _WIDTH = 31, 64
_SCORES = 24
_CLOSE = 0.03  # of what rounding would change: near enough to be one rounding's result
_MOST = 0.75  # of the results must be; an exponential's own error may tip some
_AHEAD = 0.2  # of the next best: half of what is rounded to nearest is rounded down


def rounding_of_probabilities(subject: Subject) -> tuple[str, str]:
    """How probabilities are rounded, and how that was seen; raises `Unseen`."""
    definition = subject.question.definition
    if not {"q", "k", "v"}.issubset(tensor.name for tensor in definition.tensors):
        raise Unseen("the probe chooses tensors q, k and v")
    changed = {name for name, option in definition.options.items() if subject.options[name] != option.default}
    if changed - {"return_lse"}:
        raise Unseen(f"{', '.join(sorted(changed))}: changes what the probe chooses; ask with the default")
    format = subject.format_of("q")
    if format.precision > 11:
        raise Unseen(f"{format} is no coarser than the arithmetic")
    seen, expected = _experiment(subject, format)
    plain = expected["not rounded"]
    effect = float(torch.stack([(value - plain).abs().mean() for value in expected.values()]).max())
    shares = {name: float(((seen - value).abs() < _CLOSE * effect).double().mean()) for name, value in expected.items()}
    best, second = sorted(shares, key=lambda name: -shares[name])[:2]
    if shares[best] < _MOST or shares[second] > shares[best] - _AHEAD:
        raise Unseen(f"what is left when two parts cancel fits no known rounding ({shares[best]:.0%} of it {best})")
    how = f"two parts of the sum that cancel but for the rounding of the smaller probability ({shares[best]:.0%} fit)"
    return best, how


def _experiment(subject: Subject, format: Format) -> tuple[Tensor, dict[str, Tensor]]:
    """What the kernel gives for each score, and what it would by each way of rounding."""
    steps = torch.arange(1, _SCORES + 1, dtype=torch.float64)
    scores = round_to(steps * 0.21, format)  # exp(-s) from 0.8 down to 0.006
    weight = torch.exp(-scores)
    first = round_to(_OTHERS * weight, format)  # value of the first key; the others have -1
    sizes = {"B": _SCORES, "H": 1, "Hkv": 1, "Sq": 16, "Sk": _OTHERS + 1, "D": _WIDTH, "Dv": _WIDTH}
    q = torch.zeros(_SCORES, 1, 16, _WIDTH, dtype=torch.float64)
    q[..., 0] = math.sqrt(_WIDTH)
    k = torch.zeros(_SCORES, 1, _OTHERS + 1, _WIDTH, dtype=torch.float64)
    k[:, 0, 1:, 0] = -scores[:, None]
    v = torch.full((_SCORES, 1, _OTHERS + 1, _WIDTH), -1.0, dtype=torch.float64)
    v[:, 0, 0] = first[:, None]
    seen = subject.call(sizes, {"q": q, "k": k, "v": v})[0][:, 0, 0, 0]
    return seen, _hypotheses(weight, first, format)


def _hypotheses(weight: Tensor, first: Tensor, format: Format) -> dict[str, Tensor]:
    total = 1 + _OTHERS * weight
    results = {"not rounded": (first - _OTHERS * weight) / total}
    modes: dict[str, Mode] = {f"rounded to {format}": "nearest", f"truncated to {format}": "toward_zero"}
    for name, mode in modes.items():
        stored = round_to(weight, format, mode)
        results[f"{name} before the division"] = (first - _OTHERS * stored) / total
        one, other = (round_to(part / total, format, mode) for part in (torch.ones_like(weight), weight))
        results[f"{name} after the division"] = one * first - _OTHERS * other
    return results
