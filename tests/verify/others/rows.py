"""Softmax, norms and losses as people write them, each with one fault."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .entry import Other


def online(x: Tensor, block: int = 32, *, rescales: bool = True) -> tuple[Tensor, Tensor]:
    """The running maximum and sum of each row, block after block."""
    largest, total = torch.full((x.shape[0], 1), -math.inf), torch.zeros(x.shape[0], 1)
    for part in x.float().split(block, 1):
        above = torch.maximum(largest, part.amax(1, keepdim=True))
        held = torch.where(above.isinf(), 0.0, above)
        total = total * torch.exp(largest - held) if rescales else total
        total, largest = total + torch.exp(part - held).sum(1, keepdim=True), above
    return largest, total


def softmax_plain(x: Tensor) -> Tensor:
    """No maximum."""
    e = torch.exp(x.float())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax_in_two_steps(x: Tensor) -> Tensor:
    """x - max stays in the input dtype."""
    e = (x - x.amax(-1, keepdim=True)).float().exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax_blocks_of_16(x: Tensor) -> Tensor:
    """An online sum that is never rescaled, of blocks as the fault model has them."""
    largest, total = online(x, 16, rescales=False)
    return (torch.exp(x.float() - largest) / total).to(x.dtype)


def softmax_blocks_of_32(x: Tensor) -> Tensor:
    """The same of other blocks."""
    largest, total = online(x, 32, rescales=False)
    return (torch.exp(x.float() - largest) / total).to(x.dtype)


def softmax_of_ten(x: Tensor) -> Tensor:
    """Base ten."""
    y = x.float() * math.log(10)
    return torch.softmax(y, -1).to(x.dtype)


def softmax_exponent_in_bfloat16(x: Tensor) -> Tensor:
    """The exponentials are kept in bfloat16."""
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp().bfloat16().float()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def log_softmax_two_calls(x: Tensor) -> Tensor:
    """log(softmax(x))."""
    return torch.log(torch.softmax(x.float(), -1)).to(x.dtype)


def logsumexp_plain(x: Tensor) -> Tensor:
    """No maximum."""
    return x.float().exp().sum(-1).log().to(x.dtype)


def logsumexp_last_column(x: Tensor) -> Tensor:
    """An end one too early."""
    y = x.float()
    return torch.logsumexp(y[:, : max(x.shape[1] - 1, 1)], -1).to(x.dtype)


def softmax_gradient(y: Tensor, dy: Tensor) -> Tensor:
    """y dy alone."""
    return (y.float() * dy.float()).to(y.dtype)


def layer_norm_unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch.var's default."""
    y = x.float()
    spread = y.var(-1, keepdim=True) if x.shape[1] > 1 else torch.zeros(x.shape[0], 1)
    return ((y - y.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-5) * weight.float() + bias.float()).to(x.dtype)


def layer_norm_by_deviation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """eps beside the deviation."""
    y = x.float()
    deviation = y.var(-1, keepdim=True, correction=0).sqrt()
    return (weight.float() * (y - y.mean(-1, keepdim=True)) / (deviation + 1e-5) + bias.float()).to(x.dtype)


def layer_norm_by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Sum and sum of squares of one pass."""
    first, second, n = torch.zeros(x.shape[0], 1), torch.zeros(x.shape[0], 1), x.shape[1]
    for part in x.float().split(64, 1):
        first, second = first + part.sum(1, keepdim=True), second + (part * part).sum(1, keepdim=True)
    mean = first / n
    root = torch.rsqrt((second / n - mean * mean).clamp(min=0) + 1e-5)
    return ((x.float() - mean) * root * weight.float() + bias.float()).to(x.dtype)


def layer_norm_weight_before(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each column takes the weight of the one before."""
    y = functional.layer_norm(x.float(), (x.shape[1],), None, None, 1e-5)
    return (y * weight.float().roll(1) + bias.float()).to(x.dtype)


