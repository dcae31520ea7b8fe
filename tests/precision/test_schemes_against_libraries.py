"""Simulation against the libraries that serve: scales, zero-points, codes and values, bit for bit.

compressed-tensors is followed in every bit, for weights and for inputs. torchao is, where it divides by the scale as
compressed-tensors does; where it multiplies by the reciprocal instead, codes may differ by one at midpoints.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats import all_values
from assay.precision.export.configurations.compressed_tensors import quantization_config, why_not
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES, Quantizer, store
from assay.precision.schemes.fitting import FakeQuantizer
from assay.precision.schemes.quantizer import codes_of, divisor_of, scales_of

SCHEME_NAMES = [
    name
    for name, scheme in SCHEMES.items()
    if "linear" in scheme.site_types
    and scheme.weight is not None
    and scheme.weight.per != "element"
    and scheme.transform == "none"
    and why_not(scheme) is None
]
INPUTS = [name for name in SCHEME_NAMES if SCHEMES[name].activation is not None]


def tensors(rows: int = 48, columns: int = 256) -> list[Tensor]:
    """Values of many kinds: normal, bfloat16 (whose ratios meet midpoints), wide, one-sided, with zero rows, tiny."""
    draw = torch.Generator().manual_seed(3)
    normal = torch.randn(rows, columns, generator=draw)
    wide = normal * torch.exp2(torch.randint(-40, 40, (rows, columns), generator=draw).float())
    integers = torch.randint(-127, 128, (rows, columns), generator=draw) / 16.0
    holed = normal.clone()
    holed[::3] = 0.0
    holed[1, :32] = 0.0
    powers = torch.exp2(torch.randint(-9, 9, (rows, columns), generator=draw).float()) * normal.sign()
    return [
        normal,
        normal.bfloat16().float(),
        wide,
        normal.abs() + 3.0,
        -normal.abs(),
        integers,
        holed,
        powers,
        normal * 1e-20,
    ]


def arguments(scheme: str) -> Any:
    """The config group of a scheme, as the library reads it."""
    from compressed_tensors.quantization import QuantizationScheme

    sites = {"x": Site("x", "linear", "linear", (48, 256))}
    group = quantization_config({"x": scheme}, sites).content["config_groups"]["group_000"]
    return QuantizationScheme.model_validate(group)


def ranges(x: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Least and greatest value of what shares a scale, in the shape that the library keeps scales in."""
    if args.strategy == "tensor":
        return torch.aminmax(x)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.strategy in ("group", "tensor_group"):
        groups = x.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)
    return x.amin(1, keepdim=True), x.amax(1, keepdim=True)


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_weights_are_stored_as_compressed_tensors_stores_them(scheme: str) -> None:
    """Its scales and zero-points from a weight, and its values with them, equal the simulated ones in every bit.

    Scales are held in bfloat16 here, as in checkpoints; the library's are rounded to it as well.
    """
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, quantizer = arguments(scheme).weights, SCHEMES[scheme].weight
    assert quantizer is not None
    for x in tensors():
        whole = generate_gparam(*torch.aminmax(x)) if args.strategy == "tensor_group" else None
        least, most = ranges(x, args)
        scale, zero = calculate_qparams(least, most, args, global_scale=whole)
        some = (torch.maximum(most, -least) > 0).flatten()  # of zeros alone any scale will do
        if quantizer.scale_format == "bfloat16":
            scale = scale.bfloat16().float()
        ours = scales_of(x, quantizer)
        if whole is None:
            assert torch.equal(ours.scale.flatten()[some], scale.flatten()[some])
        else:
            assert ours.divisor is not None
            assert torch.equal(ours.divisor.flatten(), whole)
            assert torch.equal(ours.scale.flatten()[some], (scale / whole).flatten()[some])
        if ours.zero is not None:
            zero = ours.zero.view(scale.shape).to(torch.int8)  # from a scale in bfloat16, see the test below
        values = fake_quantize(x, scale, None if quantizer.symmetric else zero, args, global_scale=whole)
        assert torch.equal(store(x, quantizer, ours), values)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_those_of_compressed_tensors(bits: int) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    quantizer = Quantizer(format=f"int{bits}", per="group", size=32, symmetric=False)
    args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=False)
    for x in tensors():
        scale, zero = calculate_qparams(*ranges(x, args), args)
        ours = scales_of(x, quantizer)
        some = x.unflatten(1, (-1, 32)).abs().amax(2) > 0  # of zeros alone any zero-point will do
        assert ours.zero is not None
        assert torch.equal(ours.scale[..., 0], scale)
        assert torch.equal(ours.zero[..., 0][some], zero.float()[some])


