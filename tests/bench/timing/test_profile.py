"""A profiler's file in words, and a roofline's gap."""

import json
from pathlib import Path

import pytest

from assay.bench.inspection.calls import Request, calls
from assay.bench.timing.contest import Peak, gap_in_words, least_of
from assay.bench.timing.profile import counters
from assay.verify.errors import BenchError
from assay.verify.settings import Settings

HEAD = '==PROF== Connected\n"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'


def table(**metrics: tuple[str, str]) -> str:
    """Nsight Compute's rows of one kernel."""
    names = {
        "duration": "Duration",
        "dram": "DRAM Throughput",
        "sm": "Compute (SM) Throughput",
        "occupancy": "Achieved Occupancy",
        "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
        "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    }
    return HEAD + "".join(f'"0","my_kernel","S","{names[k]}","{u}","{v}"\n' for k, (v, u) in metrics.items())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (table(duration=("1,024.5", "us"), dram=("91.2", "%"), sm=("20", "%")), "bound by bandwidth"),
        (table(dram=("30", "%"), sm=("85", "%"), tensor=("82", "%")), "bound by the tensor pipe"),
        (table(dram=("30", "%"), sm=("85", "%")), "bound by arithmetic"),
        (table(dram=("30", "%"), sm=("20", "%"), occupancy=("12", "%")), "(occupancy)"),
        (table(dram=("30", "%"), sm=("20", "%"), occupancy=("80", "%")), "(latency)"),
        (table(dram=("30", "%"), sm=("20", "%"), conflicts=("50", ""), wavefronts=("100", "")), "bank conflicts: 0.5"),
    ],
)
def test_nsight_computes_table_is_put_in_words(tmp_path: Path, rows: str, words: str) -> None:
    """Shares of the peaks say what a kernel waits for."""
    path = tmp_path / "report.csv"
    path.write_text(rows, encoding="utf-8")
    (line,) = counters(path)
    assert line.startswith("0: my_kernel: ")
    assert words in line
    assert ("1024.5 us" in line) == ("1,024.5" in rows)


def test_protons_tree_is_put_in_words(tmp_path: Path) -> None:
    """The leaves of a hatchet file are kernels, with their count and time."""
    leaf = {"frame": {"name": "k"}, "metrics": {"count": 4, "time (ns)": 8000}, "children": []}
    path = tmp_path / "proton.hatchet"
    path.write_text(json.dumps([{"frame": {"name": "ROOT"}, "metrics": {}, "children": [leaf]}]), encoding="utf-8")
    assert counters(path) == ["k: 2 us, the mean of 4 launches"]


OTHERS = [
    *("", "a,b\n1,2\n", "{", "[]", "[" * 10_000, '{"metrics": 3}', '{"metrics": {"time (ns)": "long"}}'),
    *(
        '{"metrics": {"time (ns)": 1, "count": 0}}',
        '{"frame": 3, "metrics": {"time (ns)": 1}}',
        '"other ""Metric Name"""\n1\n',
    ),
]


@pytest.mark.parametrize("text", OTHERS)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """What is neither is told in one line."""
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match="--profile"):
        counters(path)


def test_the_least_time_is_the_longer_of_products_and_bytes() -> None:
    """A long product is bound by the rate, a row of one by the bandwidth, and a softmax always by that."""
    peak = Peak("d", bandwidth=1e9, rates={"fp32": 1e12}, source="")

    def least(op: str, **sizes: int) -> tuple[str, float]:
        found = least_of(next(iter(calls(Settings(op, dtype="float32"), Request((sizes,))))), peak)
        assert found is not None
        return found.bound, found.seconds

    sides = 4 * 3 * 4096**2
    assert least("gemm", M=4096, N=4096, K=4096) == ("bandwidth", pytest.approx(sides / 1e9))
    fast = Peak("d", bandwidth=1e12, rates={"fp32": 1e12}, source="")
    case = next(iter(calls(Settings("gemm", dtype="float32"), Request(({"M": 512, "N": 512, "K": 512},)))))
    found = least_of(case, fast)
    assert found is not None
    assert (found.bound, found.seconds) == ("products", pytest.approx(2 * 512**3 / 1e12))
    assert least("softmax", R=10, N=1000) == ("bandwidth", pytest.approx(2 * 4 * 10_000 / 1e9))
    assert least_of(case, Peak("d", 1e12, {}, "")) is None
    assert "launch overhead" in gap_in_words(1e-6, found, 5e-6)
    assert gap_in_words(2 * found.seconds * 0.9, found, 0.0) == "bound by products"
    assert gap_in_words(4 * found.seconds, found, 0.0) == "4 times what its products need"
