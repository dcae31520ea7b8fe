"""torchao's file, read by torchao."""

import json
from typing import Any

from assay.precision.export.configurations.torchao import entry_of
from assay.precision.export.verifying.verified import Asked, Verified, difference
from assay.precision.schemes import scheme_named
from assay.runtime.modules import optional
from assay.runtime.results import installed_version


def torchao(asked: Asked, file: str) -> Verified:
    """The configuration of each linear in an ``FqnToConfig``. Raises NotInstalled, and what torchao raises."""
    core: Any = optional("torchao.core.config", purpose="--verify-export", extra="audit")
    held = asked.held["torchao"]
    read = core.config_from_dict(json.loads((asked.place / file).read_text(encoding="utf-8"))).fqn_to_config
    wrong = []
    for site in asked.names:
        entry = entry_of(scheme_named(held[site])) if site in held else None
        expected = None if entry is None else core.config_to_dict(core.config_from_dict(entry))
        given = None if read.get(site) is None else core.config_to_dict(read[site])
        if given != expected:
            wrong.append(difference(site, held.get(site), given and given["_type"]))
    return Verified(file, f"torchao {installed_version('torchao')}", len(asked.names), tuple(wrong))
