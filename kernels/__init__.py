"""Kernels under test, one op a file, by backend."""
