"""Keys of stored results: every source that an answer depends on changes its key, and no other source does."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from assay.runtime import results
from assay.runtime.results import ResultStore, Sources, installed_version, own_sources, result_key, user_sources
from tests.test_house import MAY_IMPORT, ROOT, imported_modules, package_of

ANSWERED_BY = {
    "verdict": "assay.verify.campaign.survey",  # of `assay verify` and `assay survey`
    "tuning": "assay.bench.tuning.searching",
    "bench": "assay.cli.bench_runs",
    "judged": "assay.judge.batch",
    "audit": "assay.precision.auditing",
}
EXAMINED = {"verdict", "tuning", "bench", "judged"}
DEPENDS = {
    "formats/rounding.py": {*ANSWERED_BY},
    "runtime/errors.py": {*ANSWERED_BY},
    "configs/__init__.py": {*ANSWERED_BY},
    "golden/definitions/softmax.py": EXAMINED,
    "golden/arithmetic/ozaki.py": EXAMINED,
    "golden/lowering/dispatch.py": EXAMINED,
    "interpreter/operators.py": EXAMINED,
    "verify/comparison/judge.py": EXAMINED,
    "verify/harness/isolation.py": {"verdict", "tuning"},
    "configs/accumulators.toml": {*ANSWERED_BY},
    "configs/contracts/pytorch.toml": EXAMINED,
    "verify/explanation/fault_models/norms.py": {"verdict", "tuning"},
    "configs/case_order.toml": {"verdict", "tuning"},
    "bench/tuning/pruning.py": {"tuning"},
    "bench/inspection/facts.py": {"tuning"},
    "bench/timing/timed.py": {"tuning", "bench", "judged"},
    "judge/procedure.py": {"judged", "bench"},
    "judge/solution/host.py": {"judged", "bench"},
    "precision/schemes/fitting.py": {"audit"},
    "configs/engines.toml": {"audit"},
    "kernels/triton/softmax.py": set(),  # unless a kernel of it is asked about
    "precision/report/summary.py": set(),
    "golden/jobs/build.py": set(),
    "cli/main.py": set(),
    "compare/comparing.py": set(),
    "pytest_plugin/plugin.py": set(),
    "mutation/replay.py": set(),
}


@pytest.fixture(autouse=True)
def _parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse equal sources once: tests read several hundred of them again and again."""
    monkeypatch.setattr(results, "_parsed", PARSED)


PARSED = functools.cache(results._parsed)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources of the package."""
    root = tmp_path_factory.mktemp("copy") / "assay"
    for floor in ("package", *MAY_IMPORT):
        shutil.copytree(ROOT / floor, root / floor, ignore=shutil.ignore_patterns("__pycache__", "models"))
    return root


def digests(root: Path) -> dict[str, str]:
    """The digest of the sources of each kind of stored answer."""
    sources = Sources(root)
    return {kind: sources.digest(module)[0] for kind, module in ANSWERED_BY.items()}


def test_a_changed_source_asks_again_what_depends_on_it(copied: Path) -> None:
    """One file of each floor: the answers that depend on it get another key, the others keep theirs."""
    assert {Path(name).parts[0] for name in DEPENDS} == {*MAY_IMPORT} - {"charts"}
    before, found = digests(copied), {}
    for name in DEPENDS:
        path = copied / name
        original = path.read_bytes()
        path.write_bytes(original + b"\n# changed\n")
        after = digests(copied)
        path.write_bytes(original)
        found[name] = {kind for kind in before if after[kind] != before[kind]}
    assert found == DEPENDS
    (copied / "docs").mkdir()
    (copied / "docs" / "hygiene.md").write_text("changed", encoding="utf-8")
    assert digests(copied) == before


def test_a_copy_has_the_keys_of_the_package(copied: Path) -> None:
    assert digests(copied) == {kind: own_sources(module)[0] for kind, module in ANSWERED_BY.items()}
    keys = [
        result_key("question", ANSWERED_BY["verdict"], targets=targets, device=device)
        for targets in ((), ("assay.kernels.triton.softmax:softmax",), ("assay.kernels.triton.rope:rope",))
        for device in ("", "a device")
    ]
    assert len({*keys, result_key("another", ANSWERED_BY["verdict"])}) == 7


def test_a_kernel_of_this_package_has_its_own_sources(copied: Path) -> None:
    """A change of one bundled kernel asks again about that kernel alone; one of a CUDA source about CUDA's."""
    kernels = {name: f"assay.kernels.{name}" for name in ("triton.softmax", "triton.rope", "cuda.rmsnorm")}
    before = {name: Sources(copied).digest(module)[0] for name, module in kernels.items()}
    for file, expected in (("triton/softmax.py", "triton.softmax"), ("cuda/sources/rmsnorm.cu", "cuda.rmsnorm")):
        path = copied / "kernels" / file
        original = path.read_bytes()
        path.write_bytes(original + b"\n")
        after = {name: Sources(copied).digest(module)[0] for name, module in kernels.items()}
        path.write_bytes(original)
        assert [name for name in kernels if after[name] != before[name]] == [expected]


def test_every_import_is_followed() -> None:
    """The expressions that find imports find all that `ast` does, in every file of the package; tables too."""
    sources = Sources(ROOT)
    assert len(sources.paths) > 400
    for name, path in sources.paths.items():
        module, text = sources._module(name), path.read_text(encoding="utf-8")
        followed = {
            *sources._imported(name, module),
            *(one for lazy in module.lazy for one in sources._homes(*lazy)),
            name,
        }
        packages = {"assay", *sys.stdlib_module_names, *(home.partition(".")[0] for home, _ in module.imports)}
        for _, imported in imported_modules(text, package_of(path.relative_to(ROOT))):
            parts = imported.split(".")
            known = next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in sources.paths), "")
            only_typed = not known and "if TYPE_CHECKING:" in text
            assert known in followed or (not known and parts[0] in packages) or only_typed, f"{name}: {imported}"


