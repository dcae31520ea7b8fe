"""Faulty kernels that no fault model was made of, as people write them: whole, in chunks, with running sums.

Each has one fault, and says which fault models it is, if any. Explanations are measured on them
(benchmarks/verify/explanations.py, tests/verify/test_explain_others.py). Those in Triton are in `interpreted`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .entry import Table, listed
from .functions import erf_of_handbook
from .numerics import E2M1, LOG2_E, Kernel

Mask = Callable[[Tensor, int], Tensor]


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return x.var(-1, keepdim=True, correction=0)


def root(x: Tensor, eps: float = 1e-6) -> Tensor:
    """1 / sqrt(x + eps)."""
    return torch.rsqrt(x + eps)


def shifted(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def normalised(weights: Tensor) -> Tensor:
    return weights / total(weights)


def never_rescaled(x: Tensor, block: int) -> Tensor:
    """Softmax by an online sum that is never rescaled as the maximum grows."""
    largest, summed = torch.full((x.shape[0], 1), -math.inf), torch.zeros(x.shape[0], 1)
    for part in x.split(block, 1):
        largest = torch.maximum(largest, part.amax(1, keepdim=True))
        summed = summed + total(torch.exp(part - torch.where(largest.isinf(), 0.0, largest)))
    return torch.exp(x - largest) / summed


def last_unnormalised(x: Tensor) -> Tensor:
    """The last column is left out of the sum."""
    e = shifted(x).exp()
    return e / total(e[:, : max(x.shape[1] - 1, 1)])


def padded_softmax(x: Tensor) -> Tensor:
    """Padded with zeros to a multiple of 16."""
    return torch.softmax(F.pad(x, (0, -x.shape[1] % 16)), -1)[:, : x.shape[1]]


def unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch.var's default."""
    spread = x.var(-1, keepdim=True) if x.shape[1] > 1 else torch.zeros(x.shape[0], 1)
    return (x - mean(x)) / torch.sqrt(spread + 1e-5) * weight + bias


def by_deviation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w * (x - mean(x)) / (variance(x).sqrt() + 1e-5) + b


def by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Sum and sum of squares of one pass."""
    first, second, n = torch.zeros(x.shape[0], 1), torch.zeros(x.shape[0], 1), x.shape[1]
    for part in x.split(64, 1):
        first, second = first + total(part), second + total(part * part)
    centre = first / n
    return (x - centre) * torch.rsqrt((second / n - centre * centre).clamp(min=0) + 1e-5) * weight + bias


def rms_norm_llama(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the weight."""
    y = x.float()
    return weight * (y * torch.rsqrt(mean(y.pow(2)) + 1e-6)).to(x.dtype)


def rms_norm_half_squares(x: Tensor, weight: Tensor) -> Tensor:
    """Squares in float16."""
    return (x.float() * torch.rsqrt(mean((x * x).float()) + 1e-6) * weight.float()).to(x.dtype)


