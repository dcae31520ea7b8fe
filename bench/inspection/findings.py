"""Findings: defects of a kernel's compiled code, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from assay.bench.inspection.arch import TENSOR_MEMORY, Arch
from assay.bench.inspection.facts import Facts, Line

Kind = Literal[
    "not compiled", "no room", "none fits", "spills", "local memory", "tf32", "transposed", "scalar loads",
    "no tensor cores", "idle products",
]  # fmt: skip
_WASTED = 2.0  # times the op's own products: from here on masked tiles are a finding


@dataclass(frozen=True)
class Finding:
    """A defect of a kernel in ``configs`` of its ``of`` configurations; ``fatal``: it can't run.

    ``weight`` orders findings of one kind, by bytes or by a factor.
    """

    kind: Kind
    kernel: str
    words: str
    configs: tuple[str, ...]
    of: int
    fatal: bool = False
    weight: float = 0.0

    def __str__(self) -> str:
        if self.of == 1:
            return f"{self.kernel}: {self.words}"
        count = "all" if len(self.configs) == self.of else len(self.configs)
        which = f": {self.configs[0]}" if len(self.configs) == 1 else ""
        return f"{self.kernel}: {self.words} ({count} of {self.of} configurations{which})"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def findings(seen: Sequence[Facts], arch: Arch, own_products: float | None = None) -> list[Finding]:
    """Return the findings of one call's launches, without configurations that the kernel's tuner prunes."""
    by_kernel: dict[str, list[Facts]] = defaultdict(list)
    for facts in seen:
        if not facts.pruned:
            by_kernel[facts.kernel].append(facts)
    results: list[Finding] = []
    for kernel, launches in by_kernel.items():
        results += _of_kernel(kernel, launches, arch)
    return results + list(_idle(by_kernel, own_products))


def _of_kernel(kernel: str, launches: Sequence[Facts], arch: Arch) -> Iterator[Finding]:
    count = len(launches)
    for kind, words in _CHECKS.items():
        grouped: dict[str, list[Facts]] = defaultdict(list)
        for facts in launches:
            if said := words(facts, arch):
                grouped[said].append(facts)
        if len(grouped) > 1 and kind in ("spills", "no room"):  # the numbers differ: report the worst
            every = [facts for group in grouped.values() for facts in group]
            worst = max(every, key=lambda facts: facts.spilled if kind == "spills" else facts.shared)
            grouped = {f"at worst {words(worst, arch)}": every}
        for said, group in grouped.items():
            fatal, weight = kind == "not compiled" and len(group) == count, max(map(_weight, group))
            yield Finding(kind, kernel, said, tuple(facts.name for facts in group), count, fatal, weight)
    if count and all(not f.error and not _fits(f, arch) for f in launches):
        least, room = _kib(min(facts.shared for facts in launches)), _kib(arch.shared)
        said = f"no configuration fits this device: they need {least} KiB of shared memory at least, a block has {room}"
        yield Finding("none fits", kernel, said, tuple(facts.name for facts in launches), count, fatal=True)


def _idle(by_kernel: dict[str, list[Facts]], own: float | None) -> Iterator[Finding]:
    """Yield a finding if even the best configurations compute more products than the op needs."""
    least = {
        kernel: min((f.amounts.products for f in launches if f.amounts and _is_known(f)), default=0.0)
        for kernel, launches in by_kernel.items()
    }
    if own and sum(least.values()) > _WASTED * own:
        kernel = max(least, key=lambda name: least[name])
        times = sum(least.values()) / own
        words = f"multiplies {times:.3g} times what the op needs at these sizes, in tiles that are mostly masked"
        yield Finding("idle products", kernel, words, (), 1, weight=times)


def _weight(facts: Facts) -> float:
    return facts.spilled or sum(held / width for width, held in facts.scalar.values()) or facts.shared


def _is_known(facts: Facts) -> bool:
    return facts.amounts is not None and facts.amounts.complete


def _fits(facts: Facts, arch: Arch) -> bool:
    return facts.shared <= arch.shared and facts.tensor_memory <= TENSOR_MEMORY


def _not_compiled(facts: Facts, arch: Arch) -> str:
    return f"doesn't compile for {arch.name}: {facts.error}" if facts.error else ""


def _no_room(facts: Facts, arch: Arch) -> str:
    if facts.tensor_memory > TENSOR_MEMORY:
        return f"needs {facts.tensor_memory} columns of tensor memory, a multiprocessor has {TENSOR_MEMORY}"
    if facts.shared > arch.shared:
        return f"needs {_kib(facts.shared)} KiB of shared memory, a block has {_kib(arch.shared)}"
    return ""


def _spills(facts: Facts, arch: Arch) -> str:
    if not facts.spilled:
        return ""
    remedy = f": not with {facts.remedy}" if facts.remedy else ""
    return f"spills {facts.spilled} bytes of a thread's registers{remedy}"


def _local(facts: Facts, arch: Arch) -> str:
    own = facts.stack - facts.spilled
    return f"keeps {own} bytes of a thread in local memory, which is in DRAM" if own > 0 else ""


def _tf32(facts: Facts, arch: Arch) -> str:
    if not facts.tf32:
        return ""
    return (
        f"float32 products run in TF32, 10 bits of fraction, at {_lines(facts.tf32)}: input_precision='ieee' keeps 23"
    )


def _transposed(facts: Facts, arch: Arch) -> str:
    if not facts.transposed:
        return ""
    return f"8-bit operand not K-major: transposed through registers, at {_lines(facts.transposed)}"


def _scalar(facts: Facts, arch: Arch) -> str:
    if not facts.scalar:
        return ""
    lines = "; ".join(
        f"{file}:{line} loads {held} bytes of a thread {width} at a time"
        for (file, line), (width, held) in facts.scalar.items()
    )
    return f"{lines}: its addresses aren't known to be neighbours, aligned by 16 bytes"


def _no_tensor_cores(facts: Facts, arch: Arch) -> str:
    return "products of at most 16 bits don't run on tensor cores" if facts.narrow and not facts.products else ""


def _lines(lines: Iterable[Line]) -> str:
    return ", ".join(f"{file}:{line}" for file, line in lines)


def _kib(count: int) -> str:
    return f"{count / 1024:.4g}"


_CHECKS: dict[Kind, Callable[[Facts, Arch], str]] = {
    "not compiled": _not_compiled,
    "no room": _no_room,
    "spills": _spills,
    "local memory": _local,
    "tf32": _tf32,
    "transposed": _transposed,
    "scalar loads": _scalar,
    "no tensor cores": _no_tensor_cores,
}

__all__ = ["Finding", "Kind", "findings"]
