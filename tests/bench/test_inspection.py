"""`assay inspect`: what a GPU's compiler makes of kernels, and what is wrong with it, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from assay.bench.inspection.amounts import Amounts
from assay.bench.inspection.arch import arch_named
from assay.bench.inspection.calls import Request
from assay.bench.inspection.facts import Facts
from assay.bench.inspection.findings import Finding, findings
from assay.bench.inspection.inspecting import Call, Job, inspected, merged
from assay.bench.inspection.page import Inspected, finding_lines, markdown, rows
from assay.verify.errors import SettingError
from assay.verify.settings import Settings

HERE = f"{__package__}.planted_launches" if __package__ else "planted_launches"
HOPPER = arch_named("sm_90a")
SQUARE = {"M": 128, "N": 256, "K": 256}


def look(
    name: str,
    op: str = "",
    dtype: str = "bfloat16",
    sizes: Mapping[str, int] | None = None,
    arch: str = "sm_90a",
    inputs: str = "",
    layouts: Mapping[str, str] | None = None,
) -> Call:
    """One call of a planted kernel, or of ``module:function``."""
    asked = Request((sizes,) if sizes else (), layouts)
    settings = Settings(op, dtype=dtype) if op else None
    target = name if ":" in name else f"{HERE}:{name}"
    (call,) = inspected(Job(name, target, arch, settings, asked, f"{HERE}:{inputs}" if inputs else ""))
    return call


def kinds(call: Call, arch: str = "sm_90a") -> list[str]:
    return [finding.kind for finding in call.findings(arch_named(arch))]


def words(call: Call, kind: str) -> str:
    """The one finding of a kind, in words."""
    (found,) = [finding for finding in call.findings(HOPPER) if finding.kind == kind]
    return str(found)


def test_a_sound_kernel_has_no_findings() -> None:
    """Tiles that fit, products of float32 in float32, and rows in enough registers: nothing to say."""
    assert kinds(look("exact_gemm", "gemm", "float32", SQUARE)) == []
    assert kinds(look("softmax", "softmax", sizes={"R": 4, "N": 1024})) == []


def test_products_in_tf32_are_found() -> None:
    """A float32 product in TF32 is named with its line; the same product of bfloat16 is none."""
    call = look("tf32_gemm", "gemm", "float32", SQUARE)
    assert re.search(r"run in TF32.*planted_launches\.py:\d+", words(call, "tf32"))
    assert list(call.launches[0].products) == ["wgmma tf32"]
    assert kinds(look("tf32_gemm", "gemm", "bfloat16", SQUARE)) == []


def test_spilling_is_found_with_what_ends_it() -> None:
    """Too few threads for a row spill, and a change that was tried and doesn't spill is named."""
    call = look("spilling_softmax", "softmax", sizes={"R": 4, "N": 16384})
    (facts,) = call.launches
    assert facts.spilled > 0
    assert (
        words(call, "spills") == f"_rows: spills {facts.spilled} bytes of a thread's registers: not with {facts.remedy}"
    )
    assert facts.remedy
    assert facts.moves["local store"] > 0


def test_a_tile_beyond_shared_memory_is_found() -> None:
    """Where every configuration needs more shared memory than a block has, nothing can run: that finding is fatal."""
    call = look("large_gemm", "gemm", sizes={"M": 256, "N": 512, "K": 1024})
    assert kinds(call) == ["no room", "none fits"]
    assert call.launches[0].occupancy == 0.0
    assert [finding.fatal for finding in call.findings(HOPPER)] == [False, True]
    assert "a block has 227" in words(call, "none fits")


def test_scalar_loads_are_found() -> None:
    """Where no element is beside another, they are loaded one at a time; neighbours are loaded 16 bytes at a time."""
    call = look("striding_softmax", "softmax", sizes={"R": 4, "N": 4096})
    assert re.search(r"planted_launches\.py:\d+ loads 32 bytes of a thread 2 at a time", words(call, "scalar loads"))
    beside = look("softmax", "softmax", sizes={"R": 4, "N": 4096})
    assert set(beside.launches[0].widths["load"]) == {16}


