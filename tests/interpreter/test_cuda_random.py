"""PyTorch's random numbers of a GPU on a CPU: against published vectors and Triton's Philox, and drawn by thread."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from assay.interpreter import pretend_cuda
from assay.interpreter.fake_cuda.random import CudaGenerator, _angle, philox
from assay.runtime.errors import SettingError
from tests.interpreter.triton_kernels import run

KNOWN = [  # Random123's kat_vectors, philox4x32 with ten rounds: counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SMALL = {"multiprocessors": 2, "threads": 512}  # four blocks of 256 threads


def words(text: str) -> list[int]:
    """Hexadecimal words."""
    return [int(word, 16) for word in text.split()]


def of_one_thread(seed: int, thread: int, turn: int) -> list[int]:
    """The four words that a thread draws in its n-th turn."""
    counter = np.array([turn, 0, thread, 0], np.uint32)
    return [int(word) for word in philox(counter, (seed & 0xFFFFFFFF, seed >> 32))]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_published_vectors(counter: str, key: str, result: str) -> None:
    first, second = words(key)
    assert philox(np.array(words(counter), np.uint32), (first, second)).tolist() == words(result)


@triton.jit
def _philox(y_ptr, low, high, N: tl.constexpr):
    i = tl.arange(0, N)
    seed = (high.to(tl.uint64) << 32) | low.to(tl.uint32).to(tl.uint64)
    zero = tl.zeros([N], tl.uint32)
    words = tl.philox(seed, zero + 3, zero, i.to(tl.uint32), zero)
    for place in tl.static_range(4):
        tl.store(y_ptr + 4 * i + place, words[place].to(tl.int32, bitcast=True))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (42, 0), (7, 2**30 + 1)])
def test_triton_has_the_same_words(low: int, high: int) -> None:
    found = torch.empty(64, 4, dtype=torch.int32)
    run(_philox, found, low, high, N=64)
    wanted = np.array([of_one_thread(high << 32 | low, thread, 3) for thread in range(64)], np.uint32)
    assert np.array_equal(found.numpy().view(np.uint32), wanted)


def test_elements_of_a_thread_lie_one_grid_apart() -> None:
    """Element e is word (e // threads) % 4 of turn e // (4 threads) of thread e % threads; calls go on."""
    generator = CudaGenerator(5, **SMALL)
    first, second = generator.rand(6000), generator.rand(3, 5)
    threads = 4 * 256
    for e in (0, 1, 255, 1023, 1024, 3071, 4095, 4096, 5999):
        word = of_one_thread(5, e % threads, e // (4 * threads))[e // threads % 4]
        assert first[e].item() == np.float32(np.float32(word) * np.float32(2**-32) + np.float32(2**-33))
    assert generator.offset == 8 + 4
    assert second.flatten()[7].item() == pytest.approx(of_one_thread(5, 7, 2)[0] / 2**32, abs=2**-24)


def test_the_number_of_multiprocessors_matters_beyond_one_grid() -> None:
    h100, a100 = CudaGenerator(1, "h100"), CudaGenerator(1, "a100")
    assert torch.equal(h100.rand(1000), a100.rand(1000))
    small, large = 108 * 8 * 256, 132 * 8 * 256
    ours, theirs = h100.rand(large), a100.rand(large)
    assert torch.equal(ours[:small], theirs[:small])
    assert not torch.equal(ours[small:], theirs[small:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rand_stays_below_one(dtype: torch.dtype) -> None:
    drawn = CudaGenerator(3).rand(200_000, dtype=dtype)
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.double().mean().item() == pytest.approx(0.5, abs=0.005)


def test_rand_in_float64_takes_two_words() -> None:
    """53 bits: the first word below, the second 21 places up; half of the words' elements lie one grid apart."""
    drawn = CudaGenerator(9, **SMALL).rand(3000, dtype=torch.float64)
    a, b, c, d = of_one_thread(9, 100, 0)
    assert drawn[100].item() == (a ^ b << 21) * 2.0**-53 + 2.0**-54
    assert drawn[1124].item() == (c ^ d << 21) * 2.0**-53 + 2.0**-54
    assert drawn[2148].item() == pytest.approx((of_one_thread(9, 100, 1)[1] << 21) * 2.0**-53, abs=2**-20)


def test_whole_numbers_are_remainders() -> None:
    narrow, wide = CudaGenerator(4).randint(-3, 7, (500,)), CudaGenerator(4).randint(-(2**62), 2**62, (500,))
    a, b, _, _ = of_one_thread(4, 77, 0)
    assert narrow[77].item() == a % 10 - 3
    assert wide[77].item() == (a << 32 | b) % 2**63 - 2**62
    assert (
        CudaGenerator(4).randint(0, 2**30, (9,))[5].item()
        == (of_one_thread(4, 5, 0)[0] << 32 | of_one_thread(4, 5, 0)[1]) % 2**30
    )
    assert CudaGenerator(4, wide=2**32).randint(0, 2**30, (9,))[5].item() == of_one_thread(4, 5, 0)[0] % 2**30


def test_bernoulli_asks_whether_the_number_is_below() -> None:
    drawn, hit = CudaGenerator(8).rand(5000), CudaGenerator(8).bernoulli(0.3, 5000, dtype=torch.bool)
    assert torch.equal(hit, drawn < np.float32(0.3))


def test_normal_numbers_are_box_and_mullers() -> None:
    found = CudaGenerator(6, **SMALL).randn(5000)
    for e in (0, 300, 1024, 1324, 2048, 3072, 4999):
        drawn = of_one_thread(6, e % 1024, e // 4096)
        place = e // 1024 % 4
        u, v = (drawn[place // 2 * 2 + i] / 2**32 + 2.0**-33 for i in range(2))
        exact = math.sqrt(-2 * math.log(u)) * (math.cos if place % 2 else math.sin)(2 * math.pi * v)
        assert abs(found.values[e].item() - exact) <= found.radius[e].item() + 1e-6
    assert found.values.std().item() == pytest.approx(1, abs=0.05)
    longest = math.sqrt(2 * 33 * math.log(2))  # of the smallest u, 2^-33
    assert found.radius.max() <= longest * (2**-20.5 + 2**-21)


def test_angles_are_rounded_once() -> None:
    step = np.float32(2.0**-32) * np.float32(2 * np.pi)
    drawn = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32)
    for word, angle in zip(drawn, _angle(drawn), strict=True):
        exact = Fraction(float(np.float32(word))) * Fraction(float(step)) + Fraction(float(step)) / 2
        off = [
            abs(Fraction(float(each)) - exact)
            for each in (np.nextafter(angle, np.float32(0)), np.nextafter(angle, np.float32(9)))
        ]
        assert abs(Fraction(float(angle)) - exact) <= min(off)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_normal_numbers_of_16_bits(dtype: torch.dtype) -> None:
    wide, narrow = CudaGenerator(2).randn(1000), CudaGenerator(2).randn(1000, dtype=dtype)
    assert torch.equal(narrow.values, wide.values.to(dtype))
    assert bool(((wide.values + wide.radius).to(dtype).double() - narrow.values.double() <= narrow.radius).all())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: CudaGenerator(2**64), "seed 18446744073709551616: expected a whole number of 64 bits"),
        (lambda: CudaGenerator(0, offset=2), "offset 2: expected a multiple of 4"),
        (lambda: CudaGenerator(0, "h1000"), "unknown device"),
        (lambda: CudaGenerator(0).randn(3, dtype=torch.float64), "torch.randn of float64 isn't reproduced"),
        (lambda: CudaGenerator(0).randint(3, 3, (2,)), "randint from 3 to 3: expected low < high"),
        (lambda: CudaGenerator(0).bernoulli(1.5, 2), "p = 1.5: expected a probability"),
        (lambda: CudaGenerator(0).rand(2**30), "expected less than 2 GiB"),
    ],
)
def test_what_is_not_reproduced_is_refused(ask: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message.replace("(", r"\(").replace("*", r"\*")):
        ask()


def test_nothing_is_drawn_for_no_elements() -> None:
    generator = CudaGenerator(0)
    assert generator.rand(0, 3).shape == (0, 3)
    assert generator.randn(0).values.shape == (0,)
    assert generator.offset == 0


DRAWS = [
    (lambda: torch.rand(300_000, device="cuda"), lambda g: g.rand(300_000)),
    (lambda: torch.rand((3, 5), dtype=torch.bfloat16, device=0), lambda g: g.rand(3, 5, dtype=torch.bfloat16)),
    (lambda: torch.randn(7, 3, device="cuda"), lambda g: g.randn(7, 3).values),
    (lambda: torch.randint(9, (40,), device="cuda"), lambda g: g.randint(0, 9, (40,))),
    (lambda: torch.randint(-5, 100, size=(6,), dtype=torch.int8, device="cuda"),
     lambda g: g.randint(-5, 100, (6,), torch.int8)),
    (lambda: torch.randint(low=1, high=2**40, size=[8], device="cuda"), lambda g: g.randint(1, 2**40, (8,))),
    (lambda: torch.rand_like(on_device(4, 2)), lambda g: g.rand(4, 2)),
    (lambda: torch.randn_like(torch.zeros(5), device="cuda"), lambda g: g.randn(5).values),
    (lambda: torch.randint_like(on_device(6).int(), 2, 8), lambda g: g.randint(2, 8, (6,), torch.int32)),
    (lambda: on_device(9).bernoulli_(0.3), lambda g: g.bernoulli(0.3, 9)),
    (lambda: on_device(9).uniform_(), lambda g: g.rand(9)),
    (lambda: on_device(9).normal_(), lambda g: g.randn(9).values),
    (lambda: on_device(9).long().random_(3, 77), lambda g: g.randint(3, 77, (9,))),
]  # fmt: skip


def on_device(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


@pytest.mark.parametrize(("draw", "expected"), DRAWS)
@pytest.mark.parametrize("seed", [0, 2**40 + 3])
def test_an_emulated_device_draws_its_own_numbers(draw: Any, expected: Any, seed: int) -> None:
    """After torch.manual_seed, twice in a row; the CPU's generator is left alone."""
    with pretend_cuda("h100"):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        generator = CudaGenerator(seed, "h100")
        for _ in range(2):
            got, want = draw(), expected(generator)
            assert got.is_cuda
            assert torch.equal(got, want)
        assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_cuda_have_a_seed_and_an_offset() -> None:
    """Their states are those of a GPU, 16 bytes, and bring back both their own draws and those of the CPU."""
    with pretend_cuda("h100"):
        one, other = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
        drawn = torch.rand(5000, generator=one, device="cuda")
        assert torch.equal(drawn, CudaGenerator(3, "h100").rand(5000))
        assert (one.initial_seed(), one.get_offset(), other.get_offset()) == (3, 4, 0)
        other.set_offset(4)
        assert torch.equal(torch.rand(5, generator=one, device="cuda"), torch.rand(5, generator=other, device="cuda"))
        torch.cuda.manual_seed(1)
        state = torch.cuda.get_rng_state()
        assert state.view(torch.int64).tolist() == [1, 0]
        first = [torch.rand(9, device="cuda"), torch.randperm(9, device="cuda")]
        torch.cuda.set_rng_state(state)
        assert all(map(torch.equal, first, [torch.rand(9, device="cuda"), torch.randperm(9, device="cuda")]))


def test_other_draws_come_from_the_cpu() -> None:
    with pretend_cuda():
        torch.manual_seed(2)
        results = [
            torch.rand(3, dtype=torch.complex64, device="cuda"),
            torch.randn(3, dtype=torch.float64, device="cuda"),
            torch.empty(3, device="cuda").normal_(2.0, 3.0),
            torch.empty(3, 2, device="cuda").T.uniform_(),
        ]
        assert all(result.is_cuda for result in results)
        assert torch.cuda.default_generators[0].get_offset() == 0
        host = torch.rand(3)
        assert not host.is_cuda