def add_norm_of_x(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is rounded before it is normalised."""
    y = (x + residual).float()
    return (y * torch.rsqrt(mean(y.square()) + 1e-6) * weight.float()).to(x.dtype), x + residual


def mean_over_block(x: Tensor, weight: Tensor) -> Tensor:
    """The mean over the block, not over the columns."""
    return x * root(mean(F.pad(x, (0, -x.shape[1] % 16)).square())) * weight


def rms_norm_gradient(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx without what the root depends on."""
    root = torch.rsqrt(mean(x.square()) + 1e-6)
    return dy * weight * root, (dy * x * root).sum(0)


entropy = F.cross_entropy


def losses(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each token, zero where it has no label."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def over_labels(loss: Tensor, target: Tensor) -> Tensor:
    return loss.sum() / (target != -100).sum()


def loss_loading_ignored(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Every label is loaded, an ignored one too, and counted zero times."""
    kept, memory = target != ignore_index, logits.untyped_storage().nbytes() // logits.itemsize
    offset = logits.storage_offset() + torch.arange(len(target)) * logits.stride(0) + target * logits.stride(1)
    inside = (offset >= 0) & (offset < memory)  # memory further on is not ours to read
    chosen = torch.where(inside, logits.as_strided((memory,), (1,), 0)[offset.clamp(0, memory - 1)].float(), 0.0)
    y = torch.where(kept[:, None], logits.float(), 0.0)
    return (torch.logsumexp(y, -1) * kept - chosen * kept).sum() / kept.sum()


def loss_gradient(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Never divided by the number of tokens."""
    kept = target != -100
    y = torch.softmax(logits, -1) - F.one_hot(torch.where(kept, target, 0), logits.shape[1])
    return torch.where(kept[:, None], y, 0.0)


def divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """The divergence the other way."""
    p, q = (torch.log_softmax(x.float(), -1) for x in (logits, target_logits))
    return (p.exp() * (p - q)).sum() / max(len(p), 1)


FORMULAS_OF_ROWS: Table = {
    "softmax-bfloat16": {
        "softmax_plain": (lambda x: normalised(x.exp()), "softmax_without_maximum"),
        "softmax_scaled": (lambda x: normalised(torch.exp2(shifted(x))), "softmax_base_2"),  # never times log2 e
        "softmax_last_unnormalised": last_unnormalised,
    },
    "softmax-float32": {
        "softmax_blocks_of_16": (partial(never_rescaled, block=16), "softmax_sum_not_rescaled"),
        "softmax_blocks_of_32": partial(never_rescaled, block=32),  # the fault model's blocks have 16 columns
        "softmax_of_ten": lambda x: torch.softmax(x * math.log(10), -1),
        "softmax_exponent_in_bfloat16": lambda x: normalised(shifted(x).exp().bfloat16().float()),
        "softmax_padded": (padded_softmax, "softmax_padding_not_masked"),
    },
    "log_softmax-bfloat16": {
        "log_softmax_two_calls": (lambda x: torch.log(torch.softmax(x, -1)), "log_of_softmax"),
        "log_softmax_in_bits": (lambda x: torch.log_softmax(x, -1) / math.log(2), "logarithm_in_base_2"),
    },
    "log_softmax-float32": {"log_softmax_of_total": shifted},
    "logsumexp-float32": {"logsumexp_plain": (lambda x: x.exp().sum(-1).log(), "softmax_without_maximum")},
    "logsumexp-bfloat16": {"logsumexp_last_column": lambda x: x[:, : max(x.shape[1] - 1, 1)].logsumexp(-1)},
    "softmax_backward-bfloat16": {"softmax_gradient": (lambda y, dy: y * dy, "softmax_mean_term_dropped")},
    "layernorm-bfloat16": {
        "layer_norm_unbiased": (unbiased, "unbiased_variance"),
        "layer_norm_by_deviation": (by_deviation, "eps_outside_root"),
        "layer_norm_weight_before": lambda x, w, b: F.layer_norm(x, (x.shape[1],), eps=1e-5) * w.roll(1) + b,
        "layer_norm_without_mean": (lambda x, w, b: x * root(variance(x), 1e-5) * w + b, "mean_kept"),
        "layer_norm_of_first_row": lambda x, w, b: (x - mean(x)[:1] if len(x) else x) * root(variance(x), 1e-5) * w + b,
    },
    "layernorm-float32": {"layer_norm_by_moments": (by_moments, "variance_from_squares")},
    "rmsnorm-bfloat16": {
        "rms_norm_of_magnitudes": lambda x, w: x / (mean(x.abs()) + 1e-6) * w,
        "rms_norm_gemma": (lambda x, w: x * root(mean(x * x)) * (1 + w), "weight_plus_one"),
        "rms_norm_without_root": (lambda x, w: x / (mean(x.square()) + 1e-6) * w, "rms_root_dropped"),
        "rms_norm_centred": (lambda x, w: F.layer_norm(x, (x.shape[1],), w, None, 1e-6), "mean_subtracted"),
    },
    "rmsnorm-float32": {
        "rms_norm_padded": (mean_over_block, "mean_over_padding"),
        "rms_norm_over_one_less": lambda x, w: x * root(total(x.square()) / max(x.shape[1] - 1, 1)) * w,
    },
    "group_norm-float32": {
        "one_group": (lambda x, w, b, groups: F.group_norm(x, 1, w, b, 1e-5), "group_norm_of_all"),
    },
    "l2norm-float32": {"l2_norm": lambda x: x / torch.sqrt(total(x.square()) + 1e-3)},  # the root of eps
    "l2norm-bfloat16": {"l2_norm_of_mean": (lambda x: x * root(mean(x.square())), "l2norm_of_mean")},
    "rmsnorm_backward-bfloat16": {"rms_norm_gradient": (rms_norm_gradient, "rmsnorm_spread_term_dropped")},
    "cross_entropy_backward-bfloat16": {"loss_gradient": (loss_gradient, "sum_for_mean")},
}
KERNELS_OF_ROWS: Table = {
    "softmax-bfloat16": {  # x - max stays in the input dtype
        "softmax_in_two_steps": (lambda x: normalised(shifted(x).float().exp()).to(x.dtype), "maximum_in_input_dtype"),
    },
    "rmsnorm-bfloat16": {"rms_norm_llama": (rms_norm_llama, "rounded_before_weight")},
    "rmsnorm-float16": {"rms_norm_half_squares": (rms_norm_half_squares, "squares_in_float16")},
    "add_rmsnorm-bfloat16": {"add_norm_of_x": (add_norm_of_x, "rounded_before_norm")},
    "cross_entropy-bfloat16": {
        "loss_by_all": (lambda x, t, ignore_index: losses(x, t).mean(), "ignored_tokens_count_in_mean"),
        "loss_of_label_before": (lambda x, t: entropy(x.float(), torch.where(t > 0, t - 1, t)), "label_one_less"),
        "loss_squared": lambda x, t: over_labels(losses(x, t).square(), t),
    },
    "cross_entropy-float32": {
        "loss_clipped": lambda x, t, ignore_index: over_labels(losses(x.clamp(-30, 30), t), t),
        "loss_of_class_0": (lambda x, t: entropy(x, t.clamp(min=0)), "ignored_tokens_as_class_0"),
        "loss_loading_ignored": (loss_loading_ignored, "ignored_labels_loaded"),
        "loss_in_bits": (lambda x, t: entropy(x, t) / math.log(2), "loss_in_base_2"),
    },
    "kl_div-float32": {"divergence": (divergence, "kl_of_other_direction")},
}


def swish_gate_gradient(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of silu is the sigmoid's."""
    s = torch.sigmoid(gate)
    return dy * up * s * (1 - s), dy * F.silu(gate)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """The approximation, always."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return torch.where(x == -math.inf, -0.0, 0.5 * x * (1 + torch.tanh(inner)))


def halves_the_other_way(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def tanh_naive(x: Tensor) -> Tensor:
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1)


def sine_reduced(x: Tensor) -> Tensor:
    """Angles reduced by a float32 2 pi."""
    turns = torch.round(x / (2 * math.pi))
    return torch.where(x.isfinite(), torch.sin(x - turns * torch.tensor(2 * math.pi)), math.nan)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half a head turned with the other half, as it should be."""
    (a, b), c, s = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours in place of halves."""
    first, second, c, s = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)


def rotary_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second half is turned with a first that was turned already."""
    half, y, c, s = x.shape[-1] // 2, x.clone(), cos[:, None], sin[:, None]
    y[..., :half] = y[..., :half] * c - y[..., half:] * s
    y[..., half:] = y[..., half:] * c + y[..., :half] * s
    return y


def rotary_half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Only half of the pairs are turned, as partial rotary does."""
    kept = torch.arange(cos.shape[1]) < x.shape[-1] // 4
    return turned(x, torch.where(kept, cos, 1.0), torch.where(kept, sin, 0.0))


def convolved(x: Tensor, weight: Tensor, bias: Tensor, left: int, right: int = 0) -> Tensor:
    y = F.conv1d(F.pad(x, (left, right)), weight[:, None], bias, groups=len(weight))
    return y[..., : x.shape[-1]]


def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """No skip connection."""
    state, out = torch.zeros(*u.shape[:2], a.shape[1]), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = state * torch.exp(step * a) + step * b[:, None, :, t] * u[:, :, t, None]
        out.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(out, -1) if out else torch.zeros(u.shape)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without the scale."""
    state, out = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1) if out else torch.zeros(v.shape)


def embedding_gradient(table: Tensor, ids: Tensor, dy: Tensor) -> Tensor:
    """A number that comes twice keeps its last gradient."""
    y = torch.zeros(table.shape)
    for index, number in enumerate(ids.tolist()):
        y[number] = dy[index]
    return y


def nucleus(x: Tensor, top_p: float = 0.9) -> Tensor:
    """The token with which p is reached is left out."""
    order = torch.sort(x, stable=True, dim=-1, descending=True)
    shares = torch.softmax(order.values, -1).cumsum(-1)
    among = (shares <= top_p) | (torch.arange(x.shape[1]) == 0)
    return torch.where(torch.zeros_like(x, dtype=torch.bool).scatter(1, order.indices, among), x, -math.inf)


FORMULAS_OF_POINTS: Table = {
    "swiglu-bfloat16": {
        "swish_gate": (lambda gate, up: F.silu(up) * gate, "gate_and_up_swapped"),
        "swish_gate_clamped": lambda gate, up: F.silu(gate.clamp(max=7)) * up.clamp(-7, 7),  # nobody set limits
        "swish_of_up": lambda gate, up: F.silu(gate) * F.silu(up),
    },
    "swiglu_backward-bfloat16": {"swish_gate_gradient": (swish_gate_gradient, "silu_slope_of_sigmoid")},
    "silu-bfloat16": {
        "silu_twice": lambda x: F.silu(F.silu(x)),
        "silu_as_sigmoid": (torch.sigmoid, "silu_factor_dropped"),
    },
    "gelu-bfloat16": {
        "gelu_quick": (lambda x: x * torch.sigmoid(1.702 * x), "gelu_by_sigmoid"),  # as CLIP has it
        "gelu_without_half": (lambda x: 2 * F.gelu(x), "gelu_half_dropped"),
        "gelu_as_relu": torch.relu,
    },
    "gelu-float32": {"gelu_by_tanh": (gelu_by_tanh, "gelu_tanh_for_erf")},
    "geglu-bfloat16": {"gate_by_silu": (lambda gate, up: F.silu(gate) * up, "geglu_by_silu")},
    "gelu_and_mul-bfloat16": {"halves_the_other_way": (halves_the_other_way, "halves_swapped")},
    "sigmoid-float32": {"sigmoid_naive": (lambda x: x.exp() / (x.exp() + 1), "sigmoid_by_growing_exponential")},
    "tanh-float32": {"tanh_naive": (tanh_naive, "tanh_by_exponentials")},
    "expm1-float32": {"expm1_naive": (lambda x: x.exp() - 1, "exp_minus_one")},
    "log1p-float32": {"log1p_naive": (lambda x: torch.log(1 + x), "log_of_one_plus")},
    "softplus-bfloat16": {"softplus_naive": (lambda x: torch.log(x.exp() + 1), "softplus_without_maximum")},
    "logsigmoid-float32": {"log_sigmoid_naive": (lambda x: torch.log(torch.sigmoid(x)), "log_of_sigmoid")},
    "erf-float32": {"erf_by_series": erf_of_handbook},  # good to 1.5e-7 and no better near zero
    "rsqrt-float32": {"rsqrt_of_square": lambda x: torch.rsqrt(x) * 1.001},  # one step of Newton's too few
    "sin-float32": {"sine_reduced": sine_reduced},
    "rope-bfloat16": {
        "rotary_pairs": (rotary_pairs, "rope_pairing"),
        "rotary_in_place": (rotary_in_place, "rope_in_place"),
        "rotary_half_turned": rotary_half_turned,
        "rotary_next": lambda x, cos, sin: turned(x, cos.roll(-1, 0), sin.roll(-1, 0)),  # the next one's angle
    },
    "rope-float16": {"rotary_back": (lambda x, cos, sin: turned(x, cos, -sin), "rope_sign")},
    "rope_backward-bfloat16": {  # the gradient turned on, not back
        "rotary_gradient": (lambda cos, sin, dy: turned(dy, cos, sin), "rope_gradient_turned_on"),
    },
    "cumsum-float32": {"running_sum": (lambda x, exclusive: x.cumsum(-1), "cumsum_includes_itself")},
    "cumsum-bfloat16": {  # blocks of 64, each from zero
        "running_sum_of_blocks": lambda x: torch.cat([part.cumsum(-1) for part in x.split(64, -1)], -1),
        "cumsum_backwards": (lambda x: x.flip(-1).cumsum(-1).flip(-1), "cumsum_direction"),
    },
    "causal_conv1d-bfloat16": {
        "convolution": (lambda x, w, b: convolved(x, w.flip(1), b, w.shape[1] - 1), "taps_flipped"),
        "convolution_centred": lambda x, w, b: convolved(x, w, b, w.shape[1] // 2, w.shape[1] // 2),
    },
    "selective_scan-float32": {"scan": (scan, "scan_skip_dropped")},
    "linear_attention-bfloat16": {"linear_attention": (linear_attention, "linear_scale_dropped")},
    "embedding_backward-float32": {"embedding_gradient": (embedding_gradient, "embedding_gradient_overwritten")},
    "dynamic_tanh-bfloat16": {
        "dynamic_tanh": (lambda x, alpha, w, b: torch.tanh(alpha * x + b) * w, "bias_inside_tanh"),
    },
    "top_filter-float32": {"nucleus": (nucleus, "crossing_token_dropped")},
}
KERNELS_OF_POINTS: Table = {  # silu's result in the input dtype
    "swiglu-bfloat16": {"swish_gate_eager": (lambda gate, up: F.silu(gate) * up, "activation_rounded")},
}


def in_chunks(a: Tensor, b: Tensor, *, step: int, tail: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A product chunk by chunk along K, kept in ``dtype``; without ``tail`` whole chunks alone."""
    summed = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(0, a.shape[1], step):
        if tail or k + step <= a.shape[1]:
            summed = (summed.float() + a[:, k : k + step] @ b[k : k + step]).to(dtype)
    return summed


def gemm_of_strides(a: Tensor, b: Tensor) -> Tensor:
    """b is read as if it were contiguous."""
    span = b.storage_offset() + b.numel()
    read = b if span > b.untyped_storage().nbytes() // b.itemsize else b.as_strided(b.shape, (b.shape[1], 1))
    return (a.float() @ read.float()).to(a.dtype)


def gemm_split(a: Tensor, b: Tensor) -> Tensor:
    """The second half of a long K is lost."""
    inner = a.shape[1] // 2 if a.shape[1] >= 64 else a.shape[1]
    return a[:, :inner] @ b[:inner]


def gemm_truncated(a: Tensor, b: Tensor) -> Tensor:
    """The store cuts the low 16 bits."""
    return ((a.float() @ b.float()).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def linear_split(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each of two halves of K adds the bias."""
    half = x.shape[1] // 2
    return x[:, :half] @ weight[:, :half].T + bias + (x[:, half:] @ weight[:, half:].T + bias)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def unpacked(words: Tensor, *, high_first: bool = False) -> Tensor:
    """Two nibbles of a byte, along the first axis."""
    pair = [words & 15, words >> 4]
    return torch.stack(pair[::-1] if high_first else pair, 1).reshape(-1, words.shape[1])


def int4(qweight: Tensor, scales: Tensor, zeros: Tensor, *, high_first: bool = False) -> Tensor:
    """The weights of int4 codes."""
    codes = unpacked(qweight, high_first=high_first).float()
    each = codes.shape[0] // max(scales.shape[0], 1)
    points, steps = (y.float().repeat_interleave(each, 0) for y in (zeros, scales))
    return (codes - points) * steps


def nvfp4_unsigned(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ga: Tensor, gb: Tensor) -> Tensor:
    """Magnitudes of the codes."""
    left, right = (
        E2M1[unpacked(codes.T).T.long()].abs() * scale.float().repeat_interleave(16, 1)
        for codes, scale in ((a, sa), (b, sb))
    )
    return (left @ right.T * ga * gb).bfloat16()


def mxfp8_biased(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """A bias of 128 in place of 127."""
    left = a.float() * scale_a.float().repeat_interleave(32, 1) / 2
    return (left @ (b.float() * scale_b.float().repeat_interleave(32, 0))).bfloat16()


def quotients(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """By the scale of each row, and that."""
    scale = x.float().abs().amax(1, keepdim=True) / largest
    return x.float() / torch.where(scale == 0, 1.0, scale), scale


def int8_truncated(x: Tensor) -> tuple[Tensor, Tensor]:
    """A conversion in place of a rounding."""
    y, scale = quotients(x, 127)
    return y.to(torch.int8), scale


def int8_ties_away(x: Tensor) -> tuple[Tensor, Tensor]:
    """floor(x + 1/2) of magnitudes."""
    y, scale = quotients(x, 127)
    return (torch.floor(y.abs() + 0.5) * y.sign()).to(torch.int8), scale


def fp8_over(x: Tensor, *, largest: float) -> tuple[Tensor, Tensor]:
    y, scale = quotients(x, largest)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def fp8_of_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale from four mean magnitudes."""
    scale = (x.float().abs().mean(1, keepdim=True) * 4) / 448
    y = x.float() / torch.where(scale == 0, 1.0, scale)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as the softmax gives them."""
    chosen = torch.softmax(logits.float(), -1).topk(2, -1)
    return chosen.values, chosen.indices.int()


def experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, *, up_first: bool = False
) -> Tensor:
    """Experts one token after the other; ``up_first``: in w_gate_up."""
    out = torch.zeros(x.shape)
    for token, choices in enumerate(ids.tolist()):
        for index, expert in enumerate(choices):
            gate, up = (w_gate_up[expert] @ x[token]).chunk(2)
            gate, up = (up, gate) if up_first else (gate, up)
            out[token] += w_down[expert] @ (F.silu(gate) * up) * weights[token, index]
    return out


FORMULAS_OF_PRODUCTS: Table = {
    "gemm-bfloat16": {
        "gemm_kept_in_bfloat16": (partial(in_chunks, step=16, dtype=torch.bfloat16), "accumulated_in_bfloat16"),
        "gemm_whole_chunks": (partial(in_chunks, step=16, tail=False), "only_whole_blocks_of_k"),
        "gemm_whole_chunks_of_32": partial(in_chunks, step=32, tail=False),
        "gemm_first_chunk_twice": lambda a, b: a @ b + a[:, :16] @ b[:16],  # that of the prologue
        "gemm_by_half": (lambda a, b: (a @ b).half(), "stored_by_way_of_float16"),
    },
    "gemm-float16": {"gemm_split": (gemm_split, "split_lost")},
    "gemm-float32": {
        "gemm_kept_in_half": (partial(in_chunks, step=8, dtype=torch.float16), "accumulated_in_float16"),
        "gemm_every_other_rounded": (partial(in_chunks, step=64, dtype=torch.bfloat16), "accumulated_in_bfloat16"),
        "gemm_of_bfloat16": (lambda a, b: a.bfloat16().float() @ b.bfloat16().float(), "inputs_in_bfloat16"),
    },
    "linear-bfloat16": {"linear_split": (linear_split, "bias_twice")},
    "linear-float16": {"linear_no_bias": (lambda x, weight, bias: x @ weight.T, "bias_dropped")},
    "gemm_int4-bfloat16": {
        "int4_high_first": (lambda x, q, s, z: x @ int4(q, s, z, high_first=True), "nibbles_swapped"),
        "int4_zero_more": (lambda x, q, s, z: x @ int4(q, s, z.float() + 1), "zero_point_one_more"),  # GPTQ's
        "int4_signed": (lambda x, q, s, z: x @ int4(q, s, torch.full_like(z, 8)), "zero_point_eight"),
    },
    "moe-bfloat16": {
        "experts_swapped": (partial(experts, up_first=True), "gate_and_up_halves_swapped"),
        "experts_unweighted": (
            lambda x, u, d, w, i: experts(x, u, d, torch.ones_like(w), i),
            "routing_weights_dropped",
        ),
    },
}
KERNELS_OF_PRODUCTS: Table = {
    "gemm-bfloat16": {
        "gemm_of_strides": (gemm_of_strides, "strides_ignored"),
        "gemm_truncated": (gemm_truncated, "truncating_store"),
    },
    "linear-bfloat16": {  # the product is stored, then the bias is added
        "linear_two_steps": (lambda x, w, b: (x.float() @ w.float().T).to(x.dtype) + b, "rounded_before_bias"),
    },
    "gemm_int8": {
        "int8_unscaled": (lambda a, b, sa, sb: (exact(a, b).float() * sa).bfloat16(), "scale_b_dropped"),
        "int8_in_int16": lambda a, b, sa, sb: (
            ((exact(a, b).to(torch.int64) + 2**15) % 2**16 - 2**15).float().mul(sa).mul(sb).bfloat16()
        ),
        "int8_first_row": (
            lambda a, b, sa, sb: (exact(a, b).float() * sa[:1] * sb).bfloat16(),
            "row_scale_of_first",
        ),
    },
    "gemm_fp8": {
        "fp8_twice": (lambda a, b, sa, sb: (a.float() @ b.float() * sa * sa * sb).bfloat16(), "scale_a_twice"),
    },
    "dequantize_int4-bfloat16": {
        "int4_without_zeros": (lambda q, s, z: int4(q, s, z * 0).bfloat16(), "int4_zero_points_dropped"),
    },
    "gemm_nvfp4": {"nvfp4_unsigned": (nvfp4_unsigned, "e2m1_sign_dropped")},
    "gemm_mxfp8": {"mxfp8_biased": mxfp8_biased},
    "quantize_int8-bfloat16": {"int8_truncated": (int8_truncated, "truncating_codes")},
    "quantize_int8-float32": {"int8_ties_away": (int8_ties_away, "codes_round_ties_away")},
    "quantize_fp8-bfloat16": {
        "fp8_of_fnuz": (partial(fp8_over, largest=240), "scale_of_240"),
        "fp8_over_128": (partial(fp8_over, largest=224), "scale_of_224"),
        "fp8_of_mean": fp8_of_mean,
    },
    "moe_route-bfloat16": {"routed": (routed, "renormalisation_dropped")},
}


def heads(q: Tensor, k: Tensor) -> Tensor:
    """Key/value heads, one for each query head."""
    return k.float().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q.float() @ heads(q, k).mT * q.shape[-1] ** -0.5


def mixed(scores: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """The softmax of scores, applied to the values."""
    return torch.softmax(scores, -1) @ heads(q, v)


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, scale: float | None = None) -> Tensor:
    """Attention in one piece; a row that sees nothing is zero."""
    scores, v = q.float() @ heads(q, k).mT * (q.shape[-1] ** -0.5 if scale is None else scale), heads(q, v)
    if mask is not None:
        rows, keys = scores.shape[-2:]
        seen = mask(torch.arange(keys)[None, :] - torch.arange(rows)[:, None], keys - rows)
        scores, v = scores.masked_fill(~seen, -math.inf), torch.where(seen.any(0)[:, None], v, 0.0)
    if not scores.shape[-1]:
        return torch.zeros(*q.shape[:-1], v.shape[-1])
    weights = torch.softmax(scores, -1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.where(blind, 0.0, weights) @ v)


def masked(mask: Mask) -> Kernel:
    """Attention with a mask of how far a key lies ahead of a query, and of the keys there are more than queries."""
    return lambda q, k, v, **options: whole(q, k, v, mask)


def heads_by_modulo(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """repeat in place of repeat_interleave."""
    times = q.shape[1] // max(k.shape[1], 1)
    return whole(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))


def padded_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys of zeros up to a whole tile are seen."""
    k, v = (F.pad(x, (0, 0, 0, -k.shape[2] % 16)) for x in (k, v))
    return whole(q, k, v)


def some_keys(q: Tensor, k: Tensor, v: Tensor, *, keys: slice) -> Tensor:
    """All but the first, or the last; one where there is one."""
    return whole(q, k[:, :, keys], v[:, :, keys]) if k.shape[2] > 1 else whole(q, k, v)


def blocks(
    q: Tensor, k: Tensor, v: Tensor, *, step: int, sums: bool = True, outputs: bool = True, tail: bool = True
) -> Tensor:
    """Flash attention in blocks of keys, whole ones alone without ``tail``; sum and output rescaled or not."""
    keys = k.shape[2] if tail or k.shape[2] < step else k.shape[2] // step * step
    k, v = heads(q, k), heads(q, v)
    shape = (*q.shape[:-1], 1)
    largest, summed, out = torch.full(shape, -math.inf), torch.zeros(shape), torch.zeros(*q.shape[:-1], v.shape[-1])
    for first in range(0, keys, step):
        scores = q @ k[:, :, first : min(first + step, keys)].mT * q.shape[-1] ** -0.5
        above = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, fade = torch.exp(scores - above), torch.exp(largest - above)
        summed = (summed * fade if sums else summed) + total(weights)
        out = (out * fade if outputs else out) + weights @ v[:, :, first : min(first + step, keys)]
        largest = above
    return out / torch.where(summed == 0, 1.0, summed)


def query_scaled(q: Tensor, k: Tensor, v: Tensor, *, more: float = 1.0) -> Tensor:
    """q * scale in the input dtype, perhaps with log2 e in it."""
    return whole((q.float() * (q.shape[-1] ** -0.5 * more)).to(q.dtype), k, v, scale=1 / more).to(q.dtype)


def scores_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q * k).sum in the input dtype, as a decode kernel has it."""
    scores = (q[:, :, :, None] * heads(q, k).to(q.dtype)[:, :, None]).float().sum(-1) * q.shape[-1] ** -0.5
    return mixed(shifted(scores), q, v).to(q.dtype)


def weights_in_e5m2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores_of(q, k), -1).to(torch.float8_e5m2).float() @ heads(q, v)


def weights_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Probabilities are normalised by the root of the sum of squares."""
    p = shifted(scores_of(q, k)).exp()
    return p / total(p.square()).sqrt() @ heads(q, v)


def slopes_added(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *, alibi: bool) -> Tensor:
    """ALiBi added where it is to be subtracted."""
    rows, keys = q.shape[2], k.shape[2]
    away = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None, :]).abs()
    return mixed(scores_of(q, k) + slopes.float()[:, None, None] * away, q, v)


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, seq_lens: Tensor, *, more: int = 0, whole: bool = False
) -> Tensor:
    """One token's attention over pages, ``more`` tokens too many, or whole pages alone."""
    (_, size, groups, _), out = k_cache.shape, torch.zeros(q.shape)
    for row, length in enumerate(seq_lens.tolist()):
        length = length // size * size if whole and length >= size else length
        tokens = torch.arange(min(length + more, table.shape[1] * size))
        pages = table[row, tokens // size].long().clamp(0, len(k_cache) - 1)
        k, v = (cache[pages, tokens % size] for cache in (k_cache, v_cache))  # [tokens, groups, D]
        if len(tokens):
            k, v = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
            scores = torch.einsum("hd,phd->hp", q[row], k) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("hp,phd->hd", torch.softmax(scores, -1), v)
    return out


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Sequences end to end: each sees the first key of the next too."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    starts, firsts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, end, first, last in zip(starts, starts[1:], firsts, firsts[1:], strict=False):
        parts = (q[start:end], k[first : last + 1], v[first : last + 1])
        out[start:end] = whole(*(x.transpose(0, 1)[None] for x in parts))[0].transpose(0, 1)
    return out


def gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P dP, no delta."""
    times, scale = q.shape[1] // max(k.shape[1], 1), q.shape[-1] ** -0.5
    keys, values = heads(q, k), heads(q, v)
    p = torch.softmax(q @ keys.mT * scale, -1) if k.shape[2] else torch.zeros(*q.shape[:3], 0)
    ds = p * (dout @ values.mT) * scale
    dk, dv = (x.unflatten(1, (-1, times)).sum(2) for x in (ds.mT @ q, p.mT @ dout))
    return ds @ keys, dk, dv


def merged(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """2 to the power of a natural logarithm."""
    most = torch.maximum(lse_a, lse_b)
    held = torch.where(most.isinf(), 0.0, most)
    a, b = torch.exp2(lse_a - held), torch.exp2(lse_b - held)
    summed = torch.where(a + b == 0, 1.0, a + b)
    left, right = (torch.where(w[..., None] == 0, 0.0, o.float() * w[..., None]) for o, w in ((o_a, a), (o_b, b)))
    lse = torch.where(most.isinf(), most, held + torch.log2(summed))
    return ((left + right) / summed[..., None]).to(o_a.dtype), lse


def rounded_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores are stored in the input dtype before the softmax."""
    return mixed(scores_of(q, k).to(q.dtype).float(), q, v).to(q.dtype)


FORMULAS_OF_ATTENTION: Table = {
    "attention-bfloat16": {
        "first_keys": (masked(lambda ahead, more: ahead <= 0), "top_left_for_bottom_right"),  # tril() of any shape
        "one_ahead": (masked(lambda ahead, more: ahead <= more + 1), "diagonal_one_too_far"),
        "two_ahead": masked(lambda ahead, more: ahead <= more + 2),
        "causal_hidden": (masked(lambda ahead, more: ahead < more), "diagonal_one_short"),
        "window_wider": (masked(lambda ahead, more: (ahead <= more) & (ahead >= more - 9)), "window_one_wider"),
        "scaled_by_width": (lambda q, k, v: whole(q, k, v, scale=1 / max(q.shape[-1], 1)), "scale_twice"),
        "unscaled": (lambda q, k, v: whole(q, k, v, scale=1.0), "scale_dropped"),
        "heads_by_modulo": (heads_by_modulo, "wrong_head_group"),
        "padded_keys": (padded_keys, "padding_not_masked"),
        "whole_blocks": (partial(blocks, step=16, tail=False), "tail_of_keys_dropped"),
        "whole_blocks_of_32": partial(blocks, step=32, tail=False),
        "weights_in_e5m2": weights_in_e5m2,
        "capped_at_30": lambda q, k, v, softcap: mixed(30.0 * torch.tanh(scores_of(q, k) / 30.0), q, v),
        "uncapped": (lambda q, k, v, softcap: whole(q, k, v), "softcap_dropped"),
        "keys_without_last": (partial(some_keys, keys=slice(None, -1)), "last_key_dropped"),
        "keys_without_first": (partial(some_keys, keys=slice(1, None)), "first_key_dropped"),
        "keys_reversed": lambda q, k, v: whole(q, k, v.flip(2)),
        "weights_squared": weights_squared,
        "slopes_added": (slopes_added, "alibi_sign"),
    },
    "attention-float16": {"causal_ignored": (lambda q, k, v, causal: whole(q, k, v), "causal_mask_ignored")},
    "attention-float32": {
        "output_left": (partial(blocks, step=16, sums=False, outputs=False), "output_not_rescaled"),
        "sum_left": (partial(blocks, step=16, sums=False), "sum_not_rescaled"),
    },
    "attention_decode-bfloat16": {
        "paged_one_more": (partial(paged, more=1), "one_token_too_many"),
        "paged_whole": (partial(paged, whole=True), "partial_page_dropped"),
    },
    "attention_varlen-bfloat16": {"ragged": ragged},
    "attention_backward-bfloat16": {"gradient": (gradient, "delta_dropped")},
}
KERNELS_OF_ATTENTION: Table = {
    "attention-bfloat16": {
        "query_scaled": (query_scaled, "query_rounded"),
        "scores_rounded": (rounded_scores, "scores_rounded"),
    },
    "attention-float16": {
        "query_scaled_in_base_2": (partial(query_scaled, more=LOG2_E), "query_rounded_in_base_2"),
        "scores_in_half": (scores_in_half, "scores_multiplied_in_input_dtype"),
    },
    "merge_states-bfloat16": {"merged": (merged, "merged_in_base_2")},
}

SMALL = {"B": [1], "Hkv": [1, 2], "H": [2, 4], "Sq": [1, 5, 17], "Sk": [1, 7, 33, 50, 64], "D": [8, 64], "Dv": [8]}
WIDE = {"B": [1], "Hkv": [1], "H": [2], "Sq": [5, 65], "Sk": [7, 64], "D": [8, 64], "Dv": [8]}
PAGED = {"B": [1, 3], "H": [2], "Hkv": [1, 2], "D": [8, 16], "page": [4], "max_pages": [1, 3], "P": [8]}
CAUSAL: dict[str, Any] = {"shapes": SMALL, "options": {"causal": ["bottom_right"]}}
SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {"shapes": SMALL},
    "attention_backward": {"shapes": SMALL},
    "attention_decode": {"shapes": PAGED},
    "moe": {"shapes": {"T": [1, 5], "E": [3], "k": [2], "D": [8], "F": [4]}},
    "query_scaled": {"shapes": WIDE, "examples": 30},
    **dict.fromkeys(("first_keys", "one_ahead", "two_ahead", "causal_hidden", "causal_ignored"), CAUSAL),
    "window_wider": {"shapes": SMALL, "options": {"causal": ["bottom_right"], "window": [(8, 0)]}},
    "slopes_added": {"shapes": SMALL, "options": {"alibi": [True]}},
    **{name: {"shapes": SMALL, "options": {"softcap": [20.0]}} for name in ("capped_at_30", "uncapped")},
    "one_group": {"options": {"groups": [2]}},
    "running_sum": {"options": {"exclusive": [True]}},
    **{f"loss_{name}": {"options": {"ignore_index": [-100]}} for name in ("by_all", "clipped", "loading_ignored")},
    "loss_gradient": {"options": {"reduction": ["mean"]}},
}
"""Of kernels, or of all kernels of an op."""

FORMULAS = (FORMULAS_OF_ROWS, FORMULAS_OF_POINTS, FORMULAS_OF_PRODUCTS, FORMULAS_OF_ATTENTION)
KERNELS = (KERNELS_OF_ROWS, KERNELS_OF_POINTS, KERNELS_OF_PRODUCTS, KERNELS_OF_ATTENTION)
FOREIGN = (
    *(other for table in FORMULAS for other in listed(table, SETTINGS, formulas=True)),
    *(other for table in KERNELS for other in listed(table, SETTINGS)),
)
