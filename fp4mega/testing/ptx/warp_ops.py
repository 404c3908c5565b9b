"""Instructions across the lanes of a warp: shfl, vote, elect, redux, match, activemask; and those that do nothing here."""

from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx.context import Context, Handler
from fp4mega.testing.ptx.errors import PtxError, UnsupportedInstructionError
from fp4mega.testing.ptx.machine import EXIT, Bundle
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import DTYPES, WARP, Array

_LANES = np.arange(WARP, dtype=np.int64)


def _per_warp(bundle: Bundle, mask: Array | None) -> list[tuple[slice, Array]]:
    """(slice of the bundle's lanes, active lanes within the warp) per warp."""
    active = bundle.active_mask(mask)
    parts = [slice(WARP * i, WARP * (i + 1)) for i in range(len(bundle.warps))]
    return [(part, active[part]) for part in parts]


def shuffle(ins: Instruction, context: Context) -> Handler:
    """shfl.sync.idx/up/down/bfly.b32 d|p, a, b, c, membermask. Reading an inactive lane gives that lane's register as it is."""
    mode = ins.parts[2]
    if (
        ins.parts[1] != "sync"
        or mode not in ("idx", "up", "down", "bfly")
        or ins.parts[-1] != "b32"
    ):
        raise UnsupportedInstructionError(ins.op)
    names = [d.strip() for d in ins.args[0].split("|")]
    write = context.operands.write(names[0])
    write_p = context.operands.write(names[1]) if len(names) > 1 else None
    value, other, clamp = (context.operands.read(a, np.uint32) for a in ins.args[1:4])

    def run(bundle: Bundle, mask: Array | None) -> None:
        values, b, c = value(bundle), other(bundle).astype(np.int64), clamp(bundle).astype(np.int64)
        lane = np.tile(_LANES, len(bundle.warps))
        segment, bound = (c >> 8) & 31, c & 31
        highest, lowest = (lane & segment) | (bound & ~segment), lane & segment
        source = {
            "idx": lowest | (b & ~segment & 31),
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
        }[mode]
        # For .up the bound is the segment's first lane.
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, lane) & 31
        base = np.repeat(np.arange(len(bundle.warps)) * WARP, WARP)
        write(bundle, values[base + source], mask)
        if write_p is not None:
            write_p(bundle, inside, mask)

    return run


def elect(ins: Instruction, context: Context) -> Handler:
    """elect.sync d|p, membermask: the lowest active lane of each warp."""
    names = [d.strip() for d in ins.args[0].split("|")]
    write_d, write_p = (context.operands.write(n) for n in names)

    def run(bundle: Bundle, mask: Array | None) -> None:
        leader = np.zeros(bundle.lanes, np.uint32)
        chosen = np.zeros(bundle.lanes, np.bool_)
        for part, active in _per_warp(bundle, mask):
            if active.any():
                first = int(np.argmax(active))
                leader[part] = first
                chosen[part.start + first] = True
        write_d(bundle, leader, mask)
        write_p(bundle, chosen, mask)

    return run


def vote(ins: Instruction, context: Context) -> Handler:
    """vote.sync.any/all/uni.pred and .ballot.b32."""
    mode = ins.parts[2]
    if mode not in ("any", "all", "uni", "ballot"):
        raise UnsupportedInstructionError(ins.op)
    write = context.operands.write(ins.args[0])
    value = context.operands.read(ins.args[1], np.bool_)

    def run(bundle: Bundle, mask: Array | None) -> None:
        values = value(bundle)
        out: Array = np.zeros(bundle.lanes, np.uint32 if mode == "ballot" else np.bool_)
        for part, active in _per_warp(bundle, mask):
            mine = values[part] & active
            if mode == "ballot":
                out[part] = int(np.dot(mine.astype(np.int64), 1 << _LANES))
            elif mode == "any":
                out[part] = bool(mine.any())
            elif mode == "all":
                out[part] = bool((mine == active).all())
            else:
                out[part] = bool((mine == active).all() or not mine.any())
        write(bundle, out, mask)

    return run


_REDUX: dict[str, Callable[[Array], object]] = {
    "add": np.sum,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def redux(ins: Instruction, context: Context) -> Handler:
    """redux.sync over the active lanes: integers, and min/max of float32 (sm_100a)."""
    mode, kind = ins.parts[2], ins.parts[-1]
    dtype = DTYPES.get(kind)
    extra = set(ins.parts[3:-1]) - {"NaN", "abs"}
    if (
        mode not in _REDUX
        or dtype is None
        or extra
        or (kind == "f32" and mode not in ("min", "max"))
    ):
        raise UnsupportedInstructionError(ins.op)
    function = _REDUX[mode]
    if kind == "f32" and "NaN" not in ins.parts:
        function = np.fmin.reduce if mode == "min" else np.fmax.reduce
    absolute = "abs" in ins.parts
    write = context.operands.write(ins.args[0])
    value = context.operands.read(ins.args[1], dtype)

    def run(bundle: Bundle, mask: Array | None) -> None:
        values = value(bundle)
        if absolute:
            values = np.abs(values)
        out = np.zeros(bundle.lanes, dtype)
        for part, active in _per_warp(bundle, mask):
            if active.any():
                out[part] = np.asarray(function(values[part][active])).astype(dtype)
        write(bundle, out, mask)

    return run


def match(ins: Instruction, context: Context) -> Handler:
    """match.any.sync.b32: the mask of lanes that hold the same value."""
    if ins.parts[1] != "any" or ins.parts[-1] != "b32":
        raise UnsupportedInstructionError(ins.op)
    write = context.operands.write(ins.args[0])
    value = context.operands.read(ins.args[1], np.uint32)

    def run(bundle: Bundle, mask: Array | None) -> None:
        values = value(bundle)
        out = np.zeros(bundle.lanes, np.uint32)
        for part, active in _per_warp(bundle, mask):
            equal = (values[part][:, None] == values[part][None, :]) & active[None, :]
            out[part] = (equal.astype(np.int64) @ (1 << _LANES)).astype(np.uint32)
        write(bundle, out, mask)

    return run


def activemask(ins: Instruction, context: Context) -> Handler:
    """activemask.b32: the lanes that execute together at this moment."""
    write = context.operands.write(ins.args[0])

    def run(bundle: Bundle, mask: Array | None) -> None:
        out = np.zeros(bundle.lanes, np.uint32)
        for part, active in _per_warp(bundle, mask):
            out[part] = int(np.dot(active.astype(np.int64), 1 << _LANES))
        write(bundle, out, mask)

    return run


def nothing(ins: Instruction, context: Context) -> Handler:
    """Hints and orders that change nothing in this model: prefetch, setmaxnreg, nanosleep, griddepcontrol, generic fences."""
    return lambda bundle, mask: None


def leave(ins: Instruction, context: Context) -> Handler:
    """ret and exit."""
    return lambda bundle, mask: EXIT


def trap(ins: Instruction, context: Context) -> Handler:
    """trap and brkpt: the kernel stops itself."""

    def run(bundle: Bundle, mask: Array | None) -> None:
        raise PtxError(f"{ins.op} executed by warps {bundle.warps} of CTA {bundle.cta.ctaid}")

    return run
