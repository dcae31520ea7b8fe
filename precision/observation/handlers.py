"""Which functions of torch are sites, and how a call of each is handed to the visitor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint

from assay.configs import architectures
from assay.precision.errors import BadModel
from assay.precision.observation.operations.attention import multihead, scaled_dot_product
from assay.precision.observation.operations.contraction import baddbmm, einsum, grouped, matmul
from assay.precision.observation.operations.convolution import convolution, transposed_convolution
from assay.precision.observation.operations.recurrence import gru, layers, lstm, one, rnn_relu, rnn_tanh
from assay.precision.observation.tracer import Handler, Tracer, Visitor, opens
from assay.runtime.memory import trim_heap

_GROWN = 1 << 25
"""Bytes by which a model of streamed weights may grow in memory before freed ones are returned."""


@contextmanager
def traced(model: torch.nn.Module, visitor: Visitor) -> Iterator[Tracer]:
    """Within, calls of ``model`` go by way of the visitor. Hooks are taken off afterwards, whatever happens."""
    tracer = Tracer(model, visitor, _HANDLERS)
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # which nothing can be seen in
            continue
        handles.append(module.register_forward_pre_hook(_enter(tracer, name, module), with_kwargs=True))
        handles.append(module.register_forward_hook(_leave(tracer, name, module), always_call=True))
    try:
        visitor.tracer = tracer
        with tracer, _without_checkpoints():
            yield tracer
    finally:
        visitor.tracer = None
        for handle in handles:
            handle.remove()


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Within, torch.utils.checkpoint calls what it is given, no more: in a backward pass no site would be open."""

    class Called:
        @staticmethod
        def apply(run: Callable[..., Any], _keeps_rng: bool, *args: Any) -> Any:
            return run(*args)

    def around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with patch.multiple(checkpoint, CheckpointFunction=Called, _checkpoint_without_reentrant_generator=around):
        yield


def _enter(tracer: Tracer, name: str, module: torch.nn.Module) -> Callable[..., Any]:
    norm = is_norm(module)

    def enter(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer.path.append(name)
        tracer.ran.add(name)
        if norm and args and isinstance(args[0], torch.Tensor) and opens(args[0]) and args[0].is_floating_point():
            return (tracer.beside(f"{name}:input", args[0]), *args[1:]), kwargs
        return None

    return enter


def _leave(tracer: Tracer, name: str, module: torch.nn.Module) -> Callable[..., Any]:
    layer = is_layer(name, module)
    suffix = "output" if is_norm(module) else "residual" if layer else None

    def leave(_module: object, _args: object, output: Any) -> Any:
        tracer.path.pop()
        if layer and tracer.streams:
            trim_heap(_GROWN)
        while tracer.gathered and tracer.gathered[-1][2] > len(tracer.path):
            tracer.gathered.pop()
        if suffix is None or output is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor) or not opens(first) or not first.is_floating_point():
            return None
        first = tracer.beside(f"{name}:{suffix}", first)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    return leave


def is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") or isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)


