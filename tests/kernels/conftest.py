"""What tests of Triton kernels share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from assay.interpreter import faithful


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Triton kernels run in the faithful interpreter; random numbers are those of one seed."""
    torch.manual_seed(0)
    with faithful():
        yield


def distinct(configs: list[Any]) -> list[Any]:
    """One configuration for each set of constants: num_warps and num_stages don't change the interpreter's results."""
    return list({str(config.kwargs): config for config in configs}.values())


def every_configuration(*kernels: Any) -> Any:
    """Parametrise a test that has the fixture ``configured`` by the distinct configurations of autotuned kernels."""
    cases = [
        pytest.param((kernel, config), id=f"{kernel.base_fn.__name__}: {config}")
        for kernel in kernels
        for config in distinct(kernel.configs)
    ]
    return pytest.mark.parametrize("configured", cases, indirect=True)


@pytest.fixture
def configured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has one configuration alone, which is not pruned."""
    kernel, config = request.param
    monkeypatch.setattr(kernel, "configs", [config])
    monkeypatch.setattr(kernel, "early_config_prune", None)
