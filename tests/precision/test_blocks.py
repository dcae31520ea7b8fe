"""Blocks one by one: many assignments in one pass, and cotangents led back, with the results of the whole model."""

import random
import tempfile
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.errors import BadModel
from assay.precision.metrics import metric_named
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import mapping
from assay.precision.prediction.backward import AGAIN, differentiate
from assay.precision.prediction.chain import chain_of
from assay.precision.prediction.quadratic_form import Products
from assay.precision.prediction.simulation import Simulator, simulated
from assay.runtime.tensors import TensorCache
from tests.precision.small_models import FORMATS, Layer, Model, made
from tests.precision.tiny_models import SIZES


def alone(found: Audit, assignment: dict[str, str]) -> np.ndarray:
    """What each sequence adds to an assignment's error by runs of the whole model."""
    each = []
    for reference, batch in zip(found.observed.references, found.batches, strict=True):
        output = simulated(found.model, batch, found.metric, found.observed, found.checked(assignment))
        each.append(torch.as_tensor(found.metric.compare(reference, output, mapping(batch))))
    return torch.cat(each).numpy()


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=1, **more)
    )


MODELS = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=1, num_local_experts=4)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ),
}


def audited(kind: str) -> Audit:
    """An audit of two batches, the first with padding."""
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (6, 12))
    mask = torch.ones_like(rows)
    mask[1, 7:] = 0
    batches = [{"input_ids": rows[:4], "attention_mask": mask[:4]}, {"input_ids": rows[4:]}]
    return audit(MODELS[kind](), batches, formats=["bf16", "fp8", "w4a16-g32", "fp8-block", "kv-fp8", "a-fp8"])


@pytest.mark.parametrize("kind", MODELS)
def test_side_by_side_is_bit_for_bit_one_by_one(kind: str) -> None:
    found = audited(kind)
    draw = random.Random(0)
    some: list[dict[str, str]] = [found.random_assignment(draw, share) for share in (1.0, 0.3, 0.05, 0.0)]
    some += [{}, *({str(site): found.menu(site)[-1]} for site in found.sites[::3])]
    found.choice_evaluator.measure_all(some)
    assert found.choice_evaluator.chain is not None
    assert found.choice_evaluator.passes < 4 + (len(some) - 4) * 0.75
    for assignment in some:
        np.testing.assert_array_equal(found.trial(assignment).distances, alone(found, assignment))


class Counted(Layer):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(x)


def test_what_lies_before_the_first_change_is_not_run() -> None:
    model, batches = made()
    model.layers = torch.nn.ModuleList(Counted() for _ in range(3))
    found = audit(model, batches, "relative", FORMATS)
    first, last = "layers.0.proj", "layers.2.proj"
    found.choice_evaluator.measure_all([{}])
    Counted.runs = 0
    assignments = [{last: "fp8"}, {last: "w8a16"}, {first: "fp8"}, {first: "fp8", last: "fp8"}]
    found.choice_evaluator.measure_all(assignments)
    assert Counted.runs == (1 + 1 + 2 + 2) * len(batches)
    assert found.choice_evaluator.passes == pytest.approx(6 / 3)
    found.choice_evaluator.measure_all(assignments)
    assert Counted.runs == 6 * len(batches)
    for assignment in assignments:
        np.testing.assert_array_equal(found.trial(assignment).distances, alone(found, assignment))


class Scaled(Layer):
    """Multiplies by an attribute that others set."""

    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Aside(Model):
    """What goes from layer to layer is not all: a later layer is scaled by what an earlier one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        self.layers[2].scale = first.abs().mean()
        return self.head(self.layers[2](second))


class Between(Model):
    """Something is computed between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 0.5
        return self.head(x)


