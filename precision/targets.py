"""The target of an audit: an engine, which bounds the schemes; a device, which bounds them too and gives times; or
both."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

from assay.configs import table
from assay.formats.devices import Device
from assay.formats.errors import UnknownOption
from assay.precision.choice.roofline import device_named, devices, running
from assay.precision.errors import UnknownDevice
from assay.precision.observation.sites import EngineRules, Site
from assay.precision.schemes import Scheme, ggml, scheme_named
from assay.precision.schemes.scheme import DEFAULTS
from assay.runtime.errors import unknown


@dataclass(frozen=True, slots=True)
class Kernel:
    """How an engine runs a scheme."""

    stored: str
    """The name of the storage format in the engine's table."""
    least: int = 0
    """The first compute capability, times ten, on which the engine computes as simulated."""
    most: int | None = None
    """The last one."""
    on_request: bool = False
    """Audited only if named."""

    def lacks(self, capability: int) -> str:
        """Return why a device of this capability lacks the kernel; empty where it has it."""
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
    """"cuda", "any", or a kind of device that configs/devices.toml lacks."""
    kernels: Mapping[str, Kernel]
    """By the name of the scheme."""
    fused: bool
    """q, k and v, and gate and up, are one product, which takes one scheme."""
    caches: str
    """Schemes of KV caches: "each" layer may have its own; "some" layers may have one shared scheme; "one" for all;
    "none"."""
    exports: tuple[str, ...]
    """Export formats that it reads."""
    source: str
    read: str
    """The day on which its source was read."""
    schemes_by_kind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The schemes that tables, heads, experts and routers may have, where limited; "*": all."""
    tables_of: tuple[str, ...] = ()
    """Model types of transformers whose tables it loads quantised; empty: all."""
    heads_not_of: tuple[str, ...] = ()
    """Model types whose heads it loads unquantised only."""
    tied: bool = True
    """A table that is also the head's weight may be quantised."""

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of the schemes that are audited by default."""
        return tuple(name for name, kernel in self.kernels.items() if not kernel.on_request)

    @property
    def on_request(self) -> tuple[str, ...]:
        """Names of the schemes that are audited only if named."""
        return tuple(name for name, kernel in self.kernels.items() if kernel.on_request)

    def lacks(self, scheme: Scheme, device: Device | None = None) -> str:
        """Return why the engine does not support a scheme; empty where it does."""
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
        """Return why the target does not support a scheme; empty where it does."""
        if self.engine is not None and (reason := self.engine.lacks(scheme, self.device)):
            return reason
        if self.device is None or (self.engine is not None and self.engine.devices == "any"):
            return ""
        return running(self.device, scheme).note

    def allows(self, site: Site, scheme: str, head: bool = False) -> bool:
        """Return whether a supported scheme is allowed at a site; ``head``: the site gives the logits."""
        if self.engine is None:
            return True
        kind = "heads" if head else ""
        kind = "experts" if site.role == "experts" or ".experts." in site else kind
        kind = "routers" if site.role == "router" else kind
        names = self.engine.schemes_by_kind.get("tables" if site.type == "embedding" else kind, ("*",))
        return scheme in names or names == ("*",)

    def served(self, formats: Collection[str], kind: str = "") -> EngineRules:
        """Return the engine's rules for sites that may have these schemes, for a model of this type of transformers."""
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


@cache
def engines() -> dict[str, Engine]:
    """All engines by name."""
    results = {}
    for name, row in table("engines").items():
        kernels = {
            scheme: Kernel(each["stored"], each.get("from", 0), each.get("to"), each.get("asked", False))
            for each in row["kernels"]
            for scheme in each["schemes"]
        }
        kinds = {"tables": (), "routers": ()}
        kinds |= {kind: tuple(row[kind]) for kind in ("tables", "heads", "experts", "routers") if kind in row}
        plain = ("title", "version", "devices", "fused", "caches", "source", "read")
        given = {key: row[key] for key in plain} | {"tied": row.get("tied", True)}
        given |= {key: tuple(row.get(key, ())) for key in ("exports", "tables_of", "heads_not_of")}
        results[name] = Engine(name=name, kernels=kernels, schemes_by_kind=kinds, **given)
    return results


def kind_of(model: object) -> str:
    """Return the type of a transformers model; empty for others."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def target_named(name: str | None) -> Target:
    """Return the target ``engine``, ``device`` or ``engine@device``, in any case; None: neither.

    Raises UnknownDevice, also where nothing is known of the engine on the device.
    """
    if name is None:
        return Target()
    first, at, second = name.lower().partition("@")
    if first not in engines():
        if at:
            raise UnknownDevice(unknown("engine", first, engines()))
        if first not in devices():
            raise UnknownDevice(unknown("device or engine", first, (*devices(), *engines())))
        return Target(device=device_named(first))
    engine, device = engines()[first], device_named(second) if at else None
    if device is None or engine.devices == "any" or (engine.devices == "cuda" and device.capability):
        return Target(engine, device)
    known = [each for each in devices() if engine.devices == "cuda" and device_named(each).capability]
    beside = f"take {engine.name}@{known[-1]}, or {engine.name} alone" if known else f"take {engine.name} alone"
    raise UnknownDevice(f"configs/engines.toml has nothing of {engine.name} on {device.name}: {beside}")


def formats_of(formats: Collection[str] | None, target: str | None) -> tuple[str, ...]:
    """Return the schemes to audit: the named ones, or (None) those of the target, or the default ones that it supports.

    Raises UnknownOption where the target lacks a named scheme, UnknownScheme, UnknownDevice, and NotInstalled where
    ggml's quantisers are needed and missing.
    """
    engine_device = target_named(target)
    usual = DEFAULTS if engine_device.engine is None else engine_device.engine.schemes
    schemes = [scheme_named(name) for name in (usual if formats is None else dict.fromkeys(formats))]
    for scheme in schemes if formats is not None else ():
        if reason := engine_device.lacks(scheme):
            raise UnknownOption(f"format {scheme.name}: {reason}; leave it out, or choose another target")
    schemes = [scheme for scheme in schemes if not engine_device.lacks(scheme)]
    if any(scheme.weight is not None and scheme.weight.blocks for scheme in schemes):
        ggml.library()
    return tuple(scheme.name for scheme in schemes)
