"""The importance matrix of an audit, as a file that ``llama-quantize --imatrix`` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from assay.precision.export.gguf.names import library
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site


def imatrix(fits: QParams, sites: Mapping[str, Site], tensors: Mapping[str, Sequence[str]]) -> bytes:
    """The file: of each tensor that a site with an input is in, sums of squares of the input's columns, and counts.

    llama-quantize divides the one by the other in float32, as the simulation does, so both weight errors alike in every
    bit. Experts of a layer have the same sums, for the simulation has. Raises NotInstalled.
    """
    gguf = library()
    # Such a file is of no architecture.
    without = type("ImatrixWriter", (gguf.GGUFWriter,), {"add_architecture": lambda self: None})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        writer = without(path, "")
        most = 0
        for site, names in tensors.items():
            seen = fits.squares(site)
            if seen is None:
                continue
            sums, count = seen
            most = max(most, count)
            experts = sites[site].shape[0] if len(sites[site].shape) == 3 else 1
            for name in names:
                rows = sums.detach().float().cpu().expand(experts, -1).contiguous()
                writer.add_tensor(f"{name}.in_sum2", rows.numpy())
                writer.add_tensor(f"{name}.counts", torch.full((experts, 1), float(count)).numpy())
        writer.add_type("imatrix")
        writer.add_array(gguf.Keys.IMatrix.DATASETS, ["the calibration data of an audit"])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, 1)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, most)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()
