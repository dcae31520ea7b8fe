"""Names the packages to setuptools, which cannot by itself find packages below a renamed folder."""

import tomllib
from pathlib import Path

from setuptools import setup

FOLDERS: dict[str, str] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]

setup(
    packages=[
        ".".join((package, *init.parent.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for init in sorted(Path(folder).rglob("__init__.py"))
    ]
)
