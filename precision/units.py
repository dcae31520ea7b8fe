"""Bytes, seconds and errors formatted for readers."""

import math


def format_bytes(count: float, digits: int = 3) -> str:
    """Return bytes with a decimal prefix: 1.25 MB."""
    return _scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)), digits)


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Return a time in s, ms, µs or ns."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)), digits)


def format_error(error: float | str | None, digits: int = 3) -> str:
    """Return an error, given as a number or as in audit.json."""
    if error is None:
        return "not measured"
    value = float(error)
    return "∞" if math.isinf(value) else f"{value:.{digits}g}"


def _scaled(value: float, units: tuple[tuple[str, float], ...], digits: int) -> str:
    rounded = float(f"{value:.{digits}g}")
    unit, size = next((pair for pair in units if rounded >= pair[1]), units[-1])
    number = rounded / size
    return f"{number:.0f} {unit}" if number >= 10**digits else f"{number:.{digits}g} {unit}"
