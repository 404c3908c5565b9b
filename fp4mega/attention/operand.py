"""How one operand of one matrix product is represented, and the short string that spells it.

Spelling: `<format>[/<scope>][+sr]`, for example `nvfp4/head`, `mxfp4_rceil`, `e4m3/tile`, `e5m2/head+sr`,
`bf16`, `none`, `same`.

- `format` is a name of `fp4mega.formats`, or `bf16` (a cast), `none` (left as it is), or `same`
  (a backward operand that is bit for bit the forward's).
- `scope` says what shares one FP32 scale: `tensor`, `head` (one per batch entry or packed sequence, and
  head), `row` (one per vector along the reduced axis), `tile` (one per kernel tile), `unit` (no scale).
- `+sr` rounds stochastically; without it rounding is to nearest, ties to even.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

FLOAT_FORMATS = ("e4m3", "e5m2")
MX_FORMATS = ("mxfp4_floor", "mxfp4_rceil", "mxfp4_even", "mxfp4_amplitude")
UNQUANTIZED = ("none", "bf16")
FORMATS = (*UNQUANTIZED, "same", "nvfp4", *MX_FORMATS, *FLOAT_FORMATS)
SCOPES = ("tensor", "head", "row", "tile", "unit")

_DEFAULT_SCOPE = {"nvfp4": "head", "e4m3": "head", "e5m2": "head"}

Rounding = Literal["nearest_even", "stochastic"]


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand's representation: format name, scope of its FP32 scale, rounding."""

    format: str
    scope: str | None = None
    rounding: Rounding = "nearest_even"

    @property
    def quantized(self) -> bool:
        """True when the operand is carried in 8 bits or fewer."""
        return self.format not in (*UNQUANTIZED, "same")

    @property
    def bits(self) -> float:
        """Stored bits a value, block scales included; 16 for an unquantized operand."""
        if self.format == "nvfp4":
            return 4.5
        if self.format in MX_FORMATS:
            return 4.25
        return 8.0 if self.format in FLOAT_FORMATS else 16.0

    def __str__(self) -> str:
        scope = (
            f"/{self.scope}" if self.scope and self.scope != _DEFAULT_SCOPE.get(self.format) else ""
        )
        return f"{self.format}{scope}{'+sr' if self.rounding == 'stochastic' else ''}"


def parse_operand(spelling: str, *, field: str) -> Operand:
    """Read an operand's spelling. Raises ValueError naming the field, the value and what is allowed."""
    if not isinstance(spelling, str):
        raise ValueError(f"{field}={spelling!r}: expected a string such as 'nvfp4' or 'e4m3/head'")
    body, plus, suffix = spelling.partition("+")
    if plus and suffix != "sr":
        raise ValueError(f"{field}={spelling!r}: the only rounding suffix is '+sr' (stochastic)")
    name, slash, scope_text = body.partition("/")
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(
            f"{field}={spelling!r}: unknown format {name!r}{hint}; allowed: {', '.join(FORMATS)}"
        )
    scope = scope_text if slash else _DEFAULT_SCOPE.get(name)
    if scope is not None and scope not in SCOPES:
        raise ValueError(
            f"{field}={spelling!r}: unknown scope {scope!r}; allowed: {', '.join(SCOPES)}"
        )
    if slash and (name in MX_FORMATS or name in (*UNQUANTIZED, "same")):
        raise ValueError(
            f"{field}={spelling!r}: format {name!r} carries no FP32 scale, so it takes no scope"
        )
    if plus and name in (*UNQUANTIZED, "same"):
        raise ValueError(
            f"{field}={spelling!r}: format {name!r} is not rounded by us, so it takes no '+sr'"
        )
    return Operand(format=name, scope=scope, rounding="stochastic" if plus else "nearest_even")
