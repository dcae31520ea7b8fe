"""Other ways to choose a format for each linear: two libraries' searches, a linear program, and rules of thumb.

Each maker takes the model (left unchanged), batches of tokens, groups of linears that share a format, and the formats
by their bits. It returns a function from the mean bits of a weight (without scales, as the libraries count) to an
assignment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from assay.precision.observation.sites import layer_and_kind
from assay.precision.schemes import SCHEMES
from assay.precision.schemes.fitting import fit_weight

Choice = Callable[[float], dict[str, str]]
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
        asked = AutoScheme(
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
                asked, own, names, {}, "text", device_map="cpu", tokenizer=object(), enable_torch_compile=False
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
