"""Matrix products, plain, quantised, microscaled and sparse, the mixture of experts, and sums over ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .gradients import by_autograd, gradients

Outputs = tuple[Tensor, ...]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    return (torch.nn.functional.linear(x.double(), weight.double(), bias.double()),)


def gemm(a: Tensor, b: Tensor) -> Outputs:
    return (a.double() @ b.double(),)


def gemm_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str = "tensor") -> Outputs:
    """Dequantised, place by place where scales go by blocks."""
    left, right = a.double(), b.double()
    if granularity != "block":
        return ((left * scale_a.double()) @ (right * scale_b.double()),)
    for k in range(0, a.shape[1], 128):
        left[:, k : k + 128] *= scale_a[:, k // 128, None].double()
        for n in range(0, b.shape[1], 128):
            right[k : k + 128, n : n + 128] *= float(scale_b[k // 128, n // 128])
    return (left @ right,)


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Outputs:
    return ((a.double() * scale_a.double()) @ (b.double() * scale_b.double()),)


def unpacked(words: Tensor, axis: int, places: Iterable[int]) -> Tensor:
    """The nibbles of each word, at these places, as neighbours along an axis."""
    nibbles = words.long()[..., None] >> 4 * torch.tensor(list(places)) & 15
    return nibbles.movedim(-1, axis + 1).flatten(axis, axis + 1).double()


def dequantized(qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> Tensor:
    """The weights [K,N]."""
    if packing == "plain":
        codes, points = unpacked(qweight, 0, range(2)), zeros.double()
    elif packing == "awq":
        codes, points = (unpacked(words, 1, map(AWQ_ORDER.index, range(8))) for words in (qweight, zeros))
    else:
        codes, points = unpacked(qweight, 0, range(8)), unpacked(zeros, 1, range(8)) + 1
    width = codes.shape[0] // max(len(scales), 1)
    return (codes - points.repeat_interleave(width, 0)) * scales.double().repeat_interleave(width, 0)


def gemm_int4(x: Tensor, *weights: Tensor, packing: str = "plain") -> Outputs:
    return (x.double() @ dequantized(*weights, packing),)


def gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Outputs:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g in range(a.shape[1] // 32):
        k = slice(32 * g, 32 * g + 32)
        total += (a[:, k].double() * scale_a[:, g, None].double()) @ (b[k].double() * scale_b[g].double())
    return (total,)


def numbers(packed: Tensor) -> Tensor:
    """The e2m1 numbers of two nibbles a byte."""
    rows = []
    for row in packed.tolist():
        codes = [code for byte in row for code in (byte % 16, byte // 16)]
        rows.append([(-1.0 if code >= 8 else 1.0) * E2M1[code % 8] for code in codes])
    return torch.tensor(rows, dtype=torch.float64).reshape(packed.shape[0], 2 * packed.shape[1])


def gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Outputs:
    """Everything dequantised."""
    left, right = (
        numbers(x) * s.double().repeat_interleave(16, dim=1) * float(g)
        for x, s, g in ((a, scale_a, global_a), (b, scale_b, global_b))
    )
    return (left @ right.T,)


def gemm_2to4(values: Tensor, index: Tensor, b: Tensor) -> Outputs:
    total = torch.zeros(values.shape[0], b.shape[1], dtype=torch.float64)
    for j in range(values.shape[1]):
        total += values[:, j, None].double() * b[4 * (j // 2) + index[:, j].long()].double()
    return (total,)


def all_reduce(shards: Tensor) -> Outputs:
    return (shards.double().sum(dim=0),)


def moe_route(logits: Tensor, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax") -> Outputs:
    """Experts sorted by logit, the first of equal ones before the others."""
    values = logits.double()
    scores = torch.sigmoid(values) if scoring == "sigmoid" else torch.softmax(values, 1)
    ids = values.argsort(dim=1, descending=True, stable=True)[:, :top_k]  # scores may round to the same
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True) if renormalize else weights, ids.to(torch.int32)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Outputs:
    """Token by token, expert by expert; an id of no expert adds nothing."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, places in enumerate(ids.tolist()):
        for place, expert in enumerate(places):
            if not 0 <= expert < len(w_down):
                continue
            gate, up = (w_gate_up[expert].double() @ x[t].double()).tensor_split(2)
            hidden = torch.nn.functional.silu(gate) * up
            y[t] += float(weights[t, place]) * (w_down[expert].double() @ hidden)
    return (y,)


def fp8_experts(
    w_gate_up: Tensor, w_down: Tensor, scale_gate_up: Tensor, scale_down: Tensor, granularity: str
) -> list[Tensor]:
    """Dequantised, place by place where scales go by blocks."""
    weights = []
    for codes, scale in ((w_gate_up, scale_gate_up), (w_down, scale_down)):
        w, width = codes.double(), 128 if granularity == "block" else 1
        for n in range(codes.shape[1]):
            for k in range(0, codes.shape[2], 128):
                w[:, n, k : k + 128] *= scale[:, n // width, k // 128 if granularity == "block" else 0, None].double()
        weights.append(w)
    return weights


def moe_fp8(x: Tensor, *tensors: Tensor, granularity: str = "channel") -> Outputs:
    return moe(x, *fp8_experts(*tensors[:4], granularity), *tensors[4:])


def moe_fp8_backward(x: Tensor, *tensors: Tensor, granularity: str = "channel") -> Outputs:
    """That of the dequantised experts, without their own gradients."""
    dx, _, _, dweights = moe_backward(x, *fp8_experts(*tensors[:4], granularity), *tensors[4:])
    return dx, dweights


def moe_int4(x: Tensor, w_gate_up: Tensor, w_down: Tensor, *rest: Tensor) -> Outputs:
    """Dequantised, row by row."""
    scale_gate_up, scale_down, zero_gate_up, zero_down, *routing = rest
    weights = []
    for packed, scales, zeros in ((w_gate_up, scale_gate_up, zero_gate_up), (w_down, scale_down, zero_down)):
        codes = unpacked(packed.flatten(0, 1), 1, range(2)).reshape(*packed.shape[:2], -1)
        width = codes.shape[2] // max(scales.shape[2], 1)
        shifted = codes - zeros.double().repeat_interleave(width, 2)
        weights.append(shifted * scales.double().repeat_interleave(width, 2))
    return moe(x, *weights, *routing)


def moe_backward(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor) -> Outputs:
    """By autograd, every token through every expert; an id of no expert adds nothing."""
    chosen = torch.nn.functional.one_hot(ids.long().clamp(-1, len(w_down)) + 1, len(w_down) + 2)[..., 1:-1].double()

    def mixed(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("td,efd->tef", x, w_gate_up).tensor_split(2, -1)
        outputs = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, w_down)
        return torch.einsum("ted,tke,tk->td", outputs, chosen, weights)

    return gradients(mixed, [x, w_gate_up, w_down, weights], dy)


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Outputs:
    w = codes.double()
    for m in range(0, codes.shape[0], 128):
        for n in range(0, codes.shape[1], 128):
            w[m : m + 128, n : n + 128] *= float(scale[m // 128, n // 128])
    return (w,)


def dequantize_int4(*weights: Tensor, packing: str = "plain") -> Outputs:
    return (dequantized(*weights, packing),)


def dequantize_mxfp4(codes: Tensor, scale: Tensor) -> Outputs:
    return (numbers(codes) * scale.double().repeat_interleave(32, dim=1),)


moe_route_backward = by_autograd(moe_route, 1)
