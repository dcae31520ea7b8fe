"""Replayed calls: the same numbers as ordinary ones, and ordinary calls wherever something has to see them."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.interpreter import faithful
from assay.kernels.triton import replay
from assay.kernels.triton.attention import attention, attention_backward
from assay.kernels.triton.attention_decode import attention_decode
from assay.kernels.triton.attention_varlen import attention_varlen, attention_varlen_backward
from assay.kernels.triton.mla_decode import mla_decode
from assay.kernels.triton.softmax import softmax
from assay.kernels.triton.swiglu import swiglu
from assay.runtime.tensors import same_bits
from tests.kernels.triton_calls import CALLS, Call


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one element at an address: what an interpreted kernel asks of a pointer."""
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def interpreted(launching: Callable[..., Any]) -> Callable[..., Any]:
    """Return `replay._launching` for a launcher that needs tensors in place of addresses."""

    def launching_tensors(compiled: Any, grid: Any, device: Any, template: Any, pointers: Any, descriptors: Any) -> Any:
        def run(*values: Any) -> None:
            typed = list(values)
            for position, _, _ in pointers:
                typed[9 + position] = tensor_at(typed[9 + position], template[position])
            for position, _, _ in descriptors:
                descriptor: TensorDescriptor = typed[9 + position]
                descriptor.base = tensor_at(descriptor.base.data_ptr(), template[position]["base"])
            compiled.run(*typed)

        launcher = SimpleNamespace(run=run, function=None, packed_metadata=None)
        return launching(launcher, grid, device, template, pointers, descriptors)

    return launching_tensors


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[replay.Plan]]:
    """The interpreter in place of Triton's compiler and launcher; the plans that are made."""
    plans: list[replay.Plan] = []
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=int, get_current_stream=lambda device: 0))
    monkeypatch.setattr(replay, "_launching", interpreted(replay._launching))
    record = replay._record

    def recorded(*args: Any) -> Any:
        result, plan = record(*args)
        plans.append(plan)
        return result, plan

    monkeypatch.setattr(replay, "_record", recorded)
    with faithful():
        for name, owner, attribute in (
            ("_run", JITFunction, "run"),
            ("_tune", Autotuner, "run"),
            ("_bench", Autotuner, "_bench"),
        ):
            monkeypatch.setattr(replay, name, getattr(owner, attribute))
        yield plans


