"""`examine_backward`: the results and the gradients of a differentiable function, each against its spec.

The gradients come from autograd (torch) or `jax.vjp` with an upstream gradient, and are compared with the op's backward
spec. For two of these specs the caller doesn't supply every input, so the function is examined as its caller sees it
(`assay.golden.definitions.composed`):

- softmax's backward spec takes y. The function computes y itself; it may save it, rounded or not, or compute it again.
  The gradient with respect to x is examined, and y may be rounded once to the dtype on the way.
- cross-entropy's has an upstream gradient of one. The product with any upstream gradient is examined, one for each
  token without reduction: a gradient that takes these for a single number is wrong.

The backward spec of a loss over many logits (linear_cross_entropy) is used unchanged, with an upstream gradient of 1.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.golden.registry import Spec, gradients_of, spec, specs
from assay.runtime.errors import unknown
from assay.runtime.files import write_text_atomically
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.examination.procedure import examine
from assay.verify.verdict import Verdict, joint_outcome


@dataclass(frozen=True)
class Pair:
    """A forward op and the spec of its gradients."""

    forward: Spec
    backward: Spec

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that have a gradient (the others are labels): each result is the gradient of one, after a d."""
        return tuple(tensor.name.removeprefix("d") for tensor in self.backward.signature().returns)

    @property
    def takes_upstream(self) -> bool:
        """Whether the backward spec's last input is an upstream gradient; otherwise the upstream gradient is one."""
        return self.backward.tensors[-1].name not in {tensor.name for tensor in self.forward.tensors}

    def arguments(self, inputs: Sequence[Any], upstream: Any = None) -> list[Any]:
        """Return the arguments of the function, from the inputs of the backward spec.

        An input that the backward spec lacks (layernorm's bias, the x of rope), on which no gradient depends, is filled
        with small repeated numbers that are exact in every dtype.
        """
        tensors = self.backward.tensors[:-1] if self.takes_upstream else self.backward.tensors
        by_name = dict(zip((tensor.name for tensor in tensors), inputs, strict=True))
        shapes = {tensor: by_name[tensor.name].shape for tensor in tensors}
        if upstream is not None and any(tensor.name not in by_name for tensor in self.forward.tensors):
            shapes[self.backward.tensors[-1]] = upstream.shape
        sizes = {dim: size for tensor, shape in shapes.items() for dim, size in zip(tensor.dims, shape, strict=True)}
        return [
            by_name[tensor.name] if tensor.name in by_name else _repeated(inputs[-1], tensor.shape(sizes))
            for tensor in self.forward.tensors
        ]


class GradientError(RuntimeError):
    """A gradient that is malformed (missing, of another shape or dtype); an examination reports it as a crash."""


@dataclass(frozen=True)
class BackwardVerdict:
    """The verdicts on a function's results and on its gradients."""

    forward: Verdict
    backward: Verdict

    @property
    def failed(self) -> tuple[str, ...]:
        """The parts that didn't pass, of "forward" and "backward"."""
        return joint_outcome(self._named)[1]

    @property
    def passed(self) -> bool:
        """Whether both pass."""
        return not self.failed

    @property
    def outcome(self) -> str:
        """FAIL if either fails, else the first outcome other than PASS."""
        return joint_outcome(self._named)[0]

    @property
    def _named(self) -> dict[str, Verdict]:
        return {"forward": self.forward, "backward": self.backward}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: both verdicts, and the parts that failed."""
        parts = {name: verdict.as_dict() for name, verdict in self._named.items()}
        return {"outcome": self.outcome, "failed": list(self.failed), **parts}

    def to_json(self, path: Any = None) -> str:
        """Return the verdict as JSON, and write it to ``path`` if given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def __str__(self) -> str:
        words = f": {' and '.join(self.failed)}" if self.failed else ""
        return f"{self.outcome}{words}\nforward: {self.forward}\nbackward: {self.backward}"


