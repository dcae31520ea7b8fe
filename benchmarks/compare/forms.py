"""How engines write the parts of a model: fused, in blocks, over ranks, absorbed, in other orders.

Each function alters one model in place and nothing that models share; `honest.py` uses the right forms, `mismatches.py`
the same with one thing wrong. Parts of a model are found by the names that transformers gives them.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layers(model: Any, only: int | None = None) -> list[Any]:
    """Return the decoder's layers, or the list of the one with this index."""
    found = list(model.model.layers)
    return found if only is None else [found[only]]


def attentions(model: Any, only: int | None = None) -> list[Any]:
    """Return the modules of softmax attention."""
    return [layer.self_attn for layer in layers(model, only) if hasattr(layer, "self_attn")]


def mixtures(model: Any, only: int | None = None) -> list[Any]:
    """Return the blocks with a router and experts."""
    return [layer.mlp for layer in layers(model, only) if hasattr(layer.mlp, "experts")]


def method(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
    """Set a method of this one module: ``function(module, ...)``."""
    setattr(module, name, types.MethodType(function, module))


def wrap(module: Any, around: Callable[..., Any]) -> None:
    """Let ``around(original, ...)`` answer this module's calls, where ``original`` is its forward."""
    original = module.forward
    module.forward = lambda *arguments, **options: around(original, *arguments, **options)


def functions(module: Any, **changed: Any) -> None:
    """Let the forward of this one module call other functions than its file's, by their names there."""
    forward = inspect.unwrap(module.forward.__func__)
    own = types.FunctionType(
        forward.__code__, forward.__globals__ | changed, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    method(module, own)


def function(module: Any, name: str) -> Callable[..., Any]:
    """Return the function that the forward of this module calls by this name."""
    return inspect.unwrap(module.forward.__func__).__globals__[name]


class Overlay:
    """A namespace with some names of its own, and all others of another one."""

    def __init__(self, below: Any, **own: Any) -> None:
        self.__dict__.update(own)
        self._below = below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbours (2i, 2i + 1) of x [B, H, S, D] by the angles of cos and sin [B, S, D], whose halves repeat."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of x [B, H, S, D] by the angles of cos and sin [B, S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def both(turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of q, k, cos, sin that turns q and k."""
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


@dataclass
class Call:
    """What attention is called with: q [B, H, S, D], k and v [B, Hkv, T, D], an additive mask or None, the scale."""

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    softcap: float | None = None


def attend(module: Any, form: Callable[[Call], Tensor]) -> None:
    """Let ``form``, which returns [B, S, H, D], be the attention of a module, with the mask of eager attention."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        return form(Call(module, q, k, v, mask, scaling, options.get("softcap"))), None

    functions(module, eager_attention_forward=attention)


def eager(call: Call) -> Tensor:
    """Attention as transformers writes it: scores in the inputs' dtype, softmax in float32."""
    original = inspect.unwrap(type(call.module).forward).__globals__["eager_attention_forward"]
    options = {} if call.softcap is None else {"softcap": call.softcap}
    return original(call.module, call.q, call.k, call.v, call.mask, scaling=call.scale, **options)[0]


def blockwise(call: Call, block: int = 16, splits: int = 1) -> Tensor:
    """Attention with an online softmax over blocks of keys, in float32; ``splits`` merge by their log-sum-exps."""
    q, k, v = (part.float() for part in (call.q, call.k, call.v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    ends = torch.linspace(0, k.shape[2], splits + 1).long().tolist()
    states = [
        _online(call, q, k[:, :, first:last], v[:, :, first:last], first, block)
        for first, last in itertools.pairwise(ends)
        if last > first
    ]
    highest = torch.stack([state[0] for state in states]).amax(0)
    total = sum(((state[0] - highest).exp() * state[1] for state in states), torch.zeros(()))
    output = sum(((state[0] - highest).exp() * state[2] for state in states), torch.zeros(()))
    return (output / total).to(call.q.dtype).transpose(1, 2)


def _online(call: Call, q: Tensor, k: Tensor, v: Tensor, first: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    highest = torch.full((*q.shape[:3], 1), -1e30)
    total, output = torch.zeros_like(highest), q.new_zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, k.shape[2], block):
        scores = (q * call.scale) @ k[:, :, start : start + block].transpose(2, 3)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.mask is not None:
            scores = scores + call.mask[..., first + start : first + start + scores.shape[-1]].float()
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = (scores - higher).exp()
        total = total * (highest - higher).exp() + weights.sum(-1, keepdim=True)
        output = output * (highest - higher).exp() + weights @ v[:, :, start : start + block]
        highest = higher
    return highest, total, output


class FusedAttention(nn.Module):
    """Attention with one product for q, k and v, as vLLM and SGLang have it; ``lost`` are parts without their bias."""

    def __init__(self, original: Any, lost: Iterable[str] = ()) -> None:
        super().__init__()
        self.config, self.layer_idx, self.scaling = original.config, original.layer_idx, original.scaling
        self.head_dim, self.num_key_value_groups = original.head_dim, original.num_key_value_groups
        parts = {name: getattr(original, f"{name}_proj") for name in "qkv"}
        self.sizes = [part.out_features for part in parts.values()]
        self.qkv_proj = nn.Linear(parts["q"].in_features, sum(self.sizes), parts["q"].bias is not None)
        self.qkv_proj.weight = _joined([part.weight for part in parts.values()])
        if parts["q"].bias is not None:
            self.qkv_proj.bias = _joined([part.bias * (name not in lost) for name, part in parts.items()])
        self.o_proj = original.o_proj
        self.q_norm, self.k_norm = (getattr(original, name, None) for name in ("q_norm", "k_norm"))
        self._rotate = function(original, "apply_rotary_pos_emb")
        self._attention = function(original, "eager_attention_forward")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the block's output [B, S, N], as the module that this one replaces."""
        parts = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        v = v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        output, _ = self._attention(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(output.flatten(2)), None


class FusedMLP(nn.Module):
    """A gated MLP with one product for gate and up; ``exchanged``: the halves are taken for one another."""

    def __init__(self, original: Any, exchanged: bool = False) -> None:
        super().__init__()
        gate, up = original.gate_proj, original.up_proj
        self.gate_up_proj = nn.Linear(gate.in_features, 2 * gate.out_features, bias=False)
        self.gate_up_proj.weight = _joined([gate.weight, up.weight])
        self.down_proj, self.act_fn, self.exchanged = original.down_proj, original.act_fn, exchanged

    def forward(self, x: Tensor) -> Tensor:
        """Return down(act(gate x) * (up x))."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.exchanged:
            gate, up = up, gate
        return self.down_proj(self.act_fn(gate) * up)


def _joined(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def fuse(model: Any) -> None:
    """Fuse q, k, v and gate, up in all layers."""
    for layer in layers(model):
        layer.self_attn = FusedAttention(layer.self_attn)
        if hasattr(layer.mlp, "gate_proj"):
            layer.mlp = FusedMLP(layer.mlp)


BLOCK = 64


class BlockFP8Linear(nn.Module):
    """A product with a weight in FP8 (e4m3) and a scale for each block, named as DeepSeek's checkpoints name them.

    ``shift``: the scale that is used stands so many blocks further along K.
    """

    def __init__(self, linear: nn.Linear, shift: int = 0) -> None:
        super().__init__()
        N, K = linear.weight.shape
        blocks = linear.weight.float().reshape(N // BLOCK, BLOCK, K // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448.0
        codes = (blocks / scale[:, None, :, None]).reshape(N, K).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.in_features, self.out_features, self.bias, self.shift = K, N, linear.bias, shift

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the weight, dequantised to x's dtype."""
        scale = self.weight_scale_inv.roll(self.shift, 1).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return F.linear(x, (self.weight.float() * scale).to(x.dtype), self.bias)


def block_fp8(model: Any) -> None:
    """Store the linears of all MLPs in FP8 with a scale for each block of 64 by 64."""
    for layer in layers(model):
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, BlockFP8Linear(getattr(layer.mlp, name)))


def over_ranks(linear: Any, ranks: int, partial: torch.dtype = torch.float32, lost: int | None = None) -> None:
    """Split K of a linear over ranks; each rounds its sum to ``partial``, in which they are added; one may be lost."""

    def forward(module: Any, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(ranks, -1), module.weight.chunk(ranks, -1), strict=True)
        sums = [F.linear(part.float(), weight.float()).to(partial) for part, weight in pieces]
        if lost is not None:
            sums[lost] = torch.zeros_like(sums[lost])
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        return total.to(x.dtype)

    method(linear, forward)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    chunk: int = 16,
    keys_normed: bool = True,
    decayed: bool = True,
    interleaved: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks: query, key [B, S, Hk, D], value [B, S, H, Dv], log decay g and beta [B, S, H].

    In a chunk that starts with the state S0, with G the sum of g from its start, u solves the triangular system
    u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) k_i S0), and the output is
    exp(G_i) q_i S0 + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j (Yang et al., Gated Delta Networks, 2024).
    ``decayed`` False leaves exp(G_i) out where S0 is read for the output, ``keys_normed`` False the norms of keys;
    ``interleaved`` False gives value heads the wrong key heads.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, g, beta = (part.transpose(1, 2).float() for part in (query, key, value, g, beta))
    q, k = (x.repeat_interleave(groups, 1) if interleaved else x.repeat(1, groups, 1, 1) for x in (q, k))
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() / q.shape[-1] ** 0.5
    if keys_normed:
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.float()
    outputs = []
    for qc, kc, vc, gc, bc in zip(*(part.split(chunk, 2) for part in (q, k, v, g, beta)), strict=True):
        total = gc.cumsum(-1)
        pairs = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        carried = total.exp()[..., None]
        system = bc[..., None] * pairs * (kc @ kc.mT)
        u = torch.linalg.solve_triangular(
            system, bc[..., None] * (vc - carried * (kc @ state)), upper=False, unitriangular=True
        )
        outputs.append((carried if decayed else 1.0) * (qc @ state) + (pairs * (qc @ kc.mT)) @ u)
        rest = (total[..., -1:] - total).exp()[..., None]
        state = total[..., -1:].exp()[..., None] * state + (rest * kc).mT @ u
    return torch.cat(outputs, 2).transpose(1, 2).to(dtype), state if output_final_state else None


def absorbed(module: Any) -> None:
    """Let latent attention read its compressed keys: the up-projection of keys goes into q, that of values last."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        nope, turned, rank = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_nope, q_rope = q.unflatten(-1, (-1, nope + turned)).transpose(1, 2).split([nope, turned], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([rank, turned], dim=-1)
        latent, k_rope = self.kv_a_layernorm(latent)[:, None], k_rope[:, None]
        q_rope, k_rope = function(module_of, "apply_rotary_pos_emb_interleave")(q_rope, k_rope, *position_embeddings)
        if past_key_values is not None:
            latent, k_rope = past_key_values.update(latent, k_rope, self.layer_idx)
        up = self.kv_b_proj.weight.unflatten(0, (-1, nope + self.v_head_dim))
        of_keys, of_values = up.split([nope, self.v_head_dim], dim=1)
        q_latent = (q_nope.float() @ of_keys.float()).to(q.dtype)
        scores = q_latent.float() @ latent.float().mT + q_rope.float() @ k_rope.float().mT
        scores = scores * self.scaling + (0.0 if attention_mask is None else attention_mask.float())
        weights = scores.softmax(-1).to(q.dtype)
        output = (weights.float() @ latent.float()).to(q.dtype).float() @ of_values.float().mT
        return self.o_proj(output.to(q.dtype).transpose(1, 2).flatten(2)), None

    module_of = types.SimpleNamespace(forward=module.forward)
    method(module, forward)


def experts_by_token(module: Any, ids_of: Callable[[Tensor], Tensor] = lambda ids: ids) -> None:
    """Let a layer's experts be summed by token in float32, from the last choice to the first."""

    def forward(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ids = ids_of(ids)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for choice in reversed(range(ids.shape[1])):
            for expert in ids[:, choice].unique().tolist():
                rows = (ids[:, choice] == expert).nonzero()[:, 0]
                gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
                output = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                total[rows] += output.float() * weights[rows, choice, None].float()
        return total.to(x.dtype)

    method(module, forward)


def carried_norms(model: Any) -> None:
    """Add the residual in the norm that follows, as engines do: layers hand on the block's output and the residual."""
    model.model.norm = CarriedNorm(model.model.norm)
    for layer in layers(model):
        layer.input_layernorm = CarriedNorm(layer.input_layernorm)
        layer.post_attention_layernorm = CarriedNorm(layer.post_attention_layernorm)
        method(layer, _carried)


class CarriedNorm(nn.Module):
    """An RMS norm of x + residual, in float32 up to the end; returns it and the rounded sum, which it hands on."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Any, residual: Tensor | None = None) -> Any:
        """Return norm(x + residual) and x + residual; for a pair in x, what follows the last layer, the norm alone."""
        if isinstance(x, tuple):
            return self(*x)[0]
        total = x.float() if residual is None else x.float() + residual.float()
        normed = total * (total.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (normed * self.weight.float()).to(x.dtype), total.to(x.dtype)


def _carried(self: Any, hidden_states: Any, **options: Any) -> tuple[Tensor, Tensor]:
    carried = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    x, residual = self.input_layernorm(*carried)
    x, _ = self.self_attn(hidden_states=x, **options)
    x, residual = self.post_attention_layernorm(x, residual)
    return self.mlp(x), residual
