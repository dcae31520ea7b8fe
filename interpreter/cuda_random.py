"""The tensors that PyTorch draws on an NVIDIA GPU for a seed, on a CPU: so that what failed there repeats here.

``torch.rand``, ``torch.randint`` and ``Tensor.bernoulli_`` are whole-number arithmetic and one rounding, so their bits
are known. ``torch.randn`` in float32 takes a sine and a cosine of the hardware, whose bits no document gives: `Normal`
has the exact value and how far the GPU's may be from it. Which thread draws which element depends on the number of
multiprocessors. Nothing of this has yet been compared with a GPU's own results (docs/gpu.md says what has).

Sources: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11) for Philox4x32-10; PyTorch 2.13,
ATen/native/cuda/DistributionTemplates.h, for who draws what; cuRAND's device API for numbers made of 32-bit words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.interpreter.cuda_devices import USUAL, cuda_device_named
from assay.runtime.errors import SettingError

_Words = NDArray[np.uint32]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by in each round
_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)

_BLOCK = 256  # threads
_DRAWN = 4  # by which a thread's place in its stream grows with each draw
_WIDE = 2**28  # ranges from here on take 64 bits of each number
_MOST_BYTES = 2**31 - 1  # beyond, PyTorch launches several kernels

_SINE = 2.0**-20.5  # largest error of sin.approx and cos.approx from -2 pi to 2 pi (PTX ISA)
_ROUNDINGS = 4 * 2.0**-23  # of logf (1 ulp here and there), sqrtf and the product, relative to the radius of the normal

_REAL = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def philox(counters: _Words, key: tuple[int, int]) -> _Words:
    """Philox4x32-10 of each counter, [..., 4] 32-bit words, the lowest first, under a key of two words: [..., 4]."""
    a, b, c, d = (counters[..., i].astype(np.uint64) for i in range(4))
    for turn in range(_ROUNDS):
        first, second = ((word + turn * weyl) & 0xFFFFFFFF for word, weyl in zip(key, _WEYL, strict=True))
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (right >> np.uint64(32)) ^ b ^ np.uint64(first), right & _WORD
        c, d = (left >> np.uint64(32)) ^ d ^ np.uint64(second), left & _WORD
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


@dataclass(frozen=True)
class Normal:
    """Normally distributed numbers: ``values`` with exact functions, of which a GPU's are within ``radius``."""

    values: Tensor
    radius: Tensor


