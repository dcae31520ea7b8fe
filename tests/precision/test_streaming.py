"""Models larger than memory: weights read from files when their module runs, with the results of those in memory."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay.formats.errors import UnknownOption
from assay.precision.auditing import Audit, audit
from assay.precision.cache import fingerprint
from assay.precision.errors import BadModel
from assay.precision.loading import load
from assay.precision.observation.running import normalised
from assay.precision.observation.streaming import device_of, source_of, streamed_parameters
from tests.precision.tiny_models import refusal

FORMATS = ("bf16", "fp8", "w8a8", "w4a16-g32", "w4a16-g32-awq", "nvfp4", "w-mxfp4", "kv-fp8", "a-fp8", "w8a8-smooth")
ASSIGNED = {
    "llama": "model.layers.1.mlp.down_proj",
    "mixtral": "model.layers.0.mlp.experts.down_proj",
    "gpt2": "lm_head",
}


def batches(vocabulary: int = 256) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, vocabulary, (4, 12), generator=generator)} for _ in range(2)]


def contributions(found: Audit) -> dict[str, float]:
    return {f"{site} {scheme}": found.contribution(site, scheme) for site in found.sites for scheme in found.menu(site)}


@cache
def in_memory(folder: Path) -> Audit:
    return audit(load(folder).model, batches(), formats=FORMATS)


@pytest.mark.parametrize("as_stored", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_weights_in_files_or_as_they_are_stored_give_the_results_of_float32_in_memory(
    stored: Callable[[str], Path], kind: str, as_stored: bool
) -> None:
    inside = in_memory(stored(kind))
    with patch("assay.precision.loading.pretrained._SMALL", 0):
        model = load(stored(kind), **({"as_stored": True} if as_stored else {"max_memory": 0})).model
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not as_stored or {each.read().dtype for each in streamed_parameters(model).values()} == {torch.bfloat16}
    assert sum(each.numel() for each in model.parameters()) == sum(each.numel() for each in inside.model.parameters())
    before = dict(model.named_parameters(remove_duplicate=False))
    outside = audit(model, batches(), formats=FORMATS)
    told = [[(site, site.shape, site.role, site.unit, site.tied) for site in each.sites] for each in (inside, outside)]
    assert told[0] == told[1]
    assert contributions(outside) == pytest.approx(contributions(inside), rel=1e-5)
    assert max(contributions(inside).values()) > 0
    assignment = {ASSIGNED[kind]: "nvfp4" if kind != "gpt2" else "w4a16-g32"} | {
        str(s): "bf16" for s in inside.sites if s.type == "activation"
    }
    assert outside.measure(assignment) == pytest.approx(inside.measure(assignment), rel=1e-6)
    for name, weights in inside.observed.weights.items():
        assert list(outside.observed.weights[name]) == list(weights)
        assert all(torch.equal(outside.observed.weights[name][expert], weight) for expert, weight in weights.items())
    assert outside.cost({}).bytes == inside.cost({}).bytes  # tied weights count once
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items()), "the model is left as it was"
    assert all(parameter.is_meta and parameter.requires_grad for parameter in after.values())


def test_so_much_stays_in_memory_as_is_allowed(stored: Callable[[str], Path]) -> None:
    whole = load(stored("llama")).model
    size = sum(parameter.numel() for parameter in whole.parameters()) * 4
    model = load(stored("llama"), max_memory=size * 3 // 4).model
    names = streamed_parameters(model)
    held = [parameter for name, parameter in model.named_parameters() if name not in names]
    assert names
    assert held
    assert sum(parameter.numel() for parameter in held) * 4 <= size * 3 // 4
    assert contributions(audit(model, batches(), formats=["fp8"])) == pytest.approx(
        contributions(audit(whole, batches(), formats=["fp8"])), rel=1e-5
    )
    assert not streamed_parameters(load(stored("llama"), max_memory=size * 4).model)


def test_an_expert_is_read_alone(stored: Callable[[str], Path]) -> None:
    loaded = load(stored("mixtral"), max_memory=0)
    experts: Any = loaded.model.get_submodule("model.layers.0.mlp.experts")
    source = source_of(experts, "down_proj")
    assert source is not None
    expected = load(stored("mixtral")).model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(source.read(2).float(), expected[2])
    assert source.read().dtype == torch.bfloat16
    file = Path(source.file)
    assert file.is_file()
    del loaded, experts
    gc.collect()
    assert not file.parent.exists()
    with pytest.raises(BadModel, match="is gone"):
        source.read()


def test_weights_that_are_not_finite_are_found_as_they_pass(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    model = load(llama, max_memory=0).model
    with pytest.raises(BadModel, match=r"model\.layers\.1\.mlp\.up_proj"):
        audit(model, batches(), formats=["bf16"])


def test_streamed_weights_have_the_fingerprint_of_those_in_memory(stored: Callable[[str], Path]) -> None:
    inside, outside = load(stored("llama")).model, load(stored("llama"), max_memory=0).model
    assert fingerprint(outside, batches()) == fingerprint(inside, batches())
    with torch.no_grad():
        inside.get_parameter("lm_head.weight")[0, 0] += 1
    assert fingerprint(outside, batches()) != fingerprint(inside, batches())


def test_what_cannot_be_streamed_is_refused(stored: Callable[[str], Path]) -> None:
    assert "max_memory" in refusal("tests.precision.tiny_models:MODELS", UnknownOption, max_memory=0)
    assert "-1 bytes" in refusal(stored("llama"), UnknownOption, max_memory=-1)
    with pytest.raises(BadModel, match="on the meta device"):
        audit(load(stored("llama")).model.to("meta"), batches())
    with pytest.raises(BadModel, match="float32"):
        audit(load(stored("llama"), max_memory=0, dtype=torch.bfloat16).model, batches())


AUDITED = """
import json, re, sys
import accelerate.hooks, scipy.optimize, torch, transformers.models.llama.modeling_llama
from assay.precision.auditing import audit
from assay.precision.loading import load

