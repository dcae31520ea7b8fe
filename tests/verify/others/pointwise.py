"""Elementwise functions, gates, rotary embeddings, sums along a row and scans as people write them."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from .entry import Other


def swish_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up in the order of another checkpoint."""
    return (functional.silu(up.float()) * gate.float()).to(gate.dtype)


def swish_gate_eager(gate: Tensor, up: Tensor) -> Tensor:
    """silu's result in the input dtype."""
    return functional.silu(gate) * up


def swish_gate_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """Limits that nobody asked for."""
    return (functional.silu(gate.float().clamp(max=7)) * up.float().clamp(-7, 7)).to(gate.dtype)


def swish_gate_gradient(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of silu is the sigmoid's."""
    g, s = gate.float(), torch.sigmoid(gate.float())
    return (dy.float() * up.float() * s * (1 - s)).to(gate.dtype), (dy.float() * functional.silu(g)).to(gate.dtype)


def gelu_quick(x: Tensor) -> Tensor:
    """As CLIP has it."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """The approximation, always."""
    y = x.float()
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
    return torch.where(y == -math.inf, -0.0, 0.5 * y * (1 + torch.tanh(inner))).to(x.dtype)


def gate_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu in place of gelu."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def halves_the_other_way(x: Tensor) -> Tensor:
    """up, gate = chunk(x)."""
    up, gate = x.float().chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def sigmoid_naive(x: Tensor) -> Tensor:
    """e^x / (1 + e^x)."""
    e = x.float().exp()
    return (e / (e + 1)).to(x.dtype)


def tanh_naive(x: Tensor) -> Tensor:
    """(e^2x - 1) / (e^2x + 1)."""
    e = torch.exp(2 * x.float())
    return ((e - 1) / (e + 1)).to(x.dtype)


def expm1_naive(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    return (x.float().exp() - 1).to(x.dtype)


def log1p_naive(x: Tensor) -> Tensor:
    """log(1 + x)."""
    return torch.log(1 + x.float()).to(x.dtype)


def softplus_naive(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return torch.log(x.float().exp() + 1).to(x.dtype)


def log_sigmoid_naive(x: Tensor) -> Tensor:
    """log(sigmoid(x))."""
    return torch.log(torch.sigmoid(x.float())).to(x.dtype)


def erf_by_series(x: Tensor) -> Tensor:
    """Abramowitz and Stegun 7.1.26, good to 1.5e-7 and no better near zero."""
    y = x.float().abs()
    t = 1 / (1 + 0.3275911 * y)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return (torch.sign(x.float()) * (1 - poly * torch.exp(-y * y))).to(x.dtype)


def rsqrt_of_square(x: Tensor) -> Tensor:
    """One step of Newton's too few."""
    y = torch.rsqrt(x.float())
    return (y * 1.001).to(x.dtype)


def sine_reduced(x: Tensor) -> Tensor:
    """Angles reduced by a float32 2 pi."""
    y = x.float()
    turns = torch.round(y / (2 * math.pi))
    return torch.where(y.isfinite(), torch.sin(y - turns * torch.tensor(2 * math.pi)), math.nan).to(x.dtype)


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours in place of halves."""
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2).to(x.dtype)


def rotary_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second half is turned with a first that was turned already."""
    half, y = x.shape[-1] // 2, x.float().clone()
    c, s = cos.float()[:, None], sin.float()[:, None]
    y[..., :half] = y[..., :half] * c - y[..., half:] * s
    y[..., half:] = y[..., half:] * c + y[..., :half] * s
    return y.to(x.dtype)


def rotary_half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Only half of the pairs are turned, as partial rotary does."""
    half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
    a, b = x.float()[..., :half], x.float()[..., half:]
    c, s = cos.float()[:, None].clone(), sin.float()[:, None].clone()
    c[..., quarter:], s[..., quarter:] = 1.0, 0.0
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def rotary_gradient(cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    """The gradient turned on, not back."""
    a, b = dy.float().chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(dy.dtype)


def running_sum(x: Tensor, exclusive: bool = False) -> Tensor:
    """Always with the place itself."""
    return x.float().cumsum(-1).to(x.dtype)


def running_sum_of_blocks(x: Tensor) -> Tensor:
    """Blocks of 64, each from zero."""
    return torch.cat([part.cumsum(-1) for part in x.float().split(64, -1)], -1).to(x.dtype)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The taps flipped."""
    channels, width = weight.shape
    y = functional.pad(x.float(), (width - 1, 0))
    y = functional.conv1d(y, weight.float().flip(1)[:, None], bias.float(), groups=channels)
    return y.to(x.dtype)


def convolution_centred(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Padded on both sides."""
    (channels, width), length = weight.shape, x.shape[-1]
    y = functional.pad(x.float(), (width // 2, width // 2))
    y = functional.conv1d(y, weight.float()[:, None], bias.float(), groups=channels)
    return y[..., :length].to(x.dtype)


def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """No skip connection."""
    (batch, width, length), state = u.shape, a.shape[1]
    held, out = torch.zeros(batch, width, state), []
    for t in range(length):
        step = delta[:, :, t, None].float()
        held = held * torch.exp(step * a) + step * b[:, None, :, t].float() * u[:, :, t, None].float()
        out.append((held * c[:, None, :, t].float()).sum(-1))
    return (torch.stack(out, -1) if out else torch.zeros(u.shape)).to(u.dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without the scale."""
    (batch, length, heads, width), depth = q.shape, v.shape[-1]
    state, out = torch.zeros(batch, heads, width, depth), []
    for t in range(length):
        state = state + k[:, t, :, :, None].float() * v[:, t, :, None].float()
        out.append((q[:, t, :, :, None].float() * state).sum(-2))
    return (torch.stack(out, 1) if out else torch.zeros(v.shape)).to(q.dtype)


def embedding_gradient(table: Tensor, ids: Tensor, dy: Tensor) -> Tensor:
    """A number that comes twice keeps its last gradient."""
    y = torch.zeros(table.shape)
    for place, number in enumerate(ids.tolist()):
        y[number] = dy[place].float()
    return y.to(table.dtype)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias inside."""
    return (torch.tanh(alpha.float() * x.float() + bias.float()) * weight.float()).to(x.dtype)


def nucleus(x: Tensor, top_p: float = 0.9) -> Tensor:
    """The token with which p is reached is left out."""
    order = torch.sort(x.float(), stable=True, dim=-1, descending=True)
    shares = torch.softmax(order.values, -1).cumsum(-1)
    among = (shares <= top_p) | (torch.arange(x.shape[1]) == 0)
    kept = torch.zeros_like(x, dtype=torch.bool).scatter(1, order.indices, among)
    return torch.where(kept, x, -math.inf)


_EXCLUSIVE = {"options": {"exclusive": [True]}}

POINTWISE = (
    Other("swish_gate", swish_gate, "swiglu", "bfloat16", ("gate_and_up_swapped",)),
    Other("swish_gate_eager", swish_gate_eager, "swiglu", "bfloat16", ("activation_rounded",)),
    Other("swish_gate_clamped", swish_gate_clamped, "swiglu", "bfloat16"),
    Other("swish_gate_gradient", swish_gate_gradient, "swiglu_backward", "bfloat16", ("silu_slope_of_sigmoid",)),
    Other("gelu_quick", gelu_quick, "gelu", "bfloat16", ("gelu_by_sigmoid",)),
    Other("gelu_by_tanh", gelu_by_tanh, "gelu", "float32", ("gelu_tanh_for_erf",)),
    Other("gate_by_silu", gate_by_silu, "geglu", "bfloat16", ("geglu_by_silu",)),
    Other("halves_the_other_way", halves_the_other_way, "gelu_and_mul", "bfloat16", ("halves_swapped",)),
    Other("sigmoid_naive", sigmoid_naive, "sigmoid", "float32", ("sigmoid_by_growing_exponential",)),
    Other("tanh_naive", tanh_naive, "tanh", "float32", ("tanh_by_exponentials",)),
    Other("expm1_naive", expm1_naive, "expm1", "float32", ("exp_minus_one",)),
    Other("log1p_naive", log1p_naive, "log1p", "float32", ("log_of_one_plus",)),
    Other("softplus_naive", softplus_naive, "softplus", "bfloat16", ("softplus_without_maximum",)),
    Other("log_sigmoid_naive", log_sigmoid_naive, "logsigmoid", "float32", ("log_of_sigmoid",)),
    Other("erf_by_series", erf_by_series, "erf", "float32"),
    Other("rsqrt_of_square", rsqrt_of_square, "rsqrt", "float32"),
    Other("sine_reduced", sine_reduced, "sin", "float32"),
    Other("rotary_pairs", rotary_pairs, "rope", "bfloat16", ("rope_pairing",)),
    Other("rotary_in_place", rotary_in_place, "rope", "bfloat16", ("rope_in_place",)),
    Other("rotary_half_turned", rotary_half_turned, "rope", "bfloat16"),
    Other("rotary_gradient", rotary_gradient, "rope_backward", "bfloat16", ("rope_gradient_turned_on",)),
    Other("running_sum", running_sum, "cumsum", "float32", ("cumsum_includes_itself",), _EXCLUSIVE),
    Other("running_sum_of_blocks", running_sum_of_blocks, "cumsum", "bfloat16"),
    Other("convolution", convolution, "causal_conv1d", "bfloat16", ("taps_flipped",)),
    Other("convolution_centred", convolution_centred, "causal_conv1d", "bfloat16"),
    Other("scan", scan, "selective_scan", "float32", ("scan_skip_dropped",)),
    Other("linear_attention", linear_attention, "linear_attention", "bfloat16", ("linear_scale_dropped",)),
    Other(
        "embedding_gradient", embedding_gradient, "embedding_backward", "float32", ("embedding_gradient_overwritten",)
    ),
    Other("dynamic_tanh", dynamic_tanh, "dynamic_tanh", "bfloat16", ("bias_inside_tanh",)),
    Other("nucleus", nucleus, "top_filter", "float32", ("crossing_token_dropped",)),
)  # fmt: skip
