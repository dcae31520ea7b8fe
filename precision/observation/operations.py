"""The functions of torch that are sites, opened: attention, products with parameters, convolutions, recurrent layers.

Each is computed by its definition, with the products and stages in it handed to the visitor. Convolutions are products
of windows; a parameter [E, ...] that is multiplied with as many matrices holds experts, each a product of its own.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import checkpoint

from assay.configs import architectures
from assay.precision.errors import BadModel
from assay.precision.observation import groups
from assay.precision.observation.tracer import Handler, ParameterRef, Steps, Tracer, Visitor, opens
from assay.runtime.memory import trim_heap

_SIGNATURE = inspect.signature(torch.nn.functional.multi_head_attention_forward)
_SCORES = 1 << 24
"""Scores computed at once without gradients: 64 MiB of float32, so that memory grows with T and not with T x T."""
_CLOSED = ("bias_k", "bias_v", "use_separate_proj_weight", "add_zero_attn", "static_k", "static_v")
"""Arguments of multi-head attention with which it runs unchanged, without sites."""


def scaled_dot_product(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Handle torch.nn.functional.scaled_dot_product_attention."""
    names = {"query": "q", "key": "k", "value": "v"}
    return _attention(tracer, *args, **{names.get(name, name): value for name, value in kwargs.items()})[0]


