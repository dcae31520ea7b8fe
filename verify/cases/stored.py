"""Cases from a golden store: goldens evaluated once, on any machine, judge a kernel here."""

from collections.abc import Iterator
from dataclasses import dataclass

from assay.golden.errors import MissingRecord, OtherFormat, StoreError
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.recipe import Recipe
from assay.golden.inputs.values import dtype_of
from assay.golden.store import Record, Store
from assay.golden.store.record import fingerprint, is_outdated
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler

_seen: dict[str, str] = {}  # the op of each record read: a key is a digest of it, so that this is true of every store


@dataclass(frozen=True)
class Stored:
    """A case with known goldens, and the record that they come from."""

    case: Case
    goldens: tuple[Golden, ...]


def stored_cases(url: str, sampler: Sampler) -> Iterator[Stored]:
    """Return the records of the store at ``url`` that match the examination: op, dtypes, options and shapes.

    An op whose results depend on a choice of the kernel (top-k ids) has none: its goldens belong to another choice.
    Records of earlier definitions or inputs, or of another format, are left out.

    Raises `StoreError` also if there is no store, or if this machine draws other inputs than a record's, and
    `DamagedRecord` if a record isn't as it was written.
    """
    if sampler.definition.outputs.chosen:
        return
    store = Store(url)
    store.require()
    for key in store.keys():  # noqa: SIM118  a store is no mapping
        if _seen.get(key, sampler.definition.name) != sampler.definition.name:
            continue
        try:
            record = store.get(key)
        except (MissingRecord, OtherFormat):  # removed since it was listed, or another version's
            continue
        _seen[key] = record.recipe.spec
        if _seen[key] == sampler.definition.name and not is_outdated(record) and _fits(record.recipe, sampler):
            yield Stored(_case(record, sampler.out_dtype), record.goldens)


def _case(record: Record, out_dtype: str | None) -> Case:
    """Return the call that the record answers."""
    recipe = record.recipe
    if fingerprint(recipe.tensors(), recipe.keywords()) != record.inputs:
        raise StoreError(
            f"record {record.key}: its inputs come out differently on this machine; "
            "please report it with `assay doctor`'s output"
        )
    return Case(**recipe.as_dict(), out_dtype=out_dtype)


def _fits(recipe: Recipe, sampler: Sampler) -> bool:
    definition = sampler.definition
    defaults = definition.complete({})
    listed = {name: sampler.options.get(name, [default]) for name, default in defaults.items()}
    return (
        all(recipe.options[name] in values for name, values in listed.items())
        and all(
            recipe.dtypes[tensor.name] == dtype_of(tensor, sampler.dtype)
            for tensor in definition.signature(recipe.options).tensors
        )
        and all(recipe.sizes.get(symbol) in sizes for symbol, sizes in sampler.shapes.items())
        and sampler.tied_sizes(recipe.sizes) == recipe.sizes
    )
