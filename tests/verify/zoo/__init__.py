"""Kernels to test the harness on: honest ones that it must pass, and copies with one fault each that it must reject."""

from .entry import Entry, Faulty
from .faulty import FAULTY, HANGING
from .honest import HONEST

__all__ = ["FAULTY", "HANGING", "HONEST", "Entry", "Faulty"]