def examine_backward(
    function: Callable[..., Any],
    op: str,
    *,
    dtype: str,
    contract: Contract | str | None = None,
    backward_contract: Contract | str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    framework: str = "torch",
    **settings: Any,
) -> BackwardVerdict:
    """Examine a differentiable ``function`` as op ``op``, forward and backward.

    ``function`` is called as a kernel of ``op`` is: with the spec's tensors positionally and the listed options as
    keywords. It is any torch function with autograd (``MyFunction.apply``, a composition of torch's own), a
    `torch.nn.Module` whose parameters bear the names of the spec's tensors (it is called with the others, and they
    take the place of its own), or a jax function. ``op`` is one whose gradient some spec is
    (`OutputRules.gradient_of`; of the built-in ones softmax, layernorm, rmsnorm, swiglu, attention and cross_entropy),
    or that spec's name.

    ``dtype`` is that of all floating tensors. ``options`` are those of the backward spec. ``contract`` is the
    forward's, ``backward_contract`` the gradients'; the default contract of each where left out. All else is as in
    `examine`.

    Raises as `examine` does, and `SettingError` for an op without a backward spec or a framework without gradients.
    """
    pair = pair_of(op)
    if not isinstance(dtype, str):
        raise SettingError(f"dtype={dtype!r}; expected one name: a gradient has its input's dtype, results have one")
    common: dict[str, Any] = {"dtype": dtype, "options": options, "framework": framework, **settings}
    gradient = gradient_of(function, op, framework=framework)
    for name in options or {}:
        if name not in pair.backward.options:
            raise SettingError(f"options: {pair.backward.name}: {unknown('option', name, pair.backward.options)}")
    forward = examine(_forward_of(function, pair, framework), pair.forward.name, contract=contract, **common)
    backward = examine(gradient, pair.backward.name, contract=backward_contract, **common)
    return BackwardVerdict(forward, backward)


def gradient_of(function: Callable[..., Any], op: str, *, framework: str = "torch") -> Callable[..., Any]:
    """Return a kernel of the op's backward spec: from its inputs and an upstream gradient it computes the gradients.

    Give it a name at a module's top to examine it by itself: ``rmsnorm_backward = gradient_of(rmsnorm, "rmsnorm")``,
    then ``assay verify my.module:rmsnorm_backward --spec rmsnorm_backward``. It doesn't know that name: `examine`
    treats it as a function without one, so its repro lines need ``--target`` and it isn't called in a plain process.
    """
    pair = pair_of(op)
    if framework not in ("torch", "jax"):
        raise SettingError(f"framework={framework!r} has no gradients; expected 'torch' or 'jax'")
    differentiate = _torch_gradients if framework == "torch" else _jax_gradients
    called = _as_function(function, pair)

    def gradient(*tensors: Any, **options: Any) -> Any:
        inputs, upstream = (tensors[:-1], tensors[-1]) if pair.takes_upstream else (tensors, None)
        return differentiate(called, pair, pair.arguments(inputs, upstream), upstream, options)

    gradient.__name__ = gradient.__qualname__ = f"gradient of {_name(function)}"
    return gradient


def pair_of(op: str) -> Pair:
    """Return the pair of an op, by the name of either spec. Raises `SettingError` if there is none.

    Of several backward specs it takes the one with the op's own inputs, and an upstream gradient if it needs one.
    """
    forward = spec(spec(op).outputs.gradient_of or op)
    names = {tensor.name for tensor in forward.tensors}
    results = [
        Pair(forward, backward)
        for backward in gradients_of(forward.name)
        if names.issuperset(tensor.name for tensor in backward.tensors[:-1])
    ]
    if results:
        return max(results, key=lambda pair: pair.takes_upstream)
    known = sorted({spec(name).outputs.gradient_of or "" for name in specs()} - {""})
    raise SettingError(f"op={op!r} has no backward spec; those that have: {', '.join(known)}")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _forward_of(function: Callable[..., Any], pair: Pair, framework: str) -> Callable[..., Any]:
    """Return the function in the form that is called with inputs that require gradients."""
    called = _as_function(function, pair)
    if framework != "torch":
        return called

    def forward(*inputs: torch.Tensor, **options: Any) -> Any:
        with torch.enable_grad():
            return called(*_leaves(pair, inputs), **options)

    forward.__name__ = forward.__qualname__ = _name(function)
    return forward


