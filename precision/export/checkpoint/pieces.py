"""Checkpoint names of a model's weights: transformers renames some, and stores experts separately."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from assay.precision.errors import CannotExport
from assay.precision.loading.quiet import quiet
from assay.precision.observation.sites import Site
from assay.precision.schemes import FakeQuantizer
from assay.runtime.modules import optional


@dataclass(frozen=True, slots=True)
class Piece:
    """A linear of a checkpoint: rows of a weight [N, K], or of one expert's weight in a parameter [E, N, K]."""

    name: str
    expert: int | None
    start: int
    stop: int


def pieces_of(model: torch.nn.Module, sites: Mapping[str, Site]) -> dict[str, list[Piece]]:
    """Return the checkpoint's pieces of each linear's weight, by site; none if its rows don't remain rows.

    The conversion that transformers does when saving is traced with row numbers instead of weights.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    numbers: dict[str, torch.Tensor] = {}
    begins: list[int] = []
    linears: list[str] = []
    count = 0
    for name, site in sites.items():
        key = name if name in parameters else f"{name}.weight"
        if site.type in ("linear", "embedding") and key in parameters and tuple(parameters[key].shape) == site.shape:
            rows = site.parameters // site.shape[-1]
            numbers[key] = torch.arange(count, count + rows, dtype=torch.float64).view(*site.shape[:-1], 1)
            linears.append(name)
            begins.append(count)
            count += rows
    results: dict[str, list[Piece | None]] = {name: [] for name in linears}
    for key, values in saved(model, numbers).items():
        index = bisect_right(begins, int(values.flatten()[0])) - 1
        results[linears[index]].append(_piece(key, values - begins[index], sites[linears[index]].shape))
    return {name: [each for each in several if each and None not in several] for name, several in results.items()}


def rows_of(name: str, stored: FakeQuantizer, start: int, stop: int, rows: int) -> FakeQuantizer:
    """Return the stored form of some of a weight's rows. Raises CannotExport if that would cut a block of scales."""
    step = stored.quantizer.size if stored.quantizer.per == "block" else 1
    if start % step or (stop % step and stop != rows):
        raise CannotExport(f"{name}: rows {start} to {stop} cut a block of {step}; take a scheme with scales of rows")
    return stored.of_rows(start, stop)


def saved(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors as in its checkpoints: with checkpoint names, experts separate."""
    if not hasattr(model, "save_pretrained"):
        return tensors
    with quiet():
        loading = optional("transformers.core_model_loading", purpose="a checkpoint", extra="audit")
    converted: dict[str, torch.Tensor] = loading.revert_weight_conversion(model, tensors)
    return converted


def _piece(name: str, numbers: torch.Tensor, shape: tuple[int, ...]) -> Piece | None:
    """Return the rows that a saved tensor holds; None if they are not consecutive, or no rows any more."""
    if numbers.dim() != 2 or numbers.shape[-1] != 1 or not name.endswith(".weight"):
        return None
    first = int(numbers[0])
    if not torch.equal(numbers.flatten(), torch.arange(first, first + len(numbers), dtype=numbers.dtype)):
        return None
    expert, start = divmod(first, shape[-2])
    return Piece(name.removesuffix(".weight"), expert if len(shape) == 3 else None, start, start + len(numbers))
