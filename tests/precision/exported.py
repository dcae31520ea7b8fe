"""A small random Llama, its sites and fits, and ways to run what was exported of it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from assay.precision.export import Exported, Written, WrittenFile, export, write_checkpoint, write_gguf
from assay.precision.loading.quiet import quiet
from assay.precision.observation.operations import traced
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Observer, Site
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES

IDS = torch.arange(3 * 16).reshape(3, 16) * 7 % 64


class Subject:
    """A model of random weights that bfloat16 holds, in float32, with what calibration showed of it."""

    def __init__(self, **changes: Any) -> None:
        sizes = {
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
        }
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**{**sizes, **changes}, dtype="bfloat16")
        self.model = transformers.LlamaForCausalLM(config).float().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
            # Outlier channels, so that column factors have something to do.
            for layer in self.model.model.layers:
                layer.input_layernorm.weight[::13] = 6.0
                layer.post_attention_layernorm.weight[::7] = 4.0
                layer.mlp.up_proj.weight[::31] *= 8.0
        self._look(IDS)

    @classmethod
    def of(cls, model: Any, ids: torch.Tensor) -> Subject:
        """Another model, and what these tokens show of it."""
        made = cls.__new__(cls)
        made.model = model
        made._look(ids)
        return made

    def _look(self, ids: torch.Tensor) -> None:
        observer = Observer(self.model)
        with torch.no_grad(), traced(self.model, observer):
            self.model(ids)
        self.sites: dict[str, Site] = observer.sites
        self.seen = observer.statistics
        self.fits = QParams(observer.statistics, observer.weights, observer.sharing_factors(), observer.fused())

    def export(self, assignment: Mapping[str, str], out: Path, *formats: Collection[str], **options: Any) -> Exported:
        """Write it as `export` does."""
        return export(self.model, assignment, out, *formats, sites=self.sites, fits=self.fits, **options)

    def checkpoint(self, assignment: Mapping[str, str], out: Path, **options: Any) -> Written:
        return write_checkpoint(self.model, assignment, out, sites=self.sites, fits=self.fits, **options)

    def gguf(self, assignment: Mapping[str, str], path: Path, **options: Any) -> WrittenFile:
        return write_gguf(self.model, assignment, path, sites=self.sites, fits=self.fits, **options)

    def weights(self, scheme: str) -> dict[str, str]:
        """The scheme at every linear but the head."""
        return {name: scheme for name, site in self.sites.items() if site.type == "linear" and name != "lm_head"}

    def simulated(self, assignment: Mapping[str, str]) -> torch.Tensor:
        """Logits with the assignment simulated."""
        tied = {name: site.tied for name, site in self.sites.items() if site.tied}
        return logits(self.model, {name: SCHEMES[scheme] for name, scheme in assignment.items()}, self.fits, tied)

    def stored(self, name: str, scheme: str) -> torch.Tensor:
        """The weight of a linear, stored and read back."""
        weight = self.model.get_submodule(name).get_parameter("weight").detach()
        stored = self.fits.weight(name, SCHEMES[scheme], weight)
        assert stored is not None
        return stored(weight)


@cache
def subject() -> Subject:
    """The one model that most tests export."""
    return Subject()


def logits(model: torch.nn.Module, schemes: Mapping[str, Any], fits: QParams, tied: Mapping[str, str]) -> torch.Tensor:
    """Logits under the open forward pass, which computes attention by its definition."""
    with torch.no_grad(), traced(model, Simulator(schemes, fits, tied)):
        return model(IDS).logits


def loaded(folder: Path, dtype: torch.dtype | str = torch.float32, **options: Any) -> Any:
    """The checkpoint as transformers loads it by itself, its weights decompressed by a first run."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
        with torch.no_grad():
            model(IDS[:1, :2])
    return model.eval()
