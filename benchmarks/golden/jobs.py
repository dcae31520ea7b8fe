"""Measure the cost of a golden record: seconds of one core for its inputs, its evaluation and its file, and its bytes.

python benchmarks/golden/jobs.py small              each entry of a bundled campaign
python benchmarks/golden/jobs.py llm --tasks 2      fewer tasks of each
python benchmarks/golden/jobs.py store --writers 4  only writing small records, by four processes at once

Times are processor times, except for the store, which also waits for the disk; docs/scale.md uses them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.resources import files
from multiprocessing import get_context
from typing import Any

import torch

from assay.golden.inputs.recipe import recipe
from assay.golden.jobs.build import Job, Outcome, build
from assay.golden.jobs.campaign import parse_campaign
from assay.golden.store import Store, make_record, record_key


def main() -> None:
    """Print a row for each entry, and the rates of the store alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", help="small, llm, or store")
    parser.add_argument("--tasks", type=int, default=8, help="how many of each entry")
    parser.add_argument("--writers", type=int, default=1, help="of `store`")
    parser.add_argument("--store", default="", help="an address to write to; a folder under the temporary one if empty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.campaign == "store":
        with tempfile.TemporaryDirectory() as folder:
            return _writers(arguments.store or folder, arguments.writers)
    text = files("assay.configs").joinpath("campaigns", f"{arguments.campaign}.toml").read_text(encoding="utf-8")
    campaign = parse_campaign(text, arguments.campaign)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(arguments.store or folder)
        print(f"{'spec':24}{'sizes':52}{'draw':>8}{'golden':>9}{'store':>8}{'(wall)':>8} ms{'bytes':>10}{'tasks/s':>9}")
        for entry in campaign.entries:
            step = max(1, entry.count // arguments.tasks)
            tasks = [entry.task(index) for index in range(0, entry.count, step)][: arguments.tasks]
            make_record(tasks[0].recipe, tasks[0].digits)  # loads the modules that are imported on first use
            drawn = both = stored = waited = size = 0.0
            for task in tasks:
                drawn += _timed(lambda task=task: (task.recipe.tensors(), task.recipe.keywords()))[0]
                taken, record = _timed(lambda task=task: make_record(task.recipe, task.digits))
                both += taken
                before = time.perf_counter()
                stored += _timed(lambda record=record: store.put(record))[0]
                waited += time.perf_counter() - before
                size += len(record.to_bytes())
            count = len(tasks) / 1e3
            sizes = ", ".join(f"{symbol}={value}" for symbol, value in tasks[-1].recipe.sizes.items())
            rate = len(tasks) / (both + stored)
            print(
                f"{entry.spec:24}{sizes[:50]:52}{drawn / count:8.2f}{(both - drawn) / count:9.2f}{stored / count:8.2f}"
                f"{waited / count:8.2f}   {size / len(tasks):10.0f}{rate:9.1f}",
                flush=True,
            )
        _bookkeeping(campaign, store)


def _writers(address: str, count: int) -> None:
    """Measure ``count`` processes that each write a hundred small records, after all folders exist."""
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        list(pool.map(_fill, [address] * count, range(0, 1000 * count, 1000), [1000] * count))
        both = list(pool.map(_fill, [address] * count, range(10**6, 10**6 + 1000 * count, 1000), [100] * count))
    wall, busy = max(wall for wall, _ in both), sum(busy for _, busy in both)
    rate, each = 100 * count / wall, busy / (100 * count) * 1e3
    print(f"{count} writers: {rate:.0f} records a second, {each:.2f} ms of a core each; {address}")


def _fill(address: str, first: int, count: int) -> tuple[float, float]:
    """Return wall-clock and processor seconds for ``count`` records of 34 numbers."""
    store, base = Store(address), make_record(recipe("softmax", {"R": 2, "N": 17}))
    records = [replace(base, recipe=replace(base.recipe, seed=seed)) for seed in range(first, first + count)]
    wall, busy = time.perf_counter(), time.process_time()
    for record in records:
        store.put(record)
    return time.perf_counter() - wall, time.process_time() - busy


def _bookkeeping(campaign: Any, store: Store) -> None:
    """Measure the cost of a task that is done already, and of reading a record."""
    tasks = [campaign.task(index) for index in range(min(campaign.count, 200))]
    keys = list(store.keys())
    for name, each, items in (
        ("a task found by its number", campaign.task, range(len(tasks))),
        ("its key", lambda task: record_key(task.recipe, task.digits), tasks),
        ("whether it is there", store.__contains__, keys),
        ("a record read and checked", store.get, keys),
    ):
        taken, _ = _timed(lambda each=each, items=items: [each(item) for item in items])
        print(f"{name:40}{taken / len(items) * 1e6:10.0f} µs")

    print(f"{'an outcome taken note of by the builder':40}{_per_outcome(campaign) * 1e6:10.0f} µs")


def _per_outcome(campaign: Any) -> float:
    """Return the seconds per task of the process that distributes the tasks."""

    class Done:
        """An engine that has done everything already."""

        def run(self, task: Any, items: Iterable[Any], *, until: float = 0.0) -> Iterator[tuple[int, list[Outcome]]]:
            for number, (_, indices) in enumerate(items):
                yield number, [Outcome(index, "made") for index in indices]

        def __enter__(self) -> Done:
            return self

        def __exit__(self, *exception: object) -> None:
            """Do nothing."""

    taken, _ = _timed(lambda: build(campaign, Job("bench", "", "memory://bench"), Done(), watch=lambda outcome: None))
    return taken / campaign.count


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


if __name__ == "__main__":
    main()
