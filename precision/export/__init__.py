"""Export of an assignment to serving stacks: configuration files, and a checkpoint that equals the simulation.

exporting (writes all files into one folder) · plan (interface of the stacks) · configurations (one file a stack) ·
checkpoint · lint · manifest (the record) · verifying (reads exports again) · reloading (loads and measures them)
"""

from assay.precision.export.checkpoint import (
    Written,
    load_checkpoint,
    packed_zero_points,
    unstorable,
    write_checkpoint,
)
from assay.precision.export.configurations.compressed_tensors import quantization_config
from assay.precision.export.configurations.gguf import WrittenFile, write_gguf
from assay.precision.export.configurations.torchao import fqn_to_config
from assay.precision.export.configurations.vllm import command_line, online_config
from assay.precision.export.exporting import FORMATS, Exported, allow_unfused, clear, export, offered, unexportable
from assay.precision.export.lint import lint, lint_config, lint_scales
from assay.precision.export.manifest import Part, Reloaded
from assay.precision.export.plan import Recipe
from assay.precision.export.reloading import reloaded
from assay.precision.export.verifying import Verified, verify_export

__all__ = [
    "FORMATS",
    "Exported",
    "Part",
    "Recipe",
    "Reloaded",
    "Verified",
    "Written",
    "WrittenFile",
    "allow_unfused",
    "clear",
    "command_line",
    "export",
    "fqn_to_config",
    "lint",
    "lint_config",
    "lint_scales",
    "load_checkpoint",
    "offered",
    "online_config",
    "packed_zero_points",
    "quantization_config",
    "reloaded",
    "unexportable",
    "unstorable",
    "verify_export",
    "write_checkpoint",
    "write_gguf",
]
