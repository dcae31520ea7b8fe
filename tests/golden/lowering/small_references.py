"""Small references, as people write them: name -> (function, tensors, sizes), of all families of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Reference = Callable[..., Any]
SMALL: dict[str, tuple[Reference, str, dict[str, int]]] = {}


def small(tensors: str, **sizes: int) -> Callable[[Reference], Reference]:
    """Decorator: list the function under its name."""

    def listed(function: Reference) -> Reference:
        SMALL[function.__name__] = (function, tensors, sizes)
        return function

    return listed


X = "x[T,D] -> y[T,D]"
TD = {"T": 3, "D": 5}


@small(X, **TD)
def naive_softmax(x: Any) -> Any:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


@small(X, **TD)
def shifted_softmax(x: Any) -> Any:
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


@small("x[T,D], w[M,D], b[M] -> y[T,M]", T=3, D=7, M=2)
def linear_gelu(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(F.linear(x, w, b))


@small("x[T,D], w[M,D], b[M] -> y[T,M]", T=3, D=7, M=2)
def linear_gelu_tanh(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(x @ w.T + b, approximate="tanh")


@small("x[T,D], weight[D] -> y[T,D]", **TD)
def rms(x: Any, weight: Any) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


@small("x[T,D], weight[D], bias[D] -> y[T,D]", **TD)
def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@small("x[T,D] -> y[T]", T=3, D=9)
def two_moments(x: Any) -> Any:
    return (x * x).mean(-1) - x.mean(-1) ** 2


@small("x[N,C,L], weight[C], bias[C] -> y[N,C,L]", N=2, C=4, L=3)
def group_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 2, weight, bias)


@small("x[N,C,L], weight[C], bias[C] -> y[N,C,L]", N=3, C=2, L=2)
def batch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, weight, bias, training=True)


@small("x[N,C,H,W], w[O,C,3,3], b[O] -> y[N,O,H,W]", N=1, C=2, H=4, W=3, O=2)
def conv_relu(x: Any, w: Any, b: Any) -> Any:
    return F.relu(F.conv2d(x, w, b, padding=1))


@small("x[N,C,L], w[C,1,2] -> y[N,C,L+1]", N=1, C=3, L=5)
def depthwise_conv(x: Any, w: Any) -> Any:
    return F.conv1d(x, w, padding=1, groups=x.shape[1])


@small("x[N,C,H,W], w[C,O,2,2] -> y[N,O,2*H+1,2*W+1]", N=1, C=2, H=2, W=2, O=2)
def transposed_conv(x: Any, w: Any) -> Any:
    return F.conv_transpose2d(x, w, stride=2, output_padding=1)


@small("x[N,C,H,W] -> y[N,C,H,W]", N=1, C=2, H=4, W=4)
def pool_and_resize(x: Any) -> Any:
    return F.max_pool2d(x, 3, stride=1, padding=1) - F.avg_pool2d(x, 3, stride=1, padding=1)


@small("q[B,H,S,D], k[B,H,S,D], v[B,H,S,D] -> y[B,H,S,D]", B=1, H=2, S=3, D=4)
def causal_attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@small("q[S,D], k[T,D], v[T,D] -> y[S,D]", S=2, T=4, D=3)
def attention_by_hand(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + 2
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1) @ v


@small("x[T,2*D], c[T,D], s[T,D] -> y[T,2*D]", T=3, D=2)
def rope(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


@small("x[T,D] -> y[T,D]", T=4, D=2)
def frequencies(x: Any) -> Any:
    inverse = 1.0 / 10000.0 ** (torch.arange(x.shape[1]).float() / x.shape[1])
    return x * torch.cos(torch.outer(torch.arange(x.shape[0]).float(), inverse))


@small("x[T,D], a[T,D] -> y[T,D]", T=5, D=2)
def scan(x: Any, a: Any) -> Any:
    out, h = torch.zeros_like(x), torch.zeros(x.shape[1])
    for t in range(x.shape[0]):
        h = torch.sigmoid(a[t]) * h + x[t]
        out[t] = h
    return out


@small(X, T=5, D=3)
def running_sum(x: Any) -> Any:
    return torch.cumsum(x, 0)


@small("x[T,D] -> y[T]", T=3, D=6)
def log_sum_exp(x: Any) -> Any:
    return torch.logsumexp(x, dim=-1)


@small("x[T,V], t:int64[T]=index(V) -> y[]", T=4, V=5)
def cross_entropy(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t)


@small("x[T,V], t:int64[T]=index(V) -> y[T]", T=4, V=5)
def smoothed_cross_entropy(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t, label_smoothing=0.1, reduction="none")


@small("x[T,D], y[T,D] -> l[]", **TD)
def mse(x: Any, y: Any) -> Any:
    return F.mse_loss(x, y)


@small("x[T,D], y[T,D] -> l[]", **TD)
def huber(x: Any, y: Any) -> Any:
    return F.smooth_l1_loss(x, y, beta=0.5)


@small("x[T,D], y[T,D] -> l[T]", **TD)
def divergence(x: Any, y: Any) -> Any:
    return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="none").sum(-1)


@small("x[T,D], y[T,D] -> l[]", **TD)
def logits_loss(x: Any, y: Any) -> Any:
    return F.binary_cross_entropy_with_logits(x, torch.sigmoid(y))


@small("x[T,D], y[T,D] -> l[T]", **TD)
def cosine(x: Any, y: Any) -> Any:
    return F.cosine_similarity(x, y, dim=-1)


@small("x[T,D], y[T,D], z[T,D] -> l[]", **TD)
def triplet(x: Any, y: Any, z: Any) -> Any:
    return F.triplet_margin_loss(x, y, z)


@small("table[V,D], ids:int64[T]=index(V) -> y[T,D]", V=4, D=3, T=5)
def embedding(table: Any, ids: Any) -> Any:
    return F.embedding(ids, table) * 2.5


@small("x[T,D], ids:int64[T]=index(G), out[G,D] -> y[G,D]", T=6, D=2, G=3)
def segment_sum(x: Any, ids: Any, out: Any) -> Any:
    return out.index_add(0, ids, x)


@small("x[T,D], ids:int64[T]=index(D) -> y[T]", T=4, D=3)
def picked(x: Any, ids: Any) -> Any:
    return torch.gather(x, 1, ids[:, None])[:, 0].exp()


@small("a[B,I,J], b[B,J,K] -> c[I,K]", B=2, I=2, J=3, K=2)
def einsum(a: Any, b: Any) -> Any:
    return torch.einsum("bij,bjk->ik", a, b)


@small("x[T,2*D] -> y[T,D]", T=3, D=4)
def swiglu(x: Any) -> Any:
    gate, up = x.split(x.shape[-1] // 2, dim=-1)
    return F.silu(gate) * up


@small(X, **TD)
def masked(x: Any) -> Any:
    return torch.where(x > 0, x * 2, x.exp()).tril()


@small(X, **TD)
def clamped(x: Any) -> Any:
    return x.clamp(-0.5, 0.7) + F.hardtanh(x) + F.relu6(x * 5)


@small(X, **TD)
def leaky(x: Any) -> Any:
    return F.leaky_relu(x, 0.1) + F.elu(x) + F.selu(x) + F.celu(x)


@small(X, **TD)
def soft_activations(x: Any) -> Any:
    return F.softplus(x) + F.mish(x) + F.softsign(x) + F.logsigmoid(x)


@small(X, **TD)
def hard_activations(x: Any) -> Any:
    return F.hardswish(x) + F.hardsigmoid(x) + F.threshold(x, 0.1, 0.5) + F.tanhshrink(x)


@small(X, **TD)
def trigonometric(x: Any) -> Any:
    return torch.sin(x) * torch.cos(x) + torch.atan(x) + torch.tan(x * 0.3)


@small(X, **TD)
def hyperbolic(x: Any) -> Any:
    return torch.sinh(x) - torch.cosh(x) + torch.asinh(x) + torch.tanh(x)


@small(X, **TD)
def powers(x: Any) -> Any:
    return x.pow(3) + x.abs().pow(1.5) + (x.abs() + 0.5) ** -0.5 + 2.0**x


@small(X, **TD)
def logarithms(x: Any) -> Any:
    y = x.abs() + 0.1
    return torch.log(y) + torch.log2(y) + torch.log1p(y) + torch.expm1(x) + torch.log10(y)


@small("x[T,D] -> y[T]", **TD)
def norms(x: Any) -> Any:
    return x.norm(dim=-1) + x.norm(p=1, dim=-1) + x.abs().amax(-1) + torch.linalg.vector_norm(x, 3, dim=-1)


@small("x[T,D] -> y[T]", T=3, D=4)
def products(x: Any) -> Any:
    return x.prod(-1) + x.var(-1) + x.std(-1, correction=0)


@small("x[T,D] -> y[T]", T=3, D=6)
def sorted_sum(x: Any) -> Any:
    return (x.sort(-1, descending=True).values * torch.arange(x.shape[1])).sum(-1)


@small("x[T,D] -> y[T,2]", T=3, D=6)
def top_two(x: Any) -> Any:
    values, ids = x.topk(2, dim=-1)
    return torch.softmax(values, -1) + ids


@small("x[T,D] -> y[T,D]", T=3, D=4)
def gradient(x: Any) -> Any:
    x = x.detach().requires_grad_()
    loss = (F.softmax(x, -1) * torch.arange(x.shape[1])).square().sum()
    return torch.autograd.grad(loss, x)[0]


@small("x[T,D], w[D] -> y[T,D], z[D]", T=3, D=4)
def functional_gradient(x: Any, w: Any) -> Any:
    return torch.func.grad(lambda x, w: F.silu(F.layer_norm(x, (x.shape[-1],), w)).sum(), argnums=(0, 1))(x, w)


@small(X, T=3, D=4)
def in_place_views(x: Any) -> Any:
    y = x.clone()
    y[:, 1:] += y[:, :-1].clone()
    y.view(-1)[::2].mul_(3.0)
    y.t()[0].neg_()
    return y


@small("x[B,T,D] -> y[B,T,D]", B=2, T=3, D=2)
def vmapped(x: Any) -> Any:
    return torch.func.vmap(lambda row: row - row.mean(0))(x)


@small(X, T=3, D=4)
def cast_inside(x: Any) -> Any:
    return (x.to(torch.bfloat16).float() * 2).to(x.dtype)


@small("x[T,D] -> y[T]", T=4, D=3)
def data_dependent(x: Any) -> Any:
    rows = []
    for row in x:
        rows.append(row.sum() if bool(row[0] > 0) else row.prod())
    return torch.stack(rows)


@small("x[T,D], lengths:int64[T]=index(D) -> y[T]", T=3, D=5)
def ragged(x: Any, lengths: Any) -> Any:
    return torch.stack([x[i, : int(n) + 1].mean() for i, n in enumerate(lengths.tolist())])


@small("x[T,D] -> y[T,D]", T=2, D=8)
def quantized(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale).clamp(-128, 127) * scale


@small(X, **TD)
def differences(x: Any) -> Any:
    return F.pad(x[:, 1:] - x[:, :-1], (0, 1)) + torch.roll(x, 1, -1) - torch.flip(x, [0])


@small("x[T,D] -> y[T]", T=3, D=4)
def distances(x: Any) -> Any:
    return torch.cdist(x, x.flip(0)).diagonal()


@small(X, **TD)
def special(x: Any) -> Any:
    return torch.erf(x) + torch.erfc(x) + torch.lgamma(x.abs() + 1.5) + torch.sigmoid(x)


@small("x[T,D], y[T,D] -> z[T,D]", **TD)
def two_operands(x: Any, y: Any) -> Any:
    return torch.maximum(x, y) - torch.minimum(x, y) + torch.atan2(x, y) + torch.lerp(x, y, 0.3)


@small("x[T,D] -> y[T,D]", T=4, D=3)
def adaptive(x: Any) -> Any:
    return F.adaptive_avg_pool1d(x[None], 2)[0].repeat_interleave(2, 1)[:, : x.shape[1]] - x


@small("x[N,C,H,W] -> y[N,C,2*H,2*W]", N=1, C=1, H=2, W=3)
def upsampled(x: Any) -> Any:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
