"""Products with parameters of several matrices, and by subscripts: bmm, matmul, einsum, grouped products.

A parameter [E, ...] that an operand of as many matrices is multiplied with holds experts: each is a product of its own.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from assay.precision.observation.tracer import Found, Tracer

_linear = torch.nn.functional.linear
_PLAIN = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def matmul(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.matmul, mm and bmm with a parameter on either side: [K, N] or [E, K, N] on the right, [M, K] or [E, M, K]
    on the left."""
    if len(args) != 2 or kwargs:
        return func(*args, **kwargs)
    one, other = args
    for x, weight, left in ((one, other, False), (other, one, True)):
        found = tracer.named(weight)
        if found is None or not isinstance(x, torch.Tensor) or weight.dim() not in (2, 3):
            continue
        if tracer.named(x) is not None or x.dim() < 2:  # two parameters, or a vector
            return func(*args, **kwargs)
        rows, kernel = (x.mT, weight) if left else (x, weight.mT)
        out = _product(tracer, kernel, rows, found)
        if out is not None:
            return out.mT if left else out
    return func(*args, **kwargs)


def baddbmm(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.baddbmm of a bias, x [E, T, K] and a parameter [E, K, N], without factors."""
    found = tracer.named(args[2]) if len(args) == 3 and not kwargs else None
    out = None if found is None else _product(tracer, args[2].mT, args[1], found)
    return func(*args, **kwargs) if out is None else args[0] + out


def grouped(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.nn.functional.grouped_mm of x [T, K], rows sorted by experts that end where ``offs`` says, and a parameter
    [E, K, N]."""
    if len(args) < 2:
        return func(*args, **kwargs)
    x, weight = args[:2]
    ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
    found = tracer.named(weight)
    others = [*args[3:], *(value for name, value in kwargs.items() if name not in ("offs", "out_dtype"))]
    if x.dim() != 2 or ends is None or any(each is not None for each in others):
        return func(*args, **kwargs)
    if found is None or weight.dim() != 3 or not tracer.holds_matrices(weight):
        return func(*args, **kwargs)
    pieces, start = [], 0
    gathered = tracer.gathered[-1] if tracer.gathered else None
    for expert, end in enumerate(ends.tolist()):
        if gathered is not None and len(gathered[0]) == len(x):  # rows of one expert, of those that were gathered
            tracer.gathered.append((gathered[0][start:end], *gathered[1:]))
        pieces.append(tracer.product(weight[expert].mT, x[start:end], (found[0], expert), _linear))
        if gathered is not None and len(gathered[0]) == len(x):
            tracer.gathered.pop()
        start = end
    rest = x.new_zeros(len(x) - start, weight.shape[-1])
    return torch.cat([*pieces, rest])


def einsum(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.einsum of a tensor and a parameter whose subscripts are summed or kept, each once."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    plain = _PLAIN.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if plain is None or len(operands) != 2 or kwargs:
        return func(*args, **kwargs)
    ways = ((operands[0], plain[1], operands[1], plain[2]), (operands[1], plain[2], operands[0], plain[1]))
    for x, of_x, weight, of_weight in ways:
        found = tracer.named(weight)
        if found is None:
            continue
        letters = None if tracer.named(x) is not None else _Letters.of(of_x, of_weight, plain[3])
        out = None if letters is None else _by_letters(tracer, letters, x, weight, found)
        return func(*args, **kwargs) if out is None else out
    return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Letters:
    """Subscripts of a product: rows of x, summed ones, those of the weight's outputs, and of several matrices."""

    x: str
    weight: str
    out: str
    rows: str
    summed: str
    outputs: str
    matrices: str

    @classmethod
    def of(cls, x: str, weight: str, out: str) -> "_Letters | None":
        """None where a subscript stands twice in one operand or in one operand alone, or nothing is summed."""
        if any(len(set(each)) < len(each) for each in (x, weight, out)):
            return None
        rows = "".join(letter for letter in x if letter in out and letter not in weight)
        summed = "".join(letter for letter in x if letter in weight and letter not in out)
        outputs = "".join(letter for letter in weight if letter in out and letter not in x)
        matrices = "".join(letter for letter in weight if letter in out and letter in x)
        whole = len(x) == len(rows + summed + matrices) and len(weight) == len(outputs + summed + matrices)
        return cls(x, weight, out, rows, summed, outputs, matrices) if whole and summed else None


def _by_letters(
    tracer: Tracer, letters: _Letters, x: torch.Tensor, weight: torch.Tensor, found: Found
) -> torch.Tensor | None:
    """The product; None for matrices that aren't along the first dimension of a parameter, which hold no experts."""
    if letters.matrices and (letters.matrices != letters.weight[0] or not tracer.holds_matrices(weight)):
        return None
    at = {letter: x.shape[place] for place, letter in enumerate(letters.x)}
    at |= {letter: weight.shape[place] for place, letter in enumerate(letters.weight)}
    held = letters.matrices
    rows = _ordered(x, letters.x, held + letters.rows + letters.summed).flatten(len(held + letters.rows))
    kernel = _ordered(weight, letters.weight, held + letters.outputs + letters.summed)
    kernel = kernel.flatten(len(held + letters.outputs))
    sizes = [at[letter] for letter in letters.outputs]
    kernel = kernel.flatten(len(held), -2) if sizes else kernel.unsqueeze(-2)
    if held:
        pieces = (tracer.product(kernel[e], rows[e], (found[0], e), _linear) for e in range(at[held]))
        out = torch.stack(list(pieces))
    else:
        out = tracer.product(kernel, rows, found, _linear)
    out = torch.unflatten(out, -1, sizes) if sizes else out[..., 0]
    return _ordered(out, held + letters.rows + letters.outputs, letters.out)


def _ordered(x: torch.Tensor, before: str, after: str) -> torch.Tensor:
    """Dimensions in another order, by their letters."""
    return x.permute(*(before.index(letter) for letter in after))


def _product(tracer: Tracer, weight: torch.Tensor, x: torch.Tensor, found: Found) -> torch.Tensor | None:
    """x [..., T, K] with a weight [N, K], or x [..., E, T, K] with the matrices [E, N, K]; None for matrices that no
    dimension of x stands beside."""
    if weight.dim() == 2:
        return tracer.product(weight, x, found, _linear)
    if x.dim() < 3 or x.shape[-3] not in (1, len(weight)) or not tracer.holds_matrices(weight):
        return None
    rows = x.expand(*x.shape[:-3], len(weight), *x.shape[-2:]).unbind(-3)
    return torch.stack([tracer.product(weight[e], each, (found[0], e), _linear) for e, each in enumerate(rows)], -3)
