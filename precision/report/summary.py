"""The summary of an audit in a terminal, and the commands to run next, each with its purpose.

Names and numbers for readers and for JSON: layers by scheme, ranges, values that aren't finite.
"""

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.precision.observation.sites import layer_and_kind
from assay.precision.targets import engines
from assay.precision.units import format_bytes, format_error, format_seconds


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one kind with one scheme, "" for none."""

    kind: str
    scheme: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    place: str

    @property
    def weighty(self) -> bool:
        """Whether they hold a weight or a cache."""
        return self.place in ("linear", "embedding", "kv_cache")

    @property
    def where(self) -> str:
        """The kind and its layers: "mlp.down_proj, layers 0-3"."""
        if not self.layers:
            return self.kind
        return f"{self.kind}, layer{'s' * (len(self.layers) > 1)} {layers_of(self.layers)}"


def grouped(sites: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Return the sites (of audit.json) grouped by kind and scheme, kinds in the model's order, without tied sites."""
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for site in sites:
        if not site["tied"]:
            kinds.setdefault(layer_and_kind(site["unit"])[1], {}).setdefault(site["scheme"] or "", []).append(site)
    results = []
    for kind, schemes in kinds.items():
        for scheme, members in schemes.items():
            layers = {layer for site in members if (layer := layer_and_kind(site["unit"])[0]) is not None}
            names = tuple(site["name"] for site in members)
            results.append(Group(kind, scheme, tuple(sorted(layers)), names, members[0]["place"]))
    return results


