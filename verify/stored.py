"""Cases out of a store of goldens: what was evaluated once, anywhere, judges a kernel here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from assay.golden.evaluation import Golden
from assay.golden.inputs.recipe import Recipe
from assay.golden.inputs.values import dtype_of
from assay.golden.store import Store
from assay.verify.inputs.cases import Case
from assay.verify.inputs.sampler import Sampler


@dataclass(frozen=True)
class Stored:
    """A case whose goldens are known, and the record that they come from."""

    case: Case
    goldens: tuple[Golden, ...]


def stored_cases(url: str, sampler: Sampler) -> Iterator[Stored]:
    """The records of the store at ``url`` that answer what is being examined: op, dtypes, options and shapes.

    An op whose results depend on a choice of the kernel's (top-k ids) has none: its goldens belong to another choice.
    Raises `StoreError`, and `DamagedRecord` where a record isn't as it was written.
    """
    if sampler.definition.chosen:
        return
    for key, recipe in _recipes(url):
        if _fits(recipe, sampler):
            case = Case(
                spec=recipe.spec,
                sizes=recipe.sizes,
                dtypes=recipe.dtypes,
                options=recipe.options,
                values=recipe.values,
                seed=recipe.seed,
                out_dtype=sampler.out_dtype,
            )
            yield Stored(case, Store(url).get(key).goldens)


@cache
def _recipes(url: str) -> tuple[tuple[str, Recipe], ...]:
    """Every record's recipe, read once in a process."""
    store = Store(url)
    return tuple((key, store.get(key).recipe) for key in store.keys())  # noqa: SIM118  a store is no mapping


def _fits(recipe: Recipe, sampler: Sampler) -> bool:
    definition = sampler.definition
    if recipe.spec != definition.name:
        return False
    defaults = definition.complete({})
    listed = {name: sampler.options.get(name, [default]) for name, default in defaults.items()}
    return (
        all(recipe.options[name] in values for name, values in listed.items())
        and all(
            recipe.dtypes[tensor.name] == dtype_of(tensor, sampler.dtype)
            for tensor in definition.signature(recipe.options).tensors
        )
        and all(recipe.sizes.get(symbol) in sizes for symbol, sizes in sampler.shapes.items())
    )
