"""The building itself: what may import what, what is packaged, what an import costs."""

import ast
import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from assay import configs

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "configs": set(),
    "precision": {"configs"},
    "kernels": set(),
    "golden": {"precision"},
    "verify": {"golden", "precision", "configs"},
    "cli": {"golden", "precision", "verify", "kernels", "configs"},
}
MACHINE_PATH = re.compile(r"(^|[^a-zA-Z])/(work|farm|tmp)/")
LONGEST_FILE = 350


def upward_imports(root: Path) -> list[str]:
    """Every import below `root` that `MAY_IMPORT` does not allow, as "file:line imports module"."""
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for floor, below in MAY_IMPORT.items()
        for path in sorted((root / floor).rglob("*.py"))
        for line, module in imported_modules(path.read_text(encoding="utf-8"), package_of(path.relative_to(root)))
        if not allowed(module, below | {floor})
    ]


def package_of(path: Path) -> str:
    """The package that relative imports in the file at `path` start from."""
    return ".".join(("assay", *path.parent.parts))


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that `source` imports, at any depth and by name in a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                start = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(filter(None, (start, node.module)))
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, f"{package}{name}" if name.startswith(".") else name


def allowed(module: str, floors: set[str]) -> bool:
    """Whether `module` is none of ours or stands on one of `floors`; a floor without `assay.` is never importable."""
    first, *rest = module.split(".")
    if first == "assay":
        return bool(rest) and rest[0] in floors
    return first not in MAY_IMPORT


def repository_files() -> list[Path]:
    """The files that git tracks, and the new ones that it does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_imports_run_downward() -> None:
    """No floor imports one above it, nor any of our folders by its bare name."""
    assert upward_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("precision/formats.py", "import assay.golden"),
        ("precision/formats.py", "from assay import verify"),
        ("precision/export/vllm.py", "from ...golden import evaluate"),
        ("precision/formats.py", "import golden"),
        ("golden/spec.py", "def late():\n    from assay.verify.contract import Contract"),
        ("golden/spec.py", "from .. import cli"),
        ("golden/arithmetic/ball.py", "from ... import verify"),
        ("verify/suspects.py", "import importlib\nimportlib.import_module('assay.kernels.triton')"),
        ("kernels/triton/softmax.py", "from assay.precision import formats"),
        ("configs/__init__.py", "import assay.precision.formats as formats"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, line: str) -> None:
    """The check above sees an upward import in every way of writing one."""
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(line + "\n", encoding="utf-8")
    (found,) = upward_imports(tmp_path)
    assert found.startswith(f"{file}:{len(line.splitlines())} imports ")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("golden/arithmetic/ball.py", "from assay.precision.formats import named"),
        ("golden/arithmetic/ball.py", "from ...precision import formats"),
        ("golden/arithmetic/ball.py", "from ..spec import spec\nfrom . import base\nfrom .base import Arithmetic"),
        ("verify/contract.py", "from assay.configs import table\nfrom assay import golden\nimport torch"),
        ("cli/main.py", "from assay import kernels, verify"),
    ],
)
def test_a_downward_import_is_let_through(tmp_path: Path, file: str, line: str) -> None:
    """The check above raises no alarm over an import of one's own or a lower floor."""
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(line + "\n", encoding="utf-8")
    assert upward_imports(tmp_path) == []


def test_every_floor_is_mapped_to_a_package() -> None:
    """Each top-level folder with an `__init__.py` is mapped to `assay.<folder>` and stands in the table of imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mapped = project["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"assay.{floor}": floor for floor in MAY_IMPORT}
    assert {init.parent.name for init in ROOT.glob("*/__init__.py")} == set(MAY_IMPORT)


def test_every_folder_of_code_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder below a floor that holds Python code has an `__init__.py` and is named to setuptools."""
    named: list[str] = []
    setuptools = ModuleType("setuptools")
    setuptools.setup = lambda packages: named.extend(packages)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent.relative_to(ROOT) for floor in MAY_IMPORT for path in (ROOT / floor).rglob("*.py")}
    assert sorted(named) == sorted(".".join(("assay", *folder.parts)) for folder in folders)


def test_every_file_of_a_floor_is_installed() -> None:
    """What the repository has on a floor, tables and templates included, is there where `assay` is imported from."""
    missing = []
    for floor in MAY_IMPORT:
        found = importlib.util.find_spec(f"assay.{floor}")
        assert found is not None, floor
        assert found.origin is not None, floor
        files = [path.relative_to(ROOT / floor) for path in repository_files() if path.is_relative_to(ROOT / floor)]
        missing += [f"{floor}/{file}" for file in files if not (Path(found.origin).parent / file).exists()]
    assert [name for name in missing if not name.endswith(".md")] == []


def test_every_floor_is_typed() -> None:
    """Each floor has the marker that lets a user's type checker read its annotations."""
    assert [floor for floor in MAY_IMPORT if not (ROOT / floor / "py.typed").is_file()] == []


def test_files_are_short() -> None:
    """No file of code is longer than a reader's patience."""
    code = [path for path in repository_files() if path.suffix in {".py", ".cu", ".cuh", ".sh"} or path.name == "dev"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in code}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_path_of_a_machine_is_written_down() -> None:
    """No text file of the repository names a folder of the machine that it was written on."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["work", "farm", "tmp"])
def test_a_path_of_a_machine_is_recognised(folder: str) -> None:
    """The expression above finds such a path at a line's start and within it, and leaves other paths alone."""
    assert MACHINE_PATH.search(f"/{folder}/x")
    assert MACHINE_PATH.search(f'open("/{folder}/x")')
    assert not MACHINE_PATH.search(f"src/{folder}/x or /{folder}load/x")


@pytest.mark.parametrize(
    "module", ["precision", "golden", "golden.store", "golden.inputs", "verify", "verify.plugin", "configs"]
)
def test_importing_is_light(module: str) -> None:
    """Neither torch, hypothesis nor fsspec is loaded until something needs it."""
    program = f"import sys, assay.{module}\nprint({{'torch', 'hypothesis', 'fsspec'}} & set(sys.modules) or [])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_every_table_can_be_read() -> None:
    """Each table under `configs` is valid TOML and is found by its name, folders included."""
    tables = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.toml")}
    assert set(configs.names()) == tables
    assert all(isinstance(configs.table(name), dict) for name in configs.names())


def test_an_unknown_table_is_refused() -> None:
    """The name of no table is answered with the names that exist."""
    with pytest.raises(ValueError, match="no table named 'contracts/nonesuch'; there are: ") as caught:
        configs.table("contracts/nonesuch")
    assert all(name in str(caught.value) for name in configs.names())
