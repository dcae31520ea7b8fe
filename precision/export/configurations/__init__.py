"""Configurations of serving stacks, one file each. In: a `Request`. Out: a `Recipe` and its files."""

from assay.precision.export.configurations import compressed_tensors, gguf, mlx, torchao, vllm

TARGETS = {
    "compressed-tensors": compressed_tensors.TARGET,
    "gguf": gguf.TARGET,
    "mlx": mlx.TARGET,
    "torchao": torchao.TARGET,
    "vllm": vllm.TARGET,
}
"""Every export target, by its name in ``--export``."""
