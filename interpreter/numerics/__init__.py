"""Numbers as a GPU's instructions give them, on NumPy arrays.

`floats`: conversions and single roundings; `emission`: a compiler's choices; `dots`: tensor cores; `libdevice`: CUDA's
mathematical functions; `ptx` and `ptx_floats`: inline assembly.
"""
