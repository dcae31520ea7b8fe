"""The regions of a model, from the first run's modules and from which of their tensors are equal.

A region is a definition (`assay.compare.definitions`) with the slots that it takes and gives. Most are modules; what
lies between modules (rotary embedding, attention, the gated product, sums into the residual stream) is placed by what
the next module takes. Where a module's input is another's output, bit for bit, they are linked: the second run must
have the link too, and errors are carried along it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from assay.compare.architecture import Architecture
from assay.compare.runs.run import INPUTS, OUTPUTS, Run, Slot


@dataclass(frozen=True)
class Parameter:
    """A module's own parameter."""

    module: str
    name: str


@dataclass(frozen=True)
class Plan:
    """A region: ``definition`` of ``inputs``, in this order, gives ``outputs``.

    ``inputs`` are slots, parameters, or constants. ``whole``: tokens are independent, so all sequences are judged at
    once; else one by one. ``slices``: parts of a result that an output is, by output.
    """

    name: str
    kind: str
    definition: str
    inputs: tuple[Slot | Parameter | Tensor, ...]
    outputs: tuple[Slot, ...]
    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = True


class Structure:
    """The regions of a model in the order of the forward pass, and where each input comes from.

    ``sources``: the output slot that an input slot is equal to. ``loose``: input slots that are no region's output.
    """

    def __init__(self, authority: Run, *runs: Run) -> None:
        self._run, self._runs = authority, (authority, *runs)
        self._facts = Architecture(authority)
        self.plans = self._ordered(list(self._all()))
        self.blocks = self._blocks()
        self.sources: dict[Slot, Slot] = {}
        self.loose: list[tuple[str, Slot]] = []
        self._link()

    @property
    def groups_of_experts(self) -> tuple[int, int]:
        """How many groups experts are in, and of how many a token chooses (DeepSeek)."""
        return int(self._facts.setting("n_group", default=1)), int(self._facts.setting("topk_group", default=1))

    def _all(self) -> Iterator[Plan]:
        layers = sorted({int(name.split(".")[1]) for name in self._run.modules if name.startswith("layers.")})
        yield from self._embedding()
        yield from self._rotary_table()
        for layer in layers:
            yield from self._layer(layer)
        yield from self._module("norm")
        yield from self._head()

    def _blocks(self) -> list[Plan]:
        """Return the gated blocks as a whole, for runs whose kernel computes one without its projections."""
        plans = []
        for plan in self.plans:
            name = plan.name.removesuffix(".gated_product")
            x, given = self._first_input(name), self._first_output(name)
            if plan.definition == "gated_product" and x is not None and given is not None:
                weights = (Parameter(f"{name}.{part}_proj", "weight") for part in ("gate", "up", "down"))
                biased = any(self._has_parameter(f"{name}.{part}_proj", "bias") for part in ("gate", "up", "down"))
                if not biased:
                    plans.append(Plan(name, "gated block", "gated_block", (x, *weights), (given,), plan.options))
        return plans

    def _ordered(self, plans: list[Plan]) -> list[Plan]:
        """Return the regions that both runs recorded, each once."""
        names: dict[str, Plan] = {}
        for plan in plans:
            if self._recorded(plan):
                names.setdefault(plan.name, plan)
        return list(names.values())

    def _recorded(self, plan: Plan) -> bool:
        slots = [*(each for each in plan.inputs if isinstance(each, Slot)), *plan.outputs]
        return all(self._run.has(slot) for slot in slots)

    def _embedding(self) -> Iterator[Plan]:
        event = self._run.first_event("embed_tokens")
        if event is not None and event[INPUTS]:
            name = next(iter(event[INPUTS]))
            scale = self._facts.embedding_scale
            inside = self._run.attribute("embed_tokens", "scalar_embed_scale") is not None
            options = {"scale": scale} if inside and scale != 1.0 else {}
            table = Parameter("embed_tokens", "weight")
            yield Plan(
                "embed_tokens", "embedding", "embedding", (table, Slot("embed_tokens", INPUTS, name)),
                (_out("embed_tokens"),), options,
            )  # fmt: skip

    def _rotary_table(self) -> Iterator[Plan]:
        frequencies = self._facts.rotary_frequencies()
        event = self._run.first_event("rotary_emb")
        if frequencies is None or event is None or "position_ids" not in event[INPUTS]:
            return
        dtype = event[OUTPUTS].get("0", {}).get("dtype")
        outputs = tuple(Slot("rotary_emb", OUTPUTS, name) for name in ("0", "1"))
        positions = Slot("rotary_emb", INPUTS, "position_ids")
        options = {"scale": frequencies[1], "dtype": dtype}
        yield Plan("rotary_emb", "rotary", "rotary_table", (positions, frequencies[0]), outputs, options)

    def _layer(self, layer: int) -> Iterator[Plan]:
        prefix = f"layers.{layer}."
        sums = {plan.outputs[0].module: plan for plan in self._residuals(layer)}
        names = [name for name in self._run.calls[0].events if name.startswith(prefix)]
        for name in names:
            last = name.rpartition(".")[2]
            if name in sums and sums[name].outputs[0].side == INPUTS:
                yield sums[name]
            if last == "q_norm":
                yield from self._query_of_both(name.rpartition(".")[0])
            elif last == "o_proj":
                yield from self._attention(layer, name.rpartition(".")[0])
            elif last == "down_proj":
                yield from self._gated_product(name.rpartition(".")[0])
            elif last == "norm" and name.endswith("linear_attn.norm"):
                yield from self._delta_rule(name.rpartition(".")[0])
            if last == "gate" and self._gives_ids(name):
                yield from self._router(name)
            elif last == "experts":
                yield from self._experts(name)
            else:
                yield from self._module(name)
            if name.count(".") == 2:  # a child of the layer: what it gives is added to the stream before the next
                yield from self._sum_inside(name)
        if prefix[:-1] in sums:
            yield sums[prefix[:-1]]

    def _module(self, name: str) -> Iterator[Plan]:
        """Yield the region of a norm or a linear layer."""
        described, event = self._run.modules.get(name), self._run.first_event(name)
        if described is None or event is None:
            return
        weight = described["parameters"].get("weight")
        x = self._first_input(name)
        if weight is None or x is None or "0" not in event[OUTPUTS]:
            return
        parameters: list[Any] = [Parameter(name, "weight")]
        if described["parameters"].get("bias") is not None:
            parameters.append(Parameter(name, "bias"))
        features, given = event[INPUTS][x.name]["shape"][-1], event[OUTPUTS]["0"]["shape"][-1]
        if len(weight["shape"]) == 2 and weight["shape"] == [given, features]:
            yield Plan(name, "projection", "linear", (x, *parameters), (_out(name),))
        elif len(weight["shape"]) == 1 and "norm" in described["class"].lower():
            yield from self._norm(name, described, x, parameters)

    def _norm(self, name: str, described: dict[str, Any], x: Slot, parameters: list[Any]) -> Iterator[Plan]:
        options: dict[str, Any] = {"eps": self._facts.epsilon(name)}
        event = self._run.first_event(name)
        assert event is not None
        if described["class"] == "LayerNorm" or len(parameters) > 1:
            yield Plan(name, "norm", "layernorm", (x, *parameters), (_out(name),), options)
        elif "gate" in event[INPUTS]:
            inputs = (x, *parameters, Slot(name, INPUTS, "gate"))
            yield Plan(name, "norm", "gated_rmsnorm", inputs, (_out(name),), options)
        else:
            options["offset"] = self._facts.norm_offset(described["class"])
            yield Plan(name, "norm", "rmsnorm", (x, *parameters), (_out(name),), options)

    def _attention(self, layer: int, name: str) -> Iterator[Plan]:
        """Yield what lies between the projections of queries, keys and values and the one behind attention."""
        cos, sin = self._rotary_slots(name)
        behind = self._first_input(f"{name}.o_proj")
        if behind is None:
            return
        if self._run.has(_out(f"{name}.kv_b_proj")):
            yield from self._latent_attention(name, cos, sin, behind)
            return
        q, k, v = (_out(f"{name}.{part}_proj") for part in "qkv")
        if not all(self._run.has(slot) for slot in (q, k, v)) or not self._facts.heads:
            return
        heads, groups = self._facts.heads, self._facts.groups
        widths = self._width(q), self._width(behind)
        gated = widths[0] == 2 * widths[1]
        projected = q
        if self._run.has(_out(f"{name}.q_norm")):
            q, k = _out(f"{name}.q_norm"), _out(f"{name}.k_norm")
        counts = {"heads": heads, "groups": groups}
        options = {**counts, **self._facts.attention(layer, widths[1] // heads)}
        given = Slot(f"{name}.attention", OUTPUTS, "0")
        seen = Slot(f"{name}.rotary", OUTPUTS, "q"), Slot(f"{name}.rotary", OUTPUTS, "k")
        values = Slot(f"{name}.rotary", OUTPUTS, "v")
        shown = all(run.has(slot) for run in self._runs for slot in (*seen, given))
        if not shown or self._width(seen[1]) != self._width(k):
            given = behind
        else:
            if cos is not None and sin is not None:
                pairs = {**counts, "interleaved": self._facts.interleaved}
                yield Plan(f"{name}.rotary", "rotary", "rotary", (q, k, cos, sin), seen, pairs)
            for written, part in ((seen[1], "k"), (values, "v")):
                held = Slot(f"{name}.cache", OUTPUTS, part)
                if all(run.has(held) for run in self._runs):
                    yield Plan(f"{name}.cache.{part}", "cache", "total", (written,), (held,), whole=False)
            q, k, v = (*seen, values)
            cos = None
        sinks = self._run.parameter(name, "sinks")
        if sinks is not None:
            inputs: tuple[Any, ...] = (q, k, v, Parameter(name, "sinks"))
            options.pop("softcap")
            yield Plan(f"{name}.attention", "attention", "attention_with_sinks", inputs, (given,), options, whole=False)
        elif cos is not None and sin is not None:
            options["interleaved"] = self._facts.interleaved
            inputs = (q, k, v, cos, sin)
            yield Plan(f"{name}.attention", "attention", "rotary_attention", inputs, (given,), options, whole=False)
        else:
            yield Plan(f"{name}.attention", "attention", "attention", (q, k, v), (given,), options, whole=False)
        if gated and given != behind:
            yield Plan(f"{name}.gate", "gated product", "output_gate", (given, projected), (behind,), {"heads": heads})

    def _query_of_both(self, name: str) -> Iterator[Plan]:
        """Yield the query of a projection that gives query and gate of each head."""
        both, taken = _out(f"{name}.q_proj"), self._first_input(f"{name}.q_norm")
        if taken is not None and self._run.has(both) and self._width(both) == 2 * self._width(taken):
            yield Plan(f"{name}.q", "projection", "first_halves", (both,), (taken,), {"heads": self._facts.heads})

    def _latent_attention(self, name: str, cos: Slot | None, sin: Slot | None, behind: Slot) -> Iterator[Plan]:
        queries = _out(f"{name}.q_b_proj" if self._run.has(_out(f"{name}.q_b_proj")) else f"{name}.q_proj")
        both = _out(f"{name}.kv_a_proj_with_mqa")
        rank = self._facts.setting("kv_lora_rank", default=0)
        if cos is None or sin is None or not rank or not self._run.has(both):
            return
        key = Slot(both.module, OUTPUTS, both.name, (rank, self._width(both)))
        options = {
            "heads": self._facts.heads,
            "plain": self._facts.setting("qk_nope_head_dim"),
            "scale": self._facts.latent_scale,
            "interleaved": self._facts.interleaved,
        }
        inputs = (queries, key, _out(f"{name}.kv_b_proj"), cos, sin)
        yield Plan(f"{name}.attention", "attention", "latent_attention", inputs, (behind,), options, whole=False)

    def _rotary_slots(self, name: str) -> tuple[Slot | None, Slot | None]:
        """Return the cosines and sines that an attention takes; None where it makes its own."""
        for candidates in (
            (Slot(name, INPUTS, "position_embeddings.0"), Slot(name, INPUTS, "position_embeddings.1")),
            (Slot("rotary_emb", OUTPUTS, "0"), Slot("rotary_emb", OUTPUTS, "1")),
        ):
            if all(self._run.has(slot) and self._run.sequence(slot, 0) is not None for slot in candidates):
                return candidates
        return None, None

    def _delta_rule(self, name: str) -> Iterator[Plan]:
        setting = self._facts.setting
        key_heads, value_heads = setting("linear_num_key_heads"), setting("linear_num_value_heads")
        qkvz, ba = _out(f"{name}.in_proj_qkvz"), _out(f"{name}.in_proj_ba")
        taken = self._first_input(f"{name}.norm")
        if key_heads is None or taken is None or not self._run.has(qkvz) or not self._run.has(ba):
            return
        widths = {"key_width": setting("linear_key_head_dim"), "value_width": setting("linear_value_head_dim")}
        options = {"key_heads": key_heads, "value_heads": value_heads, **widths}
        parameters = (Parameter(f"{name}.conv1d", "weight"), Parameter(name, "A_log"), Parameter(name, "dt_bias"))
        yield Plan(
            f"{name}.delta_rule",
            "delta rule",
            "gated_delta_rule",
            (qkvz, ba, *parameters),
            (taken,),
            options,
            whole=False,
        )
        gate = Slot(f"{name}.norm", INPUTS, "gate")
        width = value_heads // key_heads * widths["value_width"]
        yield Plan(f"{name}.z", "projection", "last_parts", (qkvz,), (gate,), {"groups": key_heads, "width": width})

    def _gated_product(self, name: str) -> Iterator[Plan]:
        gate, up = _out(f"{name}.gate_proj"), _out(f"{name}.up_proj")
        taken = self._first_input(f"{name}.down_proj")
        if taken is not None and self._run.has(gate) and self._run.has(up):
            options = {"activation": self._facts.activation}
            yield Plan(f"{name}.gated_product", "gated product", "gated_product", (gate, up), (taken,), options)

    def _gives_ids(self, name: str) -> bool:
        event = self._run.first_event(name)
        return event is not None and any(each["dtype"].startswith("int") for each in event[OUTPUTS].values())

    def _router(self, name: str) -> Iterator[Plan]:
        event = self._run.first_event(name)
        x = self._first_input(name)
        assert event is not None
        floats = [key for key, each in event[OUTPUTS].items() if not each["dtype"].startswith("int")]
        ids = next(key for key, each in event[OUTPUTS].items() if each["dtype"].startswith("int"))
        if x is None or len(floats) != 2:
            return
        logits, weights = (Slot(name, OUTPUTS, key) for key in floats)
        options = {"in_float32": True} if self._facts.routes_in_float32 else {}
        yield Plan(f"{name}.logits", "router", "router_logits", (x, Parameter(name, "weight")), (logits,), options)
        chosen = Slot(name, OUTPUTS, ids)
        routing = self._facts.routing
        yield Plan(f"{name}.weights", "router", "routing_weights", (logits, chosen), (weights,), routing)

    def _experts(self, name: str) -> Iterator[Plan]:
        event = self._run.first_event(name)
        described = self._run.modules.get(name, {"parameters": {}})
        if event is None or not {"gate_up_proj", "down_proj"} <= described["parameters"].keys():
            return
        integers = [key for key, each in event[INPUTS].items() if each["dtype"].startswith("int")]
        floats = [key for key, each in event[INPUTS].items() if not each["dtype"].startswith("int")]
        if len(integers) != 1 or len(floats) != 2:
            return
        x, weights = (Slot(name, INPUTS, key) for key in floats)
        parameters = (Parameter(name, "gate_up_proj"), Parameter(name, "down_proj"))
        inputs = (x, Slot(name, INPUTS, integers[0]), weights, *parameters)
        options = {"activation": self._facts.activation}
        yield Plan(name, "experts", "experts", inputs, (_out(name),), options)

    def _sum_inside(self, name: str) -> Iterator[Plan]:
        """Yield the sum of routed and shared experts."""
        routed, given = _out(f"{name}.experts"), self._first_output(name)
        if given is None or not self._run.has(routed):
            return
        for shared in (f"{name}.shared_experts", f"{name}.shared_expert"):
            branch, gate = self._first_output(shared), _out(f"{name}.shared_expert_gate")
            if branch is None:
                continue
            if self._run.has(gate):
                yield Plan(f"{name}.sum", "residual", "gated_total", (routed, branch, gate), (given,))
            else:
                yield Plan(f"{name}.sum", "residual", "total", (routed, branch), (given,))

    def _residuals(self, layer: int) -> Iterator[Plan]:
        """Yield the sums into the residual stream: what a child of the layer takes and no other gave."""
        name = f"layers.{layer}"
        stream, end = self._first_input(name), self._first_output(name)
        if stream is None or end is None:
            return
        known: set[str] = {self._digest(stream)}
        pending: list[Slot] = []
        children = [
            child
            for child in self._run.calls[0].events
            if child.startswith(f"{name}.") and child.count(".") == 2 and self._first_output(child) is not None
        ]
        for child in children:
            taken, given = self._first_input(child), self._first_output(child)
            if taken is None or given is None:
                continue
            if self._digest(taken) not in known and pending:
                yield Plan(f"{name}.residual", "residual", "total", (stream, *pending), (taken,))
                stream, pending = taken, []
                known.add(self._digest(taken))
            pending = [slot for slot in pending if self._digest(slot) != self._digest(taken)]
            pending.append(given)
            known.add(self._digest(given))
        if self._digest(end) not in known and pending:
            yield Plan(f"{name}.residual_2", "residual", "total", (stream, *pending), (end,))

    def _head(self) -> Iterator[Plan]:
        x, event = self._first_input("lm_head"), self._run.first_event("lm_head")
        if x is None or event is None:
            return
        parameters = [Parameter("lm_head", key) for key in ("weight", "bias") if self._has_parameter("lm_head", key)]
        yield Plan("lm_head", "head", "linear", (x, *parameters), (_out("lm_head"),))
        logits = Slot("", OUTPUTS, "logits")
        cap = float(self._facts.setting("final_logit_softcapping", default=0.0))
        if cap and self._run.has(logits):
            yield Plan("logits", "head", "capped", (_out("lm_head"),), (logits,), {"softcap": cap})
        taken, given = Slot("log_softmax", INPUTS, "0"), _out("log_softmax")
        if self._run.has(given):
            if (temperature := self._temperature(taken)) != 1.0:
                options = {"temperature": temperature}
                yield Plan("temperature", "log-softmax", "tempered", (self.logits,), (taken,), options)
            yield Plan("log_softmax", "log-softmax", "log_softmax", (taken,), (given,))

    @property
    def logits(self) -> Slot:
        """The slot of the logits."""
        whole = Slot("", OUTPUTS, "logits")
        return whole if self._run.has(whole) else _out("lm_head")

    def _temperature(self, taken: Slot) -> float:
        """Return the number that the logits are divided by before the softmax: a decimal, if one is meant."""
        logits, divided = self._run.whole(self.logits), self._run.whole(taken)
        if logits is None or divided is None or len(divided) > len(logits):
            return 1.0
        logits, divided = logits[: len(divided)].double(), divided.double()
        temperature = float(logits.pow(2).sum() / (logits * divided).sum())
        meant = round(temperature, 3)
        return meant if meant and abs(temperature / meant - 1) < 1e-3 else temperature

    def _has_parameter(self, module: str, name: str) -> bool:
        return name in self._run.modules[module]["parameters"]

    def _first_input(self, name: str) -> Slot | None:
        return self._first(name, INPUTS)

    def _first_output(self, name: str) -> Slot | None:
        return self._first(name, OUTPUTS)

    def _first(self, name: str, side: str) -> Slot | None:
        event = self._run.first_event(name)
        entries = {} if event is None else event[side]
        key = next((key for key, each in entries.items() if each["dtype"].startswith(("float", "bfloat"))), None)
        return None if key is None else Slot(name, side, key)

    def _width(self, slot: Slot) -> int:
        values = self._run.sequence(slot, 0)
        return 0 if values is None else values.shape[1]

    def _digest(self, slot: Slot) -> str:
        values = self._run.sequence(slot, 0)
        return str(slot) if values is None else digest(values)

    def _link(self) -> None:
        """Find the output that each input is equal to; the latest, where several are."""
        producers: dict[str, Slot] = {}
        for plan in self.plans:
            for taken in plan.inputs:
                if not isinstance(taken, Slot) or taken in self.sources:
                    continue
                found = producers.get(self._digest(taken))
                if found is not None:
                    self.sources[taken] = found
                elif not self._is_integer(taken) and taken not in producers.values():
                    self.loose.append((plan.name, taken))
            for given in plan.outputs:
                for slot in (*self._parts(given), given):
                    producers[self._digest(slot)] = slot

        self.sources.setdefault(self.logits, producers.get(self._digest(self.logits), self.logits))
        softmax = next((plan for plan in self.plans if plan.name in ("temperature", "log_softmax")), None)
        first = None if softmax is None else softmax.inputs[0]
        if isinstance(first, Slot) and first not in self.sources and first.module == "log_softmax":
            self.sources[first] = self.sources[self.logits]  # of all tokens but the last, and perhaps cast
            self.loose = [each for each in self.loose if each[1] != first]

    def _parts(self, given: Slot) -> list[Slot]:
        """Return the parts of an output that are taken apart: the latent and the rotary key."""
        rank = self._facts.setting("kv_lora_rank", default=0)
        if not given.module.endswith("kv_a_proj_with_mqa") or not rank:
            return []
        return [replace(given, part=part) for part in ((0, rank), (rank, self._width(given)))]

    def _is_integer(self, slot: Slot) -> bool:
        values = self._run.sequence(slot, 0)
        return values is not None and not values.is_floating_point()


def digest(values: Tensor) -> str:
    """Return a digest of a tensor's dtype and bytes."""
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{values.dtype}{hashlib.blake2b(raw, digest_size=12).hexdigest()}"


def _out(name: str) -> Slot:
    return Slot(name, OUTPUTS, "0")
