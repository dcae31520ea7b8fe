"""The building itself: what may import what, what is packaged, what an import costs."""

import ast
import graphlib
import importlib.metadata
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
    "runtime": set(),
    "charts": set(),
    "configs": set(),
    "formats": {"runtime", "configs"},
    "interpreter": {"formats", "runtime", "configs"},
    "golden": {"formats", "runtime"},
    "kernels": {"formats"},
    "verify": {"golden", "interpreter", "formats", "runtime", "configs", "charts"},
    "bench": {"verify", "golden", "interpreter", "formats", "runtime", "configs", "charts"},
    "judge": {"bench", "verify", "golden", "interpreter", "formats", "runtime", "configs"},
    "mutation": {"verify", "golden", "formats", "runtime"},
    "pytest_plugin": {"mutation", "verify", "golden", "interpreter", "formats", "runtime"},
    "precision": {"formats", "runtime", "configs", "charts"},
    "compare": {"verify", "golden", "formats", "runtime", "configs", "charts"},
    "cli": {
        "compare",
        "precision",
        "judge",
        "bench",
        "verify",
        "kernels",
        "golden",
        "interpreter",
        "formats",
        "runtime",
        "configs",
    },
}
PUBLIC_NAMES = {("verify/__init__.py", "assay.judge.procedure.judge")}
"""Names that a package offers from above, loaded on first use; the documented path is `assay.verify.judge`."""
TOP = "package"  # the folder that is `assay` itself
MACHINE_PATH = re.compile(r"(^|[^a-zA-Z])/(work|farm|tmp)/")
LONGEST_FILE = 800
MOST_FILES = 15


def upward_imports(root: Path) -> list[str]:
    """Every import below `root` that `MAY_IMPORT` does not allow, as "file:line imports module"."""
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for floor, below in MAY_IMPORT.items()
        for path in sorted((root / floor).rglob("*.py"))
        for line, module in imported_modules(path.read_text(encoding="utf-8"), package_of(path.relative_to(root)))
        if not allowed(module, below | {floor}) and (path.relative_to(root).as_posix(), module) not in PUBLIC_NAMES
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
    assert upward_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "upward"),
    [
        ("formats/format.py", "import assay.golden", True),
        ("formats/format.py", "from assay import verify", True),
        ("precision/export/lint.py", "from ...golden import evaluate", True),
        ("formats/format.py", "import golden", True),
        ("golden/spec.py", "def late():\n    from assay.verify.contract import Contract", True),
        ("golden/spec.py", "from .. import cli", True),
        ("golden/arithmetic/ball.py", "from ... import verify", True),
        (
            "verify/explanation/fault_models.py",
            "import importlib\nimportlib.import_module('assay.kernels.triton')",
            True,
        ),
        ("kernels/triton/softmax.py", "from assay.golden import evaluate", True),
        ("configs/__init__.py", "import assay.formats.format as formats", True),
        ("golden/arithmetic/ball.py", "from assay.formats.format import named", False),
        ("golden/arithmetic/ball.py", "from ...formats import format", False),
        (
            "golden/arithmetic/ball.py",
            "from ..spec import spec\nfrom . import base\nfrom .base import Arithmetic",
            False,
        ),
        ("verify/contract.py", "from assay.configs import table\nfrom assay import golden\nimport torch", False),
        ("cli/main.py", "from assay import kernels, verify", False),
    ],
)
def test_an_upward_import_is_found_in_every_way_of_writing_one(
    tmp_path: Path, file: str, line: str, upward: bool
) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(line + "\n", encoding="utf-8")
    found = upward_imports(tmp_path)
    assert len(found) == upward
    assert all(each.startswith(f"{file}:{len(line.splitlines())} imports ") for each in found)