@pytest.mark.parametrize("scheme", INPUTS)
def test_inputs_are_stored_as_compressed_tensors_stores_them(scheme: str) -> None:
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from compressed_tensors.quantization.quant_config import QuantizationStatus

    args, quantizer = arguments(scheme).input_activations, SCHEMES[scheme].activation
    assert quantizer is not None
    for x in tensors():
        x = x.reshape(4, 12, -1)
        module: Any = torch.nn.Module()
        module.quantization_status = QuantizationStatus.FROZEN
        stored = FakeQuantizer(quantizer)
        if args.dynamic == "local":
            stored = FakeQuantizer(
                quantizer, divisor=divisor_of(x[:3], quantizer)
            )  # of calibration: some values lie beyond
            module.input_global_scale = stored.divisor.reshape(1)  # type: ignore[union-attr]
        elif not args.dynamic:
            stored = FakeQuantizer(quantizer, scales_of(x[:3].flatten(0, 1), quantizer))
            module.input_scale = stored.scales.scale.reshape(1)  # type: ignore[union-attr]
        assert torch.equal(stored(x), forward_quantize(module, x.clone(), "input", args))


def in_float32(scheme: str) -> Quantizer:
    """How a scheme stores a weight, but with float32 scales."""
    quantizer = SCHEMES[scheme].weight
    assert quantizer is not None
    return replace(quantizer, scale_format="float32")


def test_fp8_rows_are_torchao_s() -> None:
    """torchao's float8 tensors of rows, blocks and the whole have the simulated scales, codes and values, where these
    scales are float32 as torchao's are."""
    from torchao.quantization.granularity import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    for scheme, granularity in (("fp8", PerRow()), ("fp8-tensor", PerTensor()), ("fp8-block", PerBlock([128, 128]))):
        quantizer = in_float32(scheme)
        for x in tensors(128)[:6]:
            theirs = Float8Tensor.from_hp(x, float8_dtype=torch.float8_e4m3fn, granularity=granularity)
            ours = scales_of(x, quantizer)
            assert torch.equal(theirs.scale.flatten(), ours.scale.flatten())
            assert torch.equal(theirs.dequantize().float(), store(x, quantizer))


def near(x: Tensor, quantizer: Quantizer, scale: Tensor, values: Tensor) -> tuple[bool, float]:
    """Whether torchao's scales are the simulated ones and no value more than a step off; the share that is off."""
    ours = scales_of(x, quantizer)
    step = ours.scale.expand(*codes_of(x, quantizer, ours).shape).reshape(x.shape)
    off = (values - store(x, quantizer)).abs()
    same = torch.equal(scale.flatten(), ours.scale.flatten())
    return same and bool((off <= step * 1.001).all()), float((off > 0).float().mean())


