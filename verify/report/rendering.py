"""What pages are rendered by: jinja2 over the templates of this room; torch is not needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2


@cache
def environment() -> jinja2.Environment:
    """What templates are rendered by; `report.html` adds what those of verdicts need."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
