"""PyTorch's random numbers of an NVIDIA GPU on a CPU, so that a failure seen with CUDA's generator repeats without it.

``torch.rand``, ``torch.randint`` and ``Tensor.bernoulli_`` are integer arithmetic and one rounding, reproduced bit for
bit. ``torch.randn`` takes a sine and a cosine of the hardware, whose bits no document gives: here they are exact, and
`Normal` says how far a GPU's result may be. Which thread draws which element depends on the number of multiprocessors.

Compared with an NVIDIA H100 (CUDA 13.0, torch 2.11.0) on 2026-11-27, of up to 2,000,003 elements in all dtypes below
and two seeds: all bits of rand, randint and bernoulli_ are equal; all elements of randn are within the radius (equal
bits: 20 % in float32, 99.8 % in float16, 100 % in bfloat16); `benchmarks/gpu/random_tensors.py`, docs/gpu.md.

Sources: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11) for Philox4x32-10; PyTorch 2.13,
ATen/native/cuda/DistributionTemplates.h, for the order of draws; cuRAND's device API for numbers made of 32-bit words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.formats.devices import DEFAULT_CUDA_DEVICE, CudaProperties, cuda_device_named
from assay.interpreter.fake_cuda.tensors import DEVICE, claimed, default_device, factory, is_cuda, like, real
from assay.interpreter.replacing import Change
from assay.runtime.errors import SettingError

_Words = NDArray[np.uint32]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)

_BLOCK_SIZE = 256
_OFFSET_STEP = 4  # by which a draw advances a thread's position in its stream
_WIDE_RANGE = 2**28  # torch.randint takes 64 bits for ranges from here on
_MAX_BYTES = 2**31 - 1  # PyTorch splits larger tensors into several kernels
_DEFAULT_SEED = 67280421310721  # c10::detail::default_rng_seed_val, the seed before any manual_seed

_SINE_ERROR = 2.0**-20.5  # largest error of sin.approx and cos.approx from -2 pi to 2 pi (PTX ISA)
_ROUNDING_ERROR = 4 * 2.0**-23  # logf (1 ulp here and there), sqrtf and the product, relative to sqrt(-2 log u)

_FLOATS = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def philox(counters: _Words, key: tuple[int, int]) -> _Words:
    """Return Philox4x32-10 of counters [..., 4] of 32-bit words, lowest first, under a key of two words: [..., 4]."""
    a, b, c, d = (counters[..., i].astype(np.uint64) for i in range(4))
    for i in range(_ROUNDS):
        key0, key1 = ((word + i * weyl) & 0xFFFFFFFF for word, weyl in zip(key, _WEYL, strict=True))
        product0, product1 = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (product1 >> np.uint64(32)) ^ b ^ np.uint64(key0), product1 & _WORD
        c, d = (product0 >> np.uint64(32)) ^ d ^ np.uint64(key1), product0 & _WORD
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


@dataclass(frozen=True)
class Normal:
    """Normally distributed numbers: ``values`` with exact functions; a GPU's are within ``radius`` of them."""

    values: Tensor
    radius: Tensor


