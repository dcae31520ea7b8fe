"""The parts of `./dev demo`; each is a task of a pool's worker."""

import json
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from assay.cli.main import main
from assay.interpreter import faithful
from assay.runtime.pool import Heartbeat
from assay.verify.campaign.survey import Job, examine_job, plan
from assay.verify.campaign.table import entries
from assay.verify.harness.target import load_target
from assay.verify.verdict import Verdict

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[1] / "configs" / "models"
QUICK: dict[str, Any] = {"effort": "quick"}  # of every examination
PLANTED = "planted:rms_norm"
SCHEMES = "w8a16,w4a16-g128,w4a16-g32,w3a16-g32,kv-fp8"


@dataclass(frozen=True)
class Part:
    """A task, its argument, and its approximate seconds on one core."""

    task: Callable[[Any, Heartbeat], Any]
    item: Any
    effort: float


@dataclass(frozen=True)
class Step:
    """A command as a user would type it, the end of its output, and its exit status."""

    command: str
    said: str
    status: int


def parts(out: Path) -> list[Part]:
    chosen = [entry for entry in entries(HERE / "kernels.toml") if not entry.absence("cpu")]
    jobs = plan(chosen, threads=1, **QUICK)
    return [
        Part(audited, out / "audit", 20),
        Part(goldens, out / "goldens", 10),
        Part(allclose_passes, PLANTED, 2),
        *(Part(examined, job, 3 * job.entry.cost) for job in jobs),
    ]


def do(part: Part, heartbeat: Heartbeat) -> tuple[Any, float]:
    """Return the result of a part, and the processor seconds that it took, with its child processes."""
    torch.set_num_threads(1)
    began = _spent()
    return part.task(part.item, heartbeat), _spent() - began


def examined(job: Job, heartbeat: Heartbeat) -> Verdict:
    """Return the verdict of a kernel. Failures of Liger's, whose calls are slow, are reported without shrinking."""
    shrinking = job.entry.group != "Liger"
    return examine_job(replace(job, settings=replace(job.settings, shrinking=shrinking)), heartbeat)


def allclose_passes(target: str, heartbeat: Heartbeat) -> bool:
    """Return whether an RMS norm passes the usual `allclose` test."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 1000, dtype=torch.bfloat16), torch.randn(1000, dtype=torch.bfloat16)
    with faithful():
        given = load_target(target)(x, weight, 1e-5)
    return torch.allclose(given, torch.nn.functional.rms_norm(x, (1000,), weight, 1e-5), rtol=1e-2, atol=1e-2)


def goldens(folder: Path, heartbeat: Heartbeat) -> list[Step]:
    """Build a store of goldens, check it, damage one bit, detect that, and repair it."""
    shutil.rmtree(folder, ignore_errors=True)
    build, check = ("golden", "build", "small", "--store", str(folder)), ("golden", "check", str(folder))
    steps = [typed(*build, "--workers", "1"), typed(*check)]
    path = sorted(folder.glob("records/*/*.safetensors"))[100]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    steps += [typed(*check, "--sample", "0")]
    return [*steps, typed(*build, "--workers", "1", "--recheck"), typed(*check, "--sample", "0")]


def audited(folder: Path, heartbeat: Heartbeat) -> dict[str, Any]:
    """Audit a bundled model; return the content of its audit.json."""
    text = str(MODELS / "held-out.txt")
    data = ("--text", text, "--sequence", "64", "--sequences", "8")
    step = typed("audit", "stdlib-llama", *data, "--target", "h200", "--max-kl", "0.01", "--formats", SCHEMES,
                 "--out", str(folder))  # fmt: skip
    if step.status:
        raise RuntimeError(step.said)
    content: dict[str, Any] = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    return content


def typed(*arguments: str) -> Step:
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(arguments)
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    return Step(" ".join(("assay", *arguments)), lines[0 if status else -1] if lines else "", status)


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
