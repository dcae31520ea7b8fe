"""What MLX is given: a program that calls mlx_lm, whose predicate has the assignment."""

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.precision.export import export
from tests.precision.exported import subject

QUERY, DOWN, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def test_the_program_converts_each_layer_as_assigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assignment = {QUERY: "w4a16-g64-asym", DOWN: "w-mxfp4", UP: "w-nvfp4", "lm_head": "w4a16-g32-asym"}
    made = subject()
    done = export(
        made.model, assignment, tmp_path / "out", ["mlx"], sites=made.sites, fits=made.fits, source="some/model"
    )
    assert done.parts[0].held == assignment
    assert done.notes == ()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    stand_in = ModuleType("mlx_lm")
    stand_in.convert = lambda *places, **options: calls.append((places, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_lm", stand_in)
    runpy.run_path(str(tmp_path / "out" / "mlx_convert.py"))
    ((places, options),) = calls
    assert places == ("some/model", "mlx_model")
    assert options["quantize"] is True
    assert options["q_group_size"] == 32
    found = {name: options["quant_predicate"](name, None) for name in made.sites}
    assert {name: each for name, each in found.items() if each is not False} == {
        QUERY: {"group_size": 64, "bits": 4, "mode": "affine"},
        DOWN: {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        UP: {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        "lm_head": {"group_size": 32, "bits": 4, "mode": "affine"},
    }


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w4a16-g64-awq", "w8a16", "fp8", "mxfp4", "q4_0", "nf4-g64"])
def test_what_mlx_has_not_is_noted(scheme: str, tmp_path: Path) -> None:
    made = subject()
    done = export(made.model, {QUERY: scheme}, tmp_path / "out", ["mlx"], sites=made.sites, fits=made.fits)
    assert done.parts == ()
    assert done.notes[0].startswith(f"mlx: {scheme} at {QUERY}: MLX has groups of integers with a bias")
