"""`pretend_cuda`: "cuda" answers, is the CPU, and nothing of it is left afterwards."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from assay.formats.devices import cuda_device_named
from assay.interpreter import faithful, pretend_cuda, pretended, suspended
from assay.interpreter.fake_cuda.world import _world
from assay.runtime.errors import SettingError

with pretend_cuda():
    OWNERS = list({id(owner): owner for owner, _, _ in _world._changes or ()}.values())


def everything() -> list[dict[str, Any]]:
    """What every object that is changed in the pretended world holds now."""
    return [dict(vars(owner)) for owner in OWNERS]


@pytest.fixture
def world() -> Iterator[None]:
    """The pretended world."""
    with pretend_cuda():
        yield


def test_everything_is_put_back() -> None:
    before = everything()
    with pretend_cuda():
        assert everything() != before
        with suspended():
            assert everything() == before
            assert not torch.cuda.is_available()
        assert torch.cuda.is_available()
    assert everything() == before
    with pytest.raises(KeyError), pretend_cuda(), pretend_cuda("a100"):
        raise KeyError
    assert everything() == before
    assert pretended() == ""
    assert len(OWNERS) > 10
    assert not torch.zeros(1).is_cuda
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_the_innermost_device_answers() -> None:
    with pretend_cuda():
        assert (pretended(), torch.cuda.get_device_capability()) == ("h200", (9, 0))
        with pretend_cuda("A100"):
            assert (pretended(), torch.cuda.get_device_capability("cuda:0")) == ("a100", (8, 0))
        assert torch.cuda.get_device_name() == "NVIDIA H200"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(SettingError, match=r"unknown device to pretend 'rocm'.*h200"), pretend_cuda("rocm"):
        pass
    with pytest.raises(SettingError, match="rocm"), faithful(pretend="rocm"):
        pass


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, device="cuda"),
        lambda: torch.tensor([1.0], device=torch.device("cuda", 0)),
        lambda: torch.arange(3, device=0),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to("cuda", torch.float16),
        lambda: torch.zeros(3).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros(3, device="cuda") + 1,
        lambda: torch.zeros(3, device="cuda").view(1, 3)[:, 1:],
        lambda: torch.empty_like(torch.zeros(3), device="cuda"),
        lambda: torch.empty_like(torch.zeros(3, device="cuda")),
        lambda: torch.zeros(3).new_zeros(2, device="cuda"),
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
        lambda: torch.nn.Linear(2, 2, device="cuda").bias,
        lambda: torch.nn.Parameter(torch.zeros(3, device="cuda")),
        lambda: torch.zeros(3).type("torch.cuda.HalfTensor"),
        lambda: torch.cuda.FloatTensor(3),
        lambda: torch.normal(0.0, 1.0, (3,), device="cuda"),
        lambda: torch.fft.fftfreq(4, device="cuda"),
        lambda: torch.as_tensor([1], device="cuda"),
    ],
)
def test_what_is_asked_for_on_cuda_says_so(make: Any) -> None:
    tensor = make()
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.get_device() == torch.get_device(tensor) == 0
    assert tensor.type().startswith("torch.cuda.")
    assert tensor.to(tensor.device).device == tensor.device
    assert "cuda:0" in repr(tensor)


@pytest.mark.usefixtures("world")
def test_what_is_asked_for_on_the_host_says_so() -> None:
    for tensor in (torch.zeros(3), torch.zeros(3, device="cuda").cpu(), torch.ones(2).half(), torch.tensor(1)):
        assert (tensor.is_cuda, tensor.device.type, tensor.get_device()) == (False, "cpu", -1)
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert not torch.zeros(2, device="meta").is_cuda


@pytest.mark.usefixtures("world")
def test_another_place_means_a_copy() -> None:
    host = torch.zeros(3)
    there = host.cuda()
    there += 1
    back = there.cpu()
    there += 1
    assert (host[0], back[0], there[0]) == (0, 1, 2)
    assert there.to("cuda") is there
    assert host.cpu() is host
    computed = (torch.zeros(3) + 1).half()
    computed.cuda().zero_()
    assert computed.sum() == 3


@pytest.mark.usefixtures("world")
def test_the_default_device_may_be_cuda() -> None:
    with torch.device("cuda"):
        assert torch.zeros(1).is_cuda
        assert torch.get_default_device().type == "cuda"
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda
        assert not torch.ones(2, device="cpu").is_cuda
    finally:
        torch.set_default_device(None)
    assert not torch.ones(2).is_cuda


def test_the_default_device_ends_with_its_world() -> None:
    with pretend_cuda():
        torch.set_default_device("cuda")
        with suspended():
            assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).is_cuda
    assert torch.get_default_device() == torch.ones(1).device == torch.device("cpu")


@pytest.mark.usefixtures("world")
def test_gradients_lie_on_the_device() -> None:
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(grads[0].is_cuda)
            return 2 * grads[0]

    x = torch.ones(3, device="cuda", requires_grad=True)
    Twice.apply(x).sum().backward()
    threads = threading.Thread(target=lambda: seen.append(torch.zeros(1, device="cuda").is_cuda))
    threads.start()
    threads.join()
    assert seen == [True, True]
    assert x.grad is not None
    assert x.grad.is_cuda


@pytest.mark.usefixtures("world")
def test_the_device_tells_its_properties() -> None:
    row = cuda_device_named("h200")
    found = torch.cuda.get_device_properties("cuda")
    driver = triton.runtime.driver.active
    told = driver.utils.get_device_properties(driver.get_current_device())
    assert found.multi_processor_count == told["multiprocessor_count"] == row.multi_processor_count == 132
    assert found.total_memory == torch.cuda.mem_get_info()[1]
    assert told["max_shared_mem"] == found.shared_memory_per_block_optin == 227 * 1024
    assert (driver.get_current_target().backend, driver.get_current_target().arch) == ("cuda", 90)
    assert driver.get_active_torch_device() == torch.device("cuda", 0)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.is_bf16_supported()) == (1, 0, True)
    assert torch.version.cuda
    assert triton.testing.do_bench(lambda: None, warmup=1, rep=1) > 0
    with torch.cuda.device(0), torch.cuda.device_of(torch.zeros(1, device="cuda")):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="invalid device ordinal: 3; pretend_cuda"):
        torch.cuda.set_device(3)


@pytest.mark.usefixtures("world")
def test_streams_events_and_memory() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert not torch.cuda.current_stream().is_capturing()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()
    assert first.elapsed_time(last) > 0
    before = torch.cuda.memory_allocated()
    held = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4000
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4000


@pytest.mark.usefixtures("world")
def test_graphs_are_refused_in_one_line() -> None:
    for ask in (torch.cuda.CUDAGraph, lambda: torch.cuda.graph(None), lambda: torch.cuda.make_graphed_callables(0, 0)):
        with pytest.raises(RuntimeError, match=r"^CUDA graphs: .* call the function itself$"):
            ask()


@pytest.mark.usefixtures("world")
def test_autocast_generators_and_pinned_memory() -> None:
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32
    generator = torch.Generator("cuda").manual_seed(3)
    again = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.equal(
        torch.randn(4, generator=generator, device="cuda"), torch.randn(4, generator=again, device="cuda")
    )
    torch.cuda.manual_seed(1)
    drawn = torch.rand(3, device="cuda")
    torch.cuda.manual_seed_all(1)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))
    pinned = torch.zeros(3).pin_memory()
    assert (pinned.is_pinned(), pinned.is_cuda, torch.zeros(3).is_pinned()) == (True, False, False)
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert pinned.to("cuda", non_blocking=True).is_cuda


@pytest.mark.usefixtures("world")
def test_products_of_cuda_alone() -> None:
    a = torch.randn(3, 40, device="cuda").bfloat16()
    b = torch.randn(40, 5, device="cuda").bfloat16()
    into = torch.zeros(3, 5, device="cuda")
    assert torch.equal(torch.mm(a, b, out_dtype=torch.float32), a.float() @ b.float())
    torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    assert torch.equal(into, torch.mm(a.float(), b.float()))
    assert torch.mm(a, b).dtype == torch.bfloat16


@pytest.mark.usefixtures("world")
def test_an_operator_of_cuda_runs() -> None:
    @torch.library.custom_op("assay_pretence::one_more", mutates_args=(), device_types="cuda")
    def one_more(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x + 1

    assert one_more(torch.zeros(1, device="cuda")) == 1


def test_what_is_compiled_runs_uncompiled_meanwhile() -> None:
    calls = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(graph)
        return graph.forward

    function = torch.compile(lambda x: torch.zeros(3) + x.sin(), backend=backend, fullgraph=True)
    with pretend_cuda():
        from torch._dynamo import trace_rules

        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()
        assert function(torch.ones(3, device="cuda")).is_cuda
        assert calls == []
    function(torch.ones(3))
    assert len(calls) == 1


def test_the_compiler_is_loaded_by_whoever_compiles_and_as_it_is() -> None:
    text = """
import sys, torch
from assay.interpreter import pretend_cuda
with pretend_cuda():
    torch.zeros(3, device="cuda")
    assert "torch._dynamo" not in sys.modules
with pretend_cuda():
    from torch._dynamo import trace_rules
    assert trace_rules.get_torch_obj_rule_map()
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: 1 / 0)
    assert compiled(torch.zeros(3, device="cuda")).is_cuda
assert torch.zeros in trace_rules.get_torch_obj_rule_map()
assert not any("assay" in type(finder).__module__ for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-P", "-c", text], check=True, timeout=300)
