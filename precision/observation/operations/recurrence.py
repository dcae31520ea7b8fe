"""Recurrent layers step by step: what comes in and the state are multiplied with weights, as torch's own cells do it.

A layer's input takes one product for all steps, its state one a step. Weights of a layer and direction are [w_ih, w_hh,
b_ih, b_hh, w_hr], biases and the state's projection w_hr where there are any. Formulas: the documentation of
torch.nn.LSTM, GRU and RNN. Packed sequences and dropout that is on run as they are and have no site.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.precision.observation.tracer import Handler, Steps, Tracer

State = tuple[torch.Tensor, ...]
"""h [B, H], and of an LSTM c [B, H]."""
Cell = Callable[[torch.Tensor, torch.Tensor, State], State]
"""What came in and the state, each multiplied and their biases added [B, gates * H], and the state before, to the next
state."""


def lstm(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    """Gates in the order of input, forget, cell, output."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    """Gates in the order of reset, update, new."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + (xz + hz).sigmoid() * (state[0] - n),)


def rnn_tanh(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    """A plain recurrence."""
    return ((x + h).tanh(),)


def rnn_relu(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    """A plain recurrence without negative values."""
    return ((x + h).relu(),)


def layers(cell: Cell) -> Handler:
    """torch.lstm, gru, rnn_tanh, rnn_relu of input [T, B, I] or [B, T, I], state [L * D, B, H] of L layers and D
    directions, weights, whether there are biases, L, dropout, training, whether D is 2, whether B is first."""

    def run(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 9 or kwargs or not isinstance(args[3], bool):  # a packed sequence has its lengths second
            return func(*args, **kwargs)
        x, state, flat, biased, count, dropout, training, both, batch_first = args
        if any(tracer.named(weight) is None for weight in flat if weight.dim() > 1) or (training and dropout):
            return func(*args, **kwargs)
        before = [state] if isinstance(state, torch.Tensor) else state
        directions = 2 if both else 1
        each = len(flat) // (count * directions)
        after: list[State] = []
        x = x if batch_first else x.transpose(0, 1)
        for layer in range(count):
            outputs = []
            for back in range(directions):
                index = layer * directions + back
                weights = _split(flat[index * each : (index + 1) * each], biased)
                first = tuple(values[index] for values in before)
                output, last = _passed(tracer, cell, x, first, weights, backwards=bool(back))
                outputs.append(output)
                after.append(last)
            x = torch.cat(outputs, -1)
        finals = (torch.stack(values) for values in zip(*after, strict=True))
        return x if batch_first else x.transpose(0, 1), *finals

    return run


def one(cell: Cell) -> Handler:
    """torch.lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell of input [B, I], state [B, H], weights and biases."""

    def run(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        x, state, *weights = args
        found = [tracer.named(weight) for weight in weights[:2]]
        if None in found or len(weights) < 2 or kwargs:
            return func(*args, **kwargs)
        before = (state,) if isinstance(state, torch.Tensor) else tuple(state)
        w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
        after = cell(_product(tracer, w_ih, x, b_ih), _product(tracer, w_hh, before[0], b_hh), before)
        return after[0] if isinstance(state, torch.Tensor) else after

    return run


def _split(flat: Sequence[torch.Tensor], biased: bool) -> list[torch.Tensor | None]:
    """w_ih, w_hh, b_ih, b_hh, w_hr; None for what there isn't."""
    rest = flat[4:] if biased else flat[2:]
    return [*flat[:2], *(flat[2:4] if biased else (None, None)), *(rest or (None,))]


def _passed(
    tracer: Tracer,
    cell: Cell,
    x: torch.Tensor,
    state: State,
    weights: Sequence[torch.Tensor | None],
    *,
    backwards: bool,
) -> tuple[torch.Tensor, State]:
    """One layer in one direction over x [B, T, I]: its outputs [B, T, H] and its last state."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    times = _product(tracer, w_ih, x, b_ih).unbind(1)
    of_state, of_projection = Steps(len(times)), Steps(len(times))
    outputs = []
    for each in reversed(times) if backwards else times:
        h, *c = cell(each, _product(tracer, w_hh, state[0], b_hh, of_state), state)
        if w_hr is not None:
            h = _product(tracer, w_hr, h, None, of_projection)
        state = h, *c
        outputs.append(h)
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _product(
    tracer: Tracer, weight: torch.Tensor | None, x: torch.Tensor, bias: torch.Tensor | None, steps: Steps | None = None
) -> torch.Tensor:
    found = tracer.named(weight)
    assert weight is not None
    assert found is not None
    linear = torch.nn.functional.linear
    return tracer.product(weight, x, found, lambda a, w: linear(a, w, bias), role="recurrence", steps=steps)
