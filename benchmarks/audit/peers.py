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
import copy
import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from heldout import options
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

from assay.precision import Audit, audit
from assay.precision.loading import load
from assay.precision.observation.sites import Site, layer_and_kind
from assay.precision.sampling import MeasuredError, difference
from assay.precision.schemes import SCHEMES
from assay.precision.schemes.fitting import fit_weight
from assay.precision.units import format_bytes, format_error

Choice = Callable[[float], dict[str, str]]
"""From the mean bits of a weight (without scales, as the libraries count) to an assignment."""
Groups = list[list[str]]


class _Expert(torch.nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (*gate_up.chunk(2), down))
        self.act_fn = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Experts(torch.nn.ModuleList):
    """The experts as modules, computing the same as transformers' experts in two stacked parameters."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, position = (index == number).nonzero(as_tuple=True)
            if len(token):
                result = result.index_add(0, token, expert(x[token]) * weights[token, position, None])
        return result


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data = weight.detach().clone()
    return made


def unfused_experts(model: Any) -> Any:
    """Return the model, or a copy in which each expert stored in stacked parameters, as Mixtral's, is three linears.

    The libraries support only experts that are linears.
    """
    held = [name for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts"]
    if not held:
        return model
    model = copy.deepcopy(model)
    for name in held:
        old = model.get_submodule(name)
        experts = _Experts(_Expert(*pair, old.act_fn) for pair in zip(old.gate_up_proj, old.down_proj, strict=True))
        model.set_submodule(name, experts.train(old.training))
    return model


def from_modelopt(model: Any, batches: list[Any], groups: Groups, formats: Mapping[int, str], method: str) -> Choice:
    """Choose by `modelopt.torch.quantization.auto_quantize`, with its own grouping replaced by these groups."""
    from modelopt.torch import quantization

    shapes: dict[int, dict[str, Any]] = {8: {"axis": 0}, 4: {"block_sizes": {-1: 128}}}
    configs = [
        {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": bits, **shapes[bits]}},
            ],
            "algorithm": "max",
        }
        for bits in formats
    ]

    def loss(output: Any, batch: Any) -> torch.Tensor:
        logits, ids = output.logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, ids)

    def choose(bits: float) -> dict[str, str]:
        gradient = method == "gradient"
        result, _ = quantization.auto_quantize(
            copy.deepcopy(model),
            constraints={"effective_bits": bits},
            quantization_formats=configs,
            data_loader=batches,
            forward_step=(lambda m, batch: m(**batch)) if gradient else (lambda m, batch: m(**batch).logits),
            loss_func=loss if gradient else None,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            method=method,
        )
        chosen = {name: getattr(module, "weight_quantizer", None) for name, module in result.named_modules()}
        return {name: formats[each.num_bits] for name, each in chosen.items() if each is not None and each.is_enabled}

    return choose


def from_autoround(model: Any, batches: list[Any], groups: Groups, formats: Mapping[int, str]) -> Choice:
    """Choose by `auto_round.AutoScheme`, with these batches instead of the data set that it would load."""
    from auto_round.auto_scheme.gen_auto_scheme import AutoScheme, GenScheme
    from auto_round.schemes import QuantizationScheme

    plain = {"act_bits": 16, "act_group_size": -1, "act_sym": True, "act_data_type": "float", "act_dynamic": True}
    sizes = {8: -1, 4: 128}
    schemes = [
        QuantizationScheme(bits=bits, group_size=sizes[bits], sym=True, data_type="int", **plain) for bits in formats
    ]
    count = sum(len(batch["input_ids"]) for batch in batches)
    rows, tokens = batches[0]["input_ids"].shape
    names = [name for group in groups for name in group]

    def choose(bits: float) -> dict[str, str]:
        auto_scheme = AutoScheme(
            avg_bits=bits,
            options=list(schemes),
            shared_layers=[group for group in groups if len(group) > 1] or None,
            nsamples=count,
            seqlen=tokens,
            batch_size=rows,
            ignore_scale_zp_bits=True,
            low_gpu_mem_usage=False,
            low_cpu_mem_usage=False,
        )
        own = copy.deepcopy(model)
        for name, module in own.named_modules():
            module.global_name = module.tmp_name = name
        with mock.patch("auto_round.auto_scheme.delta_loss.get_dataloader", return_value=batches):
            result = GenScheme(
                auto_scheme, own, names, {}, "text", device_map="cpu", tokenizer=object(), enable_torch_compile=False
            ).get_layer_config()
        return {name: formats[each["bits"]] for name, each in result.items() if each["bits"] in formats}

    return choose


def by_weight_error(model: Any, groups: Groups, formats: Mapping[int, str]) -> Choice:
    """Minimise the sum of squared errors of the weights by an integer linear program, without data."""
    names = {name for group in groups for name in group}
    weights = {name: module.weight.detach().float() for name, module in model.named_modules() if name in names}

    def error(name: str, bits: int) -> float:
        quantizer = SCHEMES[formats[bits]].weight
        assert quantizer is not None, f"{formats[bits]} stores no weights"
        return float((fit_weight(quantizer, weights[name], None)(weights[name]) - weights[name]).square().sum())

    options = [(index, bits) for index in range(len(groups)) for bits in formats]
    errors = np.array([sum(error(name, bits) for name in groups[index]) for index, bits in options])
    sizes = np.array([bits * sum(weights[name].numel() for name in groups[index]) for index, bits in options])
    whole = sum(weight.numel() for weight in weights.values())
    single = np.array([[float(index == group) for index, _ in options] for group in range(len(groups))])

    def choose(bits: float) -> dict[str, str]:
        result = milp(
            errors / errors.max(),
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(single, 1, 1), LinearConstraint(sizes[None] / whole, -np.inf, bits)],
        )
        taken = [option for option, share in zip(options, result.x, strict=True) if share > 0.5]
        return {name: formats[bits] for index, bits in taken for name in groups[index]}

    return choose


def first_and_last(model: Any, groups: Mapping[str, list[str]], formats: Mapping[int, str]) -> Choice:
    """Give the most bits to the first and last layer and the head, the fewest to others, within the budget."""
    names = [name for group in groups.values() for name in group]
    layers = [layer for name in names if (layer := layer_and_kind(name)[0]) is not None]
    ends = {None, min(layers), max(layers)}
    bits_of = {name: (min, max)[layer_and_kind(name)[0] in ends](formats) for name in names}
    sizes = {name: model.get_submodule(name).weight.numel() for name in names}
    mean = sum(bits_of[name] * sizes[name] for name in names) / sum(sizes.values())
    return lambda bits: {name: formats[bits_of[name]] for name in names} if mean <= bits else {}


def uniform(groups: Mapping[str, list[str]], formats: Mapping[int, str]) -> Choice:
    """Give all linears the widest format that fits the budget."""
    names = [name for group in groups.values() for name in group]
    return lambda bits: dict.fromkeys(names, formats[max(each for each in formats if each <= bits)])


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


def choices(model: Any, batches: list[dict[str, Any]], result: Audit, unfused: bool, logits: bool) -> dict[str, Choice]:
    """Return all peers that choose under one rule of fusing, by name; ``logits``: the model returns logits."""
    groups: dict[str, list[str]] = {}
    for site in _linears(result):
        groups.setdefault(site.unit, []).append(str(site))
    some: dict[str, Choice] = {}
    if logits and importlib.util.find_spec("auto_round"):
        some["AutoRound"] = from_autoround(model, batches, list(groups.values()), TWO)
    some["weight error"] = by_weight_error(model, list(groups.values()), TWO)
    if unfused:
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
        "each linear alone": (audited(list(TWO.values()), UNFUSED), True),
    }
    every: list[Row] = []
    for rule, (result, unfused) in rules.items():
        rows = list(compared(result, choices(model, batches, result, unfused, logits), given.bits))
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
