"""Tensor-parallel linear layers and expert-parallel mixtures on two processes: every rank judged, faults planted."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from assay.golden.registry import spec
from assay.kernels.parallel.collectives import all_reduce
from assay.kernels.parallel.linear import column_parallel_linear, row_parallel_linear
from assay.kernels.parallel.moe import moe_dispatched, moe_reduced
from assay.verify.cases.case import Case
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError
from assay.verify.examination.distributed import Group, examine_ranks, of_rank
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.kernels import parallel_functions as functions

WIRE = {"wire": torch.bfloat16}
COLUMNS = {"weight": "N", "bias": "N"}
EXPERTS = {"w_gate_up": "E", "w_down": "E"}
TOKENS = {**EXPERTS, "x": "T", "weights": "T", "ids": "T"}
ROWS = {"x": "K", "weight": "K"}
SIZES = {
    "linear": {"M": 6, "N": 64, "K": 34},
    "moe": {"T": 17, "D": 24, "F": 20, "E": 4, "k": 3},
    "all_reduce": {"R": 9, "N": 64},
}
LAYERS: dict[str, tuple[Any, str, dict[str, str], str, str]] = {  # function, op, sharded, gathered, contract
    "column, gathered": (partial(column_parallel_linear, gather=True), "linear", COLUMNS, "", "linear"),
    "column": (column_parallel_linear, "linear", COLUMNS, "N", "linear"),
    "column of a sequence": (
        partial(column_parallel_linear, sequence=True), "linear", {"x": "M", **COLUMNS}, "N", "linear",
    ),
    "row": (row_parallel_linear, "linear", ROWS, "", "linear"),
    "row of a sequence": (partial(row_parallel_linear, sequence=True), "linear", ROWS, "M", "linear"),
    "row, bfloat16": (partial(row_parallel_linear, **WIRE), "linear", ROWS, "", "linear_bfloat16"),
    "dispatched": (moe_dispatched, "moe", TOKENS, "T", "moe"),
    "dispatched, bfloat16": (partial(moe_dispatched, **WIRE), "moe", TOKENS, "T", "moe_dispatched_bfloat16"),
    "reduced": (moe_reduced, "moe", EXPERTS, "", "moe"),
    "reduced, bfloat16": (partial(moe_reduced, **WIRE), "moe", EXPERTS, "", "moe_reduced_bfloat16"),
    "all-reduce": (all_reduce, "all_reduce", {"shards": "R"}, "", "all_reduce"),
    "all-reduce, bfloat16": (partial(all_reduce, **WIRE), "all_reduce", {"shards": "R"}, "", "all_reduce_bfloat16"),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "linear": {"M": [2, 6], "N": [4, 34], "K": [1, 33, 64]},
    "moe": {"T": [1, 7], "D": [5], "F": [9], "E": [2, 4], "k": [2]},
    "all_reduce": {"R": [1, 5], "N": [3]},
}


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def failing(name: str, group: Group, dtype: str, function: Any = None, contract: Contract | None = None) -> list[int]:
    """The ranks that fail a case of ordinary numbers, under the contract of a layer if no other is named."""
    own, op, sharded, gathered, promised = LAYERS[name]
    case = Case(op, SIZES[op], {t.name: t.dtype or dtype for t in spec(op).tensors})
    found = []
    for rank in range(2):
        kernel = of_rank(function or own, op, group, rank, sharded=sharded, gathered=gathered)
        harness = KernelHarness(Call(kernel, {}), contract or contract_from_table(f"parallel.{promised}"))
        if harness.try_case(case).failure is not None or kernel.differing:
            found.append(rank)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_its_contract_on_every_rank(name: str, group: Group) -> None:
    """In bfloat16 and, where ranks add in it, float32; ranks that return the whole have the same bits."""
    for dtype in ("bfloat16",) if "bfloat16" in name else ("float32", "bfloat16", "float16"):
        assert failing(name, group, dtype) == []


@pytest.mark.parametrize("name", ["row, bfloat16", "column, gathered", "dispatched"])
def test_a_layer_passes_an_examination(name: str, group: Group) -> None:
    """Special values, subnormals, other data before, repetition: on both ranks."""
    function, op, sharded, gathered, promised = LAYERS[name]
    settings = {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "contract": f"parallel.{promised}"}
    verdict = examine_ranks(
        function, op, group, sharded=sharded, gathered=gathered, dtype="bfloat16", shapes=SHAPES[op], **settings
    )
    assert verdict.outcome == "PASS", str(verdict)


LINEAR, MOE = "linear", "moe"
FAULTS: dict[str, tuple[str, str, str, str, str]] = {  # layer, file, name, old, new
    "no all-reduce": ("row", LINEAR, "row_parallel_linear", "sum_over_ranks(partial, group)", "partial"),
    "the bias on every rank": (
        "row", LINEAR, "row_parallel_linear", "weight.float().T).to(wire)", "weight.float().T + bias.float()).to(wire)",
    ),
    "the bias left out": ("row", LINEAR, "row_parallel_linear", "torch.add(total.float(), bias_32)", "total.float()"),
    "partial sums in bfloat16": ("row", LINEAR, "row_parallel_linear", ".to(wire)", ".bfloat16()"),
    "all rows on every rank but the first": (
        "row of a sequence", LINEAR, "row_parallel_linear", "reduce_scatter(partial, group)",
        "sum_over_ranks(partial, group)[: len(partial) // 2]",
    ),
    "columns in the order of the last rank": (
        "column, gathered", LINEAR, "column_parallel_linear", "all_gather(y, 1, group, summed=False)",
        "all_gather(y, 1, group, summed=False).roll(len(weight), 1)",
    ),
    "rows of this rank alone": (
        "column of a sequence", LINEAR, "column_parallel_linear", "all_gather(x.float(), 0, group, summed=True)",
        "torch.cat([x.float()] * 2)",
    ),
    "experts counted from the first on every rank": (
        "dispatched", MOE, "moe_dispatched", " - dist.get_rank(group) * local_experts\n    outputs",
        " % 1\n    outputs",
    ),
    "an expert too far": ("reduced", MOE, "moe_reduced", "dist.get_rank(group) * local_experts\n    (pairs",
                          "dist.get_rank(group) * local_experts - 1\n    (pairs"),
    "tokens back in the order of experts": (
        "dispatched", MOE, "moe_dispatched", "outputs.float()[torch.argsort(order)]", "outputs.float()",
    ),
    "tokens beyond a capacity dropped": (
        "dispatched", MOE, "moe_dispatched", "weights[:, :, None]",
        "(weights * (torch.arange(top_k) < 2))[:, :, None]",
    ),
    "shares of the first rank alone": (
        "reduced", MOE, "moe_reduced", "sum_over_ranks(partial.to(wire), group)", "partial.to(wire)",
    ),
    "shares added in bfloat16": ("reduced", MOE, "moe_reduced", "partial.to(wire)", "partial.bfloat16()"),
    "experts' results in bfloat16": ("dispatched", MOE, "moe_dispatched", ".to(wire)\n", ".bfloat16()\n"),
    "the weight left out": ("reduced", MOE, "moe_reduced", " * factors[:, None]", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, group: Group) -> None:
    """One replacement in the source of a layer that passes without it: some rank fails, or two differ."""
    layer, file, name, old, new = FAULTS[fault]
    given = dict(getattr(LAYERS[layer][0], "keywords", {}))
    faulty = partial(functions.with_fault, file, name, old, new, **given)
    assert failing(layer, group, "float32", faulty) != []


@pytest.mark.parametrize(
    ("layer", "name", "old", "new"),
    [
        ("row", "row_parallel_linear", "dist.all_reduce(total, group=group)", "dist.reduce(total, 0, group=group)"),
        ("column, gathered", "column_parallel_linear", "torch.cat(parts, dim)", "torch.cat(parts[::-1], dim)"),
    ],
)
def test_a_fault_of_a_collective_is_found(layer: str, name: str, old: str, new: str, group: Group) -> None:
    """The sum reaches rank 0 alone, which the other rank's bits show on either; parts come in the wrong order."""
    given = dict(getattr(LAYERS[layer][0], "keywords", {}))
    faulty = partial(functions.with_faulty_collective, "linear", name, old, new, **given)
    assert failing(layer, group, "float32", faulty) == [0, 1]


