"""Devices and the roofline: what a scheme costs on a device."""

import dataclasses

import pytest

from assay.configs import table
from assay.precision.choice.roofline import Cost, Device, Roofline, Shape, device_named, devices, running
from assay.precision.errors import UnknownDevice, WrongShape
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES

DEVICE = Device(
    name="round",
    title="round numbers",
    rates={"fp32": 1e12, "bf16": 4e12, "fp8": 8e12},
    microscaling=False,
    bandwidth=1e11,
    memory=1e9,
    achievable=1.0,
    launch=0.0,
    source="made up",
)
SHAPE = Shape(batch=2, prompt=512, context=1000, heads=8, kv_heads=2, head_dim=64, layers=1)
LINEAR = Site("up", "linear", "linear", (1024, 512), "up")
CACHE = Site("attention:kv_cache", "kv_cache", "kv_cache", unit="attention:kv_cache")


def cost(site: Site, scheme: str = "", shape: Shape = SHAPE, device: Device = DEVICE, bits: int = 16) -> Cost:
    """Of one site alone."""
    return Roofline(device, [site], shape, bits).cost(str(site), scheme)


@pytest.mark.parametrize("name", devices())
def test_every_device_has_a_source_for_its_figures(name: str) -> None:
    row, device = table("devices")[name], device_named(name)
    assert any(word in row["source"] for word in ("datasheet", "data sheet", "whitepaper", "documentation"))
    assert "20" in row["source"]
    assert set(device.rates) <= {scheme.compute for scheme in SCHEMES.values()}
    assert device.rates["bf16"] > 1e14
    assert 1e11 <= device.bandwidth < 1e13
    assert 1e10 < device.memory < 1e12
    assert 0 < device.achievable <= 1
    assert device.launch >= 0
    assert device.microscaling == ("fp4" in device.rates)
    for narrow, wide in (("fp8", "bf16"), ("fp4", "fp8"), ("bf16", "tf32"), ("fp6", "bf16")):
        if narrow in device.rates and wide in device.rates:  # one figure with sparsity would be four times another
            assert device.rates[narrow] <= 2.05 * device.rates[wide]
    assert device.rates.get("fp16", device.rates["bf16"]) == device.rates["bf16"]


def test_an_unknown_device_is_one_line_with_the_nearest_names() -> None:
    with pytest.raises(UnknownDevice, match=r"^unknown device 'h20'; did you mean 'h200'") as refused:
        device_named("h20")
    assert "\n" not in str(refused.value)
    with pytest.raises(UnknownDevice, match=r"known: a100, .*h100, .*tpu-v6e"):
        device_named("qqqqqq")
    assert device_named("H200") == device_named("h200")


RUNS: dict[str, tuple[str, str]] = {
    "a100": ("w8a8 w4a16-g128 w-nvfp4 kv-fp8", "fp8"),
    "h200": ("fp8 w4a8-fp8-g128", "mxfp8 nvfp4"),
    "b200": ("mxfp8 mxfp6 nvfp4", ""),
    "mi300x": ("fp8", "mxfp4"),
    "rtx4090": ("fp8", ""),
    "tpu-v5e": ("w8a8", "fp8"),
    "tpu-v6e": ("bf16", "fp16"),
}
"""Of devices, schemes that run natively and others that don't."""


@pytest.mark.parametrize("device", RUNS)
def test_which_schemes_run_where(device: str) -> None:
    native, others = (names.split() for names in RUNS[device])
    for name in (*native, *others):
        how = running(device_named(device), SCHEMES[name])
        assert how.native == (name in native)
        assert how.native or (how.note and how.arithmetic == "bf16")


def test_a_linear_by_hand() -> None:
    """[1024, 512] in 16 bits: 1024 tokens are bound by operations, 2 tokens by bytes."""
    found = cost(LINEAR)
    assert found.bytes == 1024 * 512 * 2
    assert found.kv_bytes == 0
    moved = 1024 * 512 * 2 + 1024 * 512 * 2 + 1024 * 1024 * 2
    assert found.prefill == pytest.approx(max(2 * 1024 * 1024 * 512 / 4e12, moved / 1e11), rel=1e-12)
    assert found.decode == pytest.approx((1024 * 512 * 2 + 2 * 512 * 2 + 2 * 1024 * 2) / 1e11, rel=1e-12)


