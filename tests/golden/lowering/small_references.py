"""Small references, as people write them, of all families of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

X = "x[T,D] -> y[T,D]"
TD = {"T": 3, "D": 5}


def naive_softmax(x: Any) -> Any:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def shifted_softmax(x: Any) -> Any:
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def rms(x: Any, weight: Any) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def attention_by_hand(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + 2
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1) @ v


def rope(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def frequencies(x: Any) -> Any:
    inverse = 1.0 / 10000.0 ** (torch.arange(x.shape[1]).float() / x.shape[1])
    return x * torch.cos(torch.outer(torch.arange(x.shape[0]).float(), inverse))


def scan(x: Any, a: Any) -> Any:
    out, h = torch.zeros_like(x), torch.zeros(x.shape[1])
    for t in range(x.shape[0]):
        h = torch.sigmoid(a[t]) * h + x[t]
        out[t] = h
    return out


def swiglu(x: Any) -> Any:
    gate, up = x.split(x.shape[-1] // 2, dim=-1)
    return F.silu(gate) * up


def logarithms(x: Any) -> Any:
    y = x.abs() + 0.1
    return torch.log(y) + torch.log2(y) + torch.log1p(y) + torch.expm1(x) + torch.log10(y)


def top_two(x: Any) -> Any:
    values, ids = x.topk(2, dim=-1)
    return torch.softmax(values, -1) + ids


def gradient(x: Any) -> Any:
    x = x.detach().requires_grad_()
    loss = (F.softmax(x, -1) * torch.arange(x.shape[1])).square().sum()
    return torch.autograd.grad(loss, x)[0]


def in_place_views(x: Any) -> Any:
    y = x.clone()
    y[:, 1:] += y[:, :-1].clone()
    y.view(-1)[::2].mul_(3.0)
    y.t()[0].neg_()
    return y


def data_dependent(x: Any) -> Any:
    rows = []
    for row in x:
        rows.append(row.sum() if bool(row[0] > 0) else row.prod())
    return torch.stack(rows)


def quantized(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale).clamp(-128, 127) * scale


SMALL: dict[str, tuple[Callable[..., Any], str, dict[str, int]]] = {
    "naive_softmax": (naive_softmax, X, TD),
    "shifted_softmax": (shifted_softmax, X, TD),
    "linear_gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        "x[T,D], w[M,D], b[M] -> y[T,M]",
        {"T": 3, "D": 7, "M": 2},
    ),
    "linear_gelu_tanh": (
        lambda x, w, b: F.gelu(x @ w.T + b, approximate="tanh"),
        "x[T,D], w[M,D], b[M] -> y[T,M]",
        {"T": 3, "D": 7, "M": 2},
    ),
    "rms": (rms, "x[T,D], weight[D] -> y[T,D]", TD),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        "x[T,D], weight[D], bias[D] -> y[T,D]",
        TD,
    ),
    "two_moments": (lambda x: (x * x).mean(-1) - x.mean(-1) ** 2, "x[T,D] -> y[T]", {"T": 3, "D": 9}),
    "group_norm": (
        lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
        "x[N,C,L], weight[C], bias[C] -> y[N,C,L]",
        {"N": 2, "C": 4, "L": 3},
    ),
    "batch_norm": (
        lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
        "x[N,C,L], weight[C], bias[C] -> y[N,C,L]",
        {"N": 3, "C": 2, "L": 2},
    ),
    "conv_relu": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
        "x[N,C,H,W], w[O,C,3,3], b[O] -> y[N,O,H,W]",
        {"N": 1, "C": 2, "H": 4, "W": 3, "O": 2},
    ),
    "depthwise_conv": (
        lambda x, w: F.conv1d(x, w, padding=1, groups=x.shape[1]),
        "x[N,C,L], w[C,1,2] -> y[N,C,L+1]",
        {"N": 1, "C": 3, "L": 5},
    ),
    "transposed_conv": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        "x[N,C,H,W], w[C,O,2,2] -> y[N,O,2*H+1,2*W+1]",
        {"N": 1, "C": 2, "H": 2, "W": 2, "O": 2},
    ),
    "pool_and_resize": (
        lambda x: F.max_pool2d(x, 3, stride=1, padding=1) - F.avg_pool2d(x, 3, stride=1, padding=1),
        "x[N,C,H,W] -> y[N,C,H,W]",
        {"N": 1, "C": 2, "H": 4, "W": 4},
    ),
    "causal_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "q[B,H,S,D], k[B,H,S,D], v[B,H,S,D] -> y[B,H,S,D]",
        {"B": 1, "H": 2, "S": 3, "D": 4},
    ),
    "attention_by_hand": (attention_by_hand, "q[S,D], k[T,D], v[T,D] -> y[S,D]", {"S": 2, "T": 4, "D": 3}),
    "rope": (rope, "x[T,2*D], c[T,D], s[T,D] -> y[T,2*D]", {"T": 3, "D": 2}),
    "frequencies": (frequencies, "x[T,D] -> y[T,D]", {"T": 4, "D": 2}),
    "scan": (scan, "x[T,D], a[T,D] -> y[T,D]", {"T": 5, "D": 2}),
    "running_sum": (lambda x: torch.cumsum(x, 0), X, {"T": 5, "D": 3}),
    "log_sum_exp": (lambda x: torch.logsumexp(x, dim=-1), "x[T,D] -> y[T]", {"T": 3, "D": 6}),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), "x[T,V], t:int64[T]=index(V) -> y[]", {"T": 4, "V": 5}),
    "smoothed_cross_entropy": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
        "x[T,V], t:int64[T]=index(V) -> y[T]",
        {"T": 4, "V": 5},
    ),
    "mse": (lambda x, y: F.mse_loss(x, y), "x[T,D], y[T,D] -> l[]", TD),
    "huber": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), "x[T,D], y[T,D] -> l[]", TD),
    "divergence": (
        lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="none").sum(-1),
        "x[T,D], y[T,D] -> l[T]",
        TD,
    ),
    "logits_loss": (lambda x, y: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)), "x[T,D], y[T,D] -> l[]", TD),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, dim=-1), "x[T,D], y[T,D] -> l[T]", TD),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x, y, z), "x[T,D], y[T,D], z[T,D] -> l[]", TD),
    "embedding": (
        lambda table, ids: F.embedding(ids, table) * 2.5,
        "table[V,D], ids:int64[T]=index(V) -> y[T,D]",
        {"V": 4, "D": 3, "T": 5},
    ),
    "segment_sum": (
        lambda x, ids, out: out.index_add(0, ids, x),
        "x[T,D], ids:int64[T]=index(G), out[G,D] -> y[G,D]",
        {"T": 6, "D": 2, "G": 3},
    ),
    "picked": (
        lambda x, ids: torch.gather(x, 1, ids[:, None])[:, 0].exp(),
        "x[T,D], ids:int64[T]=index(D) -> y[T]",
        {"T": 4, "D": 3},
    ),
    "einsum": (
        lambda a, b: torch.einsum("bij,bjk->ik", a, b),
        "a[B,I,J], b[B,J,K] -> c[I,K]",
        {"B": 2, "I": 2, "J": 3, "K": 2},
    ),
    "swiglu": (swiglu, "x[T,2*D] -> y[T,D]", {"T": 3, "D": 4}),
    "masked": (lambda x: torch.where(x > 0, x * 2, x.exp()).tril(), X, TD),
    "clamped": (lambda x: x.clamp(-0.5, 0.7) + F.hardtanh(x) + F.relu6(x * 5), X, TD),
    "leaky": (lambda x: F.leaky_relu(x, 0.1) + F.elu(x) + F.selu(x) + F.celu(x), X, TD),
    "soft_activations": (lambda x: F.softplus(x) + F.mish(x) + F.softsign(x) + F.logsigmoid(x), X, TD),
    "hard_activations": (
        lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.threshold(x, 0.1, 0.5) + F.tanhshrink(x),
        X,
        TD,
    ),
    "trigonometric": (lambda x: torch.sin(x) * torch.cos(x) + torch.atan(x) + torch.tan(x * 0.3), X, TD),
    "hyperbolic": (lambda x: torch.sinh(x) - torch.cosh(x) + torch.asinh(x) + torch.tanh(x), X, TD),
    "powers": (lambda x: x.pow(3) + x.abs().pow(1.5) + (x.abs() + 0.5) ** -0.5 + 2.0**x, X, TD),
    "logarithms": (logarithms, X, TD),
    "norms": (
        lambda x: x.norm(dim=-1) + x.norm(p=1, dim=-1) + x.abs().amax(-1) + torch.linalg.vector_norm(x, 3, dim=-1),
        "x[T,D] -> y[T]",
        TD,
    ),
    "products": (lambda x: x.prod(-1) + x.var(-1) + x.std(-1, correction=0), "x[T,D] -> y[T]", {"T": 3, "D": 4}),
    "sorted_sum": (
        lambda x: (x.sort(-1, descending=True).values * torch.arange(x.shape[1])).sum(-1),
        "x[T,D] -> y[T]",
        {"T": 3, "D": 6},
    ),
    "top_two": (top_two, "x[T,D] -> y[T,2]", {"T": 3, "D": 6}),
    "gradient": (gradient, "x[T,D] -> y[T,D]", {"T": 3, "D": 4}),
    "functional_gradient": (
        lambda x, w: torch.func.grad(lambda x, w: F.silu(F.layer_norm(x, (x.shape[-1],), w)).sum(), argnums=(0, 1))(
            x, w
        ),
        "x[T,D], w[D] -> y[T,D], z[D]",
        {"T": 3, "D": 4},
    ),
    "in_place_views": (in_place_views, X, {"T": 3, "D": 4}),
    "vmapped": (
        lambda x: torch.func.vmap(lambda row: row - row.mean(0))(x),
        "x[B,T,D] -> y[B,T,D]",
        {"B": 2, "T": 3, "D": 2},
    ),
    "cast_inside": (lambda x: (x.to(torch.bfloat16).float() * 2).to(x.dtype), X, {"T": 3, "D": 4}),
    "data_dependent": (data_dependent, "x[T,D] -> y[T]", {"T": 4, "D": 3}),
    "ragged": (
        lambda x, lengths: torch.stack([x[i, : int(n) + 1].mean() for i, n in enumerate(lengths.tolist())]),
        "x[T,D], lengths:int64[T]=index(D) -> y[T]",
        {"T": 3, "D": 5},
    ),
    "quantized": (quantized, "x[T,D] -> y[T,D]", {"T": 2, "D": 8}),
    "differences": (lambda x: F.pad(x[:, 1:] - x[:, :-1], (0, 1)) + torch.roll(x, 1, -1) - torch.flip(x, [0]), X, TD),
    "distances": (lambda x: torch.cdist(x, x.flip(0)).diagonal(), "x[T,D] -> y[T]", {"T": 3, "D": 4}),
    "special": (lambda x: torch.erf(x) + torch.erfc(x) + torch.lgamma(x.abs() + 1.5) + torch.sigmoid(x), X, TD),
    "two_operands": (
        lambda x, y: torch.maximum(x, y) - torch.minimum(x, y) + torch.atan2(x, y) + torch.lerp(x, y, 0.3),
        "x[T,D], y[T,D] -> z[T,D]",
        TD,
    ),
    "adaptive": (
        lambda x: F.adaptive_avg_pool1d(x[None], 2)[0].repeat_interleave(2, 1)[:, : x.shape[1]] - x,
        "x[T,D] -> y[T,D]",
        {"T": 4, "D": 3},
    ),
    "upsampled": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        "x[N,C,H,W] -> y[N,C,2*H,2*W]",
        {"N": 1, "C": 1, "H": 2, "W": 3},
    ),
}
"""Name -> function, tensors, sizes."""
