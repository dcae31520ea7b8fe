"""Prunes candidates by their compiled code before any runs, and models their time by the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from assay.bench.inspection.arch import Arch
from assay.bench.inspection.facts import Facts
from assay.bench.inspection.inspecting import Call
from assay.bench.tuning.choice import Choice
from assay.bench.tuning.record import Candidate
from assay.formats.devices import devices

_KINDS = {"bf16": "bf16", "fp16": "fp16", "tf32": "tf32", "int8": "int8", "e4m3": "fp8", "e5m2": "fp8"}


def of_choice(call: Call, choice: Choice) -> list[Facts]:
    """Return the launches of a choice: of tuned kernels those of its configuration, and all of the others.

    A call that fails before its first launch has none; its examination will report it.
    """
    return [
        facts
        for facts in call.launches
        if not facts.tuned or choice.configs.get(facts.kernel, config(facts)) == config(facts)
    ]


def config(facts: Facts) -> dict[str, Any]:
    """Return a launch's configuration in the form of a choice."""
    return {**facts.config, "num_warps": facts.warps, "num_stages": facts.stages}


def configs_of(calls: Iterable[Call]) -> dict[str, list[dict[str, Any]]]:
    """Return all configurations of every tuned kernel, pruned ones included."""
    results: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        for facts in call.launches:
            if facts.tuned:
                every = results.setdefault(facts.kernel, [])
                if config(facts) not in every:
                    every.append(config(facts))
    return results


def with_resources(candidate: Candidate, seen: Sequence[Facts], arch: Arch) -> Candidate:
    """Return the candidate with the resources of its launches; PRUNED if one can't run on the device."""
    launches = [facts for facts in seen if not facts.error]
    if launches:
        candidate = replace(
            candidate,
            registers=max(facts.registers for facts in launches),
            spilled=max(facts.spilled for facts in launches),
            shared=max(facts.shared for facts in launches),
            occupancy=min(facts.occupancy for facts in launches),
            modelled=modelled(launches, arch),
            work=modelled(launches, arch, waves=False),
        )
    why = next(_reasons(seen, arch), "")
    return replace(candidate, outcome="PRUNED", why=why) if why else candidate


def _reasons(seen: Sequence[Facts], arch: Arch) -> Iterator[str]:
    for facts in seen:
        if facts.error:
            yield f"{facts.kernel} doesn't compile: {facts.error}"
        elif facts.pruned:
            yield f"{facts.kernel}: left out by the kernel's own pruning at these sizes"
        elif facts.shared > arch.shared:
            yield f"{facts.kernel} needs {facts.shared:,} bytes of shared memory, a block has {arch.shared:,}"
        elif not facts.occupancy:
            yield f"{facts.kernel}: not one block fits a multiprocessor"


def without_spills(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Prune the candidates of one case that spill registers, if another doesn't."""
    left = [each for each in candidates if each.outcome == "PASS"]
    if not any(each.spilled == 0 for each in left):
        return list(candidates)
    return [
        replace(each, outcome="PRUNED", why=f"spills {each.spilled} bytes of a thread")
        if each.outcome == "PASS" and each.spilled
        else each
        for each in candidates
    ]


def modelled(launches: Sequence[Facts], arch: Arch, *, waves: bool = True) -> float | None:
    """Return the least seconds of the launches on the architecture's device by the roofline.

    None if not all work could be counted, or configs/devices.toml has no rates of the device. A launch takes the longer
    of its products (at the peak rate of its instructions) and its bytes (all loads and stores, at the peak bandwidth),
    and with ``waves`` times ceil(w)/w for w waves of blocks, because the last wave takes as long as a full one. Caches,
    latency and conflicts don't count: the result orders candidates and is no prediction of a time.
    """
    device = devices()[arch.device.key]
    if not device.rates or any(facts.amounts is None for facts in launches):
        return None
    total = 0.0
    for facts in launches:
        assert facts.amounts is not None
        kind = next((_KINDS[word] for name in facts.products for word in name.split() if word in _KINDS), "fp32")
        rate = device.rates.get(kind, device.rates["fp32"])
        moved = facts.amounts.loaded + facts.amounts.stored
        seconds = max(
            facts.amounts.products / rate,
            facts.amounts.others / device.rates["fp32"],
            moved / device.bandwidth,
        )
        total += seconds * (_tail(facts, arch) if waves else 1.0)
    return total


def _tail(facts: Facts, arch: Arch) -> float:
    """Return ceil(w)/w for the launch's w waves of blocks."""
    device = arch.device
    warps = device.max_threads_per_multi_processor // device.warp_size
    blocks = max(int(facts.occupancy * warps) // max(facts.warps, 1), 1)
    waves = math.prod(facts.grid) / (blocks * device.multi_processor_count)
    return math.ceil(waves) / waves if waves else 1.0
