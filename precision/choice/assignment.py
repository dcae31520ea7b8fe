"""A recommended assignment, with what is known of it."""

import math
from collections import Counter

from assay.precision.amounts import in_bytes, in_error, in_seconds
from assay.precision.choice.roofline import Cost
from assay.precision.prediction.quadratic_form import Prediction


class Assignment(dict[str, str]):
    """Site names to scheme names, with what is known of them. Printed in a line; `dict(a)` shows all sites."""

    prediction: Prediction
    measured: float = math.nan
    """The error with the assignment simulated, over the held-out data where there are any; NaN: not measured."""
    cost: Cost
    """Bytes of weights and KV cache; seconds of a prefill and of a decode step."""
    met: bool = True
    """Whether every budget is kept."""
    why: str = ""
    """In words: what bound the choice, or which budgets can't be met together."""

    def __str__(self) -> str:
        counted = Counter(self.values()).most_common()
        parts = [f"{len(self)} site{'s' * (len(self) != 1)}"]
        if self:
            parts[0] += ": " + ", ".join(f"{count} {scheme}" for scheme, count in counted)
        if hasattr(self, "prediction"):
            low, high = in_error(self.prediction.low), in_error(self.prediction.high)
            parts.append(f"error predicted {in_error(self.prediction.error)} ({low} to {high})")
        if not math.isnan(self.measured):
            parts.append(f"measured {in_error(self.measured)}")
        if hasattr(self, "cost"):
            parts.append(f"weights {in_bytes(self.cost.bytes)}, KV cache {in_bytes(self.cost.kv_bytes)}")
            if not math.isnan(self.cost.prefill):
                parts.append(f"prefill {in_seconds(self.cost.prefill)}, decode step {in_seconds(self.cost.decode)}")
        return "; ".join(parts if self.met else [*parts, "budgets not met"])

    def __repr__(self) -> str:
        return f"Assignment({self})"