def peak():
    # Of this program alone: getrusage's begins at that of the process which started it.
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

before = peak()
ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
for memory in (0, None):  # the peak of all of it comes last
    found = audit(load(sys.argv[1], max_memory=memory).model, [{"input_ids": ids}], formats=["w4a16-g32", "w8a8"])
    told = {f"{site} {q}": found.contribution(site, q) for site in found.sites for q in found.menu(site)}
    told["measured"] = found.measure({str(s): "w4a16-g32" for s in found.sites if "w4a16-g32" in found.menu(s)})
    size = sum(parameter.numel() for parameter in found.model.parameters()) * 4
    print(json.dumps({"told": told, "peak": peak() - before, "size": size}))
    del found
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from Linux's /proc")
def test_the_peak_of_memory_stays_below_the_model(tmp_path: Path) -> None:
    """52 MB of weights in shards are audited in less memory than they take, with the results of the audit in memory,
    which in its turn takes at most three times the model and a batch's activations."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model", max_shard_size="20MB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    command = [sys.executable, "-P", "-W", "ignore", "-c", AUDITED, str(tmp_path / "model")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    streamed, whole = map(json.loads, ran.stdout.splitlines()[-2:])
    assert streamed["told"] == pytest.approx(whole["told"], rel=1e-4)
    assert streamed["size"] == whole["size"] > 100e6
    assert streamed["peak"] < streamed["size"], streamed["peak"]
    activations = 32 * 8 * (12 * 512 + 4 * 1408) * 4  # of 32 tokens in 8 layers
    assert whole["size"] < whole["peak"] < 3 * whole["size"] + activations, whole["peak"]


def test_small_parameters_are_cast_once(stored: Callable[[str], Path]) -> None:
    model = load(stored("llama"), as_stored=True).model
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    assert norms
    assert all(each.weight.dtype == torch.float32 and not each.weight.is_meta for each in norms)


def test_no_device_that_there_is_not() -> None:
    assert "such as cpu or cuda" in refusal("stdlib-llama", UnknownOption, device="cuda:77")
    assert "such as cpu or cuda" in refusal("stdlib-llama", UnknownOption, device="nonsense")
    assert "got meta" in refusal("stdlib-llama", UnknownOption, device="meta")


def test_batches_follow_the_model() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    model.register_parameter("first", torch.nn.Parameter(torch.zeros(1)))
    given = {"x": torch.zeros(2, 2, dtype=torch.float64), "ids": torch.zeros(2, dtype=torch.int64)}
    (batch,) = normalised([given], model)
    assert device_of(model) == torch.device("cpu")
    assert (batch["x"].dtype, batch["ids"].dtype) == (torch.float32, torch.int64)
