"""`define_torch`: an op whose definition is a PyTorch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from assay.golden.lowering.frameworks import in_torch
from assay.golden.lowering.spec import STAGES, Definition, options_of, version_of, with_roles
from assay.golden.registry import define
from assay.golden.signature import parse


def define_torch(name: str, signature: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register a PyTorch function as the op ``name``; it stays the function that it is.

    It takes the tensors of ``signature`` (``"x[R,N], gate[R,1] -> y[R,N]"``) by position, and its keywords with
    defaults are the op's options. ``fields`` are those of `Spec`, which say more of the op than a reference does:
    ``rows`` that are independent, sizes, inputs, options with usual values, the ``gradient_of`` which op it is. Golden
    and tolerance are those of the function as a reference (docs/references.md). Raises `DefinitionError` as `define`
    does.
    """

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        text = with_roles(" ".join(signature.split()))
        options = options_of(function, len([tensor for tensor in parse(text).tensors if not tensor.keyword]))
        facts = {"stages": STAGES, "version": version_of((function,)), **fields}
        facts["options"] = {**options, **fields.get("options", {})}
        define(name, text, needs_dtypes=True, **facts)(Definition(name, (in_torch(function),)))
        return function

    return registered
