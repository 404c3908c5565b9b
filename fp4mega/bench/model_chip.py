"""What the speed model takes a GB200's multiprocessor to be: how long each unit is busy with one instruction, and latencies.

Rates are published; those marked "assumed" are not, and docs/blackwell_model.md says how far results depend on them. Cycles are SM clocks.
A multiprocessor is four partitions; a warp lives in one of them, which issues one instruction a cycle.
"""

from dataclasses import dataclass

LANES, PARTITIONS = 32, 4
FLOPS_PER_CYCLE = {"UTCHMMA": 8192, "UTCQMMA": 16384, "UTCOMMA": 32768}
"""Dense FLOP a cycle and SM: BF16; FP8 and mxf8f6f4; mxf4 and mxf4nvf4."""
K_OF = {"UTCHMMA": 16, "UTCQMMA": 32, "UTCOMMA": 64}
"""Reduced length of one instruction."""
SHARED_BYTES_PER_CYCLE = 128
RATES = {
    "fma": 128.0, "alu": 64.0, "ex2": 16.0, "cvt_bf16": 62.0, "cvt_e4m3": 32.0, "cvt_e2m1": 57.0,
    "shared": 32.0, "uniform": 64.0,
}  # fmt: skip
"""Lanes a cycle and SM. shared: words of four bytes. uniform: assumed, one instruction every two cycles."""
_CVT = {"BF16": "cvt_bf16", "F16": "cvt_bf16", "E4M3": "cvt_e4m3", "E5M2": "cvt_e4m3", "E2M1": "cvt_e2m1"}  # fmt: skip
_PACKED = ("FFMA2", "FMUL2", "FADD2")
_FMA = ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2")
_EX2 = ("MUFU", "F2I", "FRND", "I2F", "F2F")
_SHARED = ("LDS", "STS", "ATOMS")
_CONTROL = ("NOP", "BRA", "BSSY", "BSYNC", "SYNCS", "BAR", "ELECT", "VOTE", "WARPSYNC", "FENCE", "MEMBAR", "DEPBAR", "UTCBAR", "USETMAXREG", "EXIT")  # fmt: skip
LATENCY = {
    "alu": 6, "fma": 4, "ex2": 24, "cvt": 10, "shared": 29, "uniform": 12, "tensor_load": 32, "tensor_store": 32,
    "constant": 30, "fence": 12, "membar": 30, "test": 12, "barrier": 20, "other": 20, "mma_issue": 20,
}  # fmt: skip
"""Cycles from issue to result, assumed. Tensor memory: added to one cycle a column."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU. `clock` in GHz. Raises ValueError for sizes that no GPU has."""

    sms: int = 152
    clock: float = 2.062
    fixed: int = 2000
    """Cycles of one CTA that no key tile hides, assumed: barriers, first loads, normalizing and storing the output."""
    latency_scale: float = 1.0
    """Factor on every assumed latency, to see what hangs on them."""

    def __post_init__(self) -> None:
        for name, least in (("sms", 1), ("clock", 0.1), ("fixed", 0), ("latency_scale", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected {least} or more")

    def latency(self, unit: str) -> float:
        """Cycles of an assumed latency."""
        return LATENCY[unit] * self.latency_scale

    def milliseconds(self, cycles: float) -> float:
        """Time of that many cycles."""
        return cycles / (self.clock * 1e6)


GB200 = Chip()
"""152 SMs at 2.062 GHz are the pair with which 1.611 ms (B1 H64 S8192) are the 1926 cycles a tile that are quoted for it."""


def unit_of(opcode: str) -> str:
    """The unit that executes a SASS opcode with its modifiers: a key of RATES, or tensor_load, tensor_store, mma, tma, control."""
    base, *modifiers = opcode.split(".")
    if base in ("LDTM", "STTM"):
        return "tensor_load" if base == "LDTM" else "tensor_store"
    if base in FLOPS_PER_CYCLE or base == "UTCCP":
        return "mma"
    if base.startswith(("UTMA", "UBLKCP")):
        return "tma"
    if base in _CONTROL or base.startswith(("R2UR", "S2", "LDC", "CS2")):
        return "control"
    if base == "F2FP":
        return next((_CVT[m] for m in modifiers if m in _CVT), "cvt_bf16")
    if base in _EX2:
        return "ex2"
    if base in _SHARED:
        return "shared"
    if base in _FMA or base in _PACKED:
        return "fma"
    # Uniform opcodes are the vector ones with a U in front; UPRMT, ULOP3, UIADD3, UMOV, USEL, UISETP, ...
    return "uniform" if base.startswith("U") else "alu"


def busy(opcode: str) -> float:
    """Cycles that one warp instruction keeps its unit of one partition busy; 0 for the tensor core and control."""
    unit = unit_of(opcode)
    if unit in ("tensor_load", "tensor_store"):
        return float(columns(opcode))
    if unit not in RATES:
        return 0.0
    wide = _words(opcode) if unit == "shared" else 2 if opcode.split(".")[0] in _PACKED else 1
    return wide * LANES * PARTITIONS / RATES[unit]


def _words(opcode: str) -> int:
    return {"64": 2, "128": 4}.get(opcode.split(".")[-1], 1)


def columns(opcode: str) -> int:
    """Tensor-memory columns of an LDTM or STTM: `LDTM.x32` 32, `LDTM` 1."""
    return max([1, *(int(m[1:]) for m in opcode.split(".") if m[:1] == "x" and m[1:].isdigit())])


def mma_cycles(opcode: str, n: int, *, a_shared: bool) -> float:
    """Cycles of one tcgen05.mma of M = 128 and N = n: its FLOP, or the bytes of its operands in shared memory if they take longer.

    Raises ValueError for an opcode that is no MMA.
    """
    base = opcode.split(".")[0]
    if base not in FLOPS_PER_CYCLE:
        raise ValueError(f"opcode={opcode!r}: expected one of {', '.join(FLOPS_PER_CYCLE)}")
    # 32 bytes a row and instruction whatever the kind: K 16 of two bytes, 32 of one, 64 of a half.
    rows = n + (128 if a_shared else 0)
    flops = 2 * 128 * n * K_OF[base]
    return max(flops / FLOPS_PER_CYCLE[base], rows * 32 / SHARED_BYTES_PER_CYCLE)
