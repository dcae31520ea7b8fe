"""Train the bundled models again: `python benchmarks/audit/train_models.py llama|mixtral [--minutes N] [--out DIR]`.

Each is a byte-level causal language model of the Python standard library's own source: 256 tokens, one per byte.
Training is in float32; the weights are rounded to bfloat16 when stored, and the loss in `training.json` is that of the
stored model. The schedule follows the clock, so a faster machine takes more steps; see docs/models.md.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"

SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""All sides of matrices are multiples of 128, so that the usual group and block sizes fit."""

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(hidden_size=256, intermediate_size=384, **SHARED),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=128, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2, **SHARED
    ),
}

SEED = 0
SEQUENCE, BATCH = 256, 2
RATE, WARM_UP, DECAY, CLIP = 2e-3, 0.03, 0.1, 1.0
BALANCE = 0.02
"""Weight of the loss that balances tokens over the experts."""

NO_SOURCE = {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
HELD_OUT_BYTES, LONGEST_HELD_OUT = 200_000, 40_000


def sources() -> tuple[list[str], list[str]]:
    """Return the files to train on and the held-out files, as paths below the standard library's folder.

    Generated tables and tests are excluded. The held-out files are the first ones by the SHA-256 of their path, each of
    at most 40 kB, that together reach 200 kB.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    results = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not NO_SOURCE & set(path.relative_to(folder).parts[:-1]) and not path.name.startswith("_sysconfigdata")
    )
    held_out: list[str] = []
    total = 0
    for name in sorted(results, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size = (folder / name).stat().st_size
        if total < HELD_OUT_BYTES and 0 < size <= LONGEST_HELD_OUT:
            held_out.append(name)
            total += size
    return [name for name in results if name not in held_out], sorted(held_out)


def text_of(names: list[str]) -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join((folder / name).read_bytes() for name in names)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, numbered by the byte's value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, clean_up_tokenization_spaces=False)


def train(kind: str, minutes: float, out: Path) -> None:
    """Train for ``minutes`` of wall-clock time; the model is stored after five of them and at the end."""
    torch.manual_seed(SEED)
    learn, held_out = sources()
    data = torch.frombuffer(bytearray(text_of(learn)), dtype=torch.uint8).long()
    config = CONFIGS[kind]()
    config.initializer_range = config.hidden_size**-0.5  # 0.02, the default, suits wide models; this learns faster
    model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.99)
    )
    draws = torch.Generator().manual_seed(SEED)
    started, stored, step, mean = time.monotonic(), False, 0, math.log(256)
    while (elapsed := (time.monotonic() - started) / 60) < minutes:
        done = elapsed / minutes
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, done / WARM_UP, 0.5 * (1 + math.cos(math.pi * done)))
        at = torch.randint(len(data) - SEQUENCE, (BATCH, 1), generator=draws)
        ids = data[at + torch.arange(SEQUENCE)]
        loss, balance = losses(model, ids)
        (loss + balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean += 0.01 * (loss.item() - mean)
        if step % 100 == 0:
            print(f"{elapsed:6.2f} min  step {step:5d}  {mean:.3f} nats per byte", flush=True)
        if not stored and elapsed >= 5:
            store(kind, model, report(model, held_out, step, elapsed), out)
            stored = True
    store(kind, model, report(model, held_out, step, (time.monotonic() - started) / 60), out)


def losses(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy in nats per predicted byte, and the experts' weighted balance loss."""
    routed = hasattr(model.config, "router_aux_loss_coef")
    result = model(input_ids=ids, use_cache=False, **({"output_router_logits": True} if routed else {}))
    loss = cross_entropy(result.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if not routed:
        return loss, torch.zeros(())
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config
    spread = load_balancing_loss_func(result.router_logits, config.num_local_experts, config.num_experts_per_tok)
    return loss, BALANCE * spread


def report(model: torch.nn.Module, held_out: list[str], steps: int, minutes: float) -> dict[str, Any]:
    """Return the results, the versions used, and how to measure them again."""
    text = text_of(held_out)
    return {
        "held_out_nats_per_byte": round(held_out_loss(model, text), 4),
        "measured_on": f"held-out.txt in windows of {SEQUENCE} bytes, of each all bytes but the first",
        "arithmetic": "float32, weights rounded to bfloat16",
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": steps,
        "trained_bytes": steps * BATCH * SEQUENCE,
        "minutes": round(minutes, 1),
        "threads": torch.get_num_threads(),
        "command": " ".join(["python", "benchmarks/audit/train_models.py", *sys.argv[1:]]),
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "held_out_sha256": hashlib.sha256(text).hexdigest(),
        "held_out_files": held_out,
    }


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, text: bytes) -> float:
    """Return the cross entropy in nats per byte of the stored model, over whole windows of ``text``."""
    rounded = type(model)(model.config).eval()
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = windows[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    parts = [losses(rounded, part)[0].item() * len(part) for part in windows.split(16)]
    return sum(parts) / len(windows)


def store(kind: str, model: torch.nn.Module, measured: dict[str, Any], out: Path) -> None:
    """Write the model's folder and the held-out text atomically."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as folder:
        new = Path(folder) / "model"
        rounded = type(model)(model.config).to(torch.bfloat16)
        rounded.load_state_dict(model.state_dict())
        rounded.save_pretrained(new)
        tokenizer().save_pretrained(new)
        (new / "training.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
        text = Path(folder) / "held-out.txt"
        text.write_bytes(text_of(measured["held_out_files"]))
        os.replace(text, out / "held-out.txt")
        home = out / f"stdlib-{kind}"
        if home.exists():
            home.rename(Path(folder) / "old")
        new.rename(home)
        for path in (home, *home.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
    print(f"{home.name}: {measured['held_out_nats_per_byte']} nats per byte on held-out text", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--minutes", type=float, default=25.0, help="wall time to train for (default 25)")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder of the models (default configs/models)")
    arguments = parser.parse_args()
    train(arguments.model, arguments.minutes, arguments.out)


if __name__ == "__main__":
    main()
