"""The call that an op makes of a kernel, in words, and whether the kernel's signature accepts it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.verify.cases.case import Case

_OF_A_SIGNATURE = re.compile("unexpected keyword argument|positional argument|missing [0-9]+ required|multiple values")


def call_in_words(case: Case, listed: Mapping[str, Sequence[Any]]) -> str:
    """Return e.g. ``f(x, weight, eps=1e-06)``: tensors by position, the listed options and their tensors by keyword."""
    positional, keywords = _arguments(case, listed)
    return f"f({', '.join([*positional, *(f'{name}={value}' for name, value in keywords.items())])})"


def signature_mismatch(kernel: Callable[..., Any], case: Case, listed: Mapping[str, Sequence[Any]]) -> str:
    """Return why the kernel's signature doesn't accept the op's call; empty if it does, or if the signature is
    unknown."""
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):  # a builtin may say nothing of its arguments
        return ""
    positional, keywords = _arguments(case, listed)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return f"called as {call_in_words(case, listed)}, but it takes {signature}: {error}"
    return ""


def is_of_signature(error: BaseException) -> bool:
    """Whether an error says that a function was called with arguments that it doesn't take."""
    return isinstance(error, TypeError) and _OF_A_SIGNATURE.search(str(error)) is not None


def _arguments(case: Case, listed: Mapping[str, Sequence[Any]]) -> tuple[list[str], dict[str, Any]]:
    tensors = case.signature.tensors
    flags = [name for name, option in case.definition.options.items() if option.tensor]
    keywords = {name: None if name in flags else case.options[name] for name in listed}
    called_for = [{name: value} for name, values in listed.items() for value in values]
    signatures = [case.signature, *(case.definition.signature(options) for options in called_for)]
    keywords |= {tensor.name: tensor.name for result in signatures for tensor in result.tensors if tensor.keyword}
    return [tensor.name for tensor in tensors if not tensor.keyword], keywords
