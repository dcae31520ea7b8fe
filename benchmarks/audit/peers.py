"""Compare `recommend`'s choices with those of peers: `peers.py stdlib-llama --bits 4.5 5 6 7`.

All choose between int8 per row and int4 in groups of 128 for the weights of every linear but routers, on the same
sequences of a text. All choices are measured over the same held-out sequences, with the same quantisers and paired by
sequence. Each choice of a peer is compared with ours at no more bytes (scales counted). Experts of a mixture are
separate linears here; those of a layer share a format if q, k and v do.

Peers: NVIDIA ModelOpt's `auto_quantize` by gradients and by KL, Intel AutoRound's `AutoScheme`, if they are installed
(`pip install nvidia-modelopt auto-round`); a linear program over the squared errors of the weights; int8 in the first
and the last layer, and one format for all. AutoRound by default chooses separately for q, k, v and for gate, up, which
engines that fuse these can't serve: it is run under both rules, and compared with ours under the same rule. ModelOpt
needs logits, or labels and a loss, and AutoRound a language model, so neither chooses for an encoder. Last, ours with
every weight-only scheme of the menu, at the bytes of the best choice of each budget.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from choosers import Choice, by_weight_error, first_and_last, from_autoround, from_modelopt, unfused_experts, uniform
from heldout import options
from rich.console import Console
from rich.table import Table

from assay.precision import Audit, audit
from assay.precision.loading import load
from assay.precision.observation.sites import Site
from assay.precision.sampling import MeasuredError, difference
from assay.precision.schemes import SCHEMES
from assay.precision.units import format_bytes, format_error

TWO = {4: "w4a16-g128", 8: "w8a16"}
"""Schemes by their bits."""
UNFUSED = "transformers"
"""An engine that doesn't fuse q, k, v and gate, up."""

VERDICTS = {-1: "better", 0: "same", 1: "worse"}


@dataclass
class Row:
    """A peer's choice and ours at no more bytes, both measured on the held-out sequences."""

    bits: float
    peer: str
    seconds: float
    bytes: float
    measured: MeasuredError
    ours: MeasuredError

    @property
    def verdict(self) -> str:
        return VERDICTS[difference(self.ours, self.measured).sign]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.INFO)
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(action="ignore"), out, err:
        yield
    logging.disable(logging.NOTSET)


def choices(model: Any, batches: list[dict[str, Any]], result: Audit, apart: bool, logits: bool) -> dict[str, Choice]:
    """Return all peers that choose under one rule of fusing, by name; ``logits``: the model returns logits."""
    groups: dict[str, list[str]] = {}
    for site in _linears(result):
        groups.setdefault(site.unit, []).append(str(site))
    some: dict[str, Choice] = {}
    if logits and importlib.util.find_spec("auto_round"):
        some["AutoRound"] = from_autoround(model, batches, list(groups.values()), TWO)
    some["weight error"] = by_weight_error(model, list(groups.values()), TWO)
    if apart:
        return some
    if logits and importlib.util.find_spec("modelopt"):
        for method in ("gradient", "kl_div"):
            some[f"ModelOpt {method}"] = from_modelopt(model, batches, list(groups.values()), TWO, method)
    return {**some, "first and last": first_and_last(model, groups, TWO), "one format": uniform(groups, TWO)}


def _linears(result: Audit) -> list[Site]:
    """Return the linears to choose for: each weight once, without routers."""
    return [site for site in result.sites if site.type == "linear" and site.role != "router" and not site.tied]


def compared(result: Audit, peers: Mapping[str, Choice], budgets: list[float]) -> Iterator[Row]:
    """Yield a row for each budget and peer; repeated choices once, missing ones never."""
    linears = set(map(str, _linears(result)))
    fixed = tuple(str(site) for site in result.sites if str(site) not in linears)
    for name, choose in peers.items():
        seen: list[dict[str, str]] = []
        for bits in budgets:
            began = time.process_time()
            with quiet():
                assignment = {site: scheme for site, scheme in choose(bits).items() if site in linears}
            spent = time.process_time() - began
            if not assignment or assignment in seen:
                continue
            seen.append(assignment)
            cost = result.cost(assignment).bytes
            ours = result.recommend(max_bytes=cost, fixed=fixed)
            measured = result.measure(assignment), result.measure(ours)
            yield Row(bits, name, spent, cost, measured[0], measured[1])


def main() -> None:
    """Audit twice, run every peer, print the tables."""
    parser = options(__doc__)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.5, 5.0, 6.0, 7.0])
    given = parser.parse_args()
    loaded, console = load(given.model), Console(width=120)
    model, logits = unfused_experts(loaded.model), loaded.kind != "encoder"
    metric = given.metric or ("kl" if logits else "relative")
    batches, check = loaded.parts(given.text, sequence=given.tokens, sequences=given.sequences, batch=given.batch)
    held = sum(len(batch["input_ids"]) for batch in check or [])

    def audited(formats: list[str], target: str | None = None) -> Audit:
        began = time.process_time()
        bits = loaded.stored.itemsize * 8
        result = audit(model, batches, metric, formats, target, check=check, bits=bits, seed=given.seed)
        result.calibrate()
        console.print(f"{len(formats)} formats: {time.process_time() - began:.1f} s of processor time to audit")
        return result

    rules = {
        "q, k, v and gate, up together": (audited(list(TWO.values())), False),
        "each linear apart": (audited(list(TWO.values()), UNFUSED), True),
    }
    every: list[Row] = []
    for rule, (result, apart) in rules.items():
        rows = list(compared(result, choices(model, batches, result, apart, logits), given.bits))
        every += rows
        title = f"{loaded.name}, {rule}; {result.metric.name} over {held} sequences held out"
        table = Table("bits", "peer", "seconds", "bytes", "its error", "ours", "its / ours", "ours is", title=title)
        for row in sorted(rows, key=lambda row: row.bits):
            ratio = row.measured / row.ours if row.ours > 0 else float("nan")
            errors = format_error(row.measured), format_error(row.ours), f"{ratio:.2f}", row.verdict
            table.add_row(f"{row.bits:g}", row.peer, f"{row.seconds:.1f}", format_bytes(row.bytes, 4), *errors)
        console.print(table)
    reported = [row.verdict for row in every]
    counts = {word: reported.count(word) for word in ("better", "same", "worse")}
    console.print("ours is better {better}, the same {same}, worse {worse}".format(**counts))

    menu = [
        name for name, scheme in SCHEMES.items() if scheme.weight and not scheme.activation and not scheme.on_request
    ]
    full = audited(menu)
    linears = set(map(str, _linears(full)))
    fixed = tuple(str(site) for site in full.sites if str(site) not in linears)
    columns = "bits", "bytes", "best of two formats", "its error", "ours, whole menu", "less", "ours is"
    table = Table(*columns, title=", ".join(menu))
    for bits in given.bits:
        best = min((row for row in every if row.bits == bits), key=lambda row: row.measured, default=None)
        if best is not None:
            ours = full.measure(full.recommend(max_bytes=best.bytes, fixed=fixed))
            less = f"{1 - ours / best.measured:.0%}" if best.measured > 0 else ""
            errors = format_error(best.measured), format_error(ours), less
            verdict = VERDICTS[difference(ours, best.measured).sign]
            table.add_row(f"{bits:g}", format_bytes(best.bytes, 4), best.peer, *errors, verdict)
    console.print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
