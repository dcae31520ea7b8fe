"""What an audit is for: an engine, which bounds the schemes; a device, which bounds them too and gives the times; both.

Called by `audit`, by exports' lint and by the command line.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from assay.configs import table
from assay.precision.choice.roofline import Device, device_named, devices, running
from assay.precision.errors import UnknownDevice
from assay.precision.schemes import SCHEMES, Scheme, ggml, scheme_named
from assay.precision.schemes.scheme import DEFAULTS
from assay.runtime.errors import unknown


@dataclass(frozen=True, slots=True)
class Engine:
    """A row of configs/engines.toml."""

    name: str
    title: str
    schemes: tuple[str, ...]
    """Looked at where nothing else is asked for."""
    on_request: tuple[str, ...]
    """Looked at only where they are asked for by name."""
    fused: bool
    """q, k and v, and gate and up, are one product, which takes one scheme."""
    source: str

    def takes(self, scheme: Scheme) -> bool:
        """Whether it can be given a scheme: one of its own, or one that stores weights as one of these does."""
        own = [SCHEMES[name] for name in (*self.schemes, *self.on_request)]
        return scheme in own or (scheme.weight is not None and any(scheme.weight == each.weight for each in own))


@dataclass(frozen=True, slots=True)
class Target:
    """An engine, a device, or both."""

    engine: Engine | None = None
    device: Device | None = None

    def lacks(self, scheme: Scheme) -> str:
        """Why a scheme has no place there; empty where it has one."""
        if self.engine is not None and not self.engine.takes(scheme):
            return f"{self.engine.name} takes {', '.join(self.engine.schemes)}, and has no {scheme.name}"
        return "" if self.device is None else running(self.device, scheme).note


@cache
def engines() -> dict[str, Engine]:
    """All engines by name."""
    found = {}
    for name, row in table("engines").items():
        lists = {"schemes": tuple(row["schemes"]), "on_request": tuple(row["on_request"])}
        found[name] = Engine(name=name, **{**row, **lists})
    return found


def target_named(name: str | None) -> Target:
    """``engine``, ``device`` or ``engine@device``, in any case; None: neither. Raises UnknownDevice."""
    if name is None:
        return Target()
    first, at, second = name.lower().partition("@")
    if first in engines():
        return Target(engines()[first], device_named(second) if at else None)
    if at:
        raise UnknownDevice(unknown("engine", first, engines()))
    if first not in devices():
        raise UnknownDevice(unknown("device or engine", first, (*devices(), *engines())))
    return Target(device=device_named(first))


def formats_of(formats: Collection[str] | None, target: str | None) -> tuple[str, ...]:
    """The schemes to look at: of those asked for (None: the target's, or the default ones) those that it has.

    Raises UnknownScheme, UnknownDevice, and NotInstalled where ggml's quantisers are needed and missing.
    """
    found = target_named(target)
    usual = DEFAULTS if found.engine is None else found.engine.schemes
    schemes = [scheme_named(name) for name in (usual if formats is None else dict.fromkeys(formats))]
    schemes = [scheme for scheme in schemes if not found.lacks(scheme)]
    if any(scheme.weight is not None and scheme.weight.blocks for scheme in schemes):
        ggml.installed()
    return tuple(scheme.name for scheme in schemes)
