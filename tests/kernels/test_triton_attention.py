"""The Triton attention: arguments, registration, and a few cases against torch in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import attention as module
from assay.kernels.triton.attention import attention
from tests.kernels.conftest import distinct
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

Inputs = dict[str, Any]


def inputs(
    queries: int = 5,
    keys: int = 7,
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    width: int = 8,
    value_width: int = 12,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(queries + keys + heads + width)
    shapes = (batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, value_width)
    return [torch.randn(shape, generator=drawn).to(dtype) for shape in shapes]


def per_head(heads: int) -> dict[str, Tensor]:
    """Slopes and sinks, each different."""
    return {"slopes": 0.5 / torch.arange(1.0, heads + 1), "sinks": torch.arange(float(heads)) - 1}


def assert_right(tensors: list[Tensor], **options: Any) -> None:
    """Within what rounded probabilities and one rounded store leave."""
    out, lse = attention(*tensors, **options, return_lse=True)
    loose = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[tensors[0].dtype]
    right, right_lse = reference("attention")(*tensors, **options, return_lse=True)
    assert (out.dtype, lse.dtype) == (tensors[0].dtype, torch.float32)
    torch.testing.assert_close(out.double(), right, rtol=loose, atol=loose)
    torch.testing.assert_close(lse.double(), right_lse, rtol=4e-6, atol=4e-6)


MASKS = [  # of each configuration: masked blocks on both sides of those without; as evidence on one side, or all masked
    ("none", (70, 80)),
    pytest.param("bottom_right", None, marks=pytest.mark.evidence),
    pytest.param("top_left", (3, 9), marks=pytest.mark.evidence),
]
WRONG: dict[str, tuple[Inputs, type[Exception], str]] = {
    "a query of doubles": ({"q": torch.zeros(2, 4, 5, 8).double()}, TypeError, "q"),
    "a query that is no tensor": ({"q": [0.0]}, TypeError, "q"),
    "a query of three dimensions": ({"q": torch.zeros(4, 5, 8)}, ValueError, "q"),
    "heads too wide": (dict(zip("qkv", inputs(width=257), strict=True)), ValueError, "q"),
    "values too wide": (dict(zip("qkv", inputs(value_width=257), strict=True)), ValueError, "v"),
    "keys of another dtype": ({"k": torch.zeros(2, 2, 7, 8).half()}, TypeError, "k"),
    "keys of another width": ({"k": torch.zeros(2, 2, 7, 9)}, ValueError, "k"),
    "keys of another batch": ({"k": torch.zeros(3, 2, 7, 8)}, ValueError, "k"),
    "heads that share nothing": (dict(zip("qkv", inputs(heads=5), strict=True)), ValueError, "k"),
    "no key heads": (dict(zip("qkv", inputs(heads=4, groups=0), strict=True)), ValueError, "k"),
    "values of another dtype": ({"v": torch.zeros(2, 2, 7, 12).half()}, TypeError, "v"),
    "fewer values than keys": ({"v": torch.zeros(2, 2, 6, 12)}, ValueError, "v"),
    "values elsewhere": ({"v": torch.zeros(2, 2, 7, 12, device="meta")}, ValueError, "v"),
    "an unknown mask": ({"causal": "left"}, ValueError, "causal"),
    "a window of one side": ({"window": (3,)}, ValueError, "window"),
    "a window that ends before it begins": ({"window": (3, -1)}, ValueError, "window"),
    "a softcap of zero": ({"softcap": 0.0}, ValueError, "softcap"),
    "no slopes": ({"alibi": True}, ValueError, "slopes"),
    "slopes of 16 bits": ({"alibi": True, "slopes": torch.zeros(4).half()}, TypeError, "slopes"),
    "slopes of the key heads": ({"alibi": True, "slopes": torch.zeros(2)}, ValueError, "slopes"),
    "sinks that are said to be there": ({"sinks": True}, TypeError, "sinks"),
    "sinks of the key heads": ({"sinks": torch.zeros(2)}, ValueError, "sinks"),
    "sinks elsewhere": ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    changed, error, argument = WRONG[name]
    with pytest.raises(error, match=rf"^{argument}: expected "):
        attention(**{**dict(zip("qkv", inputs(), strict=True)), **changed})


def test_the_operator_is_well_registered() -> None:
    operator = torch.ops.assay.attention.default
    torch.library.opcheck(operator, (*inputs(), None, None, 0.3, None, None, None))
    half = inputs(70, 3, dtype=torch.float16)
    torch.library.opcheck(operator, (*half, *per_head(4).values(), 0.3, 5.0, -3, 2))


def test_compiled_code_gives_the_same_bits() -> None:
    tensors, options = inputs(70, 71), {"causal": "bottom_right", "window": (9, 0), "alibi": True, **per_head(4)}
    compiled = torch.compile(lambda *x: attention(*x, **options) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), attention(*tensors, **options) + 1)


def _shape(config: Any) -> str:
    sides = f"{config.kwargs['BLOCK_M']} x {config.kwargs['BLOCK_N']}"
    return f"{sides}, {config.num_warps} warps, {config.num_stages} stages"


@pytest.mark.parametrize("config", distinct(module.CONFIGS), ids=_shape)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_every_configuration(
    config: Any, causal: str, window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._attention_kernel, "configs", [config])
    monkeypatch.setattr(module._attention_kernel, "early_config_prune", None)
    assert_right(inputs(150, 300, batch=1, heads=2, groups=1), causal=causal, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 64, 128, 256])
def test_a_configuration_is_left(dtype: torch.dtype, width: int) -> None:
    """For each dtype, width of heads and number of rows; float32's are those of one stage."""
    for rows, masked in itertools.product((1, 64, 65, 1000), (False, True)):
        arguments = {
            "q_ptr": torch.zeros(1, dtype=dtype),
            "Sq": rows,
            "B": 1,
            "GROUP_SIZE": 1,
            "HAS_MASK": masked,
            "slopes_ptr": None,
        }
        left = module.prune_configs(module.CONFIGS, arguments | {"BLOCK_D": width, "BLOCK_DV": width})
        assert left
        assert {config.num_stages == 1 for config in left} == {dtype == torch.float32}


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(5, 9), (9, 5), (1, 70), (70, 37), pytest.param(130, 67, marks=pytest.mark.evidence)]
)
def test_options_act_together(causal: str, queries: int, keys: int) -> None:
    """Every mask with and without window, softcap, bias and sink, with more keys than queries and with fewer."""
    tensors, vectors = inputs(queries, keys, batch=1), per_head(4)
    for window, softcap, alibi, sinks in itertools.product([None, (2, 3)], [None, 1.5], [False, True], [False, True]):
        options: Inputs = {"window": window, "softcap": softcap, "scale": -0.7 if softcap else None}
        options |= {"alibi": alibi, "slopes": vectors["slopes"], "sinks": vectors["sinks"] if sinks else None}
        assert_right(tensors, causal=causal, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "value_width"), [(1, 7), (5, 1), (40, 16), (256, 80), (16, 256)])
