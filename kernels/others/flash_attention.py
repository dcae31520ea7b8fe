"""flash-attention's Triton kernels, imported without its package's __init__, which needs the CUDA extension."""

import sys
from importlib.util import find_spec
from types import ModuleType

if "flash_attn" not in sys.modules:
    _spec = find_spec("flash_attn")
    _package = ModuleType("flash_attn")
    _package.__path__ = list(_spec.submodule_search_locations or ()) if _spec else []
    sys.modules["flash_attn"] = _package

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary

__all__ = ["apply_rotary", "cross_entropy_loss", "layer_norm_fn", "rms_norm_fn"]