def circle_of_imports(root: Path) -> list[str]:
    """The modules of one circle of imports below `root`, late ones and those for type checkers included; or none.

    That a module names the package which it stands in, or a package re-exports its own modules, is no circle.
    """
    files = {package_of(path.relative_to(root)): path for path in root.glob("*/**/__init__.py")}
    for path in root.glob("*/**/*.py"):
        files.setdefault(f"{package_of(path.relative_to(root))}.{path.stem}", path)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        if path.relative_to(root).parts[0] not in MAY_IMPORT or (path.stem == "__init__" and module not in files):
            continue
        source, package = path.read_text(encoding="utf-8"), package_of(path.relative_to(root))
        named = {name if name in files else name.rpartition(".")[0] for _, name in imported_modules(source, package)}
        graph[module] = {name for name in named & files.keys() if name != module and not module.startswith(f"{name}.")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_go_in_a_circle() -> None:
    assert circle_of_imports(ROOT) == []


@pytest.mark.parametrize(
    "late",
    ["from assay.golden import a", "def late():\n    import assay.golden.a", "if TYPE_CHECKING:\n    from .a import x"],
)
def test_a_circle_of_imports_is_found(tmp_path: Path, late: str) -> None:
    folder = tmp_path / "golden"
    folder.mkdir()
    (folder / "__init__.py").write_text("from assay.golden.a import x\n", encoding="utf-8")
    (folder / "a.py").write_text("from assay.golden import b\n", encoding="utf-8")
    (folder / "b.py").write_text("import math\n", encoding="utf-8")
    assert circle_of_imports(tmp_path) == []
    (folder / "b.py").write_text(late + "\n", encoding="utf-8")
    assert set(circle_of_imports(tmp_path)) == {"assay.golden.a", "assay.golden.b"}


def test_no_folder_is_a_corridor() -> None:
    """A folder that has rooms has at most fifteen files beside them."""
    folders = {path.parent for floor in MAY_IMPORT for path in (ROOT / floor).rglob("*.py")}
    crowded = {
        str(folder.relative_to(ROOT)): len(files)
        for folder in folders
        if any(room.parent == folder for room in folders)
        and len(files := [path for path in folder.glob("*.py") if path.stem != "__init__"]) > MOST_FILES
    }
    assert crowded == {}


def test_every_floor_is_mapped_to_a_package() -> None:
    """Each top-level folder with an `__init__.py` is mapped to `assay.<folder>` and stands in the table of imports;
    `assay` itself is the folder `package`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mapped = project["tool"]["setuptools"]["package-dir"]
    assert mapped == {"assay": TOP} | {f"assay.{floor}": floor for floor in MAY_IMPORT}
    assert {init.parent.name for init in ROOT.glob("*/__init__.py")} == {TOP, *MAY_IMPORT}


def test_every_folder_of_code_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    setuptools = ModuleType("setuptools")
    setuptools.setup = lambda packages: named.extend(packages)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent.relative_to(ROOT) for floor in MAY_IMPORT for path in (ROOT / floor).rglob("*.py")}
    assert sorted(named) == ["assay", *sorted(".".join(("assay", *folder.parts)) for folder in folders)]


def test_the_package_has_its_version() -> None:
    attribute = runpy.run_path(str(ROOT / TOP / "__init__.py"))["__getattr__"]
    assert attribute("__version__") == importlib.metadata.version("kernel-assay")
    with pytest.raises(AttributeError, match="module 'assay' has no attribute '__versoin__'"):
        attribute("__versoin__")


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
    assert [floor for floor in (TOP, *MAY_IMPORT) if not (ROOT / floor / "py.typed").is_file()] == []


def test_files_are_short() -> None:
    code = [path for path in repository_files() if path.suffix in {".py", ".cu", ".cuh", ".sh"} or path.name == "dev"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in code}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_files_that_the_docs_name_exist() -> None:
    """A file of ours that a page of the docs names is there; a bare name stands in the folder named before it."""
    missing = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text(encoding="utf-8")):
            first = name.partition("/")[0]
            if first in MAY_IMPORT and "/" in name:
                folder = (ROOT / name).parent if name.endswith(".py") else ROOT / name
                missing += [] if (ROOT / name).exists() else [f"{page.name}: {name}"]
            elif "/" not in name and folder != ROOT and page.name == "design.md":
                missing += [] if (folder / name).exists() else [f"{page.name}: {name} in {folder.name}"]
    assert missing == []


def test_no_path_of_a_machine_is_written_down() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["work", "farm", "tmp"])
def test_a_path_of_a_machine_is_recognised(folder: str) -> None:
    assert MACHINE_PATH.search(f"/{folder}/x")
    assert MACHINE_PATH.search(f'open("/{folder}/x")')
    assert not MACHINE_PATH.search(f"src/{folder}/x or /{folder}load/x")


@pytest.mark.parametrize(
    "module",
    ["formats", "precision", "golden", "golden.store", "golden.inputs", "verify", "pytest_plugin.plugin", "configs"],
)
def test_importing_is_light(module: str) -> None:
    program = f"import sys, assay.{module}\nprint({{'torch', 'hypothesis', 'fsspec'}} & set(sys.modules) or [])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_every_table_can_be_read() -> None:
    tables = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.toml")}
    assert set(configs.names()) == tables
    assert all(isinstance(configs.table(name), dict) for name in configs.names())


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table named 'contracts/nonesuch'; there are: ") as caught:
        configs.table("contracts/nonesuch")
    assert all(name in str(caught.value) for name in configs.names())
