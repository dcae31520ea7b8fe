"""What llama.cpp computes with a quantised model against what is simulated: `gguf_served.py MODEL --text FILE`.

Of each type of ggml, at every weight with whole blocks of it, prints the divergence from the model as it is, nats per
token: simulated with weights alone; simulated with inputs rounded as llama.cpp's CPU products do; of the logits that
llama.cpp gives for the file that `write_gguf` writes. Then that of llama.cpp from the second simulation.
"""

import tempfile
from pathlib import Path

import torch
from furniture import options

from assay.precision.auditing import audit
from assay.precision.export import write_gguf
from assay.precision.export.gguf.serving import LlamaCpp
from assay.precision.loading import load
from assay.precision.observation.operations import traced
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES
from assay.precision.schemes.ggml import block_types


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the next token."""
    exact, found = (each.double().log_softmax(-1) for each in (reference, other))
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def main() -> None:
    """Print a row for each type."""
    given = options(__doc__, sequences=8, batch=8, seed=0).parse_args()
    loaded = load(given.model)
    batches = loaded.batches(given.text, sequence=given.tokens, sequences=given.sequences, batch=given.batch)
    types = {name: kind for name, kind in block_types().items() if kind.weights}
    formats = [scheme for name, kind in types.items() for scheme in (name, f"{name}-{kind.activations}")]
    found = audit(loaded.model, batches, formats=formats, bits=loaded.stored.itemsize * 8)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    sites = {str(site): site for site in found.sites if site.shape}

    def simulated(assignment: dict[str, str]) -> torch.Tensor:
        schemes = {name: SCHEMES[scheme] for name, scheme in assignment.items()}
        with torch.no_grad(), traced(found.model, Simulator(schemes, found.fits, found.observed.tied)):
            return found.model(input_ids=ids).logits

    exact = simulated({})
    print(f"{'type':12} {'weights':>10} {'and inputs':>10} {'llama.cpp':>10} {'between':>10}  bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name, kind in types.items():
            own = {}
            for site in sites:
                menu = found.menu(site)
                own[site] = next(each for each in (name, kind.fallback, "q8_0") if each in menu)
            rounded = {
                site: scheme if sites[site].type == "embedding" else f"{scheme}-{types[scheme].activations}"
                for site, scheme in own.items()
            }
            written = write_gguf(found.model, own, path, sites=sites, fits=found.fits, overwrite=True)
            served, inputs = LlamaCpp(path)(ids).logits, simulated(rounded)
            errors = [divergence(exact, each) for each in (simulated(own), inputs, served)]
            errors.append(divergence(inputs, served))
            print(f"{name:12} {' '.join(f'{error:10.3g}' for error in errors)}  {written.bytes:,}", flush=True)


main()