def other(tensor: Tensor) -> Tensor:
    """Return a tensor of other numbers in other memory, with the same strides."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return result.copy_(
        tensor.flip(0) if tensor.dim() and tensor.dtype.is_floating_point and tensor.itemsize > 1 else tensor
    )


Q, K, V = (torch.randn(1, heads, 24, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
PACKED = {name: x[0].transpose(0, 1).contiguous() for name, x in (("q", Q), ("k", K), ("v", V))}
OFFSETS = {"cu_seqlens_q": torch.tensor([0, 5, 24], dtype=torch.int32)}
OFFSETS["cu_seqlens_k"] = OFFSETS["cu_seqlens_q"].clone()
CACHE, LATENT = torch.randn(4, 8, 2, 16, dtype=torch.bfloat16), torch.randn(4, 8, 48, dtype=torch.bfloat16)
PAGES = {
    "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
    "seq_lens": torch.tensor([9, 16], dtype=torch.int32),
}
ATTENTION = [
    Call(attention, {"q": Q, "k": K, "v": V}, {"causal": "bottom_right", "return_lse": True}),
    Call(attention, {"q": Q, "k": K, "v": V, "sinks": torch.randn(4)}, {"window": (3, 0), "causal": "top_left"}),
    Call(attention_backward, {"q": Q, "k": K, "v": V, "dout": Q.flip(0)}),
    Call(attention_varlen, PACKED | OFFSETS),
    Call(attention_varlen_backward, {**PACKED, "dout": PACKED["q"].clone(), **OFFSETS}),
    Call(attention_decode, {"q": Q[0].transpose(0, 1)[:2], "k_cache": CACHE, "v_cache": CACHE.clone(), **PAGES}),
    Call(
        mla_decode,
        {"q": torch.randn(2, 4, 32).bfloat16(), "q_rope": torch.randn(2, 4, 16).bfloat16(), "cache": LATENT[..., :32]}
        | {"rope_cache": LATENT[..., 32:], **PAGES},
        {"return_lse": True},
    ),
]


@pytest.mark.parametrize("case", [*CALLS, *ATTENTION], ids=str)
def test_a_replay_gives_the_bits_of_an_ordinary_call(case: Call, replays: list[replay.Plan]) -> None:
    kernel = replay.replayed(case.kernel.__wrapped__)  # type: ignore[attr-defined]
    for _ in range(2):
        kernel(**{name: other(tensor) for name, tensor in case.tensors.items()}, **case.options)
    assert isinstance(replays[-1], replay.Plan)
    tensors = {name: other(tensor) for name, tensor in case.tensors.items()}
    got, expected = (f(**tensors, **case.options) for f in (kernel, kernel.__wrapped__))  # type: ignore[attr-defined]
    assert len(replays) == 1
    for x, y in zip(*((r,) if isinstance(r, Tensor) else r for r in (got, expected)), strict=True):
        assert x.stride() == y.stride()
        assert same_bits(x, y)


plain_softmax: Any = softmax.__wrapped__  # type: ignore[attr-defined]


class Counted:
    """A replayed function, and how often its body ran."""

    def __init__(self, body: Callable[..., Any] = plain_softmax) -> None:
        self.runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            return body(*args, **kwargs)

        self.call = replay.replayed(run)

    def runs_of(self, *args: Any, times: int = 4, **kwargs: Any) -> int:
        before = self.runs
        for _ in range(times):
            self.call(*args, **kwargs)
        return self.runs - before


def test_a_signature_is_recorded_once_and_no_other_is_taken_for_it(replays: list[replay.Plan]) -> None:
    softmax = Counted()
    x = torch.randn(8, 40)
    assert softmax.runs_of(x) == 2
    assert softmax.runs_of(x.clone()) == 0
    for changed in (x.bfloat16(), x[:4], x.t(), x[:, 1:], x.reshape(-1)[1:].unfold(0, 40, 39)):
        assert softmax.runs_of(changed) == 2, changed.shape

    def scaled(x: Tensor, by: Any) -> Any:
        return softmax.call(x) * by

    options = Counted(scaled)
    assert [options.runs_of(x, by) for by in (1, 1.0, True, 2, 1)] == [2, 2, 2, 2, 0]
    assert options.call(x, 1.0).dtype == torch.float32


def test_autograd_modes_transformations_and_profilers_see_ordinary_calls(replays: list[replay.Plan]) -> None:
    softmax, x = Counted(), torch.randn(4, 8)
    assert softmax.runs_of(x) == 2
    weight = torch.randn(4, 8, requires_grad=True)
    assert softmax.runs_of(weight) == 4
    softmax.call(weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert softmax.runs_of(weight) == 0
    for mode in (PlainDispatch(), PlainFunction(), profile(activities=[ProfilerActivity.CPU]), torch.device("cpu")):
        with mode:
            assert softmax.runs_of(x) == 4, mode
    assert softmax.runs_of(x.as_subclass(Subclass)) == 4
    assert torch.func.vmap(lambda row: Counted(lambda y: y * 2).call(row))(x).shape == x.shape
    assert softmax.runs_of(x) == 0


class PlainDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PlainFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_an_interpreter_sees_every_launch() -> None:
    """Without the fixture's stand-ins: inside `faithful` nothing is recorded, whatever is called how often."""
    softmax = Counted()
    with faithful():
        assert softmax.runs_of(torch.randn(4, 8)) == 4


@pytest.mark.parametrize(
    "body",
    [
        lambda x: plain_softmax(x) * x.sum().item(),  # reads a tensor
        lambda x: plain_softmax(x[x[:, 0] > 0]),  # a shape that depends on one
        lambda x: plain_softmax(x) + torch.rand_like(x),  # other numbers in every call
        lambda x: plain_softmax(x) + CONSTANT,  # a tensor that is no argument
        lambda x: x + 1,  # launches nothing
    ],
)
def test_what_depends_on_more_than_the_signature_stays_ordinary(body: Any, replays: list[replay.Plan]) -> None:
    counted = Counted(body)
    assert counted.runs_of(torch.randn(4, 8).abs()) == 4
    assert len(replays) == 1


CONSTANT = torch.ones(4, 8)


def test_one_tensor_in_two_arguments_is_not_recorded_but_replayed(replays: list[replay.Plan]) -> None:
    swiglu_, x, y = Counted(swiglu.__wrapped__), torch.randn(4, 8), torch.randn(4, 8)  # type: ignore[attr-defined]
    assert swiglu_.runs_of(x, x) == 4
    assert swiglu_.runs_of(x, y) == 1
    assert swiglu_.runs_of(x, x) == 0
    assert same_bits(swiglu_.call(x, x), swiglu.__wrapped__(x, x))  # type: ignore[attr-defined]


def test_a_plan_keeps_no_memory_and_plans_are_bounded(replays: list[replay.Plan], monkeypatch: Any) -> None:
    monkeypatch.setattr(replay, "_MOST_PLANS", 3)
    counted, x = Counted(), torch.randn(4, 8)
    counted.runs_of(x)
    memory = weakref.ref(x)
    del x
    gc.collect()
    assert memory() is None
    for columns in range(1, 8):
        counted.runs_of(torch.randn(4, columns))
    assert counted.runs_of(torch.randn(4, 8)) == 2  # forgotten


def test_refusals_are_raised_in_every_call(replays: list[replay.Plan]) -> None:
    counted = Counted()
    for wrong in (torch.ones(3, dtype=torch.int32), torch.ones(2, 2, 2), [1.0]):
        for _ in range(3):
            with pytest.raises((TypeError, ValueError), match="x: expected"):
                counted.call(wrong)
