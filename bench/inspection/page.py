"""Reports inspected kernels as tables, with a row for each kernel or for each configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from assay.bench.inspection.arch import Arch
from assay.bench.inspection.facts import Facts
from assay.bench.inspection.findings import Finding
from assay.bench.inspection.inspecting import Call
from assay.runtime.output import visible

HEAD = (
    "kernel", "dtype", "of it", "configurations", "registers", "spilled", "shared KiB", "occupancy %", "products",
    "copies", "load bytes", "x own products", "x own bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Inspected:
    """The result for one kernel in one dtype; ``problem`` if it couldn't be called at all."""

    name: str
    dtype: str
    calls: tuple[Call, ...]
    problem: str = ""

    @property
    def title(self) -> str:
        """Return its name, with the dtype if there is a choice."""
        return f"{self.name} ({self.dtype})" if self.dtype else self.name

    def findings(self, arch: Arch) -> list[tuple[str, Finding]]:
        """Return the worst finding of each kind and kernel, with the call that shows it and the number of others."""
        results: dict[tuple[str, str], list[tuple[str, Finding]]] = defaultdict(list)
        for call in self.calls:
            for finding in call.findings(arch):
                results[finding.kernel, finding.kind].append((call.words, finding))
        return [_worst(same, len(self.calls)) for same in results.values()]

    @property
    def problems(self) -> list[str]:
        """Return why calls failed or ended early."""
        problems = [self.problem] if self.problem else []
        for call in self.calls:
            if call.problem:
                early = f"nothing is known after {call.launches[-1].kernel}: " if call.launches else ""
                problems.append(f"{call.words}: {early}{call.problem}")
        if not problems and not any(call.launches for call in self.calls):
            problems.append("launches no Triton kernel")
        return problems

    def as_dict(self, arch: Arch) -> dict[str, Any]:
        """Return plain data."""
        calls = [call.as_dict(arch) for call in self.calls]
        return {"kernel": self.name, "dtype": self.dtype, "problem": self.problem, "calls": calls}


def _worst(same: Sequence[tuple[str, Finding]], calls: int) -> tuple[str, Finding]:
    """Return the worst of findings of one kind, with the calls that have such findings in words."""
    where, finding = max(same, key=lambda pair: (pair[1].fatal, pair[1].weight))
    others = len({words for words, _ in same}) - 1
    if others + 1 == calls > 1 and len({each.words for _, each in same}) == 1:
        return "", finding
    more = f"; and {others} other call{'s' if others > 1 else ''}" if others else ""
    return f"{where}{more}", finding


def rows(inspected: Inspected, *, each: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield rows under `HEAD`: one for each launched kernel, or with ``each`` for each configuration."""
    groups: dict[Any, list[tuple[Call, Facts]]] = defaultdict(list)
    for call in inspected.calls:
        for facts in call.launches:
            if not facts.pruned and not facts.error:
                key = (call.words, facts.kernel, facts.name) if each else facts.kernel
                groups[key].append((call, facts))
    for pairs in groups.values():
        launches = [facts for _, facts in pairs]
        names = dict.fromkeys(facts.name for facts in launches)
        yield (
            inspected.name,
            inspected.dtype,
            f"{launches[0].kernel}{f' at {pairs[0][0].words}' if each else ''}",
            launches[0].name if each else str(len(names)),
            _range(facts.registers for facts in launches),
            _range(facts.spilled for facts in launches),
            _range(facts.shared / 1024 for facts in launches),
            _range(100 * facts.occupancy for facts in launches),
            ", ".join(dict.fromkeys(kind for facts in launches for kind in _products(facts))),
            ", ".join(
                dict.fromkeys(kind for facts in launches for kind in facts.moves if "async" in kind or "TMA" in kind)
            ),
            _widths(launches),
            *_times_own(pairs),
        )


def _products(facts: Facts) -> Iterable[str]:
    if facts.products or not facts.amounts or not facts.amounts.products:
        return facts.products
    return ("FFMA",)


def _widths(launches: Sequence[Facts]) -> str:
    """Return the width by which most bytes are loaded, as a range over the configurations."""
    results = set()
    for facts in launches:
        loads: dict[int, int] = defaultdict(int)
        for kind in ("load", "async copy"):
            for width, count in facts.widths.get(kind, {}).items():
                loads[width] += width * count
        if loads:
            results.add(max(loads, key=lambda width: loads[width]))
    return _range(results) if results else ""


def _times_own(pairs: Sequence[tuple[Call, Facts]]) -> tuple[str, str]:
    products = [
        facts.amounts.products / call.own_products
        for call, facts in pairs
        if facts.amounts and facts.amounts.products and call.own_products
    ]
    moved = [
        (facts.amounts.loaded + facts.amounts.stored) / call.own_bytes
        for call, facts in pairs
        if facts.amounts and call.own_bytes
    ]
    about = "" if all(facts.amounts and facts.amounts.complete for _, facts in pairs) else "~"
    return about + _range(products) if products else "", about + _range(moved) if moved else ""


def _range(numbers: Iterable[float]) -> str:
    results = sorted(set(numbers))
    low, high = f"{results[0]:.3g}", f"{results[-1]:.3g}"
    return low if low == high else f"{low} to {high}"


def finding_lines(inspected: Inspected, arch: Arch) -> Iterator[str]:
    """Yield the findings, one per line, then the problems."""
    for where, finding in inspected.findings(arch):
        yield f"{finding}{f' [{where}]' if where else ''}"
    yield from inspected.problems


def markdown(every: Sequence[Inspected], arch: Arch, versions: str, command: str) -> str:
    """Return a page of all kernels in Markdown."""
    lines = [
        f"# Compiled for {arch.name}, without a GPU",
        "",
        f"What `{command}` found; {versions}. Nothing ran: each launch, in every configuration that",
        "its tuner would try at these sizes, was compiled, and the compiler's representations and machine code read.",
        "",
        "`configurations`: how many different ones were compiled, over all calls. `spilled`: bytes of a thread.",
        f"`occupancy`: of the warps that a multiprocessor of an {arch.device.name} can hold. `load bytes`: of one",
        "instruction, where most bytes are loaded. `x own products`, `x own bytes`: operations of products, and bytes",
        "asked for by loads and stores (masked ones included, caches not), as multiples of what the op itself needs,",
        "over all configurations and calls; ~ marks kernels whose loops or branches depend on values in memory.",
        "",
        "## Findings",
        "",
    ]
    results = [f"- {one.title}, {words}" for one in every for words in finding_lines(one, arch)]
    lines += [*(results or ["None."]), "", "## Kernels", ""]
    lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(row)} |" for one in every for row in rows(one)]
    return visible("\n".join(lines) + "\n")


__all__ = ["HEAD", "Inspected", "finding_lines", "markdown", "rows"]
