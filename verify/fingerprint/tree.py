"""The order of a sum: reconstruct its tree from sums of ones that a huge term absorbs, and name it.

Term i is huge, term j its negative, all others are ones. Ones that are added before the two meet are absorbed, so the
sum is n - l, with l the number of leaves below the lowest common ancestor of i and j. P. Xie, Y. Gao, J. Xue, *FPRev:
revealing the order of floating-point summation*, USENIX ATC 2025. A node with more than two children stands for terms
that a unit adds at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Union

import torch

from assay.verify.fingerprint.accumulator import LARGE, Width
from assay.verify.fingerprint.subject import Reduction, Unseen

Node = Union[int, tuple["Node", ...]]  # noqa: UP007  a recursive alias
_SIZES = (64, 32, 16, 8)  # terms: fewer need a narrower range of the operands and the result
_LONG = 512  # most terms of a sum whose blocks are counted


@dataclass(frozen=True)
class Prober:
    """Sums of n ones with two huge terms, for one reduction."""

    reduction: Reduction
    terms: int
    unit: float

    def common(self, first: int, others: Sequence[int]) -> list[int]:
        """Return, for each other term, the number of leaves below its lowest common ancestor with ``first``."""
        rows = torch.full((len(others), self.terms), self.unit, dtype=torch.float64)
        rows[:, first] = 2.0**LARGE
        rows[torch.arange(len(others)), torch.as_tensor(others)] = -(2.0**LARGE)
        kept = self.reduction.sums(rows) / self.unit
        if not bool(((kept == kept.round()) & (kept >= 0) & (kept <= self.terms - 2)).all()):
            raise Unseen(f"sums of ones beside a huge term give no whole number of ones ({float(kept.flatten()[0]):g})")
        return [self.terms - int(count) for count in kept]


def _prober(reduction: Reduction, result: Width, terms: int) -> Prober:
    """Return a prober whose units a huge term absorbs and whose counts the result can hold; raise `Unseen`."""
    if result.is_limit:
        raise Unseen("the accumulator is too wide for a term that swallows others")
    shift = result.widest + terms.bit_length() + 1
    if shift > reduction.reach or terms > 2**reduction.subject.out.precision:
        raise Unseen(f"{terms} terms need a wider range, or a wider result")
    unit = 2.0 ** (LARGE - shift)
    if float(reduction.sums(torch.full((1, terms), unit, dtype=torch.float64))[0]) != terms * unit:
        raise Unseen(f"{terms} small terms by themselves don't add up to their sum")
    return Prober(reduction, terms, unit)


def tree_of(reduction: Reduction, result: Width, terms: int) -> Node:
    """Return the tree of the whole sum; raise `Unseen` if no tree fits the sums."""
    return _tree(_prober(reduction, result, terms), list(range(terms)), terms + 1)


def _tree(probe: Prober, leaves: list[int], above: int) -> Node:
    """Return the subtree of ``leaves``; groups that meet only at its parent, of ``above`` leaves, stay separate."""
    first, rest = leaves[0], leaves[1:]
    if not rest:
        return first
    levels: dict[int, list[int]] = {}
    for leaf, count in zip(rest, probe.common(first, rest), strict=True):
        levels.setdefault(count, []).append(leaf)
    node: Node = first
    size = 1
    for count in sorted(levels):
        group = levels[count]
        part = _tree(probe, group, count)
        # members that meet each other only where they meet the first one are terms added at once
        at_once = isinstance(part, tuple) and len(group) > 1 and max(probe.common(group[0], group[1:])) == count
        siblings = part if isinstance(part, tuple) and at_once else (part,)
        size += len(group)
        if size != count and count < above:
            raise Unseen("the sums of ones fit no tree: the order changes from call to call, or nothing is swallowed")
        node = (node, *siblings)
    return node


def leaves_of(node: Node) -> list[int]:
    """Return the leaves below a node, in order of addition."""
    return [node] if isinstance(node, int) else [leaf for child in node for leaf in leaves_of(child)]


def name_of(node: Node) -> str:
    """Return the order in words."""
    count = len(leaves_of(node))
    if count > 2 and _is_balanced(node):
        return "pairwise"
    chain = _chain(node)
    if chain is not None:
        sizes = {len(leaves_of(part)) for part in chain[:-1]} or {count}
        size = len(leaves_of(chain[0]))
        if size == 1 and sizes == {1}:
            return _direction([leaf for part in chain for leaf in leaves_of(part)])
        if len(sizes) == 1 and size > 1 and all(_is_run(part) for part in chain):
            fused = all(_is_fused(part) for part in chain)
            inside = f"{size} terms at once" if fused else name_of(chain[0])
            return f"in {'steps' if fused else 'blocks'} of {size}, {'each ' if fused else ''}{inside}"
        if len(sizes) == 1 and size > 1 and (named := _side_by_side(chain)):
            return named
    return f"all {count} terms at once" if _is_fused(node) else _lanes(node) or "irregular"


def _direction(order: list[int]) -> str:
    if order == sorted(order):
        return "sequential"
    if [index ^ 1 for index in order[2:]] == sorted(order[2:]):
        return "sequential in pairs, the second of each first"
    if order[1:] == sorted(order[1:], reverse=True) or order == sorted(order, reverse=True):
        return "sequential, last term first"
    return "sequential, in another order"


def _chain(node: Node) -> list[Node] | None:
    """Return the parts that one accumulator adds in sequence, innermost first; None if both operands are sums."""
    parts: list[Node] = []
    while isinstance(node, tuple):
        sizes = [len(leaves_of(child)) for child in node]
        if len(node) > 2 and len(set(sizes)) == 1:
            break  # terms that are added at once
        big = max(range(len(node)), key=lambda index: sizes[index])
        small = node[:big] + node[big + 1 :]
        parts.append(small if len(small) > 1 else small[0])  # an accumulator takes one term, or several at once
        node = node[big]
        if sum(sizes) - sizes[big] >= sizes[big]:
            break
    parts.append(node)
    return parts[::-1] if len(parts) > 1 else None


def _is_run(node: Node) -> bool:
    """Return whether the leaves are consecutive."""
    leaves = sorted(leaves_of(node))
    return leaves[-1] - leaves[0] == len(leaves) - 1


def _is_fused(node: Node) -> bool:
    return isinstance(node, tuple) and len(node) > 2 and all(isinstance(child, int) for child in node)


def _is_balanced(node: Node) -> bool:
    if isinstance(node, int):
        return True
    sizes = [len(leaves_of(child)) for child in node]
    return len(node) == 2 and sizes[0] == sizes[1] and all(_is_balanced(child) and _is_run(child) for child in node)


def _lanes(node: Node) -> str:
    """Describe parallel accumulators, added at the end: lanes (every k-th term) or parts (consecutive terms)."""
    parts: list[Node] = [node]
    while True:
        split = [child for part in parts for child in (part if isinstance(part, tuple) else (part,))]
        if any(len(leaves_of(child)) < 2 for child in split):
            return ""
        parts = split
        sizes = {len(leaves_of(part)) for part in parts}
        if len(sizes) != 1:
            return ""
        if all(_inner(part) == "sequential" for part in parts):
            return _side_by_side(parts)


def _side_by_side(parts: Sequence[Node]) -> str:
    """Describe equal parts, each with its own accumulator: of every k-th term, or of consecutive terms."""
    if any(_inner(part) != "sequential" for part in parts):
        return ""
    count = len(parts)
    if all({b - a for a, b in pairwise(leaves_of(part))} == {count} for part in parts):
        ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
        return f"{count} accumulators side by side, each sequential over every {count}{ending} term"
    return f"split into {count} parts, each sequential" if all(_is_run(part) for part in parts) else ""


def _inner(node: Node) -> str:
    chain = _chain(node)
    ones = chain is not None and all(isinstance(part, int) for part in chain)
    return "sequential" if ones and sorted(leaves_of(node)) == leaves_of(node) else ""


def order(reduction: Reduction, result: Width) -> tuple[str, str]:
    """Return the order of the sum in words, and the evidence; raise `Unseen`."""
    tried: Unseen | None = None
    for terms in _SIZES:
        try:
            whole = tree_of(reduction, result, terms)
            name, parts = name_of(whole), _equal_parts(whole)
            if parts and parts == _equal_parts(tree_of(reduction, result, terms // 2)):
                name = f"split into {parts} parts, each {name.partition(', ')[2]}"
        except Unseen as error:
            tried = tried or error
            continue
        return name, f"the tree of {terms} terms, from which of them a huge term swallows before its negative meets it"
    assert tried is not None
    raise tried


def _equal_parts(node: Node) -> int:
    """Return into how many equal runs of consecutive terms (more than one each) the sum is split; 0 if it isn't."""
    if _is_balanced(node):
        return 0
    chain = _chain(node) or []
    sizes = {len(leaves_of(part)) for part in chain}
    return len(chain) if len(sizes) == 1 and sizes != {1} and all(map(_is_run, chain)) else 0


