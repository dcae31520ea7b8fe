"""What an audit is for: an engine, which bounds the schemes; a device, which bounds them too and gives the times; both.

Called by `audit`, by exports and by the command line.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from assay.configs import table
from assay.formats.errors import UnknownOption
from assay.precision.choice.roofline import Device, device_named, devices, running
from assay.precision.errors import UnknownDevice
from assay.precision.observation.sites import EngineRules, Site
from assay.precision.schemes import Scheme, ggml, scheme_named
from assay.precision.schemes.scheme import DEFAULTS
from assay.runtime.errors import unknown


@dataclass(frozen=True, slots=True)
class Kernel:
    """How an engine runs a scheme."""

    stored: str
    """What its file calls the format that weights are stored in."""
    least: int = 0
    """Compute capabilities, times ten, that it computes it on as it is simulated: from this one on."""
    most: int | None = None
    """And up to this one."""
    on_request: bool = False
    """RowSample at only where it is asked for by name."""

    def lacks(self, capability: int) -> str:
        """Why it has no place at a capability; empty where it has."""
        if capability < self.least:
            return f"from compute capability {self.least / 10:.1f} on"
        return f"up to compute capability {self.most / 10:.1f}" if self.most and capability > self.most else ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A row of configs/engines.toml."""

    name: str
    title: str
    version: str
    devices: str
    """"cuda", "any", or a kind of device that configs/devices.toml has none of."""
    kernels: Mapping[str, Kernel]
    """By the name of the scheme."""
    fused: bool
    """q, k and v, and gate and up, are one product, which takes one scheme."""
    caches: str
    """"each" layer's KV cache may have a scheme, "some" the one that any has or none, "one" of all, "none"."""
    exports: tuple[str, ...]
    """Formats of an export that it reads."""
    source: str
    read: str
    """The day on which its source was read."""
    schemes_by_kind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Schemes that tables, heads, experts and routers may have, where not all; "*": all."""
    tables_of: tuple[str, ...] = ()
    """Model types of transformers whose tables it loads quantised; empty: all."""
    heads_not_of: tuple[str, ...] = ()
    """Model types whose heads it loads as they are only."""
    tied: bool = True
    """A table that is the head's weight too may have a scheme."""

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of those that are looked at where nothing else is asked for."""
        return tuple(name for name, kernel in self.kernels.items() if not kernel.on_request)

    @property
    def on_request(self) -> tuple[str, ...]:
        """Names of those that are looked at only where they are asked for."""
        return tuple(name for name, kernel in self.kernels.items() if kernel.on_request)

    def takes(self, scheme: Scheme) -> bool:
        """Whether it can be given a scheme on some device."""
        return scheme.name in self.kernels

    def lacks(self, scheme: Scheme, device: Device | None = None) -> str:
        """Why it can't be given a scheme; empty where it can."""
        kernel = self.kernels.get(scheme.name)
        if kernel is None:
            return f"{self.name} takes {', '.join(self.schemes)}, and has no {scheme.name}"
        if device is None or self.devices != "cuda":
            return ""
        if where := kernel.lacks(device.capability):
            return f"{self.name} computes {scheme.name} {where}, and {device.name} has {device.capability / 10:.1f}"
        return ""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine, a device, or both."""

    engine: Engine | None = None
    device: Device | None = None

    def lacks(self, scheme: Scheme) -> str:
        """Why a scheme has no place there; empty where it has one."""
        if self.engine is not None and (reason := self.engine.lacks(scheme, self.device)):
            return reason
        if self.device is None or (self.engine is not None and self.engine.devices == "any"):
            return ""
        return running(self.device, scheme).note

    def allows(self, site: Site, scheme: str, head: bool = False) -> bool:
        """Whether a scheme that it has may stand at a site; ``head``: it gives the logits."""
        if self.engine is None:
            return True
        kind = "tables" if site.type == "embedding" else _kind(site) or ("heads" if head else "")
        names = self.engine.schemes_by_kind.get(kind, ("*",))
        return scheme in names or names == ("*",)

    def served(self, formats: Collection[str], kind: str = "") -> EngineRules:
        """What the engine makes of sites that may have these schemes, of a model of a type of transformers."""
        if self.engine is None:
            return EngineRules()
        kinds = sum(scheme.weight is None and "kv_cache" in scheme.site_types for scheme in map(scheme_named, formats))
        together = self.engine.caches == "one" or (self.engine.caches == "some" and kinds > 1)
        plain_tables = bool(self.engine.tables_of) and kind not in self.engine.tables_of
        plain_head = kind in self.engine.heads_not_of

        def allows(site: Site, scheme: str, head: bool) -> bool:
            plain = (site.type == "embedding" and plain_tables) or (head and plain_head)
            return not plain and self.allows(site, scheme, head)

        return EngineRules(not self.engine.fused, together, self.engine.tied, allows)


def _kind(site: Site) -> str:
    if site.role == "router":
        return "routers"
    return "experts" if site.role == "experts" or ".experts." in site else ""


@cache
def engines() -> dict[str, Engine]:
    """All engines by name."""
    return {name: _engine(name, row) for name, row in table("engines").items()}


def _engine(name: str, row: Mapping[str, Any]) -> Engine:
    kernels = {
        scheme: Kernel(each["stored"], each.get("from", 0), each.get("to"), each.get("asked", False))
        for each in row["kernels"]
        for scheme in each["schemes"]
    }
    schemes = {"tables": (), "routers": ()}
    schemes |= {kind: tuple(row[kind]) for kind in ("tables", "heads", "experts", "routers") if kind in row}
    plain = ("title", "version", "devices", "fused", "caches", "source", "read")
    given = {key: row[key] for key in plain} | {"tied": row.get("tied", True)}
    given |= {key: tuple(row.get(key, ())) for key in ("tables_of", "heads_not_of")}
    return Engine(name=name, kernels=kernels, exports=tuple(row["exports"]), schemes_by_kind=schemes, **given)


def kind_of(model: object) -> str:
    """The type of a model of transformers; empty for others."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def target_named(name: str | None) -> Target:
    """``engine``, ``device`` or ``engine@device``, in any case; None: neither.

    Raises UnknownDevice, also where nothing is known of the engine on the device.
    """
    if name is None:
        return Target()
    first, at, second = name.lower().partition("@")
    if first in engines():
        engine = engines()[first]
        return Target(engine, _of(engine, device_named(second)) if at else None)
    if at:
        raise UnknownDevice(unknown("engine", first, engines()))
    if first not in devices():
        raise UnknownDevice(unknown("device or engine", first, (*devices(), *engines())))
    return Target(device=device_named(first))