def test_an_operand_transposed_through_registers_is_found() -> None:
    """8-bit products of Hopper want K beside K: b row by row goes through registers, b column by column doesn't."""
    sizes = {"M": 128, "N": 128, "K": 256}
    by_row = look("fp8_gemm", "gemm_fp8", "float8_e4m3fn", sizes)
    where = r"not K-major: transposed through registers, at planted_launches\.py:\d+"
    assert re.search(where, words(by_row, "transposed"))
    ours = "assay.kernels.triton.gemm_fp8:gemm_fp8"
    by_column = look(ours, "gemm_fp8", "float8_e4m3fn", sizes, layouts={"b": "transposed"})
    assert kinds(by_column) == []


def test_idle_products_are_counted() -> None:
    """Tiles of 128 rows for 16 of them multiply eight times what the op needs."""
    few = {"M": 16, "N": 256, "K": 256}
    assert "multiplies 8 times" in words(look("tall_gemm", "gemm", sizes=few), "idle products")
    assert kinds(look("tall_gemm", "gemm", sizes=SQUARE)) == []


def test_amounts_of_a_product_are_exact() -> None:
    """A product without idle tiles multiplies exactly what the op needs; each operand is read once by each tile."""
    call = look("exact_gemm", "gemm", "float32", SQUARE)
    found = call.launches[0].amounts
    assert found.products == call.own_products == 2 * 128 * 256 * 256
    assert found.loaded == 4 * (128 * 256 * (256 // 64) + 256 * 256 * (128 // 64))
    assert found.stored == 4 * 128 * 256
    assert found.complete
    assert call.own_bytes == 4 * (128 * 256 + 256 * 256 + 128 * 256)


def test_a_loop_that_hangs_on_the_program_is_counted_for_each() -> None:
    call = look("triangle", inputs="vector")
    assert [facts.config for facts in call.launches] == [{"BLOCK": 256}, {"BLOCK": 512}]
    for facts in call.launches:
        programs, size = facts.grid[0], facts.config["BLOCK"]
        blocks = programs * (programs + 1) / 2
        assert facts.amounts == Amounts(0.0, blocks * size, 4 * blocks * size, 4 * 2048.0)


def test_a_loop_that_hangs_on_memory_is_told_as_such() -> None:
    found = look("as_said", inputs="vector").launches[0].amounts
    assert not found.complete
    assert found.loaded == 4 + 4 * 128


def test_an_early_return_is_followed_where_it_is_known() -> None:
    """A program that returns by its place does nothing; one that may, by what lies in memory, is counted as if not."""
    found = look("early", inputs="vector").launches[0].amounts
    assert found == Amounts(0.0, 0.0, 3 * (4 + 4 * 512.0), 3 * 4 * 512.0, complete=False)


def test_what_does_not_compile_is_told_by_the_compiler() -> None:
    """A kernel that the compiler refuses is a fatal finding with its words, those of the innermost function, and the
    lines that led there."""
    call = look("refused", inputs="vector")
    told = words(call, "not compiled")
    assert "doesn't compile for sm_90a: ValueError: arange's range must be a power of 2" in told
    assert told.endswith("in `return x + tl.arange(0, 3)`, of `tl.store(y_ptr, _three(tl.load(x_ptr)))`")
    assert call.findings(HOPPER)[0].fatal


def test_arguments_may_come_with_keywords() -> None:
    assert look("exact_gemm", inputs="matrices").launches[0].kernel == "_product"


def test_a_function_that_launches_nothing_says_so() -> None:
    one = Inspected("untouched", "", (look("untouched", inputs="vector"),))
    assert one.problems == ["launches no Triton kernel"]


def test_a_number_that_no_kernel_has_counted_is_one() -> None:
    """A function that reads a result as a size goes on, the same each time; where it then ends in an error, that is
    told, and behind which kernel."""
    calls = [look("softmax_of_a_count", "softmax", sizes={"R": 4, "N": 512}) for _ in range(2)]
    assert [[launch.grid for launch in call.launches] for call in calls] == [[(1, 1, 1), (1, 1, 1)]] * 2
    (told,) = Inspected("counting", "", (calls[0],)).problems
    assert told.endswith("nothing is known after _rows: RuntimeError: no rows")


@pytest.mark.parametrize(
    ("arch", "unit"), [("sm_80", "mma bf16"), ("sm_90a", "wgmma bf16"), ("sm_100a", "tcgen05 16-bit")]
)
def test_each_architecture_has_its_own_tensor_cores(arch: str, unit: str) -> None:
    assert list(look("exact_gemm", "gemm", "bfloat16", SQUARE, arch=arch).launches[0].products) == [unit]


def test_architectures_have_many_names() -> None:
    """An architecture is named as ptxas does, with or without its letter, or by a device; another is refused."""
    assert arch_named("sm_90") == arch_named("SM_90a") == arch_named("h200")
    assert arch_named("a100").name == "sm_80"
    with pytest.raises(SettingError, match=r"--arch sm_42: unknown; expected one of sm_70, .*sm_100a, or a device"):
        arch_named("sm_42")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "share"),
    [(128, 32, 0, 1.0), (128, 255, 0, 0.125), (256, 128, 0, 0.25), (128, 32, 100 * 1024, 0.125), (32, 16, 0, 0.5),
     (128, 32, 228 * 1024, 0.0)],
)  # fmt: skip
def test_occupancy_is_that_of_the_calculator(threads: int, registers: int, shared: int, share: float) -> None:
    """Registers, shared memory, blocks and threads each bound the warps of a multiprocessor, as CUDA's table has it."""
    assert HOPPER.occupancy(threads, registers, shared) == share


