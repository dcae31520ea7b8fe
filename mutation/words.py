"""The names of the corruptions, gravest first, and of the remarks."""

STRUCTURE = (
    "all zeros",
    "sign changed",
    "one row zero",
    "one tile zero",
    "two rows swapped",
    "last column zero",
    "shifted by one",
    "one NaN",
)
"""What no tolerance should let through."""
SIZE = ("times 1.05", "one element off by 10 %", "one element off by 1", "times 1.01")
PRECISION = ("truncated to bfloat16", "rounded to float16", "rounded to float32")
"""What a tolerance for the format in question may well allow."""
ALL = (*STRUCTURE, *SIZE, *PRECISION)

ZEROS = "all expected values are zero"
BOTH_ZERO = "both sides are zero"
SAME = "compared with itself"
NANS = "NaN on both sides"
EMPTY = "nothing to compare"
NO_NUMBERS = "no numbers"
NOT_AGAIN = "does not pass again after the test"
THINNED = "replayed on a part of its elements"
NO_ROOM = "not kept: too much memory in one test"

GRADES = {
    "unused": "the answer can't make the test fail",
    "blind": "some wrong structure is never noticed: zeros, a sign, a row, an order, a NaN",
    "coarse": "structure is noticed, an error of 1 % or more in size is not",
    "strict": "both are noticed in at least one replay",
    "unjudged": "nothing that could be replayed, or what equals itself",
}