def _of(engine: Engine, device: Device) -> Device:
    if engine.devices == "any" or (engine.devices == "cuda" and device.capability):
        return device
    known = [name for name in devices() if engine.devices == "cuda" and device_named(name).capability]
    beside = f"take {engine.name}@{known[-1]}, or {engine.name} alone" if known else f"take {engine.name} alone"
    raise UnknownDevice(f"configs/engines.toml has nothing of {engine.name} on {device.name}: {beside}")


def formats_of(formats: Collection[str] | None, target: str | None) -> tuple[str, ...]:
    """The schemes to look at: those asked for, or (None) those of the target, or the default ones that it has.

    Raises UnknownOption where the target lacks one that is asked for, UnknownScheme, UnknownDevice, and NotInstalled
    where ggml's quantisers are needed and missing.
    """
    engine_device = target_named(target)
    usual = DEFAULTS if engine_device.engine is None else engine_device.engine.schemes
    schemes = [scheme_named(name) for name in (usual if formats is None else dict.fromkeys(formats))]
    for scheme in schemes if formats is not None else ():
        if reason := engine_device.lacks(scheme):
            raise UnknownOption(f"format {scheme.name}: {reason}; leave it out, or choose another target")
    schemes = [scheme for scheme in schemes if not engine_device.lacks(scheme)]
    if any(scheme.weight is not None and scheme.weight.blocks for scheme in schemes):
        ggml.installed()
    return tuple(scheme.name for scheme in schemes)