EXAMINE = """
import json, sys

from assay.verify.campaign.survey import Job, examine_job
from assay.verify.campaign.table import Entry
from assay.verify.settings import Settings
settings = Settings("softmax", "float32", examples=1, shapes={"N": [4]})
examine_job(Job(Entry("mine", "torch:sigmoid", settings), settings), lambda *note: None)
print(json.dumps([name for name in sys.modules if name.startswith("assay")]))
"""


def test_what_an_examination_loads_is_in_its_key() -> None:
    """Every module of the package that is loaded when a wrong kernel is examined counts for its verdict."""
    run = subprocess.run([sys.executable, "-P", "-c", EXAMINE], capture_output=True, text=True, check=True)
    files, _ = Sources(ROOT).closure(ANSWERED_BY["verdict"])
    loaded = {name for name in json.loads(run.stdout.splitlines()[-1]) if name in Sources(ROOT).paths}
    assert len(loaded) > 150
    assert loaded - files.keys() == set()


def test_an_unknown_module_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"no module assay\.verify\.moved"):
        own_sources("assay.verify.moved")


def test_versions_count() -> None:
    """The versions of what is imported, under the names of distributions, are in the key; what only shows isn't."""
    versions = own_sources(ANSWERED_BY["verdict"])[1]
    assert {"kernel-assay", "torch", "triton", "jax", "numpy", "mpmath", "python-flint"} <= versions.keys()
    assert not {"rich", "typer", "jinja2"} & versions.keys()
    assert versions["torch"] == installed_version("torch")
    assert installed_version("no-such-distribution", "none") == "none"
    assert "transformers" in own_sources("assay.precision.loading.pretrained")[1]


def test_the_sources_are_read_in_no_time() -> None:
    PARSED.cache_clear()
    began = time.process_time()
    Sources(ROOT).digest(ANSWERED_BY["verdict"])
    assert time.process_time() - began < 0.6  # 0.11 s on an idle core


def test_a_script_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sources of a module that no search finds are its file's; there are none of a module that isn't there."""
    script = tmp_path / "script.py"
    script.write_text("one", encoding="utf-8")
    module = type(sys)("script_without_spec")
    module.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "script_without_spec", module)
    before = user_sources("script_without_spec")
    script.write_text("two", encoding="utf-8")
    assert user_sources("script_without_spec") != before != ""
    assert user_sources("no_such_module") == ""


def test_what_a_users_module_imports_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules of other folders too, through each other; of installed packages the version counts."""
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    for name, text in (
        ("own/kernel_of_mine.py", "def kernel(x):\n    from helper_of_mine.inner import half\n    return half(x)\n"),
        ("other/helper_of_mine/__init__.py", ""),
        ("other/helper_of_mine/inner.py", "import triton\nimport kernel_of_mine\nhalf = 2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    before = user_sources("kernel_of_mine")
    assert before == user_sources("kernel_of_mine")
    inner = tmp_path / "other" / "helper_of_mine" / "inner.py"
    inner.write_text(inner.read_text(encoding="utf-8").replace("half = 2", "half = 3"), encoding="utf-8")
    changed = user_sources("kernel_of_mine")
    assert changed != before
    monkeypatch.setattr(results, "_version_of", lambda top: f"{top} 0.0")
    assert user_sources("kernel_of_mine") != changed


def damage(path: Path) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[:-20])


def rename(path: Path) -> None:
    """Take a file away."""
    path.rename(path.with_name("gone"))


@pytest.mark.parametrize("spoil", [damage, rename])
def test_a_store_gives_back_what_was_put(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    store, answer, versions = ResultStore(tmp_path / "store"), {"a": [1, 2.5, None]}, {"torch": "2"}
    arrays = {"x": np.array([[1.0, np.nan, -0.0]]), "y": np.arange(3)}
    assert store.get("plain", "k") is None
    assert store.get_arrays("arrays", "k") is None
    assert store.key_of("plain") == ""
    plain = store.put("plain", "k", answer, versions)
    both = store.put_arrays("arrays", "k", answer, versions, arrays)
    assert sorted(json.loads(plain.read_text())) == ["answer", "key", "made", "versions"]
    assert (store.key_of("plain"), store.get("plain", "k"), store.get("plain", "other")) == ("k", answer, None)
    stored = store.get_arrays("arrays", "k")
    assert stored is not None
    assert stored[0] == answer
    assert {name: array.tobytes() for name, array in stored[1].items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert store.get_arrays("arrays", "other") is None
    for path in (plain, both):
        spoil(path)
    assert store.get("plain", "k") is None
    assert store.get_arrays("arrays", "k") is None


def test_the_running_package_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_sources(ANSWERED_BY["verdict"])
    monkeypatch.setattr(Sources, "digest", lambda *modules: pytest.fail("read again"))
    assert own_sources(ANSWERED_BY["verdict"]) == before
    assert results._own().root == Path(results.__file__).resolve().parents[1]


def test_a_pipe_beside_a_users_module_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_a_pipe.py").write_text("import math\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    alone = user_sources("beside_a_pipe")
    os.mkfifo(tmp_path / "pipe.py")
    assert user_sources("beside_a_pipe") == alone != ""
