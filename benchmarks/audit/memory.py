"""What an audit takes of memory, of a random Llama in bfloat16: `memory.py 384 1024 20` (hidden, MLP, layers).

Prints for weights in memory and for streamed ones: the peak of resident memory beyond what the imports took (Linux's
VmHWM), in multiples of the float32 model, and seconds of looking, predicting and two measurements.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SCHEMES = ("bf16", "w8a8", "w4a16-g32")


def make(folder: Path, hidden: int, middle: int, layers: int) -> None:
    """Store the model, in shards of 20 MB."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="20MB")


def peak() -> float:
    """MiB, of this program so far."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def examine(folder: Path, memory: int | None, sequences: int, tokens: int) -> str:
    """Audit the model in this process, and measure two random assignments."""
    import accelerate.hooks  # noqa: F401 - what an audit imports is no part of what it takes
    import scipy.optimize  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from assay.precision.auditing import audit
    from assay.precision.loading import load

    ids = torch.randint(0, 256, (2, sequences, tokens), generator=torch.Generator().manual_seed(0))
    before, began = peak(), time.monotonic()
    found = audit(load(folder, max_memory=memory).model, [{"input_ids": each} for each in ids], formats=SCHEMES)
    predicted = peak() - before
    draw = random.Random(0)
    for _ in range(2):
        found.measure(found.random_assignment(draw))
    size = sum(parameter.numel() for parameter in found.model.parameters()) * 4 / 2**20
    whole = peak() - before
    return (
        f"model {size:.0f} MiB in float32, {'in memory' if memory is None else 'streamed'}: peak {predicted:.0f} MiB "
        f"({predicted / size:.2f}) with the backward pass, {whole:.0f} MiB ({whole / size:.2f}) with measurements; "
        f"{found.seconds['looking']:.1f} s looking, {found.seconds['predicting']:.1f} s predicting, "
        f"{time.monotonic() - began:.0f} s in all"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("hidden", type=int)
    arguments.add_argument("middle", type=int)
    arguments.add_argument("layers", type=int)
    arguments.add_argument("--sequences", type=int, default=2, help="of a batch; there are two batches")
    arguments.add_argument("--tokens", type=int, default=16)
    arguments.add_argument("--of", help=argparse.SUPPRESS)
    arguments.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.of is not None:
        print(examine(Path(given.of), given.memory, given.sequences, given.tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), given.hidden, given.middle, given.layers)
        for memory in ([], ["--memory", "0"]):
            again = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--of", folder, *memory]
            subprocess.run(again, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
