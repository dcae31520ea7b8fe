"""Experiments on the definition: which change of it gives the kernel's numbers."""
