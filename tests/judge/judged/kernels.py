"""A KernelBench problem in a few lines, and solutions of it: ``solution(body)`` is one with this ``forward``."""

import textwrap

LINEAR = '''
import torch
from torch import nn


class Model(nn.Module):
    """A linear layer, and a softmax over its results."""

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=1)


batch = 96
features = 64


def get_inputs():
    return [torch.rand(batch, features)]


def get_init_inputs():
    return [features]
'''

RELU = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


batch = 96
features = 64


def get_inputs():
    return [torch.rand(batch, features)]


def get_init_inputs():
    return []
"""

DISTANCE = '''
import torch
from torch import nn


class Model(nn.Module):
    """The mean square of a difference, of uniform numbers."""

    def forward(self, a, b):
        return torch.mean((a - b) ** 2)


batch = 64
features = 96


def get_inputs():
    return [torch.rand(batch, features), torch.rand(batch, features)]


def get_init_inputs():
    return []
'''

AFFINE = '''
import torch
from torch import nn


class Model(nn.Module):
    """A product with a weight, and a bias that begins as zeros."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return x * self.weight + self.bias


batch = 64
features = 48


def get_inputs():
    return [torch.rand(batch, features)]


def get_init_inputs():
    return [features]
'''

TANH = RELU.replace("torch.relu(x)", "torch.tanh(x)").replace("torch.rand(", "0.4 * torch.rand(")

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
