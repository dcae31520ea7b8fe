"""Two runs of a model compared: honest ones are within, faulty ones are named by region and cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from assay.compare import compare, record
from assay.compare.errors import CompareError, RecordingError
from tests.compare.conftest import Pair


def _bfloat16(model: Any) -> None:
    model.bfloat16()


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def _eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 1.25


def _gelu(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def _weight(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data *= 1.1


def _no_residual(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp.register_forward_hook(lambda module, args, out: out * 2)


def _half_norm(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x: norm.weight * (x.bfloat16() * x.bfloat16().pow(2).mean(-1, keepdim=True).rsqrt()).float()


def _weights_twice(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    forward = experts.forward
    experts.forward = lambda x, ids, weights: forward(x, ids, weights * weights)


def _other_expert(model: Any) -> None:
    gate = model.model.layers[0].mlp.gate

    def chosen(module: Any, args: Any, out: Any) -> Any:
        logits, _, ids = out
        ids = (ids + 1) % logits.shape[-1]
        weights = logits.float().softmax(-1).gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    # A module of its own around the router: what it gives is what is recorded.
    forward = gate.forward
    gate.forward = lambda x: chosen(gate, (x,), forward(x))


FAULTS: dict[str, tuple[str, Callable[[Any], None], str, str]] = {
    "eps": ("llama", _eps, "layers.1.input_layernorm", "eps=0.001 in place of 1e-06"),
    "scale": ("llama", _scale, "layers.0.self_attn.attention", "softmax scale 1.25 times 0.25"),
    "gelu": ("llama", _gelu, "layers.1.mlp.gated_product", "gelu in place of silu"),
    "weight": ("llama", _weight, "layers.0.self_attn.v_proj", "v_proj.weight is 1.1 times that of the other run"),
    "half norm": ("llama", _half_norm, "norm", "bfloat16"),
    "other expert": ("mixtral", _other_expert, "layers.0.mlp.gate.choice", "no score among the highest"),
    "weights twice": ("mixtral", _weights_twice, "layers.1.mlp.experts", "the routing weights are applied twice"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_run_is_named_by_region_and_cause(name: str, pair: Pair, request: pytest.FixtureRequest) -> None:
    model, change, region, cause = FAULTS[name]
    report = pair(request.getfixturevalue(model), b=change)
    first = report.first_beyond
    assert first is not None
    assert (first.name, first.status_a, first.status_b) == (region, "within", "beyond")
    assert cause in first.cause
    assert report.verdict == "a"


def _folded(model: Any) -> None:
    layer = model.model.layers[0]
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        linear.weight.data *= layer.post_attention_layernorm.weight.data
    layer.post_attention_layernorm.weight.data.fill_(1.0)


def _neighbours(model: Any) -> None:
    """Llama's own order of features: rows of queries and keys permuted, neighbours rotated together."""
    from transformers.models.llama import modeling_llama

    attention = model.model.layers[1].self_attn
    width = attention.head_dim
    order = torch.arange(width).reshape(2, -1).T.reshape(-1)
    for linear in (attention.q_proj, attention.k_proj):
        rows = linear.weight.data.reshape(-1, width, linear.in_features)
        linear.weight.data = rows[:, order].reshape(-1, linear.in_features)
    rotate = modeling_llama.apply_rotary_pos_emb
    forward = attention.forward

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        back = order.argsort()
        turned = rotate(q[..., back], k[..., back], cos, sin, **options)
        return tuple(x[..., order] for x in turned)

    def patched(*args: Any, **kwargs: Any) -> Any:
        with patch.object(modeling_llama, "apply_rotary_pos_emb", rotated):
            return forward(*args, **kwargs)

    attention.forward = patched


@pytest.mark.parametrize("change", [_folded, _neighbours])
def test_weights_that_mean_the_same_are_no_fault(change: Any, pair: Pair, llama: nn.Module) -> None:
    report = pair(llama, b=change)
    assert report.first_beyond is None, str(report)


def test_the_run_with_the_fault_is_the_wrong_one(pair: Pair, llama: nn.Module) -> None:
    report = pair(llama, a=_scale)
    assert report.first_beyond is not None
    assert report.first_beyond.status_a == "beyond"
    assert report.verdict == "b"


