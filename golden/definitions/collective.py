"""Collective operations: what comes out of all ranks together."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.registry import Reduction, define


@define(
    "all_reduce",
    "shards[R,N] -> y[N]",
    rows="N",
    may_be_zero=("N",),
    sharded="R",
    reduction=Reduction("R", of=("shards",)),
    faults=("saturating_store", "store_rounds_ties_away"),
)
def all_reduce(xp: Arithmetic[N], shards: N) -> N:
    """The sum over the ranks, in any order."""
    return xp.sum(shards, axis=0)[0]
