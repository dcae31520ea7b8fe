"""The choice of an assignment: one option for every unit, under budgets of error, bytes and time. Only numbers.

problem (units, options, budgets; what is dominated) · program (the integer program) · refinement (exchanges under the
true error) · choosing (diverse solutions) · closest (what to do when no assignment meets the budgets) · front.
"""

from assay.precision.choice.choosing import choose
from assay.precision.choice.closest import closest
from assay.precision.choice.front import front
from assay.precision.choice.problem import Budgets, Choice, ErrorOf, Option, Quantity, Unit

__all__ = ["Budgets", "Choice", "ErrorOf", "Option", "Quantity", "Unit", "choose", "closest", "front"]
