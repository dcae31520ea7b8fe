"""Trying out which sizes a reference takes is not heard."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import warnings

import pytest
import torch

from assay.golden.lowering import example_of


def talkative(x: torch.Tensor) -> torch.Tensor:
    print("shape", x.shape)
    print("to the other stream", file=sys.stderr)
    warnings.warn("not tuned for this size", stacklevel=1)
    return torch.softmax(x, -1)


def test_sizes_are_tried_in_silence(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    assert example_of(talkative, lambda: torch.randn(4, 6)).text == "x[B,C] -> out[B,C]"
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []
    print("heard again")
    assert capfd.readouterr().out == "heard again\n"


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_elsewhere_refuses_no_size() -> None:
    assert example_of(talkative, lambda: torch.randn(4, 6)).sizes == {"B": 4, "C": 6}


def test_an_error_is_told_though_what_was_printed_is_not(capfd: pytest.CaptureFixture[str]) -> None:

    def refusing(x: torch.Tensor) -> torch.Tensor:
        print("no")
        raise ValueError("expected something else")

    with pytest.raises(ValueError, match="expected something else"):
        example_of(refusing, lambda: torch.randn(4, 6))
    assert capfd.readouterr() == ("", "")


def test_a_size_that_a_mask_refuses_is_not_logged() -> None:
    log, found = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(1000)
    log.addHandler(found)
    try:
        example_of(lambda x, mask: x.masked_fill(~mask, 0.0), lambda: [torch.randn(8, 8), torch.ones(8, 8).bool()])
    finally:
        log.removeHandler(found)
    assert [record.getMessage() for record in found.buffer] == []
    assert not log.disabled
