"""Parameters that no site holds: what an audit can give no other format, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from assay.precision.observation.sites import Site
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.observation.tracer import HEAD

_TOLD = 3
"""Parameters that are named in a line."""


@dataclass(frozen=True, slots=True)
class Shut:
    """A parameter of two dimensions or more in no site."""

    name: str
    parameters: int
    """Its elements."""
    why: str
    """What has it, in words."""


@dataclass(frozen=True, slots=True)
class Unaudited:
    """What of a model's parameters is in no site; vectors, as the weights of norms are, and biases of experts aside."""

    shut: tuple[Shut, ...] = ()
    """The largest first."""
    whole: int = 0
    """Elements of all of the model's parameters, vectors too."""

    @property
    def parameters(self) -> int:
        """Elements that are in no site."""
        return sum(each.parameters for each in self.shut)

    @property
    def share(self) -> float:
        """Of all elements, from 0 to 1."""
        return self.parameters / self.whole if self.whole else 0.0

    @property
    def clause(self) -> str:
        """The same as a clause of a longer sentence, empty where there are none."""
        return f"; {self}" if self.shut else ""

    def __str__(self) -> str:
        """The share and the largest by name; empty where there are none."""
        if not self.shut:
            return ""
        largest = ", ".join(f"{each.name} ({each.parameters:,}; {each.why})" for each in self.shut[:_TOLD])
        more = f" and {len(self.shut) - _TOLD} more" if len(self.shut) > _TOLD else ""
        share = f"{100 * self.share:.2g}" if self.share < 0.995 else "100"
        return f"{share} % of the parameters have no site and keep their format: {largest}{more}"


def unaudited(
    model: torch.nn.Module, sites: Mapping[str, Site], ran: Collection[str], given: Collection[int]
) -> Unaudited:
    """What no site holds; ``ran``: names of the modules that ran; ``given``: identities of the parameters that were
    given to a function of torch."""
    streamed = streamed_parameters(model)
    names: dict[object, list[str]] = {}
    sizes: dict[str, torch.Tensor] = {}
    for name, values in model.named_parameters(remove_duplicate=False):
        names.setdefault(streamed.get(name) or id(values), []).append(name)
        sizes[name] = values
    held = {str(site).removesuffix(HEAD) for site in sites.values() if site.shape}
    shut = [
        Shut(several[0], sizes[several[0]].numel(), _why(model, several[0], ran, id(sizes[several[0]]) in given))
        for several in names.values()
        if sizes[several[0]].dim() > 1
        and not several[0].endswith("bias")
        and not any(name.removesuffix(".weight") in held for name in several)
    ]
    whole = sum(sizes[several[0]].numel() for several in names.values())
    return Unaudited(tuple(sorted(shut, key=lambda each: (-each.parameters, each.name))), whole)


def _why(model: torch.nn.Module, name: str, ran: Collection[str], given: bool) -> str:
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner) if owner else model
    if isinstance(module, torch.jit.ScriptModule):
        return "in TorchScript"
    if owner not in ran and not given:
        return "didn't run on this data"
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return f"a {type(module).__name__}"
    if isinstance(module, torch.nn.RNNBase):
        return f"packed sequences of {type(module).__name__}"
    return f"in {type(module).__name__}, the weight of no product that can be seen into"
