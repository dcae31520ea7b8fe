"""Small examinations and a golden as JSON without times, to be compared between processes in other surroundings."""

import json
from typing import Any

import torch

_OF_TIME = ("seconds", "compile_seconds", "date", "repro")  # a repro line states the surroundings


def softmax(x: torch.Tensor) -> torch.Tensor:
    """A right one."""
    return torch.softmax(x.float(), -1).to(x.dtype)


def bent_softmax(x: torch.Tensor) -> torch.Tensor:
    """A wrong one: its sum is too large."""
    shares = torch.exp(x - x.amax(-1, keepdim=True))
    return shares / (shares.sum(-1, keepdim=True) + 1e-3)


def results() -> str:
    """Examine both and evaluate a golden to 25 digits; import assay as late as a user may."""
    from assay.golden import evaluate
    from assay.verify import examine

    verdicts = [
        examine(softmax, "softmax", dtype="bfloat16", effort="quick", examples=1),
        examine(bent_softmax, "softmax", dtype="float32", effort="quick", examples=0),
    ]
    x = torch.arange(12.0, dtype=torch.float64, device="cpu").reshape(3, 4) / 7
    golden = evaluate("softmax", x, digits=25)
    numbers = [part.tolist() for part in (golden.value, golden.low, golden.radius)]
    return json.dumps([*(_timeless(json.loads(verdict.to_json())) for verdict in verdicts), numbers], sort_keys=True)


def _timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _timeless(part) for name, part in content.items() if name not in _OF_TIME}
    return [_timeless(part) for part in content] if isinstance(content, list) else content