def layers_of(layers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 sequence, 2,000 tokens."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def plain(value: Any) -> Any:
    """Return values for JSON, numbers with six digits: non-finite ones as strings, unmeasured ones as null."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def growth_words(result: Mapping[str, Any]) -> str:
    """Return the growth of the error over long sequences, with its interval if there is one.

    Also names the sequence length that predictions are calibrated for.
    """
    rests = "measured there; the intervals of predictions are for sequences as long as those chosen on"
    if not isinstance(result["growth"], float):
        last = f"the error at position {result['steps'][-1]['end']:,}"
        return f"{last} can't be compared with that at {result['base']:,}; {rests}"
    apart = result["apart"]
    between = f" ({apart['low']:.2g} to {apart['high']:.2g})" if apart else ""
    last = result["steps"][-1]["end"]
    grown = f"the error at position {last:,} is {result['growth']:.2g} times that at {result['base']:,}{between}"
    return f"{grown}; {rests}"


_WIDE = 2.0
"""Ratio of the ends of a measured error's interval above which more text is worth its time."""
_LEAST = 16
"""Sequences, half of them held out: eight show which errors are correlated."""
_SERVES = {"vllm": "vllm serve {}", "sglang": "python -m sglang.launch_server --model-path {}"}
"""Engines whose server loads a checkpoint; transformers and others load it in Python."""


def next_steps(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (purpose, command) of each next step for the content of audit.json; none if no command made it."""
    if not content["command"]:
        return []
    chosen, exports = content["recommended"], {part["format"]: part["paths"] for part in content["exports"]}
    steps = []
    if not chosen["met"] and "error" in content["settings"]["budgets"]:
        measured = float(chosen["measured"] or math.nan)  # null if the model breaks
        if math.isfinite(measured):
            allowed = _again(content, "--max-kl", format_error(1.05 * measured))
            steps.append(("allow the error that the closest assignment has", allowed))
    if not exports:
        steps.append(_exporting(content))
    if "checkpoint" in exports:
        engine = _engine(content) or "vllm"
        checkpoint, *options = map(Path, exports["checkpoint"])
        if options and engine == "vllm":  # of KV caches, which need a separate command
            command = f"cd {shlex.quote(str(checkpoint.parent))} && sh {shlex.quote(options[0].name)}"
            steps.append(("serve it", command))
        elif engine in _SERVES:
            steps.append(("serve it", _SERVES[engine].format(shlex.quote(str(checkpoint)))))
    elif "compressed-tensors" in exports:
        steps.append(("write the quantised checkpoint that it describes", _again(content, "--checkpoint")))
    if exports:
        folder = Path(next(iter(exports.values()))[0]).parent
        steps.append(("read the export as its readers do", f"assay audit --verify-export {shlex.quote(str(folder))}"))
    length = content["positions"]["steps"][-1]["end"] if content["positions"] else 0
    if length > content["data"]["tokens"] / content["data"]["sequences"]:
        steps.append(_at_length(content, length))
    interval = chosen["interval"]
    if interval is not None and float(interval["high"]) > _WIDE * float(interval["low"]):
        more = str(4 * (content["data"]["sequences"] + (content["held_out"] or {"sequences": 0})["sequences"]))
        steps.append(("narrow the error's interval by more text", _again(content, "--sequences", more)))
    return steps


def _at_length(content: Mapping[str, Any], length: int) -> tuple[str, str]:
    """Return an audit over sequences of that length: about as many tokens, but at least sixteen sequences."""
    tokens = sum(part["tokens"] for part in (content["data"], content["held_out"]) if part)
    given = [*shlex.split(content["command"]), ""]
    folders = [after if each == "--out" else each[6:] for each, after in pairwise(given) if each.startswith("--out")]
    out = ["--out", f"{folders[-1].rstrip('/')}-{length}"] if folders else []
    options = ("--sequence", str(length), "--sequences", str(max(tokens // length, _LEAST)), *out)
    return f"choose by, and have intervals for, sequences of {length:,} tokens", _again(content, *options)


def _exporting(content: Mapping[str, Any]) -> tuple[str, str]:
    reader = engines().get(_engine(content))
    if reader is None:
        words = "write it for every engine; what no export holds keeps its format, and the rest is chosen again"
        return words, _again(content, "--export", "all")
    words = f"write it for {reader.title}; where the export has no words for a choice, it is made again"
    form = reader.exports[0]
    return words, _again(content, *(["--checkpoint"] if form == "compressed-tensors" else ["--export", form]))


def _engine(content: Mapping[str, Any]) -> str:
    """Return the engine of the target, a device, or nothing."""
    return str(content["settings"]["target"] or "").partition("@")[0]


def _again(content: Mapping[str, Any], *more: str) -> str:
    """Return the original command with ``more`` options, which replace earlier ones; measurements are reused."""
    given = shlex.split(content["command"])
    for name, after in pairwise([*more, "--"]):
        if name.startswith("--") and name != "--export":  # --export may be repeated
            given = [each for each in given if not each.startswith(f"{name}=")]
            while name in given:
                index = given.index(name)
                del given[index : index + (1 if after.startswith("--") else 2)]
    return shlex.join([*given, *more])


_WIDTH = 116  # columns of the output
_FINDINGS = 3  # shown in the terminal
_INSIDE = "further assignments of the front lie inside, to which it was not fitted"
_BESIDE = 4
"""Baselines shown in the terminal besides the model in bfloat16."""


def summary(content: Mapping[str, Any], written: Sequence[str] = ()) -> str:
    """Return the summary of audit.json as text for a terminal; ``written``: paths to list."""
    model, settings, chosen = (content[key] for key in ("model", "settings", "recommended"))
    inside, count = content["coverage"]["inside"], content["coverage"]["count"]
    linears = sum(site["place"] == "linear" for site in content["sites"])
    sites = f"{counted(len(content['sites']), 'site')}, {linears} of them linear{'s' * (linears != 1)}"
    lines = [
        *_folded(f"{'MET' if chosen['met'] else 'NOT MET'}  ", headline(content)),
        *_folded(_line("not audited", ""), content["unaudited"]["words"]),
        _line("model", f"{model['kind']}, {model['parameters']:,} parameters in {model['stored']}, {sites}"),
        *(_line(*line) for line in data_lines(content)),
        _line("cost", ", ".join(f"{stage} {spent:.1f} s" for stage, spent in content["seconds"].items())),
        _line("noise floor", f"{format_error(content['noise_floor'])} {settings['unit']} (every site in bfloat16)"),
        *(_line("budget", line) for line in budget_lines(content)),
        *_folded(_line("decided by", ""), chosen["why"]),
        *(part for line in fixed_lines(content) for part in _folded(_line("kept", ""), line)),
        *_table(content),
        _line("predicted", f"{interval(chosen['prediction'])} {settings['unit']}"),
        _line("measured", f"{measured_words(chosen)} {settings['unit']}{_beside(content)}"),
        *_folded(_line("", ""), _outside(chosen)),
        *_baselines(content),
        *([_line("positions", growth_words(content["positions"]))] if content["positions"] else []),
        *([_line("interval", f"{inside} of {count} {_INSIDE}")] if count else []),
        *_costs(content),
        *(_line("exported", line) for line in export_lines(content)),
    ]
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for finding in content["findings"]:
        first.setdefault((finding["kind"], finding["site"]), finding)
    foremost = list(first.values())[:_FINDINGS]
    for finding in foremost:
        lines += _folded(_line("finding", ""), f"{finding['site']}: {finding['words']} {finding['remedy']}")
    if len(content["findings"]) > len(foremost):
        more = counted(len(content["findings"]) - len(foremost), "more finding")
        lines.append(_line("", f"and {more} in the report"))
    lines += [_line("next", f"{command}   # {what}") for what, command in next_steps(content)]
    lines += [_line("wrote", path) for path in written]
    return "\n".join(lines)


def headline(content: Mapping[str, Any]) -> str:
    """Return the outcome in one sentence: bytes of weights, error of the outputs, share of unchanged tokens."""
    chosen, before = content["recommended"], content["untouched"]["bytes"]
    share = f" ({100 * chosen['bytes'] / before:.0f} %)" if before else ""
    over = content["held_out"] or content["data"]
    name, settings, error = content["model"]["name"], content["settings"], format_error(chosen["measured"])
    off = {
        "kl": f"output probabilities differ by {error} {settings['unit']} (KL divergence)",
        "relative": f"outputs differ by a relative error of {error}",
    }.get(settings["metric"], f"measured error {error}, {settings['unit']}")
    words = [f"{name}: weights take {format_bytes(chosen['bytes'])} instead of {format_bytes(before)}{share}", off]
    if chosen["agreement"] is not None:
        few = content["model"]["kind"] == "classifier"
        what = counted(over["sequences" if few else "tokens"], "sequence" if few else "token")
        thing = "class" if few else "next token"
        held = "held-out " if content["held_out"] else ""
        of = what.replace(" ", f" {held}", 1)
        same = "100 %" if chosen["agreement"] == 1 else f"{min(100 * chosen['agreement'], 99.99):.4g} %"
        words.append(f"the most likely {thing} stays the same at {same} of {of}")
    return "; ".join(words)


def data_lines(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return which data the assignment was chosen on and which it was judged on."""
    lines = []
    for name, data in (("data", content["data"]), ("held out", content["held_out"])):
        if data:
            size = f"{counted(data['sequences'], 'sequence')}, {counted(data['tokens'], 'token')}"
            lines.append((name, f"{data['text']}: {size}"))
    if not content["held_out"]:
        lines.append(("held out", "nothing: errors are over the data that was chosen on, so they are too small"))
    return lines


def interval(prediction: Mapping[str, Any]) -> str:
    """Return an error with its interval and level."""
    return f"{format_error(prediction['error'])} ({interval_ends(prediction)})"


def interval_ends(prediction: Mapping[str, Any]) -> str:
    """Return the ends of a predicted interval, with its level."""
    level = prediction["level"]
    said = f"{math.floor(100 * level + 1e-9)} %" if level else "a guess"
    return f"{said}: {format_error(prediction['low'])} to {format_error(prediction['high'])}"


def _outside(chosen: Mapping[str, Any]) -> str:
    """Return a remark if the measured error is outside of the prediction's interval."""
    if chosen["measured"] is None:
        return ""
    low, high = (float(chosen["prediction"][end]) for end in ("low", "high"))
    if low <= float(chosen["measured"]) <= high:
        return ""
    return "outside of the prediction's interval: of many assignments, the one that is predicted best tends to be worse"


def measured_words(one: Mapping[str, Any]) -> str:
    """Return a measured error with its 95 % interval over sequences, if it has one."""
    ends = one["interval"]
    between = f" (95 %: {format_error(ends['low'])} to {format_error(ends['high'])})" if ends else ""
    return f"{format_error(one['measured'])}{between}"


def advice_lines(content: Mapping[str, Any]) -> list[str]:
    """Return a line that recommends a simple assignment if it is as good at no more bytes."""
    better = [each for each in content["baselines"] if each["instead"]]
    if not better:
        return []
    best = min(better, key=lambda each: float(each["measured"]))
    error = f"{measured_words(best)} {content['settings']['unit']}"
    return [f"take {best['name']}: as good at no more bytes, {format_bytes(best['bytes'])}, {error}"]


def _baselines(content: Mapping[str, Any]) -> list[str]:
    """Return the simple assignments nearest in bytes, the model in bfloat16, and the better choice if there is one."""
    *simple, unquantised = content["baselines"] or [None]
    if unquantised is None:
        return []
    size = content["recommended"]["bytes"]
    near = sorted(simple, key=lambda each: abs(math.log(max(each["bytes"], 1) / max(size, 1))))[:_BESIDE]
    lines = [f"{each['name']}: {measured_words(each)}; {each['words']}" for each in (*near, unquantised)]
    head = ["beside", *[""] * len(near)]
    results = [part for name, line in zip(head, lines, strict=True) for part in _folded(_line(name, ""), line)]
    return [*results, *(part for line in advice_lines(content) for part in _folded(_line("instead", ""), line))]


def budget_lines(content: Mapping[str, Any]) -> list[str]:
    """Return each budget with the recommended assignment's use of it, and whether it is kept."""
    chosen, unit = content["recommended"], content["settings"]["unit"]
    took: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "error": (chosen["measured"], lambda value: f"{format_error(value)} {unit}"),
        "bytes": (chosen["bytes"], format_bytes),
        "time": (chosen["decode"] if chosen["decode"] is not None else chosen["prefill"], format_seconds),
    }
    assumed = " (half of the model's, since no budget was given)" if content["settings"]["assumed"] else ""
    lines = []
    for name, limit in content["settings"]["budgets"].items():
        value, words = took[name]
        kept = value is not None and float(value) <= float(limit) * (1 + 1e-9)
        lines.append(f"{name} of at most {words(limit)}: {words(value)}, {'kept' if kept else 'NOT kept'}{assumed}")
    return lines


def fixed_lines(content: Mapping[str, Any]) -> list[str]:
    """Return a line on the sites that kept their format because no serving stack loads another."""
    fixed = set(content["settings"]["fixed"])
    indices = [site["place"] for site in content["sites"] if site["name"] in fixed]
    tables, linears = indices.count("embedding"), indices.count("linear")
    names = ["embedding tables"] * bool(tables)
    names += [f"{counted(linears, 'linear')} that no checkpoint holds quantised"] * bool(linears)
    verb = "keeps its" if not tables and linears == 1 else "keep their"
    return [f"{' and '.join(names)} {verb} format because something is exported"] if names else []


def export_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the bytes of weights of each export, which are larger if it can't express all sites."""
    count, limit = len(content["recommended"]["assignment"]), content["settings"]["budgets"].get("bytes")
    lines = []
    for part in content["exports"]:
        over = f", above the budget of {format_bytes(limit)}" if limit is not None and part["bytes"] > limit else ""
        again = f"; {part['loaded']['words']}" if part["loaded"] else ""
        sites = f"{part['sites']} of {counted(count, 'site')}"
        lines.append(f"{part['format']}: weights {format_bytes(part['bytes'])}{over}; {sites}{again}")
    return lines


def _line(name: str, words: str) -> str:
    return f"  {name:<12}{words}"


def _beside(content: Mapping[str, Any]) -> str:
    """Return the measured error compared with the noise floor."""
    measured, floor = content["recommended"]["measured"], content["noise_floor"]
    if measured is None or not float(floor) > 0:
        return ""
    times = float(measured) / float(floor)
    return ", which can't be told from bfloat16" if times <= 1 else f", {times:.3g} times the noise floor"


def _table(content: Mapping[str, Any]) -> list[str]:
    """Return which layers have which scheme, a line for each kind of unit; units without weight or cache share one."""
    kinds: dict[str, list[str]] = {}
    others = 0
    for group in grouped(content["sites"]):
        where = f" {layers_of(group.layers)}" if group.layers else ""
        if group.weighty:
            kinds.setdefault(group.kind, []).append(f"{group.scheme or 'as it is'}{where}")
        elif group.scheme:
            others += len(group.sites)
    width = max(map(len, kinds), default=0)
    lines = []
    for position, (kind, schemes) in enumerate(kinds.items()):
        lines += _folded(f"  {'' if position else 'assignment':<12}{kind:<{width}}  ", "; ".join(schemes))
    return [*lines, _line("", f"and {counted(others, 'activation')} in another format")] if others else lines


def _costs(content: Mapping[str, Any]) -> list[str]:
    before, after, settings = content["untouched"], content["recommended"], content["settings"]
    share = after["bytes"] / before["bytes"] if before["bytes"] else 1.0
    context = f", at {counted(settings['context'], 'token')}"
    quantities: list[tuple[str, str, Callable[[float], str], str]]
    quantities = [("bytes", "weights", format_bytes, f" ({100 * share:.0f} %)")]
    quantities += [("kv_bytes", "KV cache", format_bytes, context)] * bool(before["kv_bytes"])
    if content["device"] is not None:
        device, decodes = f", at least, on {content['device']}", before["decode"] is not None
        quantities.append(("prefill", "prefill" if decodes else "pass", format_seconds, device))
        quantities += [("decode", "decode step", format_seconds, device)] * decodes
    return [
        _line(name, f"{words(before[key])} before, {words(after[key])} after{rest}")
        for key, name, words, rest in quantities
    ]


def _folded(head: str, words: str) -> list[str]:
    """Return a heading and text folded to a terminal's width, with the text's further lines indented."""
    width = max(_WIDTH, len(head) + 40)
    folds = textwrap.TextWrapper(width, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
    return folds.wrap(words)
