"""A problem and a solution of each format, in a few lines."""

import json
from pathlib import Path

CONSTANTS = """
N = 2048 * 2  # rows
height = width = 128
shape = (64, 3, 5)
a, b = 7, 9
rate: float = 0.5
count: int = 12
twice = N * 2
flag = True
"""

DEFINITION = {
    "name": "scaled_rows",
    "op_type": "norm",
    "axes": {"T": {"type": "var"}, "H": {"type": "const", "value": 24}, "TH": {"type": "expr", "expression": "T * H"}},
    "inputs": {"x": {"shape": ["T", "H"], "dtype": "float32"}, "s": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": {"shape": ["T", "H"], "dtype": "float32"}},
    "reference": "import torch\n\ndef run(x, s):\n    return torch.softmax(x * s, -1)\n",
    "constraints": ["T <= 4096"],
}
WORKLOADS = [
    {
        "uuid": f"w{rows}",
        "axes": {"T": rows},
        "inputs": {"x": {"type": "random"}, "s": {"type": "scalar", "value": 0.5}},
    }
    for rows in (40, 9)
]
INTO = """
import torch

def run(x, s, y):
    z = torch.exp((x - x.amax(1, keepdim=True)) * s)
    y.copy_(z / z.sum(1, keepdim=True))
"""

REFERENCE = """
import torch
from task import input_t
from utils import checker


def ref_kernel(data: input_t):
    a, b, out = data
    out[...] = a + 2 * b
    return out


def generate_input(size: int, wide: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 2 * size if wide else size)
    a, b = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return a, b, torch.empty(shape)


check_implementation = checker(ref_kernel)
"""
SUBMISSION = """
import torch
from task import input_t

def custom_kernel(data: input_t):
    a, b, out = data
    return torch.add(a, b, alpha=2, out=out)
"""
TASK = """
from typing import TypedDict

input_t = tuple


class TestSpec(TypedDict):
    size: int
"""
TASK_YML = """
lang: "py"
tests:
  - {"size": 17, "wide": False, "seed": 3}
  - {size: 33, wide: true, seed: 4}   # as YAML has it
benchmarks:
  - {"size": 40, "wide": False, "seed": 5}
"""

ROBUST = """
import torch
from torch import nn


def forward_fn(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Model(nn.Module):
    def __init__(self, features=32, eps=1e-5, init_method="ones"):
        super().__init__()
        made = torch.ones(features) if init_method == "ones" else torch.randn(features)
        self.weight, self.eps = nn.Parameter(made), eps

    def forward(self, x, fn=forward_fn):
        return fn(x, self.weight, self.eps)


def get_inputs(batch=8, features=32):
    return [torch.randn(batch, features)]


input_names = ["x"]
"""
FORWARD = """
import torch

def forward(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
"""
CONFIG = {
    "single_input_configs": [{"batch": 24}],
    "single_init_configs": [{"init_method": "random"}],
    "single_shared_configs": [{"features": 48}],
    "multi_input_configs": [{"batch": 3}, {"batch": 5}],
    "multi_init_configs": [{}],
    "multi_shared_configs": [{"features": 16}],
}


def filled(folder: Path, files: dict[str, object]) -> Path:
    """The folder with these files; what is no text is written as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


def flashinfer_trace(folder: Path) -> Path:
    """A definition with two workloads, and a solution that writes into its last argument."""
    lines = "\n".join(json.dumps({"definition": "scaled_rows", "workload": one}) for one in WORKLOADS)
    files = {"definition.json": DEFINITION, "workload.jsonl": lines, "solution.json": flashinfer_solution("mine", INTO)}
    return filled(folder, files)


def flashinfer_solution(name: str, source: str) -> dict[str, object]:
    """A solution of that definition."""
    return {
        "name": name,
        "definition": "scaled_rows",
        "author": "me",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
        "sources": [{"path": "main.py", "content": source}],
    }
