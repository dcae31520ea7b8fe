"""Run the checks that need a GPU: `./dev gpu [PART...]`, each part a separate script of at most 8 minutes.

A run on a GPU writes the part's section of docs/gpu.md; without a GPU, or with `--rehearse`, each part runs completely
on the CPU in small sizes and nothing is written. Exits 1 if a claim of a part fails.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("random_tensors", "interpreter_bits", "accumulators", "libraries", "kernels", "model_audit")


def run(parts: list[str], rehearse: bool) -> list[str]:
    """Run each part in a separate process; return the names of the failed ones."""
    failed = []
    for name in parts:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-P", str(HERE / f"{name}.py"), *(["--rehearse"] if rehearse else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="./dev gpu")
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU even where there is a GPU")
    given = parser.parse_args()
    for name in given.part:
        if name not in PARTS:
            parser.error(f"unknown part {name!r}; expected of {', '.join(PARTS)}")
    import torch

    rehearse = given.rehearse or not torch.cuda.is_available()
    if rehearse:
        print("a rehearsal on the CPU: it shows that the scripts run, nothing about a GPU", flush=True)
    failed = run(given.part or list(PARTS), rehearse)
    print(f"parts that failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