def is_layer(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is one of a stack of layers: numbered, and with modules of its own."""
    listed = name.rpartition(".")[2].isdecimal() and not isinstance(module, torch.jit.ScriptModule)
    return listed and any(module.children())


def _product(x_at: int, *, transposed: bool, names: tuple[str, ...] = ()) -> Handler:
    """A function whose argument at ``x_at`` is multiplied with the next: a parameter W [N, K], or [K, N] as GPT-2's
    Conv1D and exported graphs have it. names: of arguments that may be given by name."""

    def handle(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        whole = [*args, *(kwargs.get(name) for name in names[len(args) :])]
        weight = whole[x_at + 1] if len(whole) > x_at + 1 and (names or not kwargs) else None
        found = tracer.named(weight)
        if weight is None or found is None or weight.dim() != 2:
            return func(*args, **kwargs)
        before, x, after = whole[:x_at], whole[x_at], whole[x_at + 2 :]  # without the weight, which may be streamed
        if not transposed:
            return tracer.product(weight, x, found, lambda a, w: func(*before, a, w, *after))
        return tracer.product(weight.mT, x, found, lambda a, w: func(*before, a, w.mT, *after))

    return handle


def _embedding(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) < 2:
        args = (*args, *(kwargs[name] for name in ("input", "weight")[len(args) :]))
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "weight")}
    # aten.embedding has the weight first, torch.nn.functional.embedding the indices.
    first = 0 if args[0].is_floating_point() else 1
    weight, ids = args[first], args[1 - first]
    found = tracer.named(weight)
    if found is None:
        return func(*args, **kwargs)

    before, after = args[:first], args[first + 1 :]

    def look_up(w: torch.Tensor) -> torch.Tensor:
        return func(*before, w, *after, **kwargs)

    return tracer.visitor.embedding(found[0], ids, weight, look_up)


def _gather(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a matrix: x[index], x.index_select(0, index)."""
    index = args[-1] if len(args) == 2 or args[1:2] == (0,) else None
    index = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
    if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype == torch.int64 and args[0].dim() == 2:
        tracer.gathered.append((index, args[0].shape[0], len(tracer.path)))
    return func(*args, **kwargs)


def _softmax(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """A softmax in a module whose name says attention: eager attention's scores and probabilities."""
    if not tracer.path or not architectures.is_attention(tracer.path[-1]):
        return func(*args, **kwargs)
    # Behind a mask that was applied before stand infinities, or the format's least number: no values of the site.
    visible = args[0] > torch.finfo(args[0].dtype).min / 2
    scores = tracer.visitor.values(tracer.site("scores"), args[0].masked_fill(~visible, 0.0))
    scores = torch.where(visible, scores, args[0])
    return tracer.visitor.values(tracer.site("probabilities"), func(scores, *args[1:], **kwargs))


def _gradient(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    raise BadModel(
        "expected a forward without a backward pass of its own, got gradients in it, as forces of an energy: audit the "
        "part that gives what they are of"
    )


_aten, _functional, _Tensor = torch.ops.aten, torch.nn.functional, torch.Tensor
_PRODUCTS = (torch.matmul, _Tensor.matmul, _Tensor.__matmul__, torch.mm, _Tensor.mm)
_ATEN_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.bmm.default)
_CONVOLUTIONS = (_functional.conv1d, _functional.conv2d, _functional.conv3d)
_ATEN_CONVOLUTIONS = tuple(
    convolve for each in (_aten.conv1d, _aten.conv2d, _aten.conv3d) for convolve in (each.default, each.padding)
)
_TRANSPOSED = (_functional.conv_transpose1d, _functional.conv_transpose2d)
_ATEN_TRANSPOSED = (_aten.conv_transpose1d.default, _aten.conv_transpose2d.input)
_CALLS: dict[Handler, tuple[Any, ...]] = {
    _product(0, transposed=False, names=("input", "weight", "bias")): (_functional.linear, _aten.linear.default),
    matmul: (*_PRODUCTS, *_ATEN_PRODUCTS, torch.bmm, _Tensor.bmm),
    baddbmm: (torch.baddbmm, _Tensor.baddbmm, _aten.baddbmm.default),
    grouped: (_functional.grouped_mm, torch._grouped_mm),
    einsum: (torch.einsum,),
    convolution: (*_CONVOLUTIONS, *_ATEN_CONVOLUTIONS),
    transposed_convolution: (*_TRANSPOSED, *_ATEN_TRANSPOSED),
    _product(1, transposed=True): (torch.addmm, _aten.addmm.default),
    _embedding: (_functional.embedding, _aten.embedding.default),
    scaled_dot_product: (_functional.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default),
    multihead: (_functional.multi_head_attention_forward,),
    _softmax: (_functional.softmax, torch.softmax, _Tensor.softmax),
    layers(lstm): (torch.lstm, _aten.lstm.input),
    layers(gru): (torch.gru, _aten.gru.input),
    layers(rnn_tanh): (torch.rnn_tanh, _aten.rnn_tanh.input),
    layers(rnn_relu): (torch.rnn_relu, _aten.rnn_relu.input),
    one(lstm): (torch.lstm_cell, _aten.lstm_cell.default),
    one(gru): (torch.gru_cell, _aten.gru_cell.default),
    one(rnn_tanh): (torch.rnn_tanh_cell, _aten.rnn_tanh_cell.default),
    one(rnn_relu): (torch.rnn_relu_cell, _aten.rnn_relu_cell.default),
    _gradient: (torch.autograd.grad, torch.autograd.backward, _Tensor.backward),
    _gather: (_Tensor.__getitem__, torch.index_select, _Tensor.index_select),
}
_HANDLERS = {call: handler for handler, calls in _CALLS.items() for call in calls}
