"""What an audit tells, in JSON, on a page and in a terminal.

Errors that are no longer small, which a quadratic form doesn't follow: no interval is promised, and it is told.
"""

import copy
import html
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from assay.precision.auditing import Audit, audit, reliability
from assay.precision.export import Part
from assay.precision.observation.sites import layer_and_kind
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.report import content_of, page, record, summary
from assay.precision.report.comparison import compared, in_lines
from assay.precision.report.summary import grouped, layers_of, next_steps, plain
from assay.precision.units import format_bytes
from tests.precision.reported import asked, small_audit, small_content
from tests.precision.small_models import FORMATS, made

SCHEMA = json.loads((files("assay.precision.report") / "audit.schema.json").read_text())


@pytest.fixture(scope="module")
def audited() -> Audit:
    """An audit of the small model in a few schemes."""
    return small_audit()


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """The content of its audit.json."""
    return small_content()


def test_the_shipped_schema_is_that_of_the_record() -> None:
    assert json.loads(record.schema()) == SCHEMA


def test_the_content_keeps_its_schema(content: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    again = json.loads(json.dumps(content, allow_nan=False))
    jsonschema.validate(again, SCHEMA)
    assert again == content


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.pop("pareto"),
        lambda content: content.update(more=1),
        lambda content: content["recommended"].update(measured="nan"),
        lambda content: content["recommended"]["prediction"].pop("low"),
        lambda content: content["sites"][0].update(place="somewhere"),
        lambda content: content["sites"][0]["alone"].update(fp8=None),
        lambda content: content["findings"][0].pop("remedy"),
    ],
)
def test_the_schema_refuses_what_is_missing_or_wrong(
    content: dict[str, Any], spoil: Callable[[dict[str, Any]], object]
) -> None:
    spoilt = copy.deepcopy(content)
    spoil(spoilt)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoilt, SCHEMA)


def test_the_content_is_what_the_audit_says(audited: Audit, content: dict[str, Any]) -> None:
    chosen = content["recommended"]
    assert chosen["prediction"]["error"] == pytest.approx(audited.predict(chosen["assignment"]).error, rel=1e-5)
    assert chosen["measured"] == pytest.approx(audited.measure(chosen["assignment"]), rel=1e-5)
    assert chosen["bytes"] == pytest.approx(audited.cost(chosen["assignment"]).bytes, rel=1e-5)
    (head,) = (site for site in content["sites"] if site["name"] == "head")
    assert head["alone"]["fp8"] == pytest.approx(audited.contribution("head", "fp8"), rel=1e-5)
    assert head["scheme"] == chosen["assignment"].get("head")
    assert len(content["calibration"]) == len(audited.measured)


def test_changes_name_every_layer_once(content: dict[str, Any]) -> None:
    sites = [site for change in content["changes"] for site in change["sites"]]
    linears = [site["name"] for site in content["sites"] if site["place"] == "linear"]
    assert sorted(site for site in sites if site in linears) == sorted(linears)
    for change in content["changes"]:
        assert change["kind"] in change["words"]
        assert (change["scheme"] or "stays as it is") in change["words"]


def test_the_summary_has_the_budget_and_three_findings(content: dict[str, Any]) -> None:
    text = summary(content, ["a/report.html"])
    assert text.startswith("MET  ")
    assert re.search(r"budget +bytes of at most .* kept", text)
    assert re.search(r"proj +\S", text)
    assert [f"Thing {number}" in text for number in range(5)] == [True, False, True, True, False]
    assert "layers.1.proj: Thing 3 is too large. Mend it." in text
    assert "and 2 more findings in the report" in text
    assert "a/report.html" in text
    assert max(map(len, text.splitlines())) <= 120
    missed = copy.deepcopy(content)
    missed["recommended"]["met"] = False
    missed["settings"]["budgets"] = {"error": 1e-12}
    assert summary(missed).startswith("NOT MET  ")
    assert "NOT kept" in summary(missed)


def test_a_comparison_names_the_better_one(audited: Audit) -> None:
    rough = dict.fromkeys([f"layers.{number}.proj" for number in range(3)], "w4a16-g32")
    found = compared(audited, ["rough", "fine"], [rough, {"head": "w8a16"}])
    assert found["better"] == "fine"
    assert "fine is better, by" in found["words"]
    assert len(found["sites_that_differ"]) == 4
    told = in_lines(found)
    assert "noise floor" in told
    assert "rough" in told
    alike = compared(audited, ["one", "other"], [rough, rough])
    assert alike["better"] is None
    assert "can't be told apart" in alike["words"]


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.3.mlp.up_proj", 3, "mlp.up_proj"),
        ("model.layers.0:residual", 0, "residual"),
        ("transformer.h.11.attn.c_attn", 11, "attn.c_attn"),
        ("lm_head", None, "lm_head"),
        ("model.norm:output", None, "model.norm:output"),
        ("2", 2, "layer"),
    ],
)
def test_a_name_says_its_place(name: str, layer: int | None, kind: str) -> None:
    assert layer_and_kind(name) == (layer, kind)


