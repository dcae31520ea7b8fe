"""The bundled kernels in models of transformers: as accurate as what they replace, forward and backward, and undone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from assay.kernels import replace  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
EXPECTED = {
    "Llama": {"norm": 5, "mlp": 2, "rope": 2, "attention": 1, "loss": 1},
    "Qwen2": {"norm": 5, "mlp": 2, "rope": 2, "attention": 1, "loss": 1},
    "Qwen3": {"norm": 9, "mlp": 2, "rope": 2, "attention": 1, "loss": 1},
    "Mixtral": {"norm": 5, "experts": 2, "rope": 2, "attention": 1, "loss": 1},
    "Gemma": {"norm": 5, "rope": 2, "attention": 1, "loss": 1},  # GELU between the projections
    "Gemma2": {"norm": 9, "rope": 2, "loss": 1},  # scores that are capped
    "Gemma3Text": {"norm": 13, "rope": 2, "attention": 1, "loss": 1},
}


class Calls(TorchDispatchMode):
    """Counts calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "assay":
            self.counts[func._schema.name.removeprefix("assay::")] += 1
        return func(*args, **(kwargs or {}))


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """A small random model of an architecture, and two sequences of ids."""
    torch.manual_seed(0)
    sizes = SMALL | ({"num_local_experts": 4} if name == "Mixtral" else {})
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes))
    return model.to(dtype).eval(), torch.randint(0, 128, (2, 17))


@pytest.mark.parametrize("name", EXPECTED)
def test_logits_and_gradients_are_those_of_the_model(name: str) -> None:
    """In float32 logits, loss and every gradient are the plain model's but for rounding; the kernels ran; restored,
    the model gives the same bits as before."""
    model, ids = made(name)
    before = model(ids, labels=ids)
    before.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    replacement = replace(model)
    assert replacement.done == EXPECTED[name], replacement
    assert set(replacement.left) == {"norm", "mlp", "experts", "rope", "attention", "loss"} - set(EXPECTED[name])
    with Calls() as calls, torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before.logits, rtol=1e-5, atol=1e-5)
    assert calls.counts["rmsnorm"] == EXPECTED[name]["norm"]
    assert calls.counts["swiglu"] == EXPECTED[name].get("mlp", 0)
    assert calls.counts["moe"] == EXPECTED[name].get("experts", 0)
    assert calls.counts["rope"] == 4
    assert calls.counts["attention"] == (2 if "attention" in EXPECTED[name] else 0)
    with Calls() as calls:
        after = model(ids, labels=ids)
        after.loss.backward()
    assert calls.counts["moe_backward"] == EXPECTED[name].get("experts", 0)
    assert calls.counts["attention_backward"] == (2 if "attention" in EXPECTED[name] else 0)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-6, atol=1e-6)
    for parameter, right in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))

    replacement.restore()
    with Calls() as calls:
        assert torch.equal(model(ids).logits, before.logits)
    assert not calls.counts
    assert "forward" not in {name for module in model.modules() for name in vars(module)}


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Gemma3Text"])
def test_in_bfloat16_it_is_no_further_from_the_truth(name: str) -> None:
    """Logits in bfloat16 lie no further from those of float32 than the plain model's in bfloat16 do (its noise floor),
    and neither do the gradients."""
    exact, ids = made(name)
    exact = exact.to(torch.bfloat16).float()  # the same weights
    rounded, _ = made(name, torch.bfloat16)

    def shown(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.no_grad():
            logits = model(ids).logits.float()
        model(ids, labels=ids).loss.backward()
        return [logits, torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])]

    right, plain = shown(exact), shown(rounded)
    replace(rounded)
    for truth, usual, ours in zip(right, plain, shown(rounded), strict=True):
        assert (ours - truth).norm() <= 1.1 * (usual - truth).norm() + 1e-6


def test_generation_and_masks_give_what_they_gave() -> None:
    """Tokens that are generated with a cache are the plain model's; where a mask hides padding, transformers' own
    attention runs, and the logits of what is visible stay."""
    model, ids = made("Llama")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    masked = model(ids, attention_mask=mask).logits
    replace(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), plain)
    with Calls() as calls, torch.no_grad():
        found = model(ids, attention_mask=mask).logits
    assert calls.counts["attention"] == 0
    torch.testing.assert_close(found[mask.bool()], masked[mask.bool()], rtol=1e-5, atol=1e-5)


def test_what_computes_something_else_stays() -> None:
    """A norm without a root, a gate of another function and a loss of one's own are left as they are, and told."""
    model, ids = made("Llama")

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight

    model.model.norm = Mean()
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    model.loss_function = lambda logits, labels, vocab_size, **rest: logits.sum()
    before = model(ids, labels=ids)
    replacement = replace(model)
    assert replacement.done == {"norm": 4, "mlp": 1, "rope": 2, "attention": 1}
    assert replacement.left["loss"] == "its loss is not that of a causal language model"
    assert "loss not: " in str(replacement)
    after = model(ids, labels=ids)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-5, atol=1e-3)
    replacement.restore()
    assert torch.equal(model(ids, labels=ids).loss, before.loss)


class Gated(torch.nn.Module):
    """Gated projections, whose weights are as small as a model's."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.002)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules_that_differ_for_few_inputs_stay(dtype: torch.dtype) -> None:
    """Centring hardly shows in wide rows of random numbers, nor do clamps and another gate in small ones."""
    silu = torch.nn.functional.silu
    others = {
        "centred": torch.nn.LayerNorm(4096, eps=1e-6, bias=False),
        "eps outside": _RootPlusEps(),
        "gelu": Gated(torch.nn.functional.gelu),
        "clamped": Gated(lambda gate: silu(gate.clamp(max=7.0))),
    }
    replacement = replace(torch.nn.ModuleDict(others).to(dtype), ["norm", "mlp"])
    assert not replacement.done, str(replacement)
    right = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(4096, eps=1e-6), "mlp": Gated(silu)}).to(dtype)
    assert replace(right, ["norm", "mlp"]).done == {"norm": 1, "mlp": 1}


class _RootPlusEps(torch.nn.Module):
    """x / (root(mean x^2) + eps): as good as an RMS norm of large rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(4096)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight.float()).to(x.dtype)


def test_mistakes_are_told() -> None:
    """What is no module, and a part that there isn't, raise and name the argument; missing parts are told."""
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        replace("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parts: expected some of norm, mlp, .* got 'head'"):
        replace(torch.nn.Linear(2, 2), ("head",))
    assert str(replace(torch.nn.Linear(2, 2))).startswith("nothing replaced; norm not: there is no module with an eps")
    assert replace(made("Llama")[0], ("norm",)).done == {"norm": 5}
