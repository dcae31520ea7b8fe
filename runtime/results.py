"""Results that are stored and reused, under keys that cover every source they depend on.

A key is a digest of the question, of the sources that answer it, and of the versions of the packages that these import.
The sources are found by following the imports of the answering module, not from a manual list: imports inside
functions, ``import_module``, modules named in strings (a preload of a worker), the names of lazy packages, and the
tables of `assay.configs` and other data files that a module reads.

`ResultStore` is the format of files that only assay reads: JSON with ``key``, ``versions``, ``made`` and ``answer``,
and arrays in a safetensors file. Verdicts, lines of ``assay judge --out`` and records of ``assay tune`` and ``assay
bench`` have their own documented formats, and keys of the same kind. Goldens don't: the address of a golden's record is
its recipe with the versions of the op's definition and of its inputs. A golden's radius certifies its value whatever
sources computed it, so a record stays right when these change; ``assay golden check`` computes it again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.runtime.files import write_bytes_atomically, write_text_atomically

if TYPE_CHECKING:
    import numpy as np

_TABLES = "assay.configs"
_DATA = {".toml", ".cu", ".cuh"}  # templates and schemas affect only the display of answers
_DISTRIBUTIONS = {"flint": "python-flint", "yaml": "pyyaml"}  # packages distributed by another name
_DISPLAY = {"jinja2", "markupsafe", "rich", "typer"}  # packages that only show answers
_USER_SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".so"}
_INSTALLED = {"site-packages", "dist-packages"}
_MOST_READ = 1 << 24  # bytes of a user's file or package whose contents are hashed; of a larger package sizes and times

# Regular expressions find imports in 0.1 s where `ast` takes 2 s for this package. tests/runtime/test_results.py
# compares both. A docstring that looks like an import can only add a source.
_TYPE_CHECKING = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)*", re.M)
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]+)", re.M)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([\w., \t]+)", re.M)
_CALLED = re.compile(r"\b(?:import_module|__import__|optional|find_spec)\(\s*[\"']([\w.]+)[\"']")
_STRING = re.compile(r"[\"']([\w./-]+)")  # stops at ":" in "module:function"
_TARGET = re.compile(r"(?:^|[\"'])([\w.]+):")  # the module of a target, and of targets that an adapter names
_COMPUTED = re.compile(r"import_module\(f[\"']|iter_modules\(")


def installed_version(distribution: str, missing: str = "") -> str:
    """Return the version of an installed distribution, or ``missing``."""
    try:
        return version(distribution)
    except (PackageNotFoundError, ValueError):  # ValueError: an empty name
        return missing


@dataclass(frozen=True)
class _Module:
    """A module by its source.

    ``imports`` are pairs of a module and a name in it, "" if the module itself is imported; ``lazy`` the same for ``if
    TYPE_CHECKING``; ``strings`` are the beginnings of all of its string constants.
    """

    digest: str
    imports: frozenset[tuple[str, str]]
    lazy: frozenset[tuple[str, str]]
    strings: frozenset[str]
    computes_imports: bool
    reads_files: bool


class Sources:
    """The sources of this package: ``root`` is the folder that holds its subpackages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, _Module] = {}

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Return the file of each module."""
        top = self.root / "__init__.py"
        paths = {"assay": top if top.is_file() else self.root / "package" / "__init__.py"}  # the latter in a checkout
        for folder in self.root.iterdir():
            if (folder / "__init__.py").is_file():
                for path in folder.rglob("*.py"):
                    *parents, last = path.relative_to(self.root).with_suffix("").parts
                    paths[".".join(("assay", *parents, *([last] if last != "__init__" else [])))] = path
        return paths

    def nearest(self, module: str) -> str:
        """Return a module, or for a module without a file the package that defines it."""
        return module if module in self.paths or "." not in module else self.nearest(_parent(module))

    def closure(self, *modules: str) -> tuple[dict[str, Path], set[str]]:
        """Return the files that modules depend on, by name, and the third-party packages that these import.

        Raises `LookupError` for a module that doesn't exist.
        """
        if unknown := [name for name in modules if name not in self.paths]:
            raise LookupError(f"there is no module {unknown[0]} in {self.root}")
        waiting, files, packages = [(name, True) for name in modules], dict[str, Path](), set[str]()
        followed: dict[str, bool] = {}  # whether to follow also modules with computed names
        while waiting:
            name, whole = waiting.pop()
            if followed.get(name, False) or (name in followed and not whole):
                continue
            module, followed[name] = self._module(name), whole
            files[name] = self.paths[name]
            files |= {path.relative_to(self.root).as_posix(): path for path in self._data(name, module)}
            packages |= {imported.partition(".")[0] for imported, _ in module.imports}
            waiting += [(imported, True) for imported in self._imported(name, module, computed=whole)]
            if parent := _parent(name):
                waiting.append((parent, False))  # its __init__.py runs first, but not its functions' imports
        return files, packages - {"", "assay", *sys.stdlib_module_names}

    def digest(self, *modules: str) -> tuple[str, dict[str, str]]:
        """Return a digest of all files of `closure`, and the versions of its packages that are installed."""
        files, packages = self.closure(*modules)
        content = "".join(f"{name} {self._digest(name, path)}\n" for name, path in sorted(files.items()))
        names = {"kernel-assay", *(_DISTRIBUTIONS.get(package, package) for package in packages - _DISPLAY)}
        versions = {name: installed_version(name) for name in sorted(names)}
        return _sha256(content.encode()), {name: number for name, number in versions.items() if number}

    def _digest(self, name: str, path: Path) -> str:
        return self._module(name).digest if name in self.paths else _sha256(path.read_bytes())

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            path = self.paths[name]
            self._modules[name] = _parsed(path.read_bytes(), name if path.stem == "__init__" else _parent(name))
        return self._modules[name]

    def _imported(self, name: str, module: _Module, *, computed: bool = True) -> Iterator[str]:
        """Yield the modules of this package that a module imports, or may import by a stated or computed name."""
        for home, attribute in module.imports:
            yield from self._homes(home, attribute)
        packages = {string for string in module.strings if string.startswith("assay.") and string in self.paths}
        yield from packages
        if computed and module.computes_imports:  # every module of a package that it names, or of its own package
            yield from (each for each in self.paths if each.startswith(tuple(f"{one}." for one in {*packages, name})))

    def _homes(self, home: str, attribute: str) -> Iterator[str]:
        """Yield the modules that define a name of a module, or that make up a package (for a lazy one, all names')."""
        inner = f"{home}.{attribute}" if attribute else home
        if inner in self.paths:
            yield inner
            if self.paths[inner].stem == "__init__":  # its names are used as attributes
                for further in self._module(inner).lazy:
                    yield from self._homes(*further)
        elif home in self.paths:
            yield home
            for further in self._module(home).lazy:
                if further[1] == attribute:
                    yield from self._homes(*further)
        elif home.startswith("assay."):
            yield self.nearest(home)  # a module that its package defines

    def _data(self, name: str, module: _Module) -> Iterator[Path]:
        """Yield the tables that a module names, and the data files of its folder if it reads files there."""
        imported = {home for home, _ in module.imports} | {f"{home}.{one}" for home, one in module.imports}
        if _TABLES in imported:
            for path in (self.root / "configs").rglob("*.toml"):
                table = path.relative_to(self.root / "configs").with_suffix("").as_posix()
                folder = table.rpartition("/")[0]  # as in `f"contracts/{name}"`
                if table in module.strings or (folder and f"{folder}/" in module.strings):
                    yield path
        elif module.reads_files and name != _TABLES:
            yield from (path for path in self.paths[name].parent.rglob("*") if path.suffix in _DATA)


def _parsed(source: bytes, package: str) -> _Module:
    """Parse a module of ``package``, the base of its relative imports."""
    text = source.decode()
    lazy = "".join(_TYPE_CHECKING.findall(text))
    rest = _TYPE_CHECKING.sub("", text)
    return _Module(
        digest=_sha256(source),
        imports=frozenset(_imports(rest, package)),
        lazy=frozenset(_imports(lazy, package)),
        strings=frozenset(_STRING.findall(rest)),
        computes_imports=_COMPUTED.search(rest) is not None,
        reads_files="__file__" in rest or "files(" in rest,
    )


def _imports(text: str, package: str) -> Iterator[tuple[str, str]]:
    for home, names in _FROM.findall(text):
        level = len(home) - len(home.lstrip("."))
        above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        home = ".".join([*above, *filter(None, [home[level:]])])
        for name in re.sub(r"#[^\n]*", "", names).strip("()").split(","):
            if name.strip():
                yield home, name.split()[0]
    for names in _IMPORT.findall(text):
        yield from ((name.split()[0], "") for name in names.split(",") if name.strip())
    yield from ((name, "") for name in _CALLED.findall(text))


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _own() -> Sources:
    return Sources(Path(__file__).resolve().parents[1])


@cache
def own_sources(*modules: str) -> tuple[str, dict[str, str]]:
    """Return `Sources.digest` of the running package at the first call: loaded code doesn't change later."""
    return _own().digest(*modules)


def versions_of(*modules: str) -> dict[str, str]:
    """Return the versions of the installed packages that modules of this package depend on."""
    return own_sources(*modules)[1]


def result_key(question: Any, *modules: str, targets: Iterable[str] = (), device: str = "") -> str:
    """Return the key of an answer, SHA-256 in hexadecimal digits.

    ``question`` is plain data; ``modules`` of this package answer it; ``targets`` are the kernels and references in
    question, "package.module:function"; ``device`` names the machine's if the answer depends on it.
    """
    named = {name for target in targets for name in _TARGET.findall(target)}
    own = {name: _own().nearest(name) for name in named if name.startswith("assay.")}
    digest, versions = own_sources(*sorted({*modules, *own.values()}))
    foreign = [user_sources(name) for name in sorted(named - own.keys()) if name.partition(".")[0] not in versions]
    content = json.dumps([question, digest, versions, foreign, device], sort_keys=True, default=str)
    return _sha256(content.encode())


def contents(path: str) -> list[str]:
    """Return a path, and name and digest of each of its files of up to 16 MiB: of a file, or of a folder."""
    top = Path(path)
    files = sorted(top.rglob("*")) if os.path.isdir(top) else [top]
    read = [
        file
        for file in files
        if os.path.isfile(file) and file.stat().st_size <= _MOST_READ and "__pycache__" not in file.parts
    ]
    return [path, *(f"{file.name} {_sha256(file.read_bytes())}" for file in read)]


def user_sources(module: str) -> str:
    """Return a digest of the sources of a user's module: of its top-level package, or of the files next to it.

    So of the modules outside of site-packages that these import; of those inside, and not of its own package, the
    version counts. Empty if there is no such module.
    """
    waiting, parts = [module.partition(".")[0]], dict[str, str]()
    while waiting:
        top = waiting.pop()
        if top in parts or top in ("assay", *sys.stdlib_module_names):  # the key covers this package by itself
            continue
        files = _files_of(top)
        if parts and any(_INSTALLED & set(file.parts) for file in files):
            parts[top] = _version_of(top)
            continue
        parts[top] = _hashed(files) if files else ""
        waiting += {name.partition(".")[0] for file in files for name in _names_imported(file)}
    digests = [digest for digest in parts.values() if digest]
    return digests[0] if len(digests) == 1 else _sha256("".join(sorted(digests)).encode()) if digests else ""


def _files_of(top: str) -> list[Path]:
    """Return the files of a top-level package, or those next to a module without a package."""
    with suppress(ImportError, ValueError, AttributeError):
        # Workers search the current folder first; the command's own process may not search it at all.
        spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(top)
        if spec is not None and spec.submodule_search_locations is not None:
            return [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*")]
        if spec is not None and spec.origin is not None:
            return list(Path(spec.origin).parent.iterdir())
    file = getattr(sys.modules.get(top), "__file__", None)  # a script, which no search finds
    return [Path(file)] if file else []


def _names_imported(file: Path) -> set[str]:
    """Return the modules that a Python file imports; none of a file that can't be read, or that is very large."""
    with suppress(OSError):
        if file.suffix == ".py" and file.is_file() and file.stat().st_size <= _MOST_READ:
            text = file.read_text(encoding="utf-8", errors="replace")
            return {name for name, _ in _imports(text, "") if name}
    return set()


@cache
def _version_of(top: str) -> str:
    """Return the version of the installed distribution that has a top-level package, with its name."""
    names = packages_distributions().get(top, [])
    return " ".join(f"{name} {installed_version(name)}" for name in sorted(set(names))) or top


def _hashed(paths: Iterable[Path]) -> str:
    """Return a digest of source files by content, or, for very many files, by size and time."""
    files = sorted(path for path in paths if path.suffix in _USER_SUFFIXES and path.is_file())
    read = sum(path.stat().st_size for path in files) <= _MOST_READ
    digest = hashlib.sha256()
    for path in files:
        state = path.stat()
        content = _sha256(path.read_bytes()) if read else f"{state.st_size} {state.st_mtime_ns}"
        digest.update(f"{path}\0{content}\0".encode())
    return digest.hexdigest()


class ResultStore:
    """Answers in ``folder``, each in a JSON file with its key; arrays are in a safetensors file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key_of(self, name: str) -> str:
        """Return the key of the answer called ``name`` that is stored; empty where there is none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))["key"])
        return ""

    def get(self, name: str, key: str) -> Any | None:
        """Return the answer called ``name``; None where there is none of this key, or its file is damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            return content["answer"] if content["key"] == key else None
        return None

    def put(self, name: str, key: str, answer: Any, versions: Mapping[str, str]) -> Path:
        """Store an answer, plain data, replacing an earlier one; return its path. Raises `OSError`."""
        text = json.dumps(_envelope(key, answer, versions))
        return write_text_atomically(self.folder / f"{name}.json", text)

    def get_arrays(self, name: str, key: str) -> tuple[Any, dict[str, np.ndarray]] | None:
        """Return the answer and the arrays called ``name``; None as `get` does."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / f"{name}.safetensors"
        with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError), safe_open(path, "numpy") as file:
            content = {part: json.loads(text) for part, text in (file.metadata() or {}).items()}
            if content["key"] == key:
                return content["answer"], {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
        return None

    def put_arrays(
        self, name: str, key: str, answer: Any, versions: Mapping[str, str], arrays: Mapping[str, np.ndarray]
    ) -> Path:
        """Store an answer and its arrays in one file; return its path. Raises `OSError`."""
        from safetensors.numpy import save

        metadata = {part: json.dumps(value) for part, value in _envelope(key, answer, versions).items()}
        return write_bytes_atomically(self.folder / f"{name}.safetensors", save(dict(arrays), metadata))


def _envelope(key: str, answer: Any, versions: Mapping[str, str]) -> dict[str, Any]:
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return {"key": key, "versions": dict(versions), "made": made, "answer": answer}
