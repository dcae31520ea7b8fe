"""The kernels that have GPU grids, wrapped so that a CPU interprets those: to examine them without a GPU.

The functions of the other files use the same grids when they are lowered for CUDA.
"""

from __future__ import annotations

from assay.kernels.pallas import add_rmsnorm as _add_rmsnorm
from assay.kernels.pallas import attention as _attention
from assay.kernels.pallas import cross_entropy as _cross_entropy
from assay.kernels.pallas import gemm as _gemm
from assay.kernels.pallas import layernorm as _layernorm
from assay.kernels.pallas import rmsnorm as _rmsnorm
from assay.kernels.pallas import rope as _rope
from assay.kernels.pallas import softmax as _softmax
from assay.kernels.pallas import swiglu as _swiglu
from assay.kernels.pallas.calls import as_on_gpu

softmax = as_on_gpu(_softmax.softmax)
softmax_backward = as_on_gpu(_softmax.softmax_backward)
rmsnorm = as_on_gpu(_rmsnorm.rmsnorm)
rmsnorm_backward = as_on_gpu(_rmsnorm.rmsnorm_backward)
layernorm = as_on_gpu(_layernorm.layernorm)
layernorm_backward = as_on_gpu(_layernorm.layernorm_backward)
add_rmsnorm = as_on_gpu(_add_rmsnorm.add_rmsnorm)
swiglu = as_on_gpu(_swiglu.swiglu)
swiglu_backward = as_on_gpu(_swiglu.swiglu_backward)
rope = as_on_gpu(_rope.rope)
rope_backward = as_on_gpu(_rope.rope_backward)
gemm = as_on_gpu(_gemm.gemm)
attention = as_on_gpu(_attention.attention)
attention_backward = as_on_gpu(_attention.attention_backward)
cross_entropy = as_on_gpu(_cross_entropy.cross_entropy)
cross_entropy_backward = as_on_gpu(_cross_entropy.cross_entropy_backward)
