"""How pages are made of templates: everything is escaped, and a name that a template misspells is an error."""

from pathlib import Path

import jinja2


def environment(templates: Path) -> jinja2.Environment:
    """What renders the templates of a folder."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