class CudaGenerator:
    """PyTorch's generator of a CUDA device after ``torch.manual_seed(seed)``; each call continues after the last.

    ``device`` is a CUDA device of ``configs/devices.toml``; ``multiprocessors`` and ``threads`` (resident on one)
    replace its figures. ``offset`` is the result of ``torch.cuda.default_generators[0].get_offset()``. ``wide`` is the
    range from which ``torch.randint`` takes 64 bits, by default that of PyTorch's published builds of 2.13. Raises
    `SettingError` for an unknown device, a seed beyond 64 bits and an offset that isn't a multiple of four.
    """

    def __init__(
        self,
        seed: int,
        device: str = DEFAULT_CUDA_DEVICE,
        *,
        offset: int = 0,
        multiprocessors: int | None = None,
        threads: int | None = None,
        wide: int = _WIDE_RANGE,
    ) -> None:
        if not -(2**63) <= seed < 2**64:
            raise SettingError(f"seed {seed}: expected a whole number of 64 bits, from -2**63 to 2**64 - 1")
        if offset < 0 or offset % _OFFSET_STEP:
            raise SettingError(
                f"offset {offset}: expected a multiple of {_OFFSET_STEP} that isn't negative, as PyTorch's are"
            )
        properties = cuda_device_named(device)
        resident = threads or properties.max_threads_per_multi_processor
        self.max_blocks = (multiprocessors or properties.multi_processor_count) * (resident // _BLOCK_SIZE)
        self.key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        self.offset = offset
        self.wide = wide

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``torch.rand(shape, dtype=dtype, device="cuda")``, bit for bit, in [0, 1)."""
        _check_dtype(dtype, _FLOATS, "torch.rand")
        values = torch.from_numpy(self._uniform(shape, dtype)).to(dtype)  # in (0, 1]
        return values.masked_fill_(values == 1, 0.0)

    def bernoulli(self, p: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``torch.empty(shape, dtype=dtype, device="cuda").bernoulli_(p)``, bit for bit; p is a number."""
        _check_dtype(dtype, _FLOATS | _INTEGERS | {torch.bool}, "Tensor.bernoulli_")
        if not 0 <= p <= 1:
            raise SettingError(f"p = {p}: expected a probability, from 0 to 1")
        values = self._uniform(shape, dtype)
        return torch.from_numpy(values < values.dtype.type(p)).to(dtype)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return ``torch.randint(low, high, shape, dtype=dtype, device="cuda")``, bit for bit."""
        _check_dtype(dtype, _INTEGERS, "torch.randint")
        if not low < high or high - low >= 2**64:
            raise SettingError(f"randint from {low} to {high}: expected low < high")
        if high - low >= self.wide:
            words = self._draw(shape, dtype, 2).astype(np.uint64)
            bits = words[..., 0] << np.uint64(32) | words[..., 1]
        else:
            bits = self._draw(shape, dtype, 4)[..., 0].astype(np.uint64)
        with np.errstate(over="ignore"):
            values = (bits % np.uint64(high - low)).view(np.int64) + np.int64(low)
        return torch.from_numpy(values).reshape(tuple(shape)).to(dtype)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Normal:
        """Return ``torch.randn(shape, dtype=dtype, device="cuda")`` and its radius; float32, float16 and bfloat16.

        Box and Muller's transform of each pair of words, as in cuRAND: the sine first, then the cosine.
        """
        _check_dtype(dtype, _FLOATS - {torch.float64}, "torch.randn")
        words = self._draw(shape, dtype, 4, by_draw=True)
        pairs = words.reshape(-1, 2)
        lengths = np.sqrt((-2 * np.log(_unit(pairs[:, 0]).astype(np.float64))).astype(np.float32))
        angles = _angle(pairs[:, 1]).astype(np.float64)
        functions = np.stack([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
        numel = math.prod(shape)
        values = torch.from_numpy(_memory_order((functions * lengths[:, None]).reshape(words.shape), numel))
        both = np.broadcast_to(lengths[:, None], functions.shape).reshape(words.shape)
        radius = torch.from_numpy(_memory_order(both, numel).astype(np.float64)) * (_SINE_ERROR + _ROUNDING_ERROR)
        if dtype != torch.float32:
            radius = radius * 2 + (values.double().abs() + radius) * torch.finfo(dtype).eps
        return Normal(values.reshape(shape).to(dtype), radius.reshape(shape))

    def _uniform(self, shape: Sequence[int], dtype: torch.dtype) -> NDArray[Any]:
        """Return numbers in (0, 1]: float64 for that dtype, float32 for others."""
        if dtype == torch.float64:
            words = self._draw(shape, dtype, 2).astype(np.uint64)
            mixed = words[..., 0] ^ words[..., 1] << np.uint64(53 - 32)
            return np.asarray(mixed.astype(np.float64) * 2.0**-53 + 2.0**-54).reshape(tuple(shape))
        return _unit(self._draw(shape, dtype, 4)[..., 0]).reshape(tuple(shape))

    def _draw(self, shape: Sequence[int], dtype: torch.dtype, unroll: int, by_draw: bool = False) -> _Words:
        """Return the words of each element, [elements, 4 / unroll]; with ``by_draw`` of each draw, [draws, threads, 4].

        A thread draws four words at a time, which make ``unroll`` elements, one grid apart in memory.
        """
        numel = math.prod(shape)
        if numel * dtype.itemsize > _MAX_BYTES:
            raise SettingError(
                f"{numel * dtype.itemsize} bytes: expected less than 2 GiB; PyTorch splits larger tensors"
            )
        threads = _BLOCK_SIZE * max(1, min(-(-numel // _BLOCK_SIZE), self.max_blocks))
        draws = -(-numel // (threads * unroll))
        first = self.offset // _OFFSET_STEP
        self.offset += draws * _OFFSET_STEP
        counters = np.zeros((draws, threads, 4), np.uint32)
        steps = np.array([first + k for k in range(draws)], np.uint64)[:, None]
        counters[..., 0], counters[..., 1] = steps & _WORD, steps >> np.uint64(32)
        counters[..., 2] = np.arange(threads, dtype=np.uint32)
        words = philox(counters, self.key)
        if by_draw:
            return words
        parts = words.reshape(draws, threads, unroll, 4 // unroll).transpose(0, 2, 1, 3)
        return parts.reshape(-1, 4 // unroll)[:numel]


def _memory_order(values: NDArray[Any], numel: int) -> NDArray[Any]:
    """Reorder [draws, threads, 4] into memory, where the elements of a thread are one grid apart."""
    return np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1)[:numel]


def _unit(words: _Words) -> NDArray[np.float32]:
    """Return float32(word) 2^-32 + 2^-33 in (0, 1]; the product is exact, so a fused multiply-add gives the same."""
    return words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)


def _angle(words: _Words) -> NDArray[np.float32]:
    """Return float32(word) s + s / 2 in one fused multiply-add, for s = float32(2 pi 2^-32)."""
    step = np.float32(2.0**-32) * np.float32(2 * np.pi)
    half = float(step / np.float32(2))
    product = words.astype(np.float32).astype(np.float64) * float(step)  # exact: 48 bits
    total = product + half
    part = total - product
    lost = (product - (total - part)) + (half - part)  # two-sum
    bits = total.view(np.int64)
    # Round to odd, lest the conversion to float32 rounds a second time.
    odd = bits + np.where((lost != 0) & (bits & 1 == 0), np.sign(lost), 0).astype(np.int64)
    return odd.view(np.float64).astype(np.float32)


def _check_dtype(dtype: torch.dtype, known: set[torch.dtype], what: str) -> None:
    if dtype not in known:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in known))
        raise SettingError(f"{what} of {str(dtype).removeprefix('torch.')} isn't reproduced; expected one of {names}")


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """`torch.Generator`. One of CUDA has a GPU's seed and offset, and a CPU generator for draws not reproduced here."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator = super().__new__(cls, device=real(device))  # type: ignore[call-arg]
        generator.__dict__.update(claimed=DEVICE if is_cuda(device) else torch.device(device))
        generator.__dict__.update(philox_seed=_DEFAULT_SEED, philox_offset=0)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.__dict__["claimed"]

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed)
        self.__dict__.update(philox_seed=super().initial_seed(), philox_offset=0)
        return self

    def seed(self) -> int:
        self.manual_seed(super().seed())
        return self.initial_seed()

    def initial_seed(self) -> int:
        return self.__dict__["philox_seed"] if is_cuda(self.device) else super().initial_seed()

    def get_offset(self) -> int:
        return self.__dict__["philox_offset"] if is_cuda(self.device) else super().get_offset()

    def set_offset(self, offset: int) -> Generator:
        if not is_cuda(self.device):
            super().set_offset(offset)
        self.__dict__["philox_offset"] = offset
        return self

    def get_state(self) -> Tensor:
        """Return the state; of CUDA 16 bytes, seed and offset, with the CPU generator's state as an attribute."""
        if not is_cuda(self.device):
            return super().get_state()
        pair = np.array([self.initial_seed(), self.get_offset()], np.uint64)
        state = torch.from_numpy(pair.view(np.uint8).copy())
        state.__dict__["_assay_cpu_state"] = self._cpu_state()
        return state

    def set_state(self, state: Tensor) -> Generator:
        """Set a state of `get_state`, or one of a real GPU."""
        if not is_cuda(self.device):
            super().set_state(state)
            return self
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError(f"expected the 16 bytes of a CUDA generator's state, got {state.numel()}: {state.dtype}")
        seed, offset = state.contiguous().numpy().view(np.uint64).tolist()
        self.__dict__.update(philox_seed=seed, philox_offset=offset)
        cpu_state = state.__dict__.get("_assay_cpu_state")
        if cpu_state is not None:
            self._set_cpu_state(cpu_state)
        return self

    def _cpu_state(self) -> Tensor:
        return super().get_state()

    def _set_cpu_state(self, state: Tensor) -> None:
        super().set_state(state)