def blocks(reduction: Reduction, result: Width) -> tuple[str, str]:
    """Return the blocks, or the number of parts, into which a long sum is split; raise `Unseen`."""
    most = min(_LONG, 2 ** min(reduction.subject.out.precision, 20))
    while most >= 2 * _SIZES[0]:
        try:
            probes = (_prober(reduction, result, terms) for terms in (most, most // 2))
            size, half = (_block([1, *probe.common(0, range(1, probe.terms))]) for probe in probes)
        except Unseen:
            most //= 2
            continue
        how = f"how many of {most} terms have been added where each meets the first one, and how many of {most // 2}"
        if size is None:
            return "no equal ones from the first term on", how
        if size == most:
            return f"none within {most} terms", how
        if size == 2 * (half or 0):
            return f"{most // size} parts, whatever the length", how
        return f"of {size} terms", how
    raise Unseen(f"fewer than {2 * _SIZES[0]} terms can be counted")


def _block(counts: list[int]) -> int | None:
    """Return the size of the blocks that ``counts`` shows (by position: leaves where a term meets the first).

    Return the number of all terms if the first ones are added sequentially; None if no size fits.
    """
    terms = len(counts)
    if counts[1:] == [*range(2, terms + 1)]:
        return terms
    for size in range(2, terms // 2 + 1):
        inside = all(count <= size for count in counts[:size])
        if inside and all(counts[index] == min(terms, (index // size + 1) * size) for index in range(size, terms)):
            return size
    return None
