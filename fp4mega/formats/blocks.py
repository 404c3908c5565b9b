"""Block formats by name: element format, block length along the reduced axis, and how blocks are scaled."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from fp4mega.formats.elements import E2M1, E4M3, E5M2, E8M0, ElementFormat

ScaleRule = Literal["two_level", "floor", "rceil", "even", "amplitude", "power_of_two"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a tensor is stored. With q an element's value, a block's scale and g the global scale, the value is

    - `two_level` (NVFP4): q * scale / g, block scale E4M3, g float32 per scope;
    - `floor`, `rceil`, `even` (MXFP4): q * scale, block scale E8M0;
    - `amplitude` (MXFP4): q * scale / 6, the scale being the power of two nearest the block's largest magnitude;
    - `power_of_two` (FP8): q / g, no blocks, g a float32 power of two per scope.
    """

    name: str
    element: ElementFormat
    block: int | None
    scale: ElementFormat | None
    scale_rule: ScaleRule

    @property
    def has_global(self) -> bool:
        """True when values also share a float32 scale over a scope."""
        return self.scale_rule in ("two_level", "power_of_two")

    @property
    def packed(self) -> bool:
        """True when two codes share a byte."""
        return self.element.bits == 4


_FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("nvfp4", E2M1, 16, E4M3, "two_level"),
        Format("mxfp4_floor", E2M1, 32, E8M0, "floor"),
        Format("mxfp4_rceil", E2M1, 32, E8M0, "rceil"),
        Format("mxfp4_even", E2M1, 32, E8M0, "even"),
        Format("mxfp4_amplitude", E2M1, 32, E8M0, "amplitude"),
        Format("e4m3", E4M3, None, None, "power_of_two"),
        Format("e5m2", E5M2, None, None, "power_of_two"),
    )
}


def list_formats() -> list[str]:
    """Names of every format."""
    return list(_FORMATS)


def get_format(format: str | Format) -> Format:
    """The format of that name; a Format is returned as it is. Raises ValueError with the nearest name."""
    if isinstance(format, Format):
        return format
    if format not in _FORMATS:
        near = get_close_matches(str(format), list(_FORMATS), n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"format={format!r} is unknown{hint}; allowed: {', '.join(_FORMATS)}")
    return _FORMATS[format]
