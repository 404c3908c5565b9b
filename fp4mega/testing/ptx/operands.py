"""Operand texts to functions on a bundle: registers, immediates, special registers, symbols and addresses.

PTX keeps no type in a register: an operand is read as the type that the instruction names. Registers hold any numpy dtype of their width.
"""

import re
from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.machine import Bundle, Geometry
from fp4mega.testing.ptx.parser import Kernel
from fp4mega.testing.ptx.types import UNSIGNED, Array, itemsize

Read = Callable[[Bundle], Array]
Write = Callable[[Bundle, Array, Array | None], None]
Special = Callable[[Bundle, Geometry], Array | int]

_NUMBER = re.compile(r"^-?(?:0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)U?$")
_ADDRESS = re.compile(r"^([%\w$.]+?)\s*(?:\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?$")


def immediate(text: str, dtype: type[np.generic]) -> np.generic:
    """A literal as one value of `dtype`, bits kept."""
    size = itemsize(dtype)
    if text[:2] in ("0f", "0F"):
        bits, width = int(text[2:], 16), 4
    elif text[:2] in ("0d", "0D"):
        bits, width = int(text[2:], 16), 8
    else:
        bits, width = int(text.rstrip("U"), 0), size
    if width != size:
        raise UnsupportedInstructionError(f"literal {text} as {np.dtype(dtype).name}")
    octets = (bits & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    return np.frombuffer(octets, dtype)[0]


def _coordinate(values: Callable[[Bundle, Geometry], tuple[int, int, int]]) -> dict[str, Special]:
    def axis(i: int) -> Special:
        return lambda b, g: values(b, g)[i]

    return {name: axis(i) for i, name in enumerate("xyz")}


def _tid(axis: int) -> Special:
    def read(b: Bundle, g: Geometry) -> Array:
        if axis == 0:
            return b.tid % np.uint32(g.block[0])
        if axis == 1:
            return b.tid // np.uint32(g.block[0]) % np.uint32(g.block[1])
        return b.tid // np.uint32(g.block[0] * g.block[1])

    return read


def _in_cluster(b: Bundle, g: Geometry) -> tuple[int, int, int]:
    rank = b.cta.rank
    x, y, _ = g.cluster
    return (rank % x, rank // x % y, rank // (x * y))


def _ratio(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (a[0] // b[0], a[1] // b[1], a[2] // b[2])


def _specials() -> dict[str, Special]:
    found: dict[str, Special] = {f"%tid.{name}": _tid(i) for i, name in enumerate("xyz")}
    vectors: dict[str, Callable[[Bundle, Geometry], tuple[int, int, int]]] = {
        "%ctaid": lambda b, g: b.cta.ctaid,
        "%nctaid": lambda b, g: g.grid,
        "%ntid": lambda b, g: g.block,
        "%cluster_ctaid": _in_cluster,
        "%cluster_nctaid": lambda b, g: g.cluster,
        "%clusterid": lambda b, g: _ratio(b.cta.ctaid, g.cluster),
        "%nclusterid": lambda b, g: _ratio(g.grid, g.cluster),
    }
    for name, values in vectors.items():
        found |= {f"{name}.{axis}": read for axis, read in _coordinate(values).items()}
    found["%laneid"] = lambda b, g: b.laneid
    found["%warpid"] = lambda b, g: b.tid // np.uint32(32)
    found["%cluster_ctarank"] = lambda b, g: b.cta.rank
    found["%cluster_nctarank"] = lambda b, g: g.ctas
    found["%smid"] = lambda b, g: 0
    # Time does not pass here: a kernel that measures it gets the number of instructions its bundle has executed.
    for clock in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
        found[clock] = lambda b, g: b.steps
    return found


SPECIALS = _specials()


class Operands:
    """Binds the operands of one kernel: register slots, parameter addresses, symbol addresses."""

    def __init__(
        self,
        kernel: Kernel,
        geometry: Geometry,
        symbols: dict[str, int],
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.kernel, self.geometry, self.symbols = kernel, geometry, symbols
        # In a cluster the address of a shared symbol carries the CTA's rank: no constant.
        self.ranked = shared if geometry.ctas > 1 else frozenset()
        self.slots = {name: i for i, name in enumerate(kernel.registers)}
        self.widths = list(kernel.registers.values())

    def constant(self, text: str, dtype: type[np.generic]) -> np.generic | None:
        """The value of a literal or of a symbol's address, None for anything else."""
        if _NUMBER.match(text):
            if dtype is np.bool_:
                return np.bool_(int(text, 0) != 0)
            return immediate(text, dtype)
        match = _ADDRESS.match(text)
        if match and match.group(1) in self.symbols and match.group(1) not in self.ranked:
            address = self.symbols[match.group(1)] + int(match.group(2) or "0", 0)
            return immediate(str(address), dtype)
        return None

    def special(self, text: str, dtype: type[np.generic]) -> Read:
        """A special register."""
        match = _ADDRESS.match(text)
        if match and match.group(1) in self.ranked:
            offset = self.symbols[match.group(1)] + int(match.group(2) or "0", 0)
            return lambda b: np.full(b.lanes, b.cta.base + offset).astype(dtype)
        read = SPECIALS.get(text)
        if read is None:
            raise UnsupportedInstructionError(f"operand {text!r}")

        def special(b: Bundle) -> Array:
            value = read(b, self.geometry)
            if isinstance(value, int):
                return np.full(b.lanes, value).astype(dtype)
            return value.astype(dtype)

        return special

    def read(self, text: str, dtype: type[np.generic]) -> Read:
        """A function giving all lanes of an operand as `dtype`."""
        text = text.strip()
        if text.startswith("!"):
            inner = self.read(text[1:], dtype)
            return lambda b: ~inner(b)
        if (slot := self.slots.get(text)) is not None:
            return self._register(text, slot, dtype)
        value = self.constant(text, dtype)
        if value is not None:
            return lambda b: np.full(b.lanes, value)
        return self.special(text, dtype)

    def _register(self, text: str, slot: int, dtype: type[np.generic]) -> Read:
        width = self.widths[slot]
        if width == 0:
            if dtype is not np.bool_:
                raise UnsupportedInstructionError(f"predicate {text} read as a number")

            def predicate(b: Bundle) -> Array:
                value = b.registers[slot]
                if value is None:
                    raise TypeError(f"predicate {text} was never written")
                return value

            return predicate
        size = itemsize(dtype)
        if size == width:
            return lambda b: b.registers[slot].view(dtype)  # type: ignore[union-attr]
        if size > width:
            raise UnsupportedInstructionError(
                f"{8 * width}-bit register {text} read as {np.dtype(dtype).name}"
            )
        narrow = UNSIGNED[size]
        whole = UNSIGNED[width]
        return lambda b: b.registers[slot].view(whole).astype(narrow).view(dtype)  # type: ignore[union-attr]

    def write(self, text: str) -> Write:
        """A function writing lanes to a register under a mask; narrower values are extended by their own sign."""
        if text == "_":
            return lambda b, value, mask: None
        slot = self.slots.get(text)
        if slot is None:
            raise UnsupportedInstructionError(f"destination {text!r}")
        width = self.widths[slot]

        def put(b: Bundle, value: Array, mask: Array | None) -> None:
            value = fit(value, width)
            if mask is not None:
                value = merge(mask, value, b.registers[slot])
            b.registers[slot] = value

        return put

    def address(self, text: str) -> Read:
        """`[register+offset]`, `[symbol+offset]` or a bare one: int64 addresses."""
        inner = text.strip()
        if inner.startswith("["):
            inner = inner[1:-1].strip()
        match = _ADDRESS.match(inner)
        if match is None:
            raise UnsupportedInstructionError(f"address {text!r}")
        base, offset = match.group(1), int(match.group(2) or "0", 0)
        if (slot := self.slots.get(base)) is not None:
            dtype: type[np.generic] = UNSIGNED[self.widths[slot]]
            register = self._register(base, slot, dtype)
            if offset:
                return lambda b: register(b).astype(np.int64) + offset
            return lambda b: register(b).astype(np.int64)
        value = self.constant(inner, np.int64)
        if value is None:
            if base in self.ranked:
                return self.special(inner, np.int64)
            raise UnsupportedInstructionError(f"address {text!r}")
        return lambda b: np.full(b.lanes, value)


def fit(value: Array, width: int) -> Array:
    """Lanes extended to a register's width in bytes (0: predicate, unchanged)."""
    size = value.dtype.itemsize
    if width == 0 or size == width:
        return value
    if size > width:
        raise UnsupportedInstructionError(f"{8 * size}-bit result in a {8 * width}-bit register")
    kind = value.dtype.kind
    if kind == "i":
        return value.astype(f"i{width}")
    if kind == "u":
        return value.astype(f"u{width}")
    return value.view(f"u{size}").astype(f"u{width}")


def merge(mask: Array | None, value: Array, old: Array | None) -> Array:
    """New lanes where the mask says so, old ones elsewhere. Raises TypeError for a predicate that was never written."""
    if mask is None:
        raise TypeError("predicate")
    if old is None:
        return np.where(mask, value, np.zeros_like(value))
    if old.dtype != value.dtype:
        old = old.view(value.dtype)
    return np.where(mask, value, old)
