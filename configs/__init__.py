"""Tables of data: accumulators, devices, contracts, campaigns."""

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

__all__ = ["names", "table"]


def table(name: str) -> dict[str, Any]:
    """Read the table `<name>.toml`; a name may have a folder, as in "contracts/pytorch".

    Raises ValueError, listing the tables that exist, when there is none of that name.
    """
    known = names()
    if name not in known:
        raise ValueError(f"no table named {name!r}; there are: {', '.join(known) or 'none'}")
    return tomllib.loads(files(__name__).joinpath(*f"{name}.toml".split("/")).read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names that `table` takes, sorted."""
    return sorted(_names(files(__name__), ""))


def _names(folder: Traversable, prefix: str) -> list[str]:
    results = []
    for entry in folder.iterdir():
        if entry.is_dir():
            results += _names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            results.append(prefix + entry.name.removesuffix(".toml"))
    return results
