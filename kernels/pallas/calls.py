"""`pl.pallas_call` for several platforms: the grid is chosen by the platform that a program is lowered for.

A TPU runs the programs of a grid one after another, and scratch memory passes from one to the next. A GPU runs them
concurrently, so its grids have loops inside the kernel. A CPU interprets the TPU's grid, or with `as_on_gpu` the GPU's.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_as_on_gpu = contextvars.ContextVar("whether a CPU interprets the grids for GPUs", default=False)


def as_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that a CPU interprets its kernels' GPU grids, gradients taken inside it included."""

    @functools.wraps(function)
    def interpreted(*arguments: Any, **options: Any) -> Any:
        token = _as_on_gpu.set(True)
        try:
            with set_xla_metadata(assay_grid="gpu"):  # jax.jit would otherwise reuse programs traced with TPU grids
                return function(*arguments, **options)
        finally:
            _as_on_gpu.reset(token)

    return interpreted


def call(
    name: str, kernel: Callable[..., None], *arrays: jax.Array, gpu: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Call ``pl.pallas_call(kernel, **options)(*arrays)`` on a TPU, interpreted on a CPU, ``gpu(*arrays)`` on a GPU.

    The platform is the one that the program is lowered for: `jax.export` for a TPU gives the compiled kernel on a CPU
    too. Without ``gpu``, lowering for one raises NotImplementedError, which names the op.
    """
    missing = functools.partial(_missing_grid, name=name, out_shape=options["out_shape"])
    if not _as_on_gpu.get():
        on_cpu = pl.pallas_call(kernel, name=name, interpret=True, **options)
    else:
        on_cpu = functools.partial(gpu, interpret=True) if gpu else missing
    on_tpu = pl.pallas_call(kernel, name=name, **options)
    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, tpu=on_tpu, cuda=gpu or missing, default=missing)


def call_on_gpu(kernel: Callable[..., None], *arrays: jax.Array, warps: int, stages: int = 3, **options: Any) -> Any:
    """Call ``pl.pallas_call(kernel, **options)(*arrays)``, compiled by Triton with ``warps`` and loop ``stages``."""
    parameters = plt.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=parameters, **options)(*arrays)


def _missing_grid(*arrays: jax.Array, name: str, out_shape: Any) -> Any:
    """Stand for a grid that a kernel lacks: lowering it raises NotImplementedError."""
    shapes, tree = jax.tree.flatten(out_shape)
    results = _missing_grid_p.bind(*arrays, name=name, shapes=tuple((shape.shape, shape.dtype) for shape in shapes))
    return jax.tree.unflatten(tree, results)


def _refuse(context: Any, *arrays: Any, name: str, shapes: Any) -> Any:
    raise NotImplementedError(
        f"{name}: this Pallas kernel has no grid for GPUs; lower it for a TPU or a CPU, or take the kernel of torch "
        "tensors in assay.kernels.triton"
    )


def _batch(arrays: Any, axes: Any, *, name: str, shapes: Any) -> Any:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    return _missing_grid_p.bind(*arrays, name=name, shapes=shapes), [0] * len(shapes)


_missing_grid_p = Primitive("no_grid")
_missing_grid_p.multiple_results = True
_missing_grid_p.def_abstract_eval(lambda *_, name, shapes: [jax.core.ShapedArray(*shape) for shape in shapes])
mlir.register_lowering(_missing_grid_p, _refuse)
batching.primitive_batchers[_missing_grid_p] = _batch