def test_a_weight_only_linear_by_hand() -> None:
    found = cost(LINEAR, "w4a16-g128")
    assert found.bytes == 1024 * 512 / 2 + 1024 * 4 * 2
    assert found.decode == pytest.approx((found.bytes + 2 * 512 * 2 + 2 * 1024 * 2) / 1e11, rel=1e-12)


def test_an_fp8_linear_by_hand() -> None:
    """fp8: a byte an element, a 16-bit scale each row; its input is read in 16 bits and written in 8 before, with a
    float32 scale each token."""
    found = cost(LINEAR, "fp8")
    assert found.bytes == 1024 * 512 + 1024 * 2
    read = 2 * (512 + 4)
    product = found.bytes + read + 2 * 1024 * 2
    assert found.decode == pytest.approx((product + 2 * 512 * 2 + read) / 1e11, rel=1e-12)


def test_a_scheme_that_falls_back_gains_memory_only() -> None:
    found, wide = cost(LINEAR, "w8a8"), cost(LINEAR)
    assert found.bytes == 1024 * 512 + 1024 * 2
    long = dataclasses.replace(SHAPE, batch=512)
    assert cost(LINEAR, "w8a8", long).prefill == pytest.approx(cost(LINEAR, "", long).prefill, rel=1e-2)
    assert cost(LINEAR, "fp8", long).prefill < 0.99 * cost(LINEAR, "", long).prefill
    assert found.decode == pytest.approx(wide.decode - (wide.bytes - found.bytes) / 1e11, rel=1e-12)


def test_attention_by_hand() -> None:
    """Decode reads the whole cache; a prefill forms half of the products of all pairs; an 8-bit cache takes half."""
    found, small = cost(CACHE), cost(CACHE, "kv-int8")
    assert found.kv_bytes == 2 * 2 * 1000 * 2 * 64 * 2
    assert small.kv_bytes == 2 * 2 * 1000 * 2 * (64 + 4)
    assert found.decode == pytest.approx((found.kv_bytes + 2 * 2 * 8 * 64 * 2) / 1e11, rel=1e-12)
    operations = 4 * 2 * 8 * 64 * (512 * 513 / 2)
    moved = 2 * 2 * 512 * (8 + 2) * 64 * 2 + 2 * 2 * 512 * 2 * 64 * 2
    assert found.prefill == pytest.approx(max(operations / 4e12, moved / 1e11), rel=1e-12)
    assert cost(CACHE, "", dataclasses.replace(SHAPE, causal=False, prompt=20000)).prefill == pytest.approx(
        4 * 2 * 8 * 64 * 20000**2 / 4e12, rel=1e-12
    )


def test_layers_without_a_cache_site_count_as_they_are() -> None:
    one = Roofline(DEVICE, [CACHE], SHAPE)
    three = Roofline(DEVICE, [CACHE], dataclasses.replace(SHAPE, layers=3))
    assert one.rest() == Cost()
    assert three.rest().kv_bytes == 2 * one.cost(str(CACHE)).kv_bytes
    assert three.total({str(CACHE): "kv-int8"}).decode == pytest.approx(
        2 * one.cost(str(CACHE)).decode + one.cost(str(CACHE), "kv-int8").decode
    )


def test_experts_by_hand() -> None:
    """2 tokens that go to 2 of 8 experts read 8 (1 - (3/4)^2) = 3.5 of them on average, and pass 4 rows."""
    site = Site("layer.experts.gate_up", "linear", "experts", (8, 1024, 512), "layer.experts")
    shape = dataclasses.replace(SHAPE, top_k=2)
    found = cost(site, "", shape)
    assert found.bytes == 8 * 1024 * 512 * 2
    assert found.decode == pytest.approx((3.5 * 1024 * 512 * 2 + 4 * 512 * 2 + 4 * 1024 * 2) / 1e11, rel=1e-12)
    moved = found.bytes * (1 - 0.75**1024) + 2048 * (512 + 1024) * 2
    assert found.prefill == pytest.approx(max(2 * 2048 * 1024 * 512 / 4e12, moved / 1e11), rel=1e-12)


