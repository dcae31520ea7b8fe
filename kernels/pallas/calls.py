"""`pl.pallas_call`, as every kernel here is called: what the program is lowered for decides which grid is taken.

A TPU runs a grid's programs one after another, and what one leaves in scratch memory the next one finds. A GPU runs
them at once, so that its grids have loops inside. Each is interpreted on a CPU: the TPU's, or under `as_on_gpu` the
GPU's.
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
    """``function``, of whose kernels a CPU interprets the grids for GPUs instead of those for TPUs.

    Gradients too, where they are taken within ``function``.
    """

    @functools.wraps(function)
    def interpreted(*arguments: Any, **options: Any) -> Any:
        before = _as_on_gpu.set(True)
        try:
            with set_xla_metadata(assay_grid="gpu"):  # by which jax.jit keeps these programs apart from the others
                return function(*arguments, **options)
        finally:
            _as_on_gpu.reset(before)

    return interpreted


def call(
    name: str, kernel: Callable[..., None], *arrays: jax.Array, gpu: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """``pl.pallas_call(kernel, **options)(*arrays)`` on a TPU, and on a GPU ``gpu(*arrays)``; on a CPU interpreted.

    What it is lowered for, not what is here, decides: `jax.export` for a TPU gives the compiled kernel on a CPU too.
    Where there is no ``gpu``, lowering for one raises NotImplementedError, which names the op.
    """
    none = functools.partial(_no_grid, name=name, results=options["out_shape"])
    if not _as_on_gpu.get():
        on_cpu = pl.pallas_call(kernel, name=name, interpret=True, **options)
    else:
        on_cpu = functools.partial(gpu, interpret=True) if gpu else none
    on_tpu = pl.pallas_call(kernel, name=name, **options)
    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, tpu=on_tpu, cuda=gpu or none, default=none)


def call_on_gpu(kernel: Callable[..., None], *arrays: jax.Array, warps: int, stages: int = 3, **options: Any) -> Any:
    """``pl.pallas_call(kernel, **options)(*arrays)``, compiled by Triton for so many warps and stages of a loop."""
    parameters = plt.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=parameters, **options)(*arrays)


def _no_grid(*arrays: jax.Array, name: str, results: Any) -> Any:
    """What stands in a program in the place of a grid that there isn't."""
    shapes, tree = jax.tree.flatten(results)
    found = _no_grid_p.bind(*arrays, name=name, shapes=tuple((one.shape, one.dtype) for one in shapes))
    return jax.tree.unflatten(tree, found)


def _refuse(context: Any, *arrays: Any, name: str, shapes: Any) -> Any:
    raise NotImplementedError(
        f"{name}: this Pallas kernel has no grid for GPUs; lower it for a TPU or a CPU, or take the kernel of torch "
        "tensors in assay.kernels.triton"
    )


def _batched(arrays: Any, axes: Any, *, name: str, shapes: Any) -> Any:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    return _no_grid_p.bind(*arrays, name=name, shapes=shapes), [0] * len(shapes)


_no_grid_p = Primitive("no_grid")
_no_grid_p.multiple_results = True
_no_grid_p.def_abstract_eval(lambda *_, name, shapes: [jax.core.ShapedArray(*shape) for shape in shapes])
mlir.register_lowering(_no_grid_p, _refuse)
batching.primitive_batchers[_no_grid_p] = _batched
