"""Right calls of the wrappers of Triton kernels that go along a sequence."""

import torch

from assay.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward
from assay.kernels.triton.selective_scan import selective_scan, selective_scan_backward
from tests.kernels.triton_calls import BF16, Call

CONVOLVED = {"x": torch.randn(2, 7, 5, dtype=BF16).mT, "weight": torch.randn(5, 4), "bias": torch.randn(5)}
CHANNELS = (("weight", torch.zeros(4, 4)), ("bias", torch.zeros(6)), ("activation", "gelu"))
SCANNED = {
    **{name: torch.randn(2, 7, 5, dtype=BF16).mT for name in ("u", "delta")},
    "a": -torch.rand(3, 5).t(),
    "b": torch.randn(2, 3, 7),
    "c": torch.randn(2, 3, 7, dtype=BF16),
    "skip": torch.randn(5),
}
STATES = (
    *(("delta", torch.zeros(2, 5, 8)), ("a", torch.zeros(5, 3, dtype=BF16)), ("a", torch.zeros(6, 3))),
    *(("b", torch.zeros(2, 4, 7)), ("c", torch.zeros(2, 3, 8)), ("skip", torch.zeros(6))),
)
SCAN_CALLS = [
    Call(causal_conv1d, CONVOLVED, {"activation": "silu"}, (True,), CHANNELS),
    Call(
        causal_conv1d_backward,
        {**CONVOLVED, "dy": torch.randn(2, 5, 7)},
        {"activation": "silu"},
        (True, True),
        (*CHANNELS, ("dy", torch.zeros(2, 5, 8))),
    ),
    Call(selective_scan, SCANNED, {"softplus": True}, (True,), STATES),
    Call(
        selective_scan_backward,
        {**SCANNED, "dy": torch.randn(2, 5, 7)},
        {"softplus": True},
        (True,),
        (*STATES, ("dy", torch.zeros(2, 5, 8)), ("dy", torch.zeros(2, 5, 7, dtype=torch.float64))),
    ),
]
