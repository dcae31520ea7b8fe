"""The loss of a bundled model that is trained with the bundled Triton kernels in it and without.

    python -P benchmarks/replaced_training.py [STEPS]

stdlib-llama is trained on from its weights in bfloat16 by AdamW, on the same batches of its held-out text, once as
transformers has it and once under `assay.kernels.replace`; on a CPU in the interpreter. Prints the losses, and writes
docs/replaced-training.svg.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from assay.interpreter import faithful
from assay.kernels import replace
from assay.precision.loading.loader import bundled

BATCH, LENGTH = 4, 128
PICTURE = Path(__file__).parents[1] / "docs" / "replaced-training.svg"


def losses(steps: int, *, replaced: bool) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    path = bundled()["stdlib-llama"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).train()
    text = torch.tensor(list(path.with_name("held-out.txt").read_bytes()))
    chance = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if replaced:
        print(replace(model))
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chance)
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def picture(curves: dict[str, list[float]]) -> str:
    """The curves as SVG."""
    every = [loss for curve in curves.values() for loss in curve]
    low, high, width, height = min(every), max(every), 640, 320
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 80}" height="{height + 60}" font-family="sans-serif">'
    ]
    for (name, curve), colour, dash, place in zip(
        curves.items(), ("#1f77b4", "#d62728"), ("none", "6 5"), (20, 40), strict=True
    ):
        points = " ".join(
            f"{60 + width * step / max(len(curve) - 1, 1):.1f},{10 + height * (high - loss) / (high - low):.1f}"
            for step, loss in enumerate(curve)
        )
        line = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {line}/>')
        parts.append(f'<text x="{width - 130}" y="{place}" fill="{colour}">{name}</text>')
    parts += [
        f'<text x="5" y="{10 + height * share + 5:.0f}">{high - share * (high - low):.2f}</text>'
        for share in (0, 0.5, 1)
    ]
    parts.append(f'<text x="60" y="{height + 40}">loss by step, 1 to {len(next(iter(curves.values())))}</text></svg>')
    return "\n".join(parts) + "\n"


def main(steps: int = 60) -> None:
    """Both curves, and the largest distance between them."""
    curves = {}
    with faithful():
        for name, replaced in (("transformers", False), ("with the kernels", True)):
            began = time.monotonic()
            curves[name] = losses(steps, replaced=replaced)
            print(
                f"{name}: {time.monotonic() - began:.0f} s, loss {curves[name][0]:.4f} to {curves[name][-1]:.4f}",
                flush=True,
            )
    apart = max(abs(a - b) / a for a, b in zip(*curves.values(), strict=True))
    print(f"at most {100 * apart:.2g} % apart in {steps} steps")
    PICTURE.write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
