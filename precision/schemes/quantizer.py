"""How a tensor may be stored: element format, what shares a scale, and how the scale is chosen and stored itself."""

from dataclasses import dataclass
from typing import Literal

from assay.formats.format import Format, format_named
from assay.precision.schemes.ggml import BlockType, block_types

Granularity = Literal["element", "tensor", "row", "group", "block"]
Rule = Literal["absmax", "mse", "output", "awq"]
ScaleFormat = Literal["float32", "bfloat16", "float8_e8m0fnu", "float8_e4m3fn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """Elements of one format with scales (and zero-points) between them: x ~ (code - zero) * scale.

    A row is a vector along the last dimension: an output channel of a weight [N, K], a token of an activation.
    """

    format: str
    """Element format, of `assay.formats`; or a block type of ggml, of configs/ggml.toml, which its code stores."""
    per: Granularity = "element"
    """What shares a scale: nothing has one ("element": a plain cast), the tensor, a row, a group of `size` along the
    row, or a block of `size` rows by `size` columns."""
    size: int = 0
    symmetric: bool = True
    """Without zero-point. An asymmetric range always holds zero."""
    dynamic: bool = True
    """An activation's scales are taken from the values at hand; otherwise once, from the calibration data."""
    scale_format: ScaleFormat = "float32"
    """bfloat16: as checkpoints of 16-bit models hold scales, and transformers rounds those to that are float32; e8m0:
    powers of two, as in OCP MX; e4m3: with one float32 scale of the tensor beside them, as in NVFP4."""
    rule: Rule = "absmax"
    """How a weight's scale is searched: from the largest magnitude; by least squared error; by least squared error of
    the output, columns weighted by the mean square of their input ("output"); with the columns scaled by a power of
    their input's mean magnitude that is searched too ("awq", arXiv:2306.00978)."""

    @property
    def element(self) -> Format:
        """The element format."""
        return self.blocks.element if self.blocks else format_named(self.format)

    @property
    def blocks(self) -> BlockType | None:
        """The block type of ggml that it stores in; None: it has scales as the other fields say."""
        return block_types().get(self.format)

    def bits(self, shape: tuple[int, ...]) -> float:
        """Bits that a tensor of this shape takes, scales and zero-points included."""
        elements, columns = 1.0, float(shape[-1]) if shape else 1.0
        for length in shape:
            elements *= length
        rows = elements / columns if columns else 0.0
        if self.blocks:
            return rows * -(-columns // self.blocks.block) * self.blocks.bytes * 8
        scales = {
            "element": 0.0,
            "tensor": 1.0,
            "row": rows,
            "group": rows * -(-columns // max(self.size, 1)),
            "block": -(-rows // max(self.size, 1)) * -(-columns // max(self.size, 1)),
        }[self.per]
        each = format_named(self.scale_format).bits + (0 if self.symmetric else self.element.bits)
        return elements * self.element.bits + scales * each + (32 if self.scale_format == "float8_e4m3fn" else 0)