class CudaGenerator:
    """PyTorch's generator of a CUDA device after ``torch.manual_seed(seed)``: each call goes on where the last ended.

    ``device`` is a row of ``configs/cuda_devices.toml``; ``multiprocessors`` and ``threads``, those resident on one,
    say what it doesn't know. ``offset`` is what ``torch.cuda.default_generators[0].get_offset()`` gave. ``wide`` is the
    range from which ``torch.randint`` takes 64 bits: that of the builds that PyTorch publishes, 2.13. Raises
    `SettingError` for an unknown device, a seed beyond 64 bits and an offset that isn't a multiple of four.
    """

    def __init__(
        self,
        seed: int,
        device: str = USUAL,
        *,
        offset: int = 0,
        multiprocessors: int | None = None,
        threads: int | None = None,
        wide: int = _WIDE,
    ) -> None:
        if not -(2**63) <= seed < 2**64:
            raise SettingError(f"seed {seed}: expected a whole number of 64 bits, from -2**63 to 2**64 - 1")
        if offset < 0 or offset % _DRAWN:
            raise SettingError(
                f"offset {offset}: expected a multiple of {_DRAWN} that isn't negative, as PyTorch's are"
            )
        row = cuda_device_named(device)
        resident = threads or row.max_threads_per_multi_processor
        self.most_blocks = (multiprocessors or row.multi_processor_count) * (resident // _BLOCK)
        self.key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        self.offset = offset
        self.wide = wide

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``torch.rand(shape, dtype=dtype, device="cuda")``, bit for bit: from 0, included, to 1, excluded."""
        _check(dtype, _REAL, "torch.rand")
        drawn = torch.from_numpy(self._uniform(shape, dtype)).to(dtype)  # from 0, excluded, to 1, included
        return drawn.masked_fill_(drawn == 1, 0.0)

    def bernoulli(self, p: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``torch.empty(shape, dtype=dtype, device="cuda").bernoulli_(p)``, bit for bit; p is a number."""
        _check(dtype, _REAL | _WHOLE | {torch.bool}, "Tensor.bernoulli_")
        if not 0 <= p <= 1:
            raise SettingError(f"p = {p}: expected a probability, from 0 to 1")
        drawn = self._uniform(shape, dtype)
        return torch.from_numpy(drawn < drawn.dtype.type(p)).to(dtype)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """``torch.randint(low, high, shape, dtype=dtype, device="cuda")``, bit for bit."""
        _check(dtype, _WHOLE, "torch.randint")
        if not low < high or high - low >= 2**64:
            raise SettingError(f"randint from {low} to {high}: expected low < high")
        span = high - low
        if span >= self.wide:
            words = self._draw(shape, dtype, 2).astype(np.uint64)
            drawn = words[..., 0] << np.uint64(32) | words[..., 1]
        else:
            drawn = self._draw(shape, dtype, 4)[..., 0].astype(np.uint64)
        with np.errstate(over="ignore"):
            found = (drawn % np.uint64(span)).view(np.int64) + np.int64(low)
        return torch.from_numpy(found).reshape(tuple(shape)).to(dtype)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Normal:
        """``torch.randn(shape, dtype=dtype, device="cuda")`` within a radius; float32, float16 and bfloat16.

        Box and Muller's transform of each pair of words, as cuRAND has it: the sine first, then the cosine.
        """
        _check(dtype, _REAL - {torch.float64}, "torch.randn")
        words = self._draw(shape, dtype, 4, whole=True)
        pairs = words.reshape(-1, 2)
        lengths = np.sqrt(_rounded(-2 * np.log(_unit(pairs[:, 0]).astype(np.float64))))
        angles = _angle(pairs[:, 1]).astype(np.float64)
        functions = _rounded(np.stack([np.sin(angles), np.cos(angles)], axis=-1))
        numel = math.prod(shape)
        values = torch.from_numpy(_laid_out((functions * lengths[:, None]).reshape(words.shape), numel))
        both = np.broadcast_to(lengths[:, None], functions.shape).reshape(words.shape)
        radius = torch.from_numpy(_laid_out(both, numel).astype(np.float64)) * (_SINE + _ROUNDINGS)
        if dtype != torch.float32:
            radius = radius * 2 + (values.double().abs() + radius) * torch.finfo(dtype).eps
        return Normal(values.reshape(shape).to(dtype), radius.reshape(shape))

    def _uniform(self, shape: Sequence[int], dtype: torch.dtype) -> NDArray[Any]:
        """Float32, or float64 for that dtype, from 0, excluded, to 1, included."""
        if dtype == torch.float64:
            words = self._draw(shape, dtype, 2).astype(np.uint64)
            mixed = words[..., 0] ^ words[..., 1] << np.uint64(53 - 32)
            return np.asarray(mixed.astype(np.float64) * 2.0**-53 + 2.0**-54).reshape(tuple(shape))
        return _unit(self._draw(shape, dtype, 4)[..., 0]).reshape(tuple(shape))

    def _draw(self, shape: Sequence[int], dtype: torch.dtype, unroll: int, whole: bool = False) -> _Words:
        """The words of each element, [elements, 4 / unroll]; with ``whole`` of each draw, [draws, threads, 4].

        A thread draws four words at a time, which make ``unroll`` elements that lie one grid apart.
        """
        numel = math.prod(shape)
        if numel * dtype.itemsize > _MOST_BYTES:
            raise SettingError(
                f"{numel * dtype.itemsize} bytes: expected less than 2 GiB; PyTorch splits larger tensors"
            )
        threads = _BLOCK * max(1, min(-(-numel // _BLOCK), self.most_blocks))
        draws = -(-numel // (threads * unroll))
        first = self.offset // 4
        self.offset += draws * _DRAWN
        counters = np.zeros((draws, threads, 4), np.uint32)
        steps = np.array([first + k for k in range(draws)], np.uint64)[:, None]
        counters[..., 0], counters[..., 1] = steps & _WORD, steps >> np.uint64(32)
        counters[..., 2] = np.arange(threads, dtype=np.uint32)
        words = philox(counters, self.key)
        if whole:
            return words
        parts = words.reshape(draws, threads, unroll, 4 // unroll).transpose(0, 2, 1, 3)
        return parts.reshape(-1, 4 // unroll)[:numel]


def _laid_out(drawn: NDArray[Any], numel: int) -> NDArray[Any]:
    """[draws, threads, 4] as elements lie in memory: those of a thread one grid apart."""
    return np.ascontiguousarray(drawn.transpose(0, 2, 1)).reshape(-1)[:numel]


def _unit(words: _Words) -> NDArray[np.float32]:
    """A word, rounded to float32, times 2^-32, which is exact, plus 2^-33: one further rounding, contracted or not."""
    return words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)


def _angle(words: _Words) -> NDArray[np.float32]:
    """A word, rounded to float32, times the float32 2 pi 2^-32, plus half of that, in one fused multiply-add."""
    step = np.float32(2.0**-32) * np.float32(2 * np.pi)
    half = float(step / np.float32(2))
    product = words.astype(np.float32).astype(np.float64) * float(step)  # exact: 48 bits
    total = product + half
    part = total - product
    lost = (product - (total - part)) + (half - part)
    bits = total.view(np.int64)
    odd = bits + np.where((lost != 0) & (bits & 1 == 0), np.sign(lost), 0).astype(np.int64)  # lest it round twice
    return odd.view(np.float64).astype(np.float32)


def _rounded(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    return numbers.astype(np.float32)


def _check(dtype: torch.dtype, known: set[torch.dtype], what: str) -> None:
    if dtype not in known:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in known))
        raise SettingError(f"{what} of {str(dtype).removeprefix('torch.')} isn't reproduced; expected one of {names}")
