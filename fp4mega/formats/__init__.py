"""What a number is: element formats, block formats with their scale rules, quantized tensors, scale layout, random bits."""

from fp4mega.formats.blocks import Format, ScaleRule, get_format, list_formats
from fp4mega.formats.elements import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    ElementFormat,
    Rounding,
    decode,
    encode,
    encode_e8m0,
    round_to,
)
from fp4mega.formats.qtensor import QTensor, pack_nibbles, qtensor_spec, unpack_nibbles
from fp4mega.formats.quantize import fake_quantize, quantize
from fp4mega.formats.random import counter_bits
from fp4mega.formats.scale_layout import from_tcgen05, to_tcgen05
from fp4mega.formats.scales import (
    mx_scale,
    nvfp4_block_scale,
    nvfp4_global_scale,
    power_of_two_scale,
    quotient,
)

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "ElementFormat",
    "Format",
    "QTensor",
    "Rounding",
    "ScaleRule",
    "counter_bits",
    "decode",
    "encode",
    "encode_e8m0",
    "fake_quantize",
    "from_tcgen05",
    "get_format",
    "list_formats",
    "mx_scale",
    "nvfp4_block_scale",
    "nvfp4_global_scale",
    "pack_nibbles",
    "power_of_two_scale",
    "qtensor_spec",
    "quantize",
    "quotient",
    "round_to",
    "to_tcgen05",
    "unpack_nibbles",
]
