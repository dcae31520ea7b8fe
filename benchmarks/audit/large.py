"""Measure the cost of an audit before its first measurement: `large.py 1024 4096 24` (hidden, MLP, layers).

A random Llama in bfloat16 with 16 heads is stored and audited, with every scheme that an audit examines by default.
Prints processor seconds of one plain forward and backward pass in float32, before and after, of the audit's recording,
of its predictions, and of one measurement, and the peak of resident memory beyond the imports (Linux's VmHWM) in
multiples of the bfloat16 weights; `--profile` prints a profile.
"""

import argparse
import cProfile
import pstats
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


def make(folder: Path, given: argparse.Namespace) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.middle,
        num_hidden_layers=given.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def peak() -> float:
    """Return the peak resident memory of this program so far, in MiB."""
    match = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def plain(folder: Path, ids: torch.Tensor) -> tuple[float, float]:
    """Return processor seconds of a forward pass, and of a forward and backward pass with gradients of weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    began = time.process_time()
    with torch.no_grad():
        model(ids)
    middle = time.process_time()
    model(ids).logits.square().mean().backward()
    return middle - began, time.process_time() - middle


def examine(folder: Path, given: argparse.Namespace, ids: torch.Tensor) -> None:
    """Audit the model in this process, and measure one random assignment."""
    import accelerate.hooks  # noqa: F401 - an audit's imports are not part of its cost
    import scipy.optimize  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from assay.precision.auditing import audit
    from assay.precision.loading import load

    before, began, profile = peak(), time.process_time(), cProfile.Profile(time.process_time)
    loaded = load(folder, as_stored=not given.whole)
    weights = sum(parameter.numel() for parameter in loaded.model.parameters()) * 2 / 2**20
    print(f"loaded: {time.process_time() - began:.1f} s, peak {(peak() - before) / weights:.2f}", flush=True)
    stages: dict[str, float] = {}

    def reported(stage: str, done: int, count: int) -> None:
        stages[stage] = time.process_time() - began
        print(
            f"{stage} {done}/{count}: after {stages[stage]:.1f} s, peak {(peak() - before) / weights:.2f}", flush=True
        )

    if given.profile:
        profile.enable()
    formats = given.formats.split(",") if given.formats else None
    batches = [{"input_ids": some} for some in ids.split(given.batch)]
    result = audit(loaded.model, batches, formats=formats, bits=16, progress=reported, exact=given.exact)
    spent, whole = time.process_time() - began, peak() - before
    profile.disable()
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
    print(f"before measuring: {spent:.1f} s, peak {whole:.0f} MiB ({whole / weights:.2f} of {weights:.0f} in bfloat16)")
    draw = random.Random(0)
    for _ in range(2):
        began = time.process_time()
        result.measure(result.random_assignment(draw))
        print(f"a measurement: {time.process_time() - began:.1f} s, peak {(peak() - before) / weights:.2f}", flush=True)


def main() -> None:
    """Read the command line, store the model, and measure in separate processes."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("hidden", type=int)
    arguments.add_argument("middle", type=int)
    arguments.add_argument("layers", type=int)
    arguments.add_argument("--vocabulary", type=int, default=32000)
    arguments.add_argument("--sequences", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--formats", default="", help="names of schemes with commas; else the usual ones")
    arguments.add_argument("--whole", action="store_true", help="weights held in float32")
    arguments.add_argument("--batch", type=int, default=1, help="sequences of a batch")
    arguments.add_argument("--exact", action="store_true", help="every row of every weight is looked at")
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--of", help=argparse.SUPPRESS)
    arguments.add_argument("--plain", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    shape = given.sequences, given.tokens
    ids = torch.randint(0, given.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    if given.plain is not None:
        print("plain: forward {:.2f} s, forward and backward {:.2f} s".format(*plain(Path(given.plain), ids)))
    elif given.of is not None:
        examine(Path(given.of), given, ids)
    else:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), given)
            for what in ("--plain", "--of", "--plain"):
                again = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], what, folder]
                subprocess.run(again, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
