"""Machine code for the speed model's tests: listings as nvdisasm prints them, and a small attention kernel with three roles."""

from fp4mega.bench.model_kernels import Description, Kernel
from fp4mega.bench.model_sass import NO_SCOREBOARD, Instruction, Listing, parse
from fp4mega.bench.model_simulate import Step


def line(text: str, *, stall: int = 1, write: int = 7, read: int = 7, wait: int = 0) -> str:
    """One instruction: its text and the two words that hold its encoding."""
    high = stall << 41 | write << 46 | read << 49 | wait << 52
    return f"        /*0000*/                   {text} ;   /* 0x{0x7919:016x} */\n        /* 0x{high:016x} */"


def step(text: str, *, stall: int = 1, write: int = NO_SCOREBOARD, wait: int = 0, **meaning) -> Step:  # fmt: skip
    return Step(Instruction(text, stall, write, NO_SCOREBOARD, wait), **meaning)


def softmax_loop(exponentials: int, *, mask: int = 0, predicated: bool = False) -> list[str]:
    """Wait for scores, load, perhaps mask, exponentials, publish in halves."""
    lines = [
        ".L_x_1:",
        line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x50], R5", write=0),
        line("@!P0 BRA `(.L_x_9)", stall=5, wait=1),
        line("LDTM.x32 R4, tmem[UR5]", write=1),
        line("NOP", wait=2),
    ]
    if mask and not predicated:
        lines.append(line("@P3 BRA `(.L_x_2)", stall=5))
    guard = "@P4 " if predicated else ""
    for _ in range(mask):
        lines += [line(f"{guard}ISETP.GT.AND P6, PT, R7, 0x9, PT", stall=2)]
        lines += [line(f"{guard}FSEL R9, R9, -INF , P6", stall=2)]
    lines.append(".L_x_2:")
    lines += [line("MUFU.EX2 R8, R8", write=2) for _ in range(exponentials)]
    lines += [
        line("F2FP.BF16.F32.PACK_AB R8, R8, R9", wait=4),
        line("STTM.x16 tmem[UR5], R8"),
        line("FENCE.VIEW.ASYNC.T", write=3),
        line("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x60], RZ", wait=8),
        line("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x70], RZ"),
        line("BRA.U UP0, `(.L_x_1)", stall=5),
    ]
    return lines


def kernel_text(exponentials: int, **mask) -> str:
    """Three roles, and the retry of a wait, which sleeps and jumps back."""
    multiply = [".L_x_4:"]
    for _ in range(2):
        multiply += [line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR33+0x60], R13", write=1)]
        multiply += [line("@!P0 BRA `(.L_x_9)", stall=5, wait=2)]
        multiply += [line("UTCHMMA tmem[UR4], gdesc[UR6], tmem[UR8]") for _ in range(6)]
        multiply += [line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR33+0x70], R13", write=1)]
        multiply += [line("@!P0 BRA `(.L_x_9)", stall=5, wait=2)]
        multiply += [line("UTCHMMA tmem[UR4], gdesc[UR6], tmem[UR8]") for _ in range(10)]
        multiply += [line("UTCBAR [UR41], URZ")]
    multiply += [line("BRA.U UP0, `(.L_x_4)", stall=5)]
    correction = [".L_x_5:", line("LDTM R5, tmem[UR4]", write=1), line("NOP", wait=2)]
    correction += [line("FADD R1, R1, R5", stall=4) for _ in range(12)]
    correction += [line("@P0 BRA `(.L_x_5)", stall=5)]
    load = [".L_x_6:", *[line("UTMALDG.4D [UR8], [UR4]") for _ in range(14)]]
    load += [line("@P0 BRA `(.L_x_6)", stall=5)]
    retry = [".L_x_9:", line("NANOSLEEP 0x20"), line("BRA `(.L_x_1)"), line("EXIT")]
    parts = [softmax_loop(exponentials, **mask), multiply, correction, load, retry]
    return "\n".join("\n".join(p) for p in parts)


DESCRIPTION = Description(
    softmax=tuple(((f"scores{i}", 0), (f"first{i}", 0), (f"last{i}", 0)) for i in (0, 1)),
    correction=(),
    waits=(("first0", 0), ("last0", 0), ("first1", 0), ("last1", 0)),
    commits=(("scores0", 1), ("scores1", 1)),
    products=(((128, False),) * 8 + ((128, True),) * 8) * 2,
    counts={},
)


def kernel(exponentials: int = 113, description: Description = DESCRIPTION, **mask) -> Kernel:
    listing: Listing = parse(kernel_text(exponentials, **mask))
    return Kernel("flash_attention_4", "a double", description, listing, 128, 0, 100_000, 512, 65_536)  # fmt: skip