def test_experts_in_modules_of_their_own_cost_what_one_tensor_does() -> None:
    shape = dataclasses.replace(SHAPE, top_k=2)
    apart = [Site(f"layer.experts.{e}.w1", "linear", "linear", (1024, 512), "layer.experts") for e in range(8)]
    whole = Site("layer.experts.w1", "linear", "experts", (8, 1024, 512), "layer.experts")
    for scheme in ("", "w4a16-g128", "w8a16"):
        many = Roofline(DEVICE, apart, shape).total({str(site): scheme for site in apart if scheme})
        one = Roofline(DEVICE, [whole], shape).total({str(whole): scheme} if scheme else {})
        for quantity in ("bytes", "prefill", "decode"):
            assert getattr(many, quantity) == pytest.approx(getattr(one, quantity), rel=1e-12)


def test_a_tied_vocabulary_is_stored_once_and_its_product_formed_for_the_last_position() -> None:
    embedding = Site("embed", "embedding", "embedding", (5000, 64), "embed")
    head = Site("lm_head", "linear", "linear", (5000, 64), "lm_head", tied="embed")
    both = Roofline(DEVICE, [embedding, head], SHAPE)
    assert both.total({"embed": "w8a16"}).bytes == 5000 * 64 + 5000 * 2 + both.rest().bytes
    assert both.cost("lm_head").prefill == both.cost("lm_head").decode
    rows = 2 * 64 * 2  # two tokens of 64 values in 16 bits
    assert both.cost("embed").decode == pytest.approx(2 * rows / 1e11, rel=1e-12)
    assert both.cost("embed", "w8a16").decode == pytest.approx((rows + 2 * (64 + 2)) / 1e11, rel=1e-12)


def test_a_float32_model_is_multiplied_in_float32() -> None:
    long = dataclasses.replace(SHAPE, batch=64)
    found = cost(LINEAR, "", long, bits=32)
    assert found.bytes == 1024 * 512 * 4 == cost(LINEAR, "tf32", long, device_named("a100"), 32).bytes
    assert found.prefill == pytest.approx(2 * 64 * 512 * 1024 * 512 / 1e12, rel=1e-12)


@pytest.mark.parametrize("scheme", ["", "fp8", "w8a8", "w4a16-g128"])
@pytest.mark.parametrize("device", devices())
def test_time_grows_with_batch_prompt_and_context(device: str, scheme: str) -> None:
    sites = [LINEAR, CACHE, Site("layer.experts.w", "linear", "experts", (8, 512, 256), "layer.experts")]
    assignment = {"up": scheme, "layer.experts.w": scheme, str(CACHE): "kv-fp8"} if scheme else {}
    before = Cost()
    for step in range(6):
        shape = dataclasses.replace(SHAPE, batch=4**step, prompt=64 * 2**step, context=64 * 3**step, top_k=2)
        now = Roofline(device_named(device), sites, shape).total(assignment)
        assert now.prefill > before.prefill
        assert now.decode > before.decode
        assert now.kv_bytes > before.kv_bytes
        before = now


def test_a_share_and_a_launch_cost_make_everything_slower() -> None:
    half = dataclasses.replace(DEVICE, achievable=0.5)
    slow = dataclasses.replace(DEVICE, launch=1e-3)
    for scheme in ("", "fp8"):
        assert cost(LINEAR, scheme, device=half).decode == pytest.approx(2 * cost(LINEAR, scheme).decode)
        assert cost(LINEAR, scheme, device=slow).decode == pytest.approx(cost(LINEAR, scheme).decode + 1e-3)


def test_a_shape_without_tokens_is_refused() -> None:
    with pytest.raises(WrongShape, match="expected batch of at least 1, got 0"):
        dataclasses.replace(SHAPE, batch=0)