def test_shares_together_are_the_whole() -> None:
    job = Job("triangle", f"{HERE}:triangle", "sm_90a", inputs=f"{HERE}:vector")
    (whole,) = inspected(job)
    (together,) = merged([list(inspected(replace(job, share=share, shares=2))) for share in range(2)])
    assert sorted(map(str, together.launches)) == sorted(map(str, whole.launches))


def test_pruned_configurations_are_compiled_where_asked() -> None:
    job = Job("few", f"{HERE}:few", "sm_90a", inputs=f"{HERE}:vector")
    (usual,) = inspected(job)
    (every,) = inspected(replace(job, pruned=True))
    assert [(facts.config["BLOCK"], facts.pruned) for facts in usual.launches] == [(512, False)]
    assert [(facts.config["BLOCK"], facts.pruned) for facts in every.launches] == [(256, True), (512, False)]


def facts(**changes: object) -> Facts:
    own = Facts("k", "k.py", 1, (1, 1, 1), {}, 4, 3, tuned=True, pruned=False, shared=1024)
    return replace(own, **changes)


def test_configurations_that_a_tuner_leaves_out_count_for_nothing() -> None:
    """What a tuner's own pruning dismisses is no finding, and no room for it no reason that none fits."""
    assert findings([facts(spilled=8, pruned=True), facts()], HOPPER) == []


def test_findings_of_many_configurations_stand_once() -> None:
    (found,) = findings([facts(spilled=8, stack=8), facts(spilled=80, stack=80), facts()], HOPPER)
    assert str(found) == "k: at worst spills 80 bytes of a thread's registers (2 of 3 configurations)"


def test_local_memory_and_idle_tensor_cores_are_told() -> None:
    """A stack that isn't spilled is local memory; narrow products without tensor cores are a finding."""
    found = findings([facts(stack=32, narrow=True)], HOPPER)
    assert [finding.kind for finding in found] == ["local memory", "no tensor cores"]


def test_the_page_has_a_row_for_each_kernel_and_all_findings() -> None:
    call = look("tf32_gemm", "gemm", "float32", SQUARE)
    one = Inspected("tf32_gemm", "float32", (call,))
    page = markdown([one], HOPPER, "Triton", "assay inspect")
    assert f"- tf32_gemm (float32), {next(finding_lines(one, HOPPER))}" in page
    (row,) = rows(one)
    assert f"| {' | '.join(row)} |" in page
    assert row[8] == "wgmma tf32"
    assert isinstance(one.findings(HOPPER)[0][1], Finding)
