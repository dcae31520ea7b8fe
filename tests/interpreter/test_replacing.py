"""Attributes that are replaced for a while: nested, suspended, and for as long as an examination lasts."""

from types import SimpleNamespace

import torch
import triton.language as tl

from assay.interpreter import faithful, lasting
from assay.interpreter.replacing import Shared
from assay.kernels.triton.softmax import softmax
from assay.verify import examine


def members() -> dict[str, object]:
    """Those of Triton's tensors, as they are now."""
    return {name: value for name, value in vars(tl.tensor).items() if name != "__annotations__"}


def test_what_is_suspended_where_nothing_holds_stays_as_it_was() -> None:
    """Suspending changes that nobody has entered neither makes them nor leaves them behind."""
    owner = SimpleNamespace(name="own")
    shared = Shared(lambda: [(owner, "name", "ours")])
    with shared.suspended():
        assert owner.name == "own"
    assert owner.name == "own"
    with shared:
        with shared.suspended():
            assert owner.name == "own"
        assert owner.name == "ours"
    assert owner.name == "own"


def test_lasting_changes_hold_from_their_first_use_to_the_end() -> None:
    """The outermost `lasting` puts them back, others and those outside of it their own end."""
    owner = SimpleNamespace(lasts="own", ends="own")
    lasts = Shared(lambda: [(owner, "lasts", "ours")], lasting=True)
    ends = Shared(lambda: [(owner, "ends", "ours")])
    with lasting():
        assert owner.lasts == "own"
        with lasting(), lasts, ends:
            assert (owner.lasts, owner.ends) == ("ours", "ours")
        assert (owner.lasts, owner.ends) == ("ours", "own")
        with lasts.suspended():
            assert owner.lasts == "own"
        assert owner.lasts == "ours"
    assert owner.lasts == "own"
    with lasts:
        assert owner.lasts == "ours"
    assert owner.lasts == "own"


def test_an_examination_leaves_the_language_as_it_was() -> None:
    """Triton's language acts on arrays between two calls of an examined kernel, and no longer than that."""
    before, seen = members(), []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        seen.append(members() == before)
        return softmax(x)

    assert examine(kernel, "softmax", dtype="float32", effort="quick", examples=0).passed
    assert seen[0]
    assert not any(seen[1:])
    assert members() == before
    with faithful():
        assert members() == before


def test_blocks_of_one_shape_and_of_others_are_told_apart() -> None:
    """Types made in a launch equal those of the same shape and elements, whenever they were made, and no others."""
    early = tl.block_type(tl.float32, [4, 1])
    x = torch.ones(2, 3)
    with lasting(), faithful():
        softmax(x)
        late = tl.block_type(tl.float32, [tl.constexpr(4), 1])
        assert late == early
        assert early == late
        assert late.with_element_ty(tl.int32).with_element_ty(tl.float32) == early
        assert late.with_element_ty(tl.int32) != late
        assert tl.block_type(tl.float32, [1, 4]) != late
        assert tl.float32 == tl.constexpr(tl.float32)
        assert tl.float32 != tl.float16
        assert tl.float32 != tl.pointer_type(tl.float32)
