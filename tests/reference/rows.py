"""Elementary functions, and what works along rows: softmax and its relatives, norms, activations, rotation, codes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sigmoid", "sqrt", "rsqrt", "reciprocal", "sin",
        "cos",
    )
} | {"softplus": torch.nn.functional.softplus}  # fmt: skip


def softmax(x: Tensor) -> Outputs:
    return (torch.softmax(x.double(), 1),)


def log_softmax(x: Tensor) -> Outputs:
    return (torch.log_softmax(x.double(), 1),)


def logsumexp(x: Tensor) -> Outputs:
    return (torch.logsumexp(x.double(), 1),)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Outputs:
    return (torch.nn.functional.layer_norm(x.double(), x.shape[1:], weight.double(), bias.double(), eps),)


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Outputs:
    """Each row over its root mean square."""
    root = ((x.double() ** 2).sum(1) / max(x.shape[1], 1) + eps).sqrt()
    return (x.double() / root[:, None] * (weight.double() + offset),)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Outputs:
    """The sum, normalised and as it is."""
    total = x.double() + residual.double()
    return (*rmsnorm(total, weight, eps), total)


def gelu(x: Tensor, approximate: str = "none") -> Outputs:
    """As torch has it, zero at -inf."""
    y = torch.nn.functional.gelu(x.double(), approximate=approximate)
    return (y.masked_fill(x.isneginf(), 0.0),)


def silu(x: Tensor) -> Outputs:
    """As torch has it, zero at -inf."""
    return (torch.nn.functional.silu(x.double()).masked_fill(x.isneginf(), 0.0),)


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Outputs:
    """silu(gate) * up."""
    bound = math.inf if limit is None else limit
    return (silu(gate.double().clamp(max=bound))[0] * up.double().clamp(-bound, bound),)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Outputs:
    """Each pair as a complex number, turned."""
    d = x.shape[-1]
    first = list(range(0, d, 2)) if interleaved else list(range(d // 2))
    second = [i + (1 if interleaved else d // 2) for i in first]
    turn = torch.complex(cos.double(), sin.double())[None, :, None]
    turned = torch.complex(x.double()[..., first], x.double()[..., second]) * turn
    y = torch.empty(x.shape, dtype=torch.float64)
    y[..., first], y[..., second] = turned.real, turned.imag
    return (y,)


def quantize(x: Tensor, granularity: str, largest: int) -> Outputs:
    """Quotients by the scale, before they are rounded; and the scales."""
    rows, columns = x.shape
    width = {"row": max(columns, 1), "tensor": 0, "group128": 128}[granularity]
    if not width:
        scale = x.double().abs().max() / largest if x.numel() else torch.ones((), dtype=torch.float64)
        return x.double() / scale, scale
    scales = torch.zeros(rows, -(-columns // width) if columns else 1, dtype=torch.float64)
    quotient = x.double()
    for g in range(-(-columns // width)):
        part = quotient[:, g * width : (g + 1) * width]
        scales[:, g] = part.abs().amax(dim=1) / largest
        part /= scales[:, g, None]
    return quotient, scales


def quantize_fp8(x: Tensor, granularity: str = "row") -> Outputs:
    quotient, scale = quantize(x, granularity, 448)
    return quotient.float().to(torch.float8_e4m3fn).double(), scale


def quantize_int8(x: Tensor, granularity: str = "row") -> Outputs:
    quotient, scale = quantize(x, granularity, 127)
    return quotient.round(), scale


def quantize_int4(x: Tensor, group: int = 128, symmetric: bool = False) -> Outputs:
    """Number by number."""
    groups = -(-x.shape[1] // group)
    codes = torch.zeros(x.shape, dtype=torch.float64)
    scales, zeros = (torch.zeros(x.shape[0], groups, dtype=torch.float64) for _ in range(2))
    for r, row in enumerate(x.double()):
        for g in range(groups):
            part = row[g * group : (g + 1) * group]
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            scale = max(high, -low) / 7 if symmetric else (high - low) / 15
            zero = 8 if symmetric else round(-low / scale)
            scales[r, g], zeros[r, g] = scale, zero
            for place, number in enumerate(part.tolist()):
                codes[r, g * group + place] = min(15, max(0, round(number / scale) + zero))
    return codes, scales, zeros


def add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Outputs:
    """The sum, normalised and as it is."""
    total = x.double() + residual.double()
    return (*layernorm(total, weight, bias, eps), total)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int = 2, eps: float = 1e-5) -> Outputs:
    """By each group's own mean and variance."""
    split = x.double().reshape(x.shape[0], groups, x[:1].numel() // groups)
    centred = split - split.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (normal.reshape(x.shape) * weight.double()[:, None] + bias.double()[:, None],)


def l2norm(x: Tensor, eps: float = 1e-6, clamp: str = "sum") -> Outputs:
    if clamp == "maximum":
        return (torch.nn.functional.normalize(x.double(), dim=1, eps=eps),)
    return (x.double() / (x.double().square().sum(1, keepdim=True) + eps).sqrt(),)


def gated_rmsnorm(
    x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6, activation: str = "silu", gate_first: bool = False
) -> Outputs:
    """With the gate behind the norm, or before it."""
    opened = torch.sigmoid(gate.double()) * (gate.double() if activation == "silu" else 1.0)
    opened = opened.masked_fill(gate.isneginf(), 0.0)
    if gate_first:
        return rmsnorm(x.double() * opened, weight, eps)
    return (rmsnorm(x, weight, eps)[0] * opened,)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    """tanh with a slope and an affine map."""
    return (torch.tanh(x.double() * alpha.double()) * weight.double() + bias.double(),)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Outputs:
    """gelu(gate) * up."""
    return (gelu(gate, approximate)[0] * up.double(),)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Outputs:
    """geglu of two halves."""
    return geglu(*x.tensor_split(2, 1), approximate)


def logsigmoid(x: Tensor) -> Outputs:
    return (torch.nn.functional.logsigmoid(x.double()),)


def cumsum(x: Tensor, reverse: bool = False, exclusive: bool = False) -> Outputs:
    """Column by column."""
    y, total = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape[0], dtype=torch.float64)
    for column in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        after = total + x[:, column].double()
        y[:, column] = total if exclusive else after
        total = after
    return (y,)