def test_groups_hold_layers_of_one_scheme() -> None:

    def site(name: str, scheme: str | None, tied: str | None = None) -> dict[str, Any]:
        return {"name": name, "unit": name, "scheme": scheme, "tied": tied, "place": "linear"}

    sites = [site(f"m.layers.{n}.up", "fp8" if n != 2 else None) for n in range(5)]
    groups = grouped([*sites, site("head", "fp8", tied="m.layers.0.up")])
    assert [(group.where, group.scheme) for group in groups] == [("up, layers 0-1, 3-4", "fp8"), ("up, layer 2", "")]


def test_numbers_are_what_json_has() -> None:
    assert [plain(value) for value in (math.inf, math.nan, 0.123456789)] == ["inf", None, 0.123457]
    assert layers_of([0, 1, 2, 5]) == "0-2, 5"


def test_exports_are_told_with_their_own_bytes(audited: Audit, content: dict[str, Any]) -> None:
    chosen = audited.recommend(max_bytes=audited.cost({}).bytes / 2)
    some = dict(list(chosen.items())[:1])
    parts = [Part("torchao", (Path("out/torchao.json"),), some), Part("checkpoint", (Path("out/c"),), dict(chosen), 7)]
    found = content_of(audited, chosen, [], [], parts, **asked(audited))
    jsonschema.validate(found, SCHEMA)
    torchao, checkpoint = found["exports"]
    assert torchao == {
        "format": "torchao",
        "paths": ["out/torchao.json"],
        "sites": 1,
        "bytes": plain(audited.cost(some).bytes),
        "loaded": None,
    }
    assert torchao["bytes"] > found["recommended"]["bytes"]
    assert checkpoint["bytes"] == 7
    told = summary(found)
    over = f"above the budget of {format_bytes(audited.cost({}).bytes / 2)}; 1 of {len(chosen)} sites"
    assert f"  exported    torchao: weights {format_bytes(torchao['bytes'])}, {over}\n" in told
    assert f"checkpoint: weights 7 B; {len(chosen)} of {len(chosen)} sites" in told
    assert "checkpoint: weights 7 B" in page(found)
    assert content["exports"] == []
    assert "exported" not in summary(content)
    assert "<h2>Exports</h2>" not in page(content)


def test_what_keeps_its_format_for_an_export_is_one_line(content: dict[str, Any]) -> None:
    assert "no checkpoint holds quantised" not in summary(content)
    linears = [site["name"] for site in content["sites"] if site["place"] == "linear"]
    spoilt = copy.deepcopy(content)
    spoilt["settings"]["fixed"] = linears[:1]
    line = "1 linear that no checkpoint holds quantised keeps its format because something is exported"
    assert line in summary(spoilt)
    assert line in page(spoilt)


def test_what_has_no_site_is_told_first() -> None:

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(8, 32, batch_first=True), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(torch.nn.utils.rnn.pack_sequence(list(x)))[0].data)

    found = audit(Packed(), [torch.randn(8, 4, 8)], "relative", FORMATS)
    chosen = found.recommend(max_bytes=found.cost({}).bytes / 2)
    told = content_of(found, chosen, [], [], **asked(found))
    jsonschema.validate(json.loads(json.dumps(told)), SCHEMA)
    assert told["unaudited"]["parameters"] == 4 * 32 * (8 + 32)
    assert told["unaudited"]["largest"][0] == {
        "name": "lstm.weight_hh_l0",
        "parameters": 4096,
        "why": "packed sequences of LSTM",
    }
    second = " ".join(summary(told).split("\n")[1:4])
    assert re.search(
        r"not audited +87 % of the parameters have no site and keep their format: lstm.weight_hh_l0", second
    )
    head = page(told).partition("<dl")[0]
    assert "87 % of the parameters have no site" in head
    assert not chosen.met
    assert "87 % of the parameters have no site" in chosen.why


def test_what_to_do_next_follows_from_what_was_found(content: dict[str, Any]) -> None:
    made = {**copy.deepcopy(content), "command": "assay audit 'my model' --text t.txt --out out", "exports": []}
    chosen, settings = made["recommended"], made["settings"]
    chosen |= {"met": True, "measured": 0.02, "interval": None}
    assert [command for _, command in next_steps(made)] == [f"{made['command']} --export all"]
    for target, options in (("vllm@h200", "--checkpoint"), ("llama.cpp", "--export gguf"), ("h200", "--export all")):
        [(_, command)] = next_steps({**made, "settings": {**settings, "target": target}})
        assert command == f"{made['command']} {options}"
    part = {"format": "checkpoint", "paths": ["out/export/checkpoint"], "sites": 1, "bytes": 1, "loaded": None}
    exported = {**made, "exports": [part], "settings": {**settings, "target": "sglang@h200"}}
    serve, verify = (command for _, command in next_steps(exported))
    assert serve == "python -m sglang.launch_server --model-path out/export/checkpoint"
    assert verify == "assay audit --verify-export out/export"
    chosen |= {"met": False, "interval": {"low": 0.01, "high": 0.03}}
    broken = {**made, "settings": {**settings, "budgets": {"error": 0.001}}}
    first, *_, last = [command for _, command in next_steps(broken)]
    assert [first, last] == [f"{made['command']} {more}" for more in ("--max-kl 0.021", "--sequences 32")]
    assert first in summary(broken)
    assert first in html.unescape(page(broken))
    assert next_steps({**made, "command": ""}) == []