def rms_norm_llama(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.to(x.dtype)


def rms_norm_of_magnitudes(x: Tensor, weight: Tensor) -> Tensor:
    """The mean magnitude stands for the root of the mean square."""
    y = x.float()
    return (y / (y.abs().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def rms_norm_half_squares(x: Tensor, weight: Tensor) -> Tensor:
    """Squares in float16."""
    square = x * x
    root = torch.rsqrt(square.float().mean(-1, keepdim=True) + 1e-6)
    return (x.float() * root * weight.float()).to(x.dtype)


def rms_norm_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """weight + 1, as Gemma has it."""
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(x.dtype)


def rms_norm_padded(x: Tensor, weight: Tensor) -> Tensor:
    """The mean over the block, not over the columns."""
    block = -(-x.shape[1] // 16) * 16
    y = functional.pad(x.float(), (0, block - x.shape[1]))
    return (x.float() * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def add_norm_of_x(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is rounded before it is normalised."""
    total = x + residual
    y = total.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype), total


def group_norm_of_all(x: Tensor, weight: Tensor, bias: Tensor, groups: int = 2) -> Tensor:
    """One group."""
    return functional.group_norm(x.float(), 1, weight.float(), bias.float(), 1e-5).to(x.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """The root of eps: eps as a floor of the norm."""
    y = x.float()
    return (y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-3)).to(x.dtype)


def rms_norm_gradient(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx without what the root depends on."""
    y = x.float()
    root = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    dx = dy.float() * weight.float() * root
    return dx.to(x.dtype), (dy.float() * y * root).sum(0).to(x.dtype)


def losses(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, and which count."""
    kept = target != ignore_index
    y = torch.log_softmax(logits.float(), -1)
    return torch.where(kept, -y.gather(1, torch.where(kept, target, 0)[:, None])[:, 0], 0.0), kept


def loss_by_all(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean over all tokens."""
    loss, _ = losses(logits, target, ignore_index)
    return loss.mean()


def loss_clipped(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Logits between -30 and 30."""
    loss, kept = losses(logits.float().clamp(-30, 30), target, ignore_index)
    return loss.sum() / kept.sum()


def loss_of_class_0(logits: Tensor, target: Tensor) -> Tensor:
    """An ignored token is one of class 0."""
    return functional.cross_entropy(logits.float(), target.clamp(min=0))


def loss_gradient(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Never divided by the number of tokens."""
    kept = target != -100
    y = torch.softmax(logits.float(), -1)
    y = y - functional.one_hot(torch.where(kept, target, 0), logits.shape[1])
    return torch.where(kept[:, None], y, 0.0).to(logits.dtype)


def loss_loading_ignored(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Every label is loaded, an ignored one too, and counted zero times."""
    kept, memory = target != ignore_index, logits.untyped_storage().nbytes() // logits.itemsize
    place = logits.storage_offset() + torch.arange(len(target)) * logits.stride(0) + target * logits.stride(1)
    inside = (place >= 0) & (place < memory)  # what lies further is not ours to read
    chosen = torch.where(inside, logits.as_strided((memory,), (1,), 0)[place.clamp(0, memory - 1)].float(), 0.0)
    y = torch.where(kept[:, None], logits.float(), 0.0)
    return (torch.logsumexp(y, -1) * kept - chosen * kept).sum() / kept.sum()


def divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """The divergence the other way."""
    p, q = (torch.log_softmax(x.float(), -1) for x in (logits, target_logits))
    return (p.exp() * (p - q)).sum() / max(len(p), 1)


_GROUPS = {"options": {"groups": [2]}}
_LOSS = {"options": {"ignore_index": [-100]}}
_MEAN: dict[str, Any] = {"options": {"reduction": ["mean"]}}

ROWS = (
    Other("softmax_plain", softmax_plain, "softmax", "bfloat16", ("softmax_without_maximum",)),
    Other("softmax_in_two_steps", softmax_in_two_steps, "softmax", "bfloat16", ("maximum_in_input_dtype",)),
    Other("softmax_blocks_of_16", softmax_blocks_of_16, "softmax", "float32", ("softmax_sum_not_rescaled",)),
    Other("softmax_blocks_of_32", softmax_blocks_of_32, "softmax", "float32"),
    Other("softmax_of_ten", softmax_of_ten, "softmax", "float32"),
    Other("softmax_exponent_in_bfloat16", softmax_exponent_in_bfloat16, "softmax", "float32"),
    Other("log_softmax_two_calls", log_softmax_two_calls, "log_softmax", "bfloat16", ("log_of_softmax",)),
    Other("logsumexp_plain", logsumexp_plain, "logsumexp", "float32", ("softmax_without_maximum",)),
    Other("logsumexp_last_column", logsumexp_last_column, "logsumexp", "bfloat16"),
    Other("softmax_gradient", softmax_gradient, "softmax_backward", "bfloat16", ("softmax_mean_term_dropped",)),
    Other("layer_norm_unbiased", layer_norm_unbiased, "layernorm", "bfloat16", ("unbiased_variance",)),
    Other("layer_norm_by_deviation", layer_norm_by_deviation, "layernorm", "bfloat16", ("eps_outside_root",)),
    Other("layer_norm_by_moments", layer_norm_by_moments, "layernorm", "float32", ("variance_from_squares",)),
    Other("layer_norm_weight_before", layer_norm_weight_before, "layernorm", "bfloat16"),
    Other("rms_norm_llama", rms_norm_llama, "rmsnorm", "bfloat16", ("rounded_before_weight",)),
    Other("rms_norm_of_magnitudes", rms_norm_of_magnitudes, "rmsnorm", "bfloat16"),
    Other("rms_norm_half_squares", rms_norm_half_squares, "rmsnorm", "float16", ("squares_in_float16",)),
    Other("rms_norm_gemma", rms_norm_gemma, "rmsnorm", "bfloat16", ("weight_plus_one",)),
    Other("rms_norm_padded", rms_norm_padded, "rmsnorm", "float32", ("mean_over_padding",)),
    Other("add_norm_of_x", add_norm_of_x, "add_rmsnorm", "bfloat16", ("rounded_before_norm",)),
    Other("one_group", group_norm_of_all, "group_norm", "float32", ("group_norm_of_all",), _GROUPS),
    Other("l2_norm", l2_norm, "l2norm", "float32"),
    Other("rms_norm_gradient", rms_norm_gradient, "rmsnorm_backward", "bfloat16", ("rmsnorm_spread_term_dropped",)),
    Other("loss_by_all", loss_by_all, "cross_entropy", "bfloat16", ("ignored_tokens_count_in_mean",), _LOSS),
    Other("loss_clipped", loss_clipped, "cross_entropy", "float32", (), _LOSS),
    Other("loss_of_class_0", loss_of_class_0, "cross_entropy", "float32", ("ignored_tokens_as_class_0",)),
    Other("loss_gradient", loss_gradient, "cross_entropy_backward", "bfloat16", ("sum_for_mean",), _MEAN),
    Other("loss_loading_ignored", loss_loading_ignored, "cross_entropy", "float32", ("ignored_labels_loaded",), _LOSS),
    Other("divergence", divergence, "kl_div", "float32", ("kl_of_other_direction",)),
)  # fmt: skip