def test_a_reduction_in_bfloat16_is_no_float32_one(group: Group) -> None:
    """What passes under the contract that declares it fails under the one that promises float32, on both ranks."""
    for name, promised in (("row, bfloat16", "linear"), ("all-reduce, bfloat16", "all_reduce")):
        contract = contract_from_table(f"parallel.{promised}")
        assert failing(name, group, "bfloat16", contract=contract) == [0, 1]


def test_ranks_that_differ_fail_though_each_is_right(group: Group) -> None:
    """A result within its tolerance on every rank, whose bits depend on the rank."""
    faulty = partial(
        functions.with_fault, "linear", "row_parallel_linear", "total.float(), bias_32)",
        "total.float(), bias_32) * (1 + x.new_tensor(2**-22) * __import__('torch').distributed.get_rank())",
    )  # fmt: skip
    settings = {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "shapes": SHAPES["linear"]}
    verdict = examine_ranks(faulty, "linear", group, dtype="float32", contract=Contract(ulps={}), **settings)
    assert verdict.outcome == "FAIL"
    assert "rank 1 gave other bits than rank 0 in a result float32[" in str(verdict)


LAID: dict[str, tuple[Any, dict[int, int], dict[int, int]]] = {  # gradients, the inputs' and the results' divisions
    "column": (functions.column_gradients, {1: 0, 2: 0}, {1: 0, 2: 0}),
    "column of a sequence": (functions.column_gradients_of_rows, {0: 0, 1: 0, 2: 0, 3: 1}, {0: 0, 1: 0, 2: 0}),
    "row": (functions.row_gradients, {0: 1, 1: 1}, {0: 1, 1: 1}),
    "row of a sequence": (functions.row_gradients_of_rows, {0: 1, 1: 1, 3: 0}, {0: 1, 1: 1}),
}