def test_an_option_is_replaced_with_its_own_value_only(content: dict[str, Any]) -> None:
    made = {**copy.deepcopy(content), "command": "assay audit --checkpoint m --text t.txt", "positions": None}
    made |= {"exports": [], "settings": {**content["settings"], "target": "vllm"}}
    assert next_steps(made)[0][1] == "assay audit m --text t.txt --checkpoint"
    described = {**made, "exports": [{"format": "compressed-tensors", "paths": ["out/export/config.json"]}]}
    words = "write the quantised checkpoint that it describes"
    assert dict(next_steps(described))[words] == "assay audit m --text t.txt --checkpoint"


@pytest.mark.parametrize("out", ["--out out/", "--out=out"])
def test_intervals_at_the_length_of_the_context_are_a_command_away(content: dict[str, Any], out: str) -> None:
    """Where errors over long positions were measured, no interval is for those: the same audit over sequences as long,
    of about as many tokens, writes into a folder of its own. Without them, or where sequences are as long, nothing is
    said."""
    command = f"assay audit m --text t.txt {out} --context 512"
    plain = {
        **copy.deepcopy(content),
        "command": command,
        "data": {**content["data"], "sequences": 80, "tokens": 20480},
    }
    long = {**plain, "positions": {"steps": [{"end": 128}, {"end": 512}]}}
    asked = [f"{command.replace(f'{out} ', '')} --sequence 512 --sequences 40 --out out-512"]
    assert [each for _, each in next_steps(long) if "--sequence " in each] == asked
    few = {**long, "data": {**plain["data"], "tokens": 100}}
    assert [each for _, each in next_steps(few) if "--sequences 16 " in each]
    as_long = {**long, "data": {**plain["data"], "sequences": 40}}
    assert not [each for made in (plain, as_long) for _, each in next_steps(made) if "--sequence " in each]


def pairs(seed: int, end: float = math.inf) -> list[Measured]:
    """24 errors of 1e-5 to 1 that are measured where they are predicted, within a tenth, up to ``end``; of those beyond
    half is measured."""
    draw = random.Random(seed)
    sizes = np.geomspace(1e-5, 1.0, 24)
    return [Measured(p, p * math.exp(draw.gauss(0, 0.1)) * (1 if p <= end else 0.4), 4.0) for p in map(float, sizes)]


@pytest.mark.parametrize("seed", range(4))
def test_no_interval_is_promised_above_what_was_measured_where_it_was_predicted(seed: int) -> None:
    """Where large measured errors leave the line the promise ends below them, and small ones keep it; where all lie on
    it, it ends with the largest but for chance, and nothing further is promised."""
    bent, straight = Calibration.fit(pairs(seed, 0.2)), Calibration.fit(pairs(seed))
    for found in (bent, straight):
        assert [found.level_of(Measured(size, 0.0, 4.0)) for size in (1e-7, 1e-3, 0.1)] == [0.95] * 3
        assert found.level_of(Measured(1.01, 0.0, 4.0)) == 0
    assert bent.level_of(Measured(0.37, 0.0, 4.0)) == 0
    assert straight.level_of(Measured(0.37, 0.0, 4.0)) == 0.95


def test_a_large_error_stands_in_record_terminal_and_page() -> None:
    """What is recommended says so wherever the audit is read, and says nothing where it is no larger than what was
    measured."""
    model, batches = made()
    found = audit(model, batches, "relative", FORMATS)
    found.calibrate(12)
    chosen = found.recommend(max_bytes=0.5 * found.cost({}).bytes)
    assert "is large" not in chosen.why
    whole, told = found.predictor, []
    for limit in (whole.calibration.limit, 1e-9):
        found.predictor = replace(whole, calibration=replace(whole.calibration, limit=limit))
        chosen.prediction = found.predict(chosen)
        chosen.why = " ".join(["chosen", *reliability(found, chosen)])
        content = content_of(found, chosen, [], [], **asked(found))
        told.append([content["recommended"]["prediction"]["level"], " ".join(summary(content).split()), page(content)])
    (level, *before), (none, *after) = told
    assert (level > 0.9, none) == (True, 0)
    assert ["a guess" in text for text in (*before, *after)] == [False, False, True, True]
    assert ["is large: of those measured" in text for text in (*before, *after)] == [False, False, True, True]