def _as_function(function: Callable[..., Any], pair: Pair) -> Callable[..., Any]:
    """Return a module as a function of its parameters; any other function unchanged."""
    if not isinstance(function, torch.nn.Module):
        return function
    module = function
    names = [tensor.name for tensor in pair.forward.tensors]
    parameters = dict(module.named_parameters())
    for name in parameters:
        if name not in names:
            raise SettingError(
                f"function: the module has a parameter {name!r}; {pair.forward.name} takes {', '.join(names)}"
            )

    def call(*inputs: torch.Tensor, **options: Any) -> Any:
        arguments = dict(zip(names, inputs, strict=True))
        weights = {name: arguments.pop(name) for name in parameters}
        return torch.func.functional_call(module, weights, tuple(arguments.values()), options)

    call.__name__ = call.__qualname__ = type(module).__name__
    return call


def _leaves(pair: Pair, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs in their own memory, with differentiable ones as leaves of a new graph."""
    names = [tensor.name for tensor in pair.forward.tensors]
    return [
        tensor.detach().requires_grad_(name in pair.differentiable) for name, tensor in zip(names, inputs, strict=True)
    ]


def _torch_gradients(
    function: Callable[..., Any],
    pair: Pair,
    inputs: Sequence[torch.Tensor],
    upstream: torch.Tensor | None,
    options: Any,
) -> tuple[torch.Tensor, ...]:
    leaves = _leaves(pair, inputs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.enable_grad():
        out = function(*leaves, **options)
    out = out[0] if isinstance(out, (tuple, list)) and len(out) == 1 else out
    if not isinstance(out, torch.Tensor):
        raise GradientError(f"{pair.forward.name}: expected one tensor of the function, got {type(out).__name__}")
    if not out.requires_grad:
        raise GradientError("the result does not hang on the inputs: it has no gradient function")
    upstream = torch.ones_like(out) if upstream is None else upstream
    if (out.shape, out.dtype) != (upstream.shape, upstream.dtype):
        expected, got = (f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}" for x in (upstream, out))
        raise GradientError(f"expected a result {expected}, got {got}")
    before = out.detach().clone()
    gradients = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    for name, result in zip(pair.differentiable, gradients, strict=True):
        if result is None:
            raise GradientError(f"no gradient of {name}: None came back")
    if not _same(before, out.detach()):
        raise GradientError("the backward pass changed the forward's result")
    return tuple(gradients)


def _jax_gradients(
    function: Callable[..., Any], pair: Pair, inputs: Sequence[Any], upstream: Any, options: Any
) -> tuple[Any, ...]:
    jax = importlib.import_module("jax")
    names = [tensor.name for tensor in pair.forward.tensors]
    indices = [index for index, name in enumerate(names) if name in pair.differentiable]

    def of_floats(*floats: Any) -> Any:
        arguments = list(inputs)
        for index, value in zip(indices, floats, strict=True):
            arguments[index] = value
        return function(*arguments, **options)

    out, pull = jax.vjp(of_floats, *(inputs[index] for index in indices))
    return tuple(pull(jax.numpy.ones_like(out) if upstream is None else upstream))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _repeated(like: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor like ``like`` of repeated numbers from -3/4 to 3/4."""
    count = math.prod(shape)
    if isinstance(like, torch.Tensor):
        return ((torch.arange(count, device=like.device) % 7 - 3) / 4).to(like.dtype).reshape(shape)
    jnp = importlib.import_module("jax").numpy
    return ((jnp.arange(count) % 7 - 3) / 4).astype(like.dtype).reshape(shape)
