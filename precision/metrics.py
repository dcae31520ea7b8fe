"""The metrics at a model's output, and the random cotangents whose products with a change estimate them.

Each metric is a quadratic form in the change dz of the output, E[(v . dz)^2] over random cotangents v: for the
Kullback-Leibler divergence of next-token distributions, KL(p || p~) = 1/2 dz' (diag p - p p') dz + O(dz^3), so v has
that covariance. It is made of random signs: drawing a token y from p and taking onehot(y) - p has the same covariance,
but heavy tails where p is peaked, and needs several times the samples. For the relative error, v is random signs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.formats.errors import UnknownOption
from assay.precision.errors import WrongShape

Batch = Mapping[str, Any]

_POSITIONS = 256  # Positions of a batch that `by_position` compares at once, to bound memory


class Metric(ABC):
    """A distance between two outputs of a model for one batch."""

    name: str
    unit: str
    power: float = 2.0
    """1 where the metric grows with the square of a change, 2 where it is the root of that (an amplitude)."""
    factor: float = 1.0
    """The expected (v . dz)^2 for each unit of distance."""

    @abstractmethod
    def output(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the tensor to compare, [B, ...]."""

    @abstractmethod
    def cotangent(self, output: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return a random v of the output's shape, independent between positions, zero at padding."""

    @abstractmethod
    def distance(self, reference: Tensor, output: Tensor) -> Tensor:
        """Return the distance of one batch at each of its positions, or a term of it."""

    @abstractmethod
    def weights(self, reference: Tensor, batch: Batch) -> Tensor:
        """Return each sequence's part of the divisor of sums over sequences, float64 [B]."""

    def compare(self, reference: Tensor, output: Tensor, batch: Batch) -> Tensor:
        """Return the distance of each sequence, summed over its positions, float64 [B]. The metric is `mean` of their
        sum and the sum of weights."""
        return _by_sequence(at_valid(self.distance(reference, output), batch))

    def agreeing(self, reference: Tensor, output: Tensor, batch: Batch) -> Tensor | None:
        """Return at how many positions of each sequence the most likely value is the same, float64 [B], out of
        `weights`; None for a metric without such outputs."""
        return None

    def by_position(self, reference: Tensor, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the distance and the weight of each position, float64 [B, T], of outputs [B, T, ...]; in chunks, since
        float64 takes twice the memory. Raises WrongShape for other outputs."""
        if reference.dim() < 3:
            shape = list(reference.shape)
            raise WrongShape(f"expected outputs of every position, [B, T, ...], for errors over positions, got {shape}")
        size, chunks = reference.shape[:2], []
        for start in range(0, size[1], _POSITIONS):
            some = slice(start, start + _POSITIONS)
            one, other = (each[:, some].flatten(0, 1)[:, None] for each in (reference, output))
            valid = _valid(reference, batch)[:, some].flatten().to(torch.float64)
            distances = torch.where(valid > 0, _by_sequence(self.distance(one, other)), 0.0)
            weights = self.weights(one, {}) * valid
            chunks.append(torch.stack([each.reshape(size[0], -1) for each in (distances, weights)]))
        whole = torch.cat(chunks, -1)
        return whole[0], whole[1]

    def error(self, squares: Any, weight: float) -> Any:
        """Return the metric from a sum of squares (v . dz)^2, a number or an array."""
        return self.mean(squares, self.factor * weight)

    def squares(self, error: float, weight: float) -> float:
        """Return the sum of squares at which `error` is ``error``."""
        return float(self.factor * weight * error**self.power)

    def mean(self, total: Any, weight: float) -> Any:
        """Return the metric from a sum of distances."""
        return (total / weight) ** (1 / self.power)


def _tensor(outputs: Any, *names: str) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    for name in names:
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(outputs, tuple | list) and (tensors := [each for each in outputs if isinstance(each, Tensor)]):
        return min(tensors, key=lambda tensor: tensor.dim() < 2)  # a loss may come first
    hidden = isinstance(outputs, Mapping) and "last_hidden_state" in outputs
    remedy = "; metric='relative' compares hidden states" if hidden else ""
    raise WrongShape(f"expected an output with {' or '.join(names)}, or a tensor, got {type(outputs).__name__}{remedy}")


def mask_of(batch: Batch) -> Tensor | None:
    """Return which positions are no padding, bool [B, T], the decoder's of an encoder-decoder; None without a mask."""
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return mask > 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None


def padding_of(batch: Any) -> Tensor | None:
    """Return `mask_of` where it holds for all sequences of the model; None for an encoder-decoder, which has two
    kinds."""
    return mask_of(batch) if isinstance(batch, Mapping) and "decoder_input_ids" not in batch else None


def _valid(output: Tensor, batch: Batch) -> Tensor:
    """Return which positions of [B, T, ...] count, bool [B, T, 1, ...]; all where no attention mask has that shape."""
    mask = mask_of(batch)
    if mask is not None and output.dim() > 2 and mask.shape == output.shape[:2]:
        return mask.to(output.device).reshape(*mask.shape, *(1,) * (output.dim() - 2))
    return torch.ones(*output.shape[:-1], 1, dtype=torch.bool, device=output.device)


def at_valid(values: Tensor, batch: Batch) -> Tensor:
    """Return values [B, T, ...] with zeros at padding."""
    return torch.where(_valid(values, batch), values, 0.0)


def _by_sequence(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).sum(1)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator, dtype=like.dtype).mul_(2).sub_(1).to(like.device)


class KL(Metric):
    """Mean Kullback-Leibler divergence of the next-token (or class) distributions, in nats per position."""

    name, unit, power, factor = "kl", "nats per token", 1.0, 2.0

    def output(self, outputs: Any, batch: Batch) -> Tensor:
        logits = _tensor(outputs, "logits")
        if logits.dim() not in (2, 3) or logits.shape[-1] < 2:
            raise WrongShape(
                f"expected logits [B, C] or [B, T, V] of at least two classes for metric='kl', got "
                f"{list(logits.shape)}: take metric='relative' or a loss of your own"
            )
        return logits

    def cotangent(self, output: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        root = output.detach().softmax(-1).sqrt_()
        sign = _signs(root, generator)
        # With u = sqrt(p), of norm one, v = u * (s - u (u . s)) has covariance diag(u) (1 - uu') diag(u).
        v = root * (sign - root * torch.linalg.vecdot(root, sign)[..., None])
        return at_valid(v, batch)

    def distance(self, reference: Tensor, output: Tensor) -> Tensor:
        terms = []
        for pair in zip(reference, output, strict=True):  # one by one: float64 takes twice the memory
            # In float32 terms of both signs would leave 1e-8 where nothing differs.
            p, q = (logits.double().log_softmax(-1) for logits in pair)
            terms.append((p.exp() * (p - q)).sum(-1, keepdim=True).clamp(min=0.0))
        return torch.stack(terms)

    def weights(self, reference: Tensor, batch: Batch) -> Tensor:
        return _by_sequence(_valid(reference, batch))

    def agreeing(self, reference: Tensor, output: Tensor, batch: Batch) -> Tensor:
        same = reference.argmax(-1, keepdim=True) == output.argmax(-1, keepdim=True)
        return _by_sequence(at_valid(same.double(), batch))


class Relative(Metric):
    """Root of the squared error over the squared reference, of logits, hidden states or embeddings."""

    name, unit = "relative", "relative error"

    def output(self, outputs: Any, batch: Batch) -> Tensor:
        return _tensor(outputs, "last_hidden_state", "logits")

    def cotangent(self, output: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        return at_valid(_signs(output, generator), batch)

    def distance(self, reference: Tensor, output: Tensor) -> Tensor:
        return (output.double() - reference.double()).square()

    def weights(self, reference: Tensor, batch: Batch) -> Tensor:
        return _by_sequence(at_valid(reference.double().square(), batch))


class Loss(Relative):
    """Root mean square, over sequences, of the change of a user's loss.

    loss(outputs, batch) gives one number a sequence, [B], differentiable in the outputs.
    """

    name, unit = "loss", "change of the loss"

    def __init__(self, loss: Callable[[Any, Batch], Tensor]) -> None:
        self._loss = loss

    def output(self, outputs: Any, batch: Batch) -> Tensor:
        value = self._loss(outputs, batch)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise WrongShape(f"expected a loss for each sequence, shape [B], got {getattr(value, 'shape', value)}")
        return value

    def weights(self, reference: Tensor, batch: Batch) -> Tensor:
        return torch.ones_like(reference, dtype=torch.float64)


def metric_named(metric: str | Callable[[Any, Batch], Tensor]) -> Metric:
    """Return the metric "kl", "relative", or that of a loss function. Raises UnknownOption."""
    if callable(metric):
        return Loss(metric)
    known = {"kl": KL, "relative": Relative}
    if metric not in known:
        raise UnknownOption(f"expected metric 'kl', 'relative' or a function of outputs and batch, got {metric!r}")
    return known[metric]()