def _attention(
    tracer: Tracer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output and probabilities by the definition, with sites at every stage: q [..., H, S, D], k and v [...,
    Hkv, S, D].

    Without gradients long sequences run in chunks of queries, each of which sees all keys, so every stage rounds as in
    one piece: the scales of scores and probabilities are within rows. The probabilities are then those of the last
    chunk; ``whole``: of all queries, at once.
    """
    if tracer.caches(lambda: is_causal or not _sees_ahead(q, k, attn_mask)):
        k, v = tracer.stage("kv_cache", k, "keys"), tracer.stage("kv_cache", v, "values")
        q = tracer.stage("kv_cache", q, "queries")
    q, k, v = tracer.stage("q", q), tracer.stage("k", k), tracer.stage("v", v)
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    rows, count = max(q.shape[-2], 1), q.numel() // max(q.shape[-1], 1) * k.shape[-2]
    step = rows if whole or torch.is_grad_enabled() else max(_SCORES * rows // max(count, 1), 1)
    outputs, probabilities = [], q.new_empty(0)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        scores = tracer.stage("scores", q[..., some, :] @ k.mT)
        mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else attn_mask[..., some, :]
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(start)
        probabilities = tracer.stage("probabilities", _MaskedSoftmax.apply(scores, mask))  # type: ignore[no-untyped-call]
        outputs.append(probabilities @ v)
    return tracer.stage("output", outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)), probabilities


def _sees_ahead(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Return whether most visible keys are seen by the query before their own, as in encoders, which keep no cache;
    keys of padding aren't visible."""
    if not 1 < q.shape[-2] == k.shape[-2]:
        return False
    if mask is None:
        return True
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if mask.shape[-2] == 1:
        return bool(visible[..., 1:].any())
    return bool(visible.diagonal(1, -2, -1).sum() > 0.5 * visible[..., 1:].any(-2).sum())


def multihead(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle `multi_head_attention_forward` of one sequence with itself: query [L, B, E] or [L, E]."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    p = given.arguments
    query, heads = p["query"], p["num_heads"]
    inner, outer = tracer.named(p["in_proj_weight"]), tracer.named(p["out_proj_weight"])
    alone = p["key"] is query and p["value"] is query and query.dim() == 3
    shut = any(p[name] is not None and p[name] is not False for name in _CLOSED)
    if not alone or inner is None or outer is None or shut:
        return func(*args, **kwargs)
    x = query.transpose(0, 1)
    projected = tracer.product(p["in_proj_weight"], x, inner, lambda a, w: _linear(a, w, p["in_proj_bias"]))
    q, k, v = (torch.unflatten(part, -1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    # Both masks as one additive mask, [B or 1, H or 1, L, L]: -inf where a boolean one is True.
    given_mask, padding, mask = p["attn_mask"], p["key_padding_mask"], None
    if given_mask is not None and given_mask.dim() == 3:
        given_mask = torch.unflatten(given_mask, 0, (-1, heads))
    for each in (given_mask, None if padding is None else padding[:, None, None, :]):
        if each is not None:
            if each.dtype == torch.bool:
                each = torch.zeros_like(each, dtype=x.dtype).masked_fill_(each, float("-inf"))
            mask = each if mask is None else mask + each
    out, probabilities = _attention(tracer, q, k, v, mask, whole=p["need_weights"])
    x = out.transpose(1, 2).flatten(-2)
    out = tracer.product(p["out_proj_weight"], x, outer, lambda a, w: _linear(a, w, p["out_proj_bias"]))
    out = out.transpose(0, 1)
    if not p["need_weights"]:
        return out, None
    return out, probabilities.mean(1) if p["average_attn_weights"] else probabilities


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax along the last dimension under a boolean mask (True: visible) or an additive one; zero where nothing is
    visible.

    One function, because behind a mask the gradient of a softmax is zero by itself.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = scores.softmax(-1)
        if mask is not None and mask.dtype == torch.bool and not bool(mask.any(-1).all()):
            probabilities.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
        ctx.save_for_backward(probabilities)
        ctx.added = None if mask is None else mask.shape
        return probabilities

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        gradient = torch._softmax_backward_data(g, p, -1, p.dtype)
        # What is added to scores may be learnt, as biases of distances are.
        return gradient, gradient.sum_to_size(ctx.added) if ctx.needs_input_grad[1] else None


_linear = torch.nn.functional.linear
_PLAIN = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def matmul(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle torch.matmul, mm and bmm with a parameter on either side: [K, N] or [E, K, N] on the right, [M, K] or [E,
    M, K] on the left."""
    if len(args) != 2 or kwargs:
        return func(*args, **kwargs)
    one, other = args
    for x, weight, left in ((one, other, False), (other, one, True)):
        parameter = tracer.named(weight)
        if parameter is None or not isinstance(x, Tensor) or weight.dim() not in (2, 3):
            continue
        if tracer.named(x) is not None or x.dim() < 2:  # two parameters, or a vector
            return func(*args, **kwargs)
        rows, kernel = (x.mT, weight) if left else (x, weight.mT)
        out = _matrix_product(tracer, kernel, rows, parameter)
        if out is not None:
            return out.mT if left else out
    return func(*args, **kwargs)


def baddbmm(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle torch.baddbmm of a bias, x [E, T, K] and a parameter [E, K, N], without factors."""
    parameter = tracer.named(args[2]) if len(args) == 3 and not kwargs else None
    out = None if parameter is None else _matrix_product(tracer, args[2].mT, args[1], parameter)
    return func(*args, **kwargs) if out is None else args[0] + out


def grouped(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle torch.nn.functional.grouped_mm of x [T, K], rows sorted by experts that end at ``offs``, and a parameter
    [E, K, N]."""
    if len(args) < 2:
        return func(*args, **kwargs)
    x, weight = args[:2]
    ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
    parameter = tracer.named(weight)
    others = [*args[3:], *(value for name, value in kwargs.items() if name not in ("offs", "out_dtype"))]
    if x.dim() != 2 or ends is None or any(each is not None for each in others):
        return func(*args, **kwargs)
    if parameter is None or weight.dim() != 3 or not tracer.holds_matrices(weight):
        return func(*args, **kwargs)
    pieces, start = [], 0
    gathered = tracer.gathered[-1] if tracer.gathered else None
    for expert, end in enumerate(ends.tolist()):
        if gathered is not None and len(gathered[0]) == len(x):  # rows of one expert, of those that were gathered
            tracer.gathered.append((gathered[0][start:end], *gathered[1:]))
        pieces.append(tracer.product(weight[expert].mT, x[start:end], (parameter[0], expert), _linear))
        if gathered is not None and len(gathered[0]) == len(x):
            tracer.gathered.pop()
        start = end
    rest = x.new_zeros(len(x) - start, weight.shape[-1])
    return torch.cat([*pieces, rest])


def einsum(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle torch.einsum of a tensor and a parameter whose subscripts are summed or kept, each once."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    plain = _PLAIN.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if plain is None or len(operands) != 2 or kwargs:
        return func(*args, **kwargs)
    orders = ((operands[0], plain[1], operands[1], plain[2]), (operands[1], plain[2], operands[0], plain[1]))
    for x, of_x, weight, of_weight in orders:
        parameter = tracer.named(weight)
        if parameter is None:
            continue
        both = tracer.named(x) is not None
        out = None if both else _by_letters(tracer, x, of_x, weight, of_weight, plain[3], parameter)
        return func(*args, **kwargs) if out is None else out
    return func(*args, **kwargs)


def _by_letters(
    tracer: Tracer, x: Tensor, of_x: str, weight: Tensor, of_weight: str, of_out: str, parameter: ParameterRef
) -> Tensor | None:
    """Return the product by its subscripts; None where a subscript occurs twice in one operand or in one operand alone,
    nothing is summed, or matrices aren't along the first dimension of a parameter, which holds no experts then."""
    if any(len(set(each)) < len(each) for each in (of_x, of_weight, of_out)):
        return None
    rows = "".join(letter for letter in of_x if letter in of_out and letter not in of_weight)
    summed = "".join(letter for letter in of_x if letter in of_weight and letter not in of_out)
    outputs = "".join(letter for letter in of_weight if letter in of_out and letter not in of_x)
    held = "".join(letter for letter in of_weight if letter in of_out and letter in of_x)  # which count matrices
    if not summed or len(of_x) > len(rows + summed + held) or len(of_weight) > len(outputs + summed + held):
        return None
    if held and (held != of_weight[0] or not tracer.holds_matrices(weight)):
        return None

    def ordered(values: Tensor, before: str, after: str) -> Tensor:
        return values.permute(*(before.index(letter) for letter in after))

    inputs = ordered(x, of_x, held + rows + summed).flatten(len(held + rows))
    kernel = ordered(weight, of_weight, held + outputs + summed).flatten(len(held + outputs))
    sizes = [weight.shape[of_weight.index(letter)] for letter in outputs]
    kernel = kernel.flatten(len(held), -2) if sizes else kernel.unsqueeze(-2)
    if held:
        pieces = (tracer.product(kernel[e], inputs[e], (parameter[0], e), _linear) for e in range(len(weight)))
        out = torch.stack(list(pieces))
    else:
        out = tracer.product(kernel, inputs, parameter, _linear)
    out = torch.unflatten(out, -1, sizes) if sizes else out[..., 0]
    return ordered(out, held + rows + outputs, of_out)


def _matrix_product(tracer: Tracer, weight: Tensor, x: Tensor, parameter: ParameterRef) -> Tensor | None:
    """Return the product of x [..., T, K] with a weight [N, K], or of x [..., E, T, K] with matrices [E, N, K]; None
    for matrices that match no dimension of x."""
    if weight.dim() == 2:
        return tracer.product(weight, x, parameter, _linear)
    if x.dim() < 3 or x.shape[-3] not in (1, len(weight)) or not tracer.holds_matrices(weight):
        return None
    rows = x.expand(*x.shape[:-3], len(weight), *x.shape[-2:]).unbind(-3)
    return torch.stack([tracer.product(weight[e], each, (parameter[0], e), _linear) for e, each in enumerate(rows)], -3)


_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Handle torch.nn.functional.conv1d, conv2d and conv3d: input [B, G * C, ...] or [G * C, ...], weight [N, C,
    ...]."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    parameter = tracer.named(weight)
    if parameter is None:
        return func(*args, **kwargs)
    sides = weight.dim() - 2
    strides, dilations = (_each(given.get(name, 1), sides) for name in ("stride", "dilation"))
    whole, kernel, padding = x if x.dim() == weight.dim() else x[None], weight.shape[2:], given.get("padding", 0)
    if padding == "same":
        reaches = [dilation * (length - 1) for length, dilation in zip(kernel, dilations, strict=True)]
        pairs = [(each // 2, each - each // 2) for each in reaches]
    else:
        pairs = [(each, each) for each in _each(0 if padding == "valid" else padding, sides)]
    windows = torch.nn.functional.pad(whole, list(chain.from_iterable(reversed(pairs))))
    for side in range(sides):
        reach = dilations[side] * (kernel[side] - 1) + 1
        windows = windows.unfold(2 + side, reach, strides[side])[..., :: dilations[side]]
    # Every window is a row: [B, ..., C * kernel].
    windows = windows.permute(0, *range(2, 2 + sides), 1, *range(2 + sides, 2 + 2 * sides)).flatten(1 + sides)
    out = tracer.product(
        weight.flatten(1), windows.flatten(1, -2), parameter, lambda a, w: groups.linear(a, w, bias), role="convolution"
    )
    out = torch.unflatten(out.mT, -1, windows.shape[1:-1])
    return out if whole is x else out[0]


def transposed_convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Handle torch.nn.functional.conv_transpose1d and 2d: input [B, G * C, ...], weight [G * C, N, ...]. Every position
    of the input is a row, multiplied with the kernels, and the products are added where they overlap."""
    given = dict(zip(_TRANSPOSED_NAMES, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    parameter = tracer.named(weight)
    sides = weight.dim() - 2
    if parameter is None or x.dim() != weight.dim() or sides > 2:
        return func(*args, **kwargs)
    kernel, length = (1, *weight.shape[2:])[-2:], (1, *x.shape[2:])[-2:]  # of one side: a picture of one row
    stride, padding, dilation, further = (
        (usual, *_each(given.get(name, usual), sides))[-2:]
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    )
    size = tuple(
        (length[side] - 1) * stride[side] - 2 * padding[side] + dilation[side] * (kernel[side] - 1) + further[side] + 1
        for side in range(2)
    )
    kernels = weight.unflatten(0, (given.get("groups", 1), -1)).flatten(2).mT.flatten(0, 1)
    out = tracer.product(kernels, x.flatten(2).mT, parameter, groups.linear, role="convolution")
    folded = torch.nn.functional.fold(out.mT, size, kernel, dilation, padding, stride)
    folded = folded if sides == 2 else folded[:, :, 0]
    return folded if bias is None else folded + bias.reshape(-1, *[1] * sides)


def _each(value: Any, sides: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    return given * sides if len(given) == 1 else given


State = tuple[Tensor, ...]
"""h [B, H], and of an LSTM c [B, H]."""
Cell = Callable[[Tensor, Tensor, State], State]
"""The multiplied input and state with biases [B, gates * H] and the state before, to the next state."""


def lstm(x: Tensor, h: Tensor, state: State) -> State:
    """Gates in the order of input, forget, cell, output."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: Tensor, h: Tensor, state: State) -> State:
    """Gates in the order of reset, update, new."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + (xz + hz).sigmoid() * (state[0] - n),)


_CELLS: dict[str, Cell] = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": lambda x, h, state: ((x + h).tanh(),),
    "rnn_relu": lambda x, h, state: ((x + h).relu(),),
}


def layer_handler(cell: Cell) -> Handler:
    """Handle torch.lstm, gru, rnn_tanh, rnn_relu of input [T, B, I] or [B, T, I], state [L * D, B, H] of L layers and D
    directions, weights, whether there are biases, L, dropout, training, whether D is 2, whether B is first.

    A layer's input takes one product for all steps, its state one for each step. The weights of a layer and direction
    are [w_ih, w_hh, b_ih, b_hh, w_hr], biases and the state's projection w_hr where there are any. Formulas: the
    documentation of torch.nn.LSTM, GRU and RNN. Packed sequences and active dropout run unchanged, without sites.
    """

    def run(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 9 or kwargs or not isinstance(args[3], bool):  # a packed sequence has its lengths second
            return func(*args, **kwargs)
        x, state, flat, biased, count, dropout, training, both, batch_first = args
        if any(tracer.named(weight) is None for weight in flat if weight.dim() > 1) or (training and dropout):
            return func(*args, **kwargs)
        before = [state] if isinstance(state, Tensor) else state
        directions = 2 if both else 1
        each = len(flat) // (count * directions)
        after: list[State] = []
        x = x if batch_first else x.transpose(0, 1)
        for layer in range(count):
            outputs = []
            for back in range(directions):
                index = layer * directions + back
                w_ih, w_hh, *rest = flat[index * each : (index + 1) * each]
                b_ih, b_hh, *rest = rest if biased else (None, None, *rest)
                w_hr = rest[0] if rest else None
                step_state: State = tuple(values[index] for values in before)
                times = _step_product(tracer, w_ih, x, b_ih).unbind(1)
                of_state, of_projection = Steps(len(times)), Steps(len(times))
                steps = []
                for inputs in reversed(times) if back else times:
                    h, *c = cell(inputs, _step_product(tracer, w_hh, step_state[0], b_hh, of_state), step_state)
                    if w_hr is not None:
                        h = _step_product(tracer, w_hr, h, None, of_projection)
                    step_state = h, *c
                    steps.append(h)
                outputs.append(torch.stack(steps[::-1] if back else steps, 1))
                after.append(step_state)
            x = torch.cat(outputs, -1)
        finals = (torch.stack(values) for values in zip(*after, strict=True))
        return x if batch_first else x.transpose(0, 1), *finals

    return run


def cell_handler(cell: Cell) -> Handler:
    """Handle torch.lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell of input [B, I], state [B, H], weights and
    biases."""

    def run(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        x, state, *weights = args
        parameters = [tracer.named(weight) for weight in weights[:2]]
        if None in parameters or len(weights) < 2 or kwargs:
            return func(*args, **kwargs)
        before = (state,) if isinstance(state, Tensor) else tuple(state)
        w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
        after = cell(_step_product(tracer, w_ih, x, b_ih), _step_product(tracer, w_hh, before[0], b_hh), before)
        return after[0] if isinstance(state, Tensor) else after

    return run


def _step_product(tracer: Tracer, weight: Tensor, x: Tensor, bias: Tensor | None, steps: Steps | None = None) -> Tensor:
    parameter = tracer.named(weight)
    assert parameter is not None
    return tracer.product(weight, x, parameter, lambda a, w: _linear(a, w, bias), role="recurrence", steps=steps)


_RELEASE_BYTES = 1 << 25  # Bytes by which a model of streamed weights may grow in memory before freed ones are returned


@contextmanager
def traced(model: torch.nn.Module, visitor: Visitor) -> Iterator[Tracer]:
    """Send calls below ``model`` through the visitor within this context; hooks are removed afterwards."""
    tracer = Tracer(model, visitor, _HANDLERS)
    with ExitStack() as after:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # which nothing can be seen in
                continue
            enter, leave = partial(_enter, tracer, name), partial(_leave, tracer, name)
            after.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            after.callback(module.register_forward_hook(leave, always_call=True).remove)
        after.callback(setattr, visitor, "tracer", None)
        visitor.tracer = tracer
        # Checkpoints call their functions: recomputation in a backward pass would see no sites.
        called: dict[str, Any] = {
            "CheckpointFunction": _Called,
            "_checkpoint_without_reentrant_generator": _around,
        }
        after.enter_context(tracer)
        after.enter_context(patch.multiple(checkpoint, **called))
        yield tracer


class _Called:
    @staticmethod
    def apply(run: Callable[..., Any], _keeps_rng: bool, *args: Any) -> Any:
        return run(*args)


def _around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _beside(tracer: Tracer, name: str, x: Any) -> Tensor | None:
    """Return the visitor's values of a site that a hook sees, None for what has no sites; the visitor's computations
    are no part of the model."""
    if not isinstance(x, Tensor) or not opens(x) or not x.is_floating_point():
        return None
    with torch._C.DisableTorchFunction():
        return tracer.values(name, x)


def _enter(tracer: Tracer, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    tracer.path.append(name)
    tracer.ran.add(name)
    first = _beside(tracer, f"{name}:input", args[0]) if args and is_norm(module) else None
    return None if first is None else ((first, *args[1:]), kwargs)


def _leave(tracer: Tracer, name: str, module: torch.nn.Module, _args: object, output: Any) -> Any:
    tracer.path.pop()
    layer = is_layer(name, module)
    if layer and tracer.streams:
        trim_heap(_RELEASE_BYTES)
    while tracer.gathered and tracer.gathered[-1][2] > len(tracer.path):
        tracer.gathered.pop()
    if not layer and not is_norm(module):
        return None
    first = output[0] if isinstance(output, tuple) and output else output
    first = _beside(tracer, f"{name}:{'output' if is_norm(module) else 'residual'}", first)
    return (first, *output[1:]) if isinstance(output, tuple) and first is not None else first


def is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") or isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)


def is_layer(name: str, module: torch.nn.Module) -> bool:
    """Return whether a module is one of a stack of layers: numbered, and with submodules."""
    listed = name.rpartition(".")[2].isdecimal() and not isinstance(module, torch.jit.ScriptModule)
    return listed and any(module.children())


def _linear_handler(x_at: int, *, transposed: bool, names: tuple[str, ...] = ()) -> Handler:
    """Handle a function that multiplies its argument ``x_at`` with the next: a parameter W [N, K], or [K, N] as in
    GPT-2's Conv1D and exported graphs. names: of arguments that may be passed by name."""

    def handle(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = [*args, *(kwargs.get(name) for name in names[len(args) :])]
        weight = arguments[x_at + 1] if len(arguments) > x_at + 1 and (names or not kwargs) else None
        parameter = tracer.named(weight)
        if weight is None or parameter is None or weight.dim() != 2:
            return func(*args, **kwargs)
        # Without the weight, which may be streamed.
        before, x, after = arguments[:x_at], arguments[x_at], arguments[x_at + 2 :]
        if not transposed:
            return tracer.product(weight, x, parameter, lambda a, w: func(*before, a, w, *after))
        return tracer.product(weight.mT, x, parameter, lambda a, w: func(*before, a, w.mT, *after))

    return handle


def _embedding(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) < 2:
        args = (*args, *(kwargs[name] for name in ("input", "weight")[len(args) :]))
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "weight")}
    # aten.embedding has the weight first, torch.nn.functional.embedding the indices.
    first = 0 if args[0].is_floating_point() else 1
    weight, ids = args[first], args[1 - first]
    parameter = tracer.named(weight)
    if parameter is None:
        return func(*args, **kwargs)

    before, after = args[:first], args[first + 1 :]
    tracer.reaches(parameter[0])
    return tracer.visitor.embedding(parameter[0], ids, weight, lambda w: func(*before, w, *after, **kwargs))


def _gather(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Note rows of a matrix: x[index], x.index_select(0, index)."""
    index = args[-1] if len(args) == 2 or args[1:2] == (0,) else None
    index = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
    if isinstance(index, Tensor) and index.dim() == 1 and index.dtype == torch.int64 and args[0].dim() == 2:
        tracer.gathered.append((index, args[0].shape[0], len(tracer.path)))
    return func(*args, **kwargs)


def _softmax(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle a softmax in a module whose name says attention: eager attention's scores and probabilities."""
    if not tracer.path or not architectures.is_attention(tracer.path[-1]):
        return func(*args, **kwargs)
    # Behind a mask that was applied before stand infinities, or the format's least number: no values of the site.
    visible = args[0] > torch.finfo(args[0].dtype).min / 2
    scores = tracer.stage("scores", args[0].masked_fill(~visible, 0.0))
    scores = torch.where(visible, scores, args[0])
    return tracer.stage("probabilities", func(scores, *args[1:], **kwargs))


def _gradient(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    raise BadModel(
        "expected a forward without a backward pass of its own, got gradients in it, as forces of an energy: audit the "
        "part that gives what they are of"
    )


_aten, _functional, _Tensor = torch.ops.aten, torch.nn.functional, Tensor
_PRODUCTS = (torch.matmul, _Tensor.matmul, _Tensor.__matmul__, torch.mm, _Tensor.mm)
_ATEN_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.bmm.default)
_CONVOLUTIONS = (_functional.conv1d, _functional.conv2d, _functional.conv3d)
_ATEN_CONVOLUTIONS = tuple(
    convolve for each in (_aten.conv1d, _aten.conv2d, _aten.conv3d) for convolve in (each.default, each.padding)
)
_TRANSPOSED = (_functional.conv_transpose1d, _functional.conv_transpose2d)
_ATEN_TRANSPOSED = (_aten.conv_transpose1d.default, _aten.conv_transpose2d.input)
_CALLS: dict[Handler, tuple[Any, ...]] = {
    _linear_handler(0, transposed=False, names=("input", "weight", "bias")): (_functional.linear, _aten.linear.default),
    matmul: (*_PRODUCTS, *_ATEN_PRODUCTS, torch.bmm, _Tensor.bmm),
    baddbmm: (torch.baddbmm, _Tensor.baddbmm, _aten.baddbmm.default),
    grouped: (_functional.grouped_mm, torch._grouped_mm),
    einsum: (torch.einsum,),
    convolution: (*_CONVOLUTIONS, *_ATEN_CONVOLUTIONS),
    transposed_convolution: (*_TRANSPOSED, *_ATEN_TRANSPOSED),
    _linear_handler(1, transposed=True): (torch.addmm, _aten.addmm.default),
    _embedding: (_functional.embedding, _aten.embedding.default),
    scaled_dot_product: (_functional.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default),
    multihead: (_functional.multi_head_attention_forward,),
    _softmax: (_functional.softmax, torch.softmax, _Tensor.softmax),
    _gradient: (torch.autograd.grad, torch.autograd.backward, _Tensor.backward),
    _gather: (_Tensor.__getitem__, torch.index_select, _Tensor.index_select),
}
for _name, _cell in _CELLS.items():
    _CALLS[layer_handler(_cell)] = getattr(torch, _name), getattr(_aten, _name).input
    _CALLS[cell_handler(_cell)] = getattr(torch, f"{_name}_cell"), getattr(_aten, f"{_name}_cell").default
_HANDLERS = {call: handler for handler, calls in _CALLS.items() for call in calls}
