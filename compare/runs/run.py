"""A recorded run: its modules by canonical names, and what each took and gave, joined over calls to whole sequences.

Prefill, chunks, single steps and batches of one text are the same sequence: of each module's tensors [B, S, ...] the
rows of a sequence's tokens are put one after the other, so that a region's data are [tokens, features] in every run.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.compare.errors import RecordingError
from assay.compare.runs.recording import EVENTS, MANIFEST, VERSION
from assay.compare.runs.tensor_store import TensorReader
from assay.configs import table

INPUTS, OUTPUTS = "inputs", "outputs"
_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)(?:\.(.*))?$")
_WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.|transformer\.|language_model\.|decoder\.)+")


@dataclass(frozen=True)
class Slot:
    """A tensor that a module takes or gives: the module's canonical name, the side, the tensor's name on it, and which
    of its features (``start``, ``stop``; None: all)."""

    module: str
    side: str
    name: str
    part: tuple[int, int] | None = None

    def __str__(self) -> str:
        words = f"{'what' if self.side == INPUTS else 'the output of'} {self.module}"
        return words + (" takes" if self.side == INPUTS else "")


@dataclass
class Call:
    """One forward pass: its token ids [B, S], the length of what is in the cache, and the events of modules in
    order."""

    past: int
    events: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    functions: list[dict[str, Any]] = field(default_factory=list)
    ids: Tensor | None = None
    valid: Tensor | None = None  # [B, S]: tokens that aren't padding


@dataclass(frozen=True)
class Piece:
    """The tokens of a sequence in one call: which row of the batch, and which of its columns."""

    call: int
    row: int
    columns: Tensor


class Run:
    """A folder that `record` wrote. Raises `RecordingError` if it isn't one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise RecordingError(f"{folder}: expected a folder that `assay compare record` wrote, with {MANIFEST}")
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            lines = (self.folder / EVENTS).read_text(encoding="utf-8").splitlines()
            events = [json.loads(line) for line in lines]
            version = self.manifest["version"]
        except (OSError, ValueError, KeyError) as error:
            raise RecordingError(f"{folder}: damaged ({error}); record it again") from None
        if version != VERSION:
            raise RecordingError(
                f"{folder}: written in version {version} of the format, expected {VERSION}; record again"
            )
        self.tensors = TensorReader(self.folder)
        self.config: dict[str, Any] = self.manifest["config"].get("text_config") or self.manifest["config"]
        names = canonical_names(self.manifest["modules"])
        self.modules: dict[str, dict[str, Any]] = {names[name]: each for name, each in self.manifest["modules"].items()}
        self.own_names = {canonical: name for name, canonical in names.items()}
        self._orders: dict[tuple[str, str], Tensor] = {}
        self.calls = self._read_calls(events, names)
        self._split_fused()
        self.adding = self._separate_sums()
        self.sequences = self._read_sequences()

    def _read_calls(self, events: list[dict[str, Any]], names: Mapping[str, str]) -> list[Call]:
        calls: list[Call] = []
        for event in events:
            if "call" in event:
                calls.append(Call(event["past"]))
            elif not calls:
                continue
            elif "function" in event:
                _add_function(calls[-1], {**event, "module": names.get(event["module"], event["module"])})
            else:
                calls[-1].events[names.get(event["module"], event["module"])].append(event)
        for call in calls:
            inputs = call.events[""][0][INPUTS] if call.events[""] else {}
            integers = {name: each for name, each in inputs.items() if each["dtype"].startswith("int")}
            ids = integers.get("input_ids") or next(iter(integers.values()), None)
            if ids is None:
                continue
            values = self.tensors.read(ids)
            call.ids = values[None] if values.dim() == 1 else values
            mask = inputs.get("attention_mask")
            if mask is not None and len(mask["shape"]) == 2:
                call.valid = self.tensors.read(mask)[:, -call.ids.shape[1] :].bool()
            else:
                call.valid = torch.ones_like(call.ids, dtype=torch.bool)
        return [call for call in calls if call.ids is not None]

    def _split_fused(self) -> None:
        """Show fused projections as their parts too: queries, keys and values, gate and up."""
        heads = self.setting("num_attention_heads", "n_heads", default=0)
        groups = self.setting("num_key_value_heads", "n_kv_heads", default=heads)
        shares = {"qkv_proj": (("q", heads), ("k", groups), ("v", groups)), "gate_up_proj": (("gate", 1), ("up", 1))}
        for module, described in list(self.modules.items()):
            parent, _, last = module.rpartition(".")
            weight = described["parameters"].get("weight")
            if last not in shares or weight is None or len(weight["shape"]) != 2:
                continue
            total, start = sum(count for _, count in shares[last]), 0
            for part, count in shares[last]:
                if not total or weight["shape"][0] % total:
                    break
                stop = start + weight["shape"][0] // total * count
                self._add_part(module, f"{parent}.{part}_proj", start, stop)
                start = stop

    def _add_part(self, fused: str, name: str, start: int, stop: int) -> None:
        described = self.modules[fused]
        parameters = {key: {**each, "rows": (start, stop)} for key, each in described["parameters"].items()}
        self.modules[name] = {**described, "parameters": parameters, "fused": fused}
        for call in self.calls:
            for event in call.events.get(fused, ()):
                outputs = {key: {**each, "part": (start, stop)} for key, each in event[OUTPUTS].items()}
                call.events[name].append({**event, "module": name, OUTPUTS: outputs})

    def _separate_sums(self) -> set[str]:
        """Show norms that add the residual first, as engines fuse them, and their layers as if the sum came before.

        Such a norm takes a block's output and the residual and gives what it normed and the sum. Return these norms.
        """
        found: set[str] = set()
        for call in self.calls:
            sums: dict[str, Any] = {}
            for module, events in call.events.items():
                for event in events if "norm" in module.rpartition(".")[2] else ():
                    given = [each for each in event[OUTPUTS].values() if each["dtype"].startswith(("float", "bfloat"))]
                    if len(given) == 2 and given[0]["shape"] == given[1]["shape"]:
                        sums[module] = given[1]
                        events[:] = [{INPUTS: {"hidden_states": given[1]}, OUTPUTS: {"0": given[0]}}]
                        break
            found |= sums.keys()
            for layer in [name for name in call.events if re.fullmatch(r"layers\.\d+", name)]:
                begin = sums.get(f"{layer}.input_layernorm")
                end = sums.get(f"layers.{int(layer[7:]) + 1}.input_layernorm", sums.get("norm"))
                if begin is not None and end is not None:
                    call.events[layer] = [{INPUTS: {"hidden_states": begin}, OUTPUTS: {"0": end}}]
        return found

    def _read_sequences(self) -> list[list[Piece]]:
        """Return the pieces of each sequence: a call without anything in its cache begins new ones."""
        sequences: list[list[Piece]] = []
        running: list[list[Piece]] = []
        for index, call in enumerate(self.calls):
            assert call.ids is not None
            assert call.valid is not None
            if call.past == 0 or len(running) != len(call.ids):
                running = [[] for _ in call.ids]
                sequences += running
            for row, pieces in enumerate(running):
                pieces.append(Piece(index, row, call.valid[row].nonzero()[:, 0]))
        return sequences

    def reorder(self, module: str, output: str, order: Tensor) -> None:
        """Read an output's features, and the rows of the module's weight and bias, in another order from now on."""
        self._orders[module, output] = order

    def keep(self, indices: list[int]) -> None:
        """Keep these sequences, in this order."""
        self.sequences = [self.sequences[index] for index in indices]
        self.__dict__.pop("ids", None)

    @property
    def parameters(self) -> int:
        """How many numbers the parameters have."""
        tensors = [each for module in self.modules.values() for each in module["parameters"].values()]
        return sum(math.prod(each["shape"]) for each in tensors)

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most of the parameters' numbers."""
        counts: dict[str, int] = defaultdict(int)
        for module in self.modules.values():
            for each in module["parameters"].values():
                counts[each["dtype"]] += math.prod(each["shape"])
        name = max(counts, key=lambda dtype: counts[dtype], default="float32")
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @cached_property
    def ids(self) -> list[Tensor]:
        """The token ids of each sequence."""
        results = []
        for pieces in self.sequences:
            rows = [self.calls[piece.call].ids[piece.row][piece.columns] for piece in pieces]  # type: ignore[index]
            results.append(torch.cat(rows))
        return results

    def first_event(self, module: str) -> dict[str, Any] | None:
        """Return the event of a module in the first call in which it ran."""
        return next((call.events[module][0] for call in self.calls if call.events.get(module)), None)

    def has(self, slot: Slot) -> bool:
        """Return whether the slot was recorded in every call."""
        held = [any(_entry(event, slot) for event in call.events.get(slot.module, ())) for call in self.calls]
        return all(held) or (slot.module == "log_softmax" and any(held))

    def sequence(self, slot: Slot, index: int) -> Tensor | None:
        """Return what a slot held for one sequence, [tokens, features]; None where it is missing or of other tokens."""
        values = self._held(slot, index) if slot.module.endswith(".cache") else self._joined(slot, index)
        order = self._orders.get((slot.module, slot.name)) if slot.side == OUTPUTS else None
        if values is not None and order is not None:
            values = values[:, order]
        return values if values is None or slot.part is None else values[:, slot.part[0] : slot.part[1]]

    def _joined(self, slot: Slot, index: int) -> Tensor | None:
        """Return what a slot held in the calls of a sequence, one after the other."""
        if slot.module == "log_softmax" and len(self.sequences) == 1 and (whole := self._at_once(slot)) is not None:
            return whole
        parts = []
        for piece in self.sequences[index]:
            call = self.calls[piece.call]
            entries = [entry for event in call.events.get(slot.module, ()) if (entry := _entry(event, slot))]
            if len(entries) != 1:
                return None
            of_cache = slot.module.endswith("kv_b_proj")  # latents of all tokens before
            rows = self._rows(entries[0], call, of_cache=of_cache)
            if rows is None:
                return None
            columns = piece.columns[piece.columns < rows.shape[1]]
            parts.append(rows[min(piece.row, len(rows) - 1)][columns])
        if len({part.shape[1:] for part in parts}) != 1:  # not of one token each, as a mask
            return None
        return torch.cat(parts)

    def _at_once(self, slot: Slot) -> Tensor | None:
        """Return what a function held that ran behind the calls, on the tokens of all; else None."""
        events = [event for call in self.calls for event in call.events.get(slot.module, ())]
        entries = [entry for event in events if (entry := _entry(event, slot)) is not None]
        if len(self.calls) == 1 or not entries:
            return None
        rows = [self.tensors.read(entry) for entry in entries]
        values = torch.cat([each.reshape(-1, each.shape[-1]) for each in rows])
        return values if len(values) in (len(self.ids[0]), len(self.ids[0]) - 1) else None

    def _held(self, slot: Slot, index: int) -> Tensor | None:
        """Return all keys, or values, that the last call's attention saw for a sequence; None if they aren't its
        tokens."""
        piece = self.sequences[index][-1]
        reference = self.calls[piece.call].events[slot.module][0][slot.side][slot.name]
        values = self.tensors.read(reference)  # [B, H, tokens, D]
        if values.dim() != 4 or values.shape[2] < len(self.ids[index]) or bool((~self.calls[piece.call].valid).any()):  # type: ignore[operator]
            return None
        values = values[:, :, : len(self.ids[index])]  # a static cache is longer
        return values[min(piece.row, len(values) - 1)].transpose(0, 1).reshape(values.shape[2], -1)

    def _rows(self, reference: Mapping[str, Any], call: Call, *, of_cache: bool = False) -> Tensor | None:
        """Return a recorded tensor as [B or 1, S, features]; of heads [B, H, tokens, D] the call's own tokens, the
        last.

        ``of_cache``: what is made of all tokens of a cache with one head, as of a latent.
        """
        assert call.ids is not None
        batch, length = call.ids.shape
        values = self.tensors.read(reference)
        if values.dim() == 4 and (reference.get("heads") or of_cache):
            # In a static cache, longer than what was written, the call's tokens stand behind those before.
            begin = call.past if values.shape[2] > call.past + length else max(values.shape[2] - length, 0)
            values = values[:, :, begin : begin + length].transpose(1, 2)
            if values.shape[1] != length:
                return None
            return values.reshape(len(values), length, -1)
        if values.dim() == 3 and values.shape[:2] == (batch, length - 1):  # without the last token, which has no next
            return values
        if values.dim() >= 2 and values.shape[:2] == (1, length) != (batch, length):
            return values.reshape(1, length, -1)
        if values.numel() % (batch * length) or (
            values.shape[0] not in (batch, 1) and values.shape[0] % (batch * length)
        ):
            return None
        return values.reshape(batch, length, -1)

    def whole(self, slot: Slot) -> Tensor | None:
        """Return what a slot held for all sequences, one after the other: [tokens of all, features]."""
        parts = [self.sequence(slot, index) for index in range(len(self.sequences))]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])

    def parameter(self, module: str, name: str) -> Tensor | None:
        """Return a module's own parameter or buffer; one in 8-bit floats times the scales that the module has beside
        it."""
        own = self.modules.get(module, {}).get("parameters", {})
        if name not in own:
            return None
        values = self.tensors.read(own[name])
        if (module, "0") in self._orders and name in ("weight", "bias"):
            values = values[self._orders[module, "0"]]
        if values.dtype.itemsize > 1 or not values.is_floating_point():
            return values
        scale = next((own[key] for key in (f"{name}{suffix}" for suffix in _SCALES) if key in own), None)
        return values.float() if scale is None else scaled(values.float(), self.tensors.read(scale).float())

    def attribute(self, module: str, *names: str) -> Any:
        """Return the first of a module's own plain attributes that it has."""
        own = self.modules.get(module, {}).get("attributes", {})
        return next((own[name] for name in names if name in own), None)

    def setting(self, *names: str, default: Any = None) -> Any:
        """Return the first of these fields that the configuration has a value for."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)


_SCALES = ("_scale_inv", "_scale")
"""What DeepSeek's, and compressed-tensors' and vLLM's, FP8 layers call the factor of a weight."""


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Return a matrix times its scale: one number, one for each row, or one for each block of equal size."""
    if scale.numel() == 1 or scale.dim() != 2 or values.dim() != 2:
        return values * scale
    sizes = [_block(length, count) for length, count in zip(values.shape, scale.shape, strict=True)]
    full = scale.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
    return values * full[: values.shape[0], : values.shape[1]]


def _block(length: int, count: int) -> int:
    """Return the size of blocks of which ``count`` cover ``length``: a power of two, where one does."""
    size = 1 << max(math.ceil(length / count) - 1, 0).bit_length()
    return size if math.ceil(length / size) == count else math.ceil(length / count)


_ANY_NAME = ("input", "x", "hidden_states", "0")
"""Names of a module's one input, or output, which another run's module may call otherwise."""


def _entry(event: Mapping[str, Any], slot: Slot) -> dict[str, Any] | None:
    """Return the reference of a slot in an event; None if there is none."""
    entries: dict[str, dict[str, Any]] = event[slot.side]
    if slot.name in entries or slot.name not in _ANY_NAME:
        return entries.get(slot.name)
    return next((each for each in entries.values() if each["dtype"].startswith(("float", "bfloat"))), None)


def _add_function(call: Call, event: dict[str, Any]) -> None:
    """Add a function's event; attention's also as what modules would give: rotated q, k and v, its result, the
    cache."""
    call.functions.append(event)
    if event["function"] == "log_softmax":
        call.events["log_softmax"].append({INPUTS: event[INPUTS], OUTPUTS: event[OUTPUTS]})
    if event["function"] not in ("attention", "sdpa"):
        return
    inputs, name = event[INPUTS], event["module"]
    given = [inputs.get(word, inputs.get(str(order))) for order, word in enumerate(("query", "key", "value"))]
    if any(each is None or len(each["shape"]) != 4 for each in given):
        return
    q, k, v = ({**each, "heads": True} for each in given)
    result = {key: {**each, "heads": event["function"] == "sdpa"} for key, each in event[OUTPUTS].items()}
    call.events[f"{name}.rotary"].append({INPUTS: {}, OUTPUTS: {"q": q, "k": k, "v": v}})
    call.events[f"{name}.attention"].append({INPUTS: {}, OUTPUTS: result})
    call.events[f"{name}.cache"].append({INPUTS: {}, OUTPUTS: {"k": k, "v": v}})


def canonical_names(names: Any) -> dict[str, str]:
    """Return for each module its name in transformers' Llama, with the layer first: ``layers.3.self_attn.q_proj``."""
    translated = table("compare")["names"]
    results: dict[str, str] = {}
    for name in names:
        short = _WRAPPERS.sub("", name)
        layer = _LAYER.match(name)
        parts = (layer[2] or "" if layer else short).split(".")
        known = ".".join(translated.get(part, part) for part in parts)
        if layer:
            known = f"layers.{layer[1]}" + (f".{known}" if known else "")
        # Some layer's module of the canonical name keeps it: "gate" is a router and a projection in different models.
        results[name] = known if known not in results.values() else short
    return results
