"""The schemes that an audit may choose from when its recommendation is to be exported."""

from collections.abc import Collection

from assay.formats.errors import UnknownOption
from assay.precision.export.configurations import TARGETS
from assay.precision.schemes import SCHEMES
from assay.precision.targets import formats_of, target_named


def offered(
    formats: Collection[str] | None, target: str | None, exports: Collection[str], checkpoint: bool = False
) -> tuple[str, ...]:
    """Return the names of the schemes that the target, every export and the ``checkpoint`` support.

    formats: the schemes requested by name; None: the default ones. Raises UnknownOption for a scheme that the target
    lacks, for an export that its engine doesn't read, and if no scheme is left; also the errors of `formats_of` of
    `precision.targets`.
    """
    asked = dict.fromkeys([*exports, *(["compressed-tensors"] if checkpoint else [])])
    engine = target_named(target).engine
    if formats is None and engine is None and "gguf" in asked:  # GGUF has types that no other format has
        names = formats_of(None, "llama.cpp")
    else:
        names = formats_of(formats, target)
    for export in asked:
        if engine is not None and export not in engine.exports:
            read = ", ".join(engine.exports)
            raise UnknownOption(f"{engine.name} reads no {export}: take its {read}, or leave the export away")
    results = tuple(name for name in names if not any(TARGETS[export].lacks(SCHEMES[name]) for export in asked))
    if not results:
        what = "none of the formats" if formats is not None else "no format"
        raise UnknownOption(f"{what} is in all of {', '.join(asked)}: export them apart, or choose others")
    return results


def apart(target: str | None, exports: Collection[str]) -> bool | None:
    """Return whether all exports allow a scheme per linear; None: the target decides."""
    if not exports or target_named(target).engine is not None:
        return None
    return all(TARGETS[name].apart for name in exports) or None