def test_int8_rows_are_torchao_s_but_for_midpoints() -> None:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows import Int8Tensor

    quantizer = in_float32("w8a16")
    for x in tensors()[:6]:
        theirs = Int8Tensor.from_hp(x, granularity=PerRow())
        close, share = near(x, quantizer, theirs.scale, theirs.dequantize().float())
        assert close
        assert share < 0.01


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_groups_are_torchao_s_but_for_midpoints(bits: int, symmetric: bool) -> None:
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor

    quantizer = Quantizer(format=f"int{bits}", per="group", size=64, symmetric=symmetric)
    mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    for x in tensors()[:6]:
        dtype = {3: torch.int3, 4: torch.int4}[bits]
        theirs = IntxUnpackedToInt8Tensor.from_hp(x, (1, 64), dtype, mapping_type=mapping)
        close, share = near(x, quantizer, theirs.scale, theirs.dequantize().float())
        assert close
        assert share < 0.01


@pytest.mark.parametrize(("scheme", "mode"), [("mxfp4", "EVEN"), ("mxfp6", "EVEN"), ("mxfp8", "RCEIL")])
def test_microscaling_is_torchao_s(scheme: str, mode: str) -> None:
    """The modes that are exported give the simulated powers of two and values.

    For MXFP8 but in groups whose largest magnitude is 448 times a power of two: there compressed-tensors, which is
    followed, takes the next power.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    elements = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp6": DTYPE_FP6_E2M3, "mxfp8": torch.float8_e4m3fn}
    quantizer = SCHEMES[scheme].weight
    assert quantizer is not None
    for x in tensors()[:6]:
        theirs = MXTensor.to_mx(x, elements[scheme], 32, scaling_mode=ScaleCalculationMode[mode])
        groups = x.unflatten(1, (-1, 32))
        edge = torch.frexp(groups.abs().amax(2)).mantissa == 0.875
        same = ~edge if scheme == "mxfp8" else torch.ones_like(edge)
        assert bool(same.any())
        scale = scales_of(x, quantizer).scale[..., 0]
        assert torch.equal(theirs.scale.float()[same], scale[same])
        values, read = (
            store(x, quantizer).unflatten(1, (-1, 32)),
            theirs.dequantize(torch.float32).unflatten(1, (-1, 32)),
        )
        assert torch.equal(values[same], read[same])


def test_nvfp4_is_torchao_s_but_for_midpoints() -> None:
    """torchao's scale of the tensor is the reciprocal, so that products round otherwise: scales of groups may differ by
    one e4m3 step and values by one e2m1 step, in under 1 % of them."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    quantizer = SCHEMES["nvfp4"].weight
    assert quantizer is not None
    for x in (tensors()[0], tensors()[1], tensors()[3], tensors()[4]):
        whole = per_tensor_amax_to_scale(x.abs().amax())
        theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole)
        ours = scales_of(x, quantizer)
        read, values = theirs.dequantize(torch.float32), store(x, quantizer)
        off = (read - values).abs() > 1e-5 * values.abs()
        assert float(off.float().mean()) < 0.01
        step = 2.0 * ours.scale.expand(*ours.scale.shape[:2], 16).flatten(1)
        assert bool(((read - values).abs() <= step * 1.001).all())


def nf4_by_search(x: Tensor) -> Tensor:
    """Blocks of 64 of a row as bitsandbytes stores them: over their largest magnitude, the nearest of 16 values."""
    table = all_values("nf4").float()
    blocks = x.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    share = torch.where(largest > 0, blocks / largest, 0.0)
    nearest = (share[..., None].double() - table.double()).abs().argmin(-1)
    return (table[nearest] * largest).reshape(x.shape)


@pytest.mark.parametrize("x", tensors())
def test_nf4_is_the_nearest_of_sixteen_shares_of_the_largest_magnitude(x: Tensor) -> None:
    quantizer = SCHEMES["nf4-g64"].weight
    assert quantizer is not None
    stored = store(x, quantizer)
    assert torch.equal(stored, nf4_by_search(x))
    assert not torch.equal(stored, store(x, replace(quantizer, format="float4_e2m1fn")))
    spoilt = x.clone()
    spoilt[0, 0] = torch.nan
    assert bool(store(spoilt, quantizer)[0, 0].isnan())
    assert quantizer.bits((2, 128)) == 2 * 128 * 4 + 4 * 32