def test_heads_of_any_width(dtype: torch.dtype, width: int, value_width: int) -> None:
    assert_right(inputs(17, 33, width=width, value_width=value_width, dtype=dtype), causal="bottom_right")


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (6, 3), (7, 1), (130, 1)])
def test_any_number_of_heads_shares_a_key_head(heads: int, groups: int) -> None:
    assert_right(inputs(3, 9, heads=heads, groups=groups), causal="bottom_right", alibi=True, **per_head(heads))


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._attention_kernel, "configs", module.CONFIGS[-1:])
    monkeypatch.setattr(module._attention_kernel, "early_config_prune", None)
    q, k, v = inputs(70, 90)
    vectors = per_head(4)
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([torch.full_like(k, math.nan), k], -1)[..., 1],
        v.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ]
    stepped = {name: torch.stack([vector, vector + 9], -1)[:, 0] for name, vector in vectors.items()}
    assert torch.equal(attention(*strided, alibi=True, **stepped), attention(q, k, v, alibi=True, **vectors))
    expanded = [x[:1, :1].expand(2, heads, -1, -1) for x, heads in ((q, 4), (k, 2), (v, 2))]
    assert_right(expanded, alibi=True, slopes=vectors["slopes"][:1].expand(4), sinks=vectors["sinks"][:1].expand(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_the_mask_stays_there(dtype: torch.dtype) -> None:
    for place in (3, 66, 140):
        for bad in (math.nan, math.inf, -math.inf):
            q, k, v = inputs(150, 150, batch=1, heads=1, groups=1, dtype=dtype)
            seen = torch.arange(150).sub(place).abs() <= 4
            right = attention(q, k, v, window=(4, 4))[0, 0]
            v[0, 0, place, 5] = bad
            out = attention(q, k, v, window=(4, 4))[0, 0]
            assert torch.equal(out[~seen], right[~seen])
            assert torch.equal(out[:, 6:], right[:, 6:])
            assert bool((out[seen, 5].isnan() if math.isnan(bad) else out[seen, 5] == bad).all())
            k[0, 0, place] = math.nan
            out = attention(q, k, v, window=(4, 4))[0, 0]
            assert torch.equal(out[~seen], right[~seen])
            assert bool(out[seen].isnan().all())


def test_opposite_infinities_that_are_seen_are_nan() -> None:
    """One row sees both, those before it one; in whole blocks as well as in those that the mask cuts through."""
    for keys in (5, 300):
        q, k, v = inputs(5, keys, batch=1, heads=1, groups=1)
        v[0, 0, 0], v[0, 0, -1] = math.inf, -math.inf
        out = attention(q, k, v, causal="bottom_right")[0, 0]
        assert bool((out[:-1] == math.inf).all())
        assert bool(out[-1].isnan().all())


def test_nothing_to_attend_to() -> None:
    """Without keys, or behind the mask: zero and -inf, or the sink's logit; without queries, heads or width: empty."""
    sinks = per_head(4)["sinks"]
    for queries, keys in ((5, 0), (9, 3)):
        tensors = inputs(queries, keys)
        out, lse = attention(*tensors, causal="bottom_right", return_lse=True)
        assert bool((out[:, :, : queries - keys] == 0).all())
        assert bool((lse[:, :, : queries - keys] == -math.inf).all())
        out, lse = attention(*tensors, causal="bottom_right", sinks=sinks, return_lse=True)
        assert bool((out[:, :, : queries - keys] == 0).all())
        torch.testing.assert_close(lse[:, :, : queries - keys], sinks[:, None].expand(2, 4, queries - keys))
    for sizes in ({"queries": 0}, {"batch": 0}, {"heads": 0}, {"value_width": 0}):
        tensors = inputs(**{"queries": 5, "keys": 7, **sizes})
        out, lse = attention(*tensors, return_lse=True)
        assert out.shape == (*tensors[0].shape[:3], tensors[2].shape[3])
        assert lse.shape == tensors[0].shape[:3]
    assert_right(inputs(5, 7, width=0))


def test_large_windows_and_few_of_many_keys() -> None:
    """A window beyond every key binds no row; one at the end of many keys reads but a few."""
    tensors = inputs(9, 1000, batch=1)
    assert torch.equal(attention(*tensors, window=(2**40, 2**40)), attention(*tensors))
    tensors[2][:, :, :900] = math.nan
    out = attention(*tensors, causal="bottom_right", window=(60, 0))
    assert bool(out.isfinite().all())