def embedding(table: Tensor, ids: Tensor) -> Outputs:
    return (torch.nn.functional.embedding(ids, table.double()),)


def reduced(loss: Tensor, reduction: str) -> Outputs:
    total = loss.sum() if reduction != "none" else loss
    return (total / max(len(loss), 1) if reduction == "batchmean" else total,)


def kl_div(logits: Tensor, target_logits: Tensor, temperature: float = 1.0, reduction: str = "batchmean") -> Outputs:
    q, p = (torch.log_softmax(x.double() / temperature, 1) for x in (logits, target_logits))
    return reduced(torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(1), reduction)


def jsd(logits: Tensor, target_logits: Tensor, beta: float = 0.5, reduction: str = "batchmean") -> Outputs:
    """Entropy of the mixture less that of the parts."""

    def entropy(share: Tensor) -> Tensor:
        return -torch.special.xlogy(share, share).sum(1)

    q, p = (torch.softmax(x.double(), 1) for x in (logits, target_logits))
    parts = beta * entropy(p) + (1 - beta) * entropy(q)
    return reduced(entropy(beta * p + (1 - beta) * q) - parts, reduction)


def top_filter(x: Tensor, top_k: int | None = None, top_p: float | None = 0.9) -> Outputs:
    """Row by row, token by token from the most likely one on."""
    y = torch.full(x.shape, -math.inf, dtype=torch.float64)
    for row, values in enumerate(x.double().tolist()):
        order = sorted(range(len(values)), key=lambda place: -values[place])[:top_k]
        most = max(values) if values else 0.0
        weights = [math.exp(values[place] - most) for place in order]
        before = 0.0
        for place, weight in zip(order, weights, strict=True):
            if top_p is not None and before / sum(weights) >= top_p and place != order[0]:
                break
            y[row, place] = values[place]
            before += weight
    return (y,)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none") -> Outputs:
    """As torch has it, of a padded sequence."""
    width = weight.shape[1]
    padded = torch.nn.functional.pad(x.double(), (width - 1, 0))
    y = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=x.shape[1])
    return (torch.nn.functional.silu(y) if activation == "silu" else y,)
