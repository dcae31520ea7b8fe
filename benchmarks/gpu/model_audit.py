"""Audit a model of 1.1 B parameters on the device, for time and memory, and a small one there and on the CPU.

The models are Llamas with random weights: their shapes are those of trained models, their errors are not.
"""

import random
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.precision.auditing import Audit, audit
from benchmarks.gpu.part import Part, main

SCHEMES = ("bf16", "w8a8", "w4a16-g32")
_CLOSE = 0.02  # of an error measured on another machine: sums have another order


def body(part: Part) -> None:
    """Audit the small model, whose measured errors must equal the CPU's, then the large one."""
    if part.rehearsal:
        part.step("tiny model", partial(_tiny, part))
    else:
        part.step("small model", partial(_small, part))
        part.step("large model", partial(_large, part))


def _tiny(part: Part) -> None:
    result = _audited("cpu", 32, 64, 2, tokens=8)
    measured = float(result.measure(result.random_assignment(random.Random(0))))
    part.claim("the audit of a tiny model measures a finite error", 0 <= measured < float("inf"), f"{measured:.3g}")


def _small(part: Part) -> None:
    here, there = (_audited(device, 256, 704, 4, tokens=64) for device in ("cuda", "cpu"))
    for seed in range(3):
        assignment = there.random_assignment(random.Random(seed))
        ours, theirs = float(here.measure(assignment)), float(there.measure(assignment))
        detail = f"{ours:.6g}, on the CPU {theirs:.6g}"
        part.claim(f"measured error of assignment {seed}, small model", abs(ours - theirs) <= _CLOSE * theirs, detail)


def _large(part: Part) -> None:
    began = part.seconds
    torch.cuda.reset_peak_memory_stats()
    result = _audited("cuda", 2048, 5632, 22, tokens=128, vocabulary=32000)
    count = sum(parameter.numel() for parameter in result.model.parameters())
    part.say(f"  {count / 1e9:.2f} B parameters; seconds: { ({k: round(v, 1) for k, v in result.seconds.items()}) }")
    for seed in range(3):
        measured = float(result.measure(result.random_assignment(random.Random(seed))))
        part.claim(f"measured error of assignment {seed}, large model, is finite", 0 <= measured < float("inf"))
    peak = torch.cuda.max_memory_allocated() / 2**30
    part.say(f"  peak of the device's memory {peak:.1f} GiB; {part.seconds - began:.0f} s")


def _audited(device: str, hidden: int, middle: int, layers: int, tokens: int, vocabulary: int = 256) -> Audit:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden < 1024 else 32,
        num_key_value_heads=2 if hidden < 1024 else 4,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().to(device)
    ids = torch.randint(0, vocabulary, (2, 2, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return audit(model, [{"input_ids": each} for each in ids], formats=SCHEMES)


if __name__ == "__main__":
    main("model_audit", body)