@pytest.mark.parametrize(
    ("model", "a", "b"),
    [
        ("llama", _bfloat16, lambda model: (_bfloat16(model), _eager(model))),
        ("llama", lambda model: None, _bfloat16),
        ("mixtral", lambda model: None, _bfloat16),
    ],
    ids=["eager against sdpa", "bfloat16 against float32", "experts in bfloat16"],
)
def test_honest_runs_are_within_and_their_shares_sum_to_the_difference(
    model: str, a: Any, b: Any, pair: Pair, request: pytest.FixtureRequest
) -> None:
    report = pair(request.getfixturevalue(model), a, b)
    assert report.first_beyond is None, str(report)
    assert report.verdict == "both"
    assert report.difference > 0
    assert report.explained == pytest.approx(1.0, abs=0.15)
    assert sum(region.share or 0.0 for region in report.regions) == pytest.approx(report.explained)


def test_prefill_and_steps_are_the_same_sequence(tmp_path: Path, tokens: Tensor, llama: Any) -> None:
    with torch.no_grad():
        with record(tmp_path / "a", llama):
            llama(tokens)
        with record(tmp_path / "b", llama):
            cache = llama(tokens[:, :16], use_cache=True).past_key_values
            for position in range(16, tokens.shape[1]):
                llama(tokens[:, position : position + 1], past_key_values=cache)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.verdict == "both"
    assert not report.unmatched


def test_keys_that_a_later_step_overwrites_are_the_cache_s(tmp_path: Path, tokens: Tensor, llama: Any) -> None:
    with torch.no_grad():
        with record(tmp_path / "a", llama):
            llama(tokens)
        with record(tmp_path / "b", llama):
            cache = llama(tokens[:, :16], use_cache=True).past_key_values
            cache.layers[1].keys[:, :, 4:8] = cache.layers[1].keys[:, :, 0:4]
            llama(tokens[:, 16:], past_key_values=cache)
    first = compare(tmp_path / "a", tmp_path / "b").first_beyond
    assert first is not None
    assert first.name == "layers.1.self_attn.cache.k"
    assert "tokens 4 to 7 those of tokens 0 to 3" in first.cause


def test_experts_that_rounding_chooses_otherwise_are_open(pair: Pair, mixtral: Any) -> None:
    """Two experts with nearly the same logits: in bfloat16 others are chosen, and neither run is wrong."""

    def tied(model: Any) -> None:
        weight = model.model.layers[0].mlp.gate.weight.data
        weight[1] = weight[0] * (1 + 1e-4)

    report = pair(mixtral, tied, lambda model: (tied(model), _bfloat16(model)))
    choice = next(region for region in report.regions if region.name == "layers.0.mlp.gate.choice")
    assert choice.statuses == ("open", "open")
    assert report.first_beyond is None


def test_runs_of_other_tokens_are_refused(tmp_path: Path, tokens: Tensor, llama: nn.Module) -> None:
    with torch.no_grad():
        for name, ids in (("a", tokens), ("b", tokens + 1)):
            with record(tmp_path / name, llama):
                llama(ids % 96)
    with pytest.raises(CompareError, match="record both with the same text"):
        compare(tmp_path / "a", tmp_path / "b")


def test_a_recording_names_what_is_wrong_with_it(tmp_path: Path, tokens: Tensor, llama: nn.Module) -> None:
    with pytest.raises(RecordingError, match="not called"), record(tmp_path / "none", llama):
        pass
    assert not any(tmp_path.iterdir())  # a second try isn't refused
    with torch.no_grad(), record(tmp_path / "a", llama):
        llama(tokens)
    with pytest.raises(RecordingError, match="exists"), record(tmp_path / "a", llama):
        pass
    (tmp_path / "a" / "events.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(RecordingError, match="damaged"):
        compare(tmp_path / "a", tmp_path / "a")
    with pytest.raises(RecordingError, match="expected a folder"):
        compare(tmp_path / "nothing", tmp_path / "a")


def test_recording_changes_no_bit_and_leaves_no_hook(tmp_path: Path, tokens: Tensor, llama: nn.Module) -> None:
    with torch.no_grad():
        plain = llama(tokens).logits
        with record(tmp_path / "a", llama):
            recorded = llama(tokens).logits
        after = llama(tokens).logits
    assert torch.equal(plain, recorded)
    assert torch.equal(plain, after)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())
