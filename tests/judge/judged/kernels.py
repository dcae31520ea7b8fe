"""A KernelBench problem in a few lines, and solutions of it: ``solution(body)`` is one with this ``forward``."""

import textwrap

_LAYER = """
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
"""
_SCALE = """
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.bias = nn.Parameter(torch.zeros(features))
"""
_PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
{init}
    def forward(self, {arguments}):
        return {result}


batch = {batch}
features = {features}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return [{given}]
"""


def problem(result: str, init: str = "", batch: int = 96, features: int = 64, arguments: str = "x") -> str:
    """A problem whose model returns ``result`` of uniform numbers."""
    inputs = ", ".join(["torch.rand(batch, features)"] * len(arguments.split(",")))
    return _PROBLEM.format(
        init=init, arguments=arguments, result=result, batch=batch, features=features, inputs=inputs,
        given="features" if init else "",
    )  # fmt: skip


LINEAR = problem("torch.softmax(self.linear(x), dim=1)", _LAYER)
RELU = problem("torch.relu(x)")
TANH = RELU.replace("torch.relu(x)", "torch.tanh(x)").replace("torch.rand(", "0.4 * torch.rand(")
DISTANCE = problem("torch.mean((a - b) ** 2)", batch=64, features=96, arguments="a, b")
AFFINE = problem("x * self.weight + self.bias", _SCALE, batch=64, features=48)
SOFTMAX = """
y = x @ self.linear.weight.t() + self.linear.bias
e = torch.exp(y - y.amax(1, keepdim=True))
result = e / e.sum(1, keepdim=True)
"""


def solution(problem: str, body: str, before: str = "", arguments: str = "x", more: str = "") -> str:
    """A solution of a problem: its constructor is the problem's, ``before`` stands at the top of the file."""
    constructor = {LINEAR: _LAYER, AFFINE: _SCALE}.get(problem, "")
    forward = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    start = "import torch\nfrom torch import nn\n"
    methods = f"{constructor}{textwrap.indent(more, '    ')}\n    def forward(self, {arguments}):\n{forward}\n"
    return f"{start}{textwrap.dedent(before)}\n\nclass ModelNew(nn.Module):\n{methods}"


def linear(body: str, before: str = "", more: str = "") -> str:
    """A solution of `LINEAR`; in ``body`` the line SOFTMAX stands for a right ``result``."""
    lines = []
    for line in textwrap.dedent(body).strip().splitlines():
        margin = line[: len(line) - len(line.lstrip())]
        lines.append(textwrap.indent(SOFTMAX.strip(), margin) if line.strip() == "SOFTMAX" else line)
    return solution(LINEAR, "\n".join(lines), before, more=more)