class Backwards(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Aside, Between, Backwards])
def test_a_model_that_is_no_chain_is_run_as_a_whole(kind: Any) -> None:
    torch.manual_seed(0)
    batches = made()[1]
    model = kind()
    assert chain_of(model, batches, metric_named("relative")) is None
    found = audit(model, batches, "relative", FORMATS)
    some = [{"layers.2.proj": "fp8"}, {"layers.0.proj": "w4a16-g32", "head": "fp8"}]
    found.choice_evaluator.measure_all(some)
    for assignment in some:
        np.testing.assert_array_equal(found.trial(assignment).distances, alone(found, assignment))
    assert found.choice_evaluator.passes == 2


def test_a_model_is_left_as_it_was() -> None:
    model, batches = made()
    chain = chain_of(model, batches, metric_named("relative"))
    assert chain is not None
    with pytest.raises(AttributeError), torch.no_grad():
        chain.output(0, chain.state(0, 3), None, Simulator({}, QParams({}), {}))  # type: ignore[arg-type]
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_does_not_fit_into_memory_is_read_from_a_file(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    tensors = [(torch.randn(size) * 3).to(dtype) for size in ((3, 5), (7,), (2, 0), (1, 4, 3))]
    cache = TensorCache(tensors[0].numel() * tensors[0].element_size())
    for tensor in tensors:
        cache.add(tensor)
    assert len(cache) == len(tensors)
    for tensor, kept in zip(tensors, cache, strict=True):
        assert kept.dtype == dtype
        assert torch.equal(kept, tensor)
    assert cache._file is not None
    del cache
    assert not list(tmp_path.iterdir())


def test_reference_outputs_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, calls = [], []
    for limit in (1 << 20, 0):
        monkeypatch.setattr(TensorCache.__init__, "__defaults__", (limit,))
        model, batches = made()
        found = audit(model, batches, "relative", FORMATS)
        before = model.calls
        errors.append(found.measure({"layers.1.proj": "fp8"}))
        calls.append(model.calls - before)
    assert errors[0] == errors[1]
    assert calls[0] == calls[1]


def products(found: Audit, *, blocks: bool, **more: Any) -> Products:
    chain = found.choice_evaluator.chain if blocks else None
    assert (chain is not None) is blocks
    given = found.model, found.batches, found.metric, found.observed
    return differentiate(*given, again=AGAIN, chain=chain, **more)


@pytest.mark.parametrize("kind", MODELS)
def test_block_by_block_gives_the_products_of_the_whole_graph(kind: str) -> None:
    found = audited(kind)
    whole, by_blocks = products(found, blocks=False), products(found, blocks=True)
    assert set(whole.keys) == set(by_blocks.keys)
    order = [by_blocks.keys.index(key) for key in whole.keys]
    assert whole.again is not None
    assert by_blocks.again is not None
    pairs = [(whole.sums, by_blocks.sums), (whole.squares, by_blocks.squares)]
    for one, other in (*pairs, *zip(whole.again, by_blocks.again, strict=True)):
        np.testing.assert_allclose(other[order], one, rtol=1e-4, atol=1e-6 * np.abs(one).max())


def test_autograd_holds_the_values_of_one_block() -> None:
    found, most = audited("llama"), {}
    for blocks in (False, True):
        held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        sizes = []

        def keep(tensor: Tensor, held: Any = held, sizes: Any = sizes) -> Tensor:
            kept = tensor.detach()
            held[id(kept)] = kept
            sizes.append(sum(each.numel() for each in held.values()))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            products(found, blocks=blocks)
        most[blocks] = max(sizes)
    assert 0 < most[True] < 2 / 3 * most[False]


def test_a_model_that_changes_between_calls_is_refused() -> None:
    found = audited("llama")
    calls = found.choice_evaluator.chain.calls  # type: ignore[union-attr]
    changed = [
        each.clone() + 1 if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in calls[0][0].leaves
    ]
    assert any(one is not other for one, other in zip(changed, calls[0][0].leaves, strict=True))
    calls[0][0] = type(calls[0][0])(tuple(changed), calls[0][0].spec)
    with pytest.raises(BadModel, match="take out randomness"):
        products(found, blocks=True)