class _DefaultGenerator(Generator):
    """`torch.cuda.default_generators[0]`; draws not reproduced here come from `torch.default_generator`."""

    def manual_seed(self, seed: int) -> Generator:
        torch.default_generator.manual_seed(seed)
        return super().manual_seed(seed)

    def _cpu_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def _set_cpu_state(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)


_default = _DefaultGenerator("cuda")

STATE_FUNCTIONS = (
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed",
    "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
"""The functions of `torch.cuda.random`."""


def state_functions() -> dict[str, Any]:
    """Return `STATE_FUNCTIONS` and `torch.cuda.default_generators` by name."""
    return {
        "default_generators": (_default,),
        "manual_seed": lambda seed: _default.manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: _default.manual_seed(int(seed)) and None,
        "seed": lambda: _default.seed() and None,
        "seed_all": lambda: _default.seed() and None,
        "initial_seed": lambda: _default.initial_seed(),
        "get_rng_state": lambda of="cuda": _default.get_state(),
        "get_rng_state_all": lambda: [_default.get_state()],
        "set_rng_state": lambda state, of="cuda": _default.set_state(state) and None,
        "set_rng_state_all": lambda states: [_default.set_state(state) for state in states] and None,
    }


Draw = Callable[[CudaGenerator, tuple[int, ...], torch.dtype], Tensor]


def changes(device: Callable[[], CudaProperties]) -> list[Change]:
    """Return the changes to torch's random functions; ``device`` returns the device that is emulated now.

    `torch.rand`, `randn` and `randint` are `empty` with `uniform_`, `normal_` and `random_`
    (ATen/native/TensorFactories), so those are covered too, with the parameters of the former. Draws that aren't
    reproduced (other parameters and dtypes, non-contiguous tensors, more than 2 GiB) come from the CPU.
    """

    def fill(tensor: Any, generator: Any, draw: Draw) -> bool:
        """Fill a contiguous tensor on the device; return False if that isn't reproduced."""
        generator = _default if generator is None else generator
        reproduced = type(tensor) in (Tensor, torch.nn.Parameter) and claimed(tensor) == DEVICE
        if not reproduced or not is_cuda(generator.device) or not tensor.is_contiguous():
            return False
        try:
            source = CudaGenerator(generator.initial_seed(), device().key, offset=generator.get_offset())
            values = draw(source, tuple(tensor.shape), tensor.dtype)
        except SettingError:
            return False
        generator.set_offset(source.offset)
        with torch.no_grad():
            tensor.copy_(values)
        return True

    def made(name: str, parse: Callable[..., tuple[tuple[Any, ...], Draw]], *, of_tensor: bool = False) -> Change:
        """Replace a factory: an empty tensor, filled."""
        wrap = like if of_tensor else factory
        original, empty = wrap(getattr(torch, name)), wrap(torch.empty_like if of_tensor else torch.empty)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            on = kwargs.get("device")
            on = on if on is not None else claimed(args[0]) if of_tensor and args else default_device()
            if not is_cuda(on):
                return original(*args, **kwargs)
            options = dict(kwargs)
            generator = options.pop("generator", None)
            (*sizes,), draw = parse(args, options)
            result = empty(*sizes, **options)
            return result if fill(result, generator, draw) else original(*args, **kwargs)

        return torch, name, make

    def tensor_method(name: str, parse: Callable[..., Draw | None]) -> Change:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
            draw = parse(*args, **kwargs)
            if draw is not None and fill(self, generator, draw):
                return self
            return original(self, *args, generator=generator, **kwargs)

        return Tensor, name, method

    return [
        (torch, "Generator", Generator),
        made("rand", lambda args, options: (args, _rand)),
        made("randn", lambda args, options: (args, _randn)),
        made("randint", _parse_randint),
        made("rand_like", lambda args, options: (args, _rand), of_tensor=True),
        made("randn_like", lambda args, options: (args, _randn), of_tensor=True),
        made("randint_like", _parse_randint_like, of_tensor=True),
        tensor_method("uniform_", lambda low=0, high=1: _rand if (low, high) == (0, 1) else None),
        tensor_method("normal_", lambda mean=0, std=1: _randn if (mean, std) == (0, 1) else None),
        tensor_method("random_", _parse_random),
        tensor_method("bernoulli_", lambda p=0.5: None if isinstance(p, Tensor) else _bernoulli(p)),
    ]


def _rand(source: CudaGenerator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return source.rand(*shape, dtype=dtype)


def _randn(source: CudaGenerator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return source.randn(*shape, dtype=dtype).values


def _randint(low: Any, high: Any) -> Draw:
    return lambda source, shape, dtype: source.randint(int(low), int(high), shape, dtype)


def _bernoulli(p: Any) -> Draw:
    return lambda source, shape, dtype: source.bernoulli(float(p), *shape, dtype=dtype)


def _parse_randint(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Draw]:
    """Parse ``randint(low=0, high, size)``; options become those of `torch.empty`."""
    rest = list(args)
    size = options.pop("size") if "size" in options else rest.pop()
    high = options.pop("high") if "high" in options else rest.pop()
    low = options.pop("low", rest.pop() if rest else 0)
    if options.get("dtype") is None:
        options["dtype"] = torch.int64
    return (size,), _randint(low, high)


def _parse_randint_like(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Draw]:
    """Parse ``randint_like(input, low=0, high)``."""
    first, *rest = args
    high = options.pop("high") if "high" in options else rest.pop()
    low = options.pop("low", rest.pop() if rest else 0)
    return (first,), _randint(low, high)


def _parse_random(*bounds: Any, **keywords: Any) -> Draw | None:
    """Parse ``random_(low=0, high)``; without bounds the range depends on the dtype and isn't reproduced."""
    low, high = (0, *bounds) if len(bounds) == 1 else bounds if len(bounds) == 2 else (None, None)
    return None if keywords or high is None else _randint(low, high)