def dealt(tensors: list[torch.Tensor], dims: dict[int, int]) -> list[list[torch.Tensor]]:
    """Both ranks' parts of tensors that are divided along these dimensions."""
    return [[x.chunk(2, dims[i])[rank] if i in dims else x for i, x in enumerate(tensors)] for rank in range(2)]


def together(answers: list[list[torch.Tensor]], dims: dict[int, int]) -> list[torch.Tensor]:
    """What the ranks' parts come to; what isn't divided must be the same on both."""
    whole = []
    for i, (first, second) in enumerate(zip(*answers, strict=True)):
        assert i in dims or torch.equal(first, second)
        whole.append(torch.cat([first, second], dims[i]) if i in dims else first)
    return whole


@pytest.mark.parametrize("name", LAID)
def test_gradients_of_a_divided_layer_are_those_of_the_whole(name: str, group: Group) -> None:
    """Of x, weight and bias, from one gradient of the result; on integers, of which float32 loses nothing."""
    function, inputs, results = LAID[name]
    torch.manual_seed(0)
    x, weight, bias, dy = (torch.randint(-4, 5, size).float() for size in ((6, 8), (10, 8), (10,), (6, 10)))
    found = together(group.run(function, dealt([x, weight, bias, dy], inputs)), results)
    for gradient, right in zip(found, (dy @ weight, dy.T @ x, dy.sum(0)), strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (functions.dispatched_gradients, dict.fromkeys(range(6), 0)),
        (functions.reduced_gradients, dict.fromkeys((1, 2), 0)),
    ],
)
def test_gradients_of_divided_experts_are_those_of_the_whole(
    function: Any, inputs: dict[int, int], group: Group
) -> None:
    """Tokens, experts and weights of two ranks against one process' autograd in float64."""
    torch.manual_seed(0)
    sizes = ((6, 5), (4, 14, 5), (4, 5, 7), (6, 2), (6, 5))
    x, first, last, weights, dy = (torch.randn(size) for size in sizes)
    ids = torch.randint(0, 4, (6, 2), dtype=torch.int32)
    found = together(group.run(function, dealt([x, first, last, weights, ids, dy], inputs)), inputs)
    leaves = [part.double().requires_grad_() for part in (x, first, last, weights)]
    rows, gates, downs, factors = leaves
    gate, up = torch.einsum("td,tkfd->tkf", rows, gates[ids.long()]).chunk(2, -1)
    y = torch.einsum("tkf,tkdf,tk->td", torch.nn.functional.silu(gate) * up, downs[ids.long()], factors)
    for gradient, right in zip(found, torch.autograd.grad(y, leaves, dy.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-5, atol=1e-5)


def refusals(group: Group, function: Any, *parts: Any, **options: Any) -> list[str]:
    """What each rank raises, in words; the same parts for both if only one's are given."""
    return group.run(partial(functions.refusal, partial(function, **options)), [*parts, *parts][:2])


UNEVEN: dict[str, tuple[str, dict[int, int], list[tuple[int, ...]], int]] = {
    "outputs": ("linear.column_parallel_linear", {1: 0, 2: 0}, [(4, 6), (7, 6), (7,)], 7),
    "terms": ("linear.row_parallel_linear", {0: 1, 1: 1}, [(4, 5), (7, 5), (7,)], 5),
    "experts": ("moe.moe_reduced", {1: 0, 2: 0}, [(4, 6), (3, 8, 6), (3, 6, 4), (4, 2)], 3),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_the_ranks_do_not_divide_are_refused(name: str, group: Group) -> None:
    """By `shard`, which makes the parts: ValueError with the number of ranks and the size."""
    path, dims, sizes, size = UNEVEN[name]
    file, _, function = path.partition(".")
    call = partial(functions.of_whole, f"assay.kernels.parallel.{file}", function, dims)
    words = f"ValueError: tensor: expected a size that 2 ranks divide evenly, got {size}"
    assert refusals(group, call, [torch.ones(size) for size in sizes]) == [words] * 2


def test_parts_that_do_not_fit_together_are_refused_on_every_rank(group: Group) -> None:
    """Ranks with other numbers of outputs, rows or experts, rows that can't be shared out, a wire of another kind."""
    x, weight, bias = torch.ones(4, 6), torch.ones(2, 6), torch.ones(2)
    uneven = "ValueError: {}: expected the same length on each of 2 ranks, got {}"
    whole = partial(column_parallel_linear, gather=True)
    found = refusals(group, whole, (x, weight, bias), (x, weight[:1], bias[:1]))
    assert found == [uneven.format("weight", [2, 1])] * 2
    found = refusals(group, column_parallel_linear, (x, weight, bias), (x[:3], weight, bias), sequence=True)
    assert found == [uneven.format("x", [4, 3])] * 2
    first, last, weights, ids = torch.ones(2, 8, 6), torch.ones(2, 6, 4), torch.ones(4, 1), torch.zeros(4, 1).int()
    for function in (moe_dispatched, moe_reduced):
        parts = (x, first, last, weights, ids), (x, first[:1], last[:1], weights, ids)
        assert refusals(group, function, *parts) == [uneven.format("w_down", [2, 1])] * 2
        none = refusals(group, function, (x, first[:0], last[:0], weights, ids))
        assert none == ["ValueError: w_down: expected an expert on each rank, got 0"] * 2
    found = refusals(group, row_parallel_linear, (x[:3], weight, bias), sequence=True)
    assert found == ["ValueError: x: expected a size that 2 ranks divide evenly, got 3"] * 2
    found = refusals(group, row_parallel_linear, (x, weight, bias), wire=torch.float64)
    words = "ValueError: wire: expected one of torch.float32, torch.bfloat16, torch.float16, got torch.float64"
    assert found == [words] * 2
    found = refusals(group, row_parallel_linear, (x, weight.bfloat16(), bias))
    assert found == ["TypeError: weight: expected float32, got bfloat16"] * 2


def test_divisions_that_an_op_does_not_have_are_one_clear_line(group: Group) -> None:
    """A tensor or symbol of another op, and a symbol that no result has."""
    with pytest.raises(
        SettingError, match=r"sharded: w='N'; expected a tensor and a symbol of x\[M,K\], weight\[N,K\]"
    ):
        examine_ranks(column_parallel_linear, "linear", group, sharded={"w": "N"}, dtype="float32")
    with pytest.raises(SettingError, match="gathered='K'; expected one of M, N"):
        examine_ranks(column_parallel_linear, "linear", group, gathered="K", dtype="float32")
