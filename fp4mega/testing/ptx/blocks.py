"""Straight-line code as Python: runs of purely computing instructions become one generated function.

A generated function keeps registers in local variables and writes each one back once. It assumes that every lane of the bundle is
active; under a partial mask instructions run one at a time through `Step`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from fp4mega.testing.ptx import arithmetic, conversions
from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.machine import Bundle
from fp4mega.testing.ptx.operands import Operands, Read, fit, merge
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import DTYPES, SHARED_WINDOW, UNSIGNED, Array, braces, itemsize

Dtype = type[np.generic]


@dataclass(slots=True)
class Step:
    """A computing instruction: destinations, sources with the dtype they are read as, and a function giving one value or a tuple."""

    function: Callable[..., Any]
    destinations: tuple[str, ...]
    sources: tuple[tuple[str, Dtype], ...]
    results: tuple[Dtype, ...]


def _pack(size: int, dtype: Dtype) -> Callable[..., Array]:
    unsigned = UNSIGNED[size]

    def pack(*parts: Array) -> Array:
        lanes = max(np.size(p) for p in parts)
        out = np.empty((lanes, len(parts)), unsigned)
        for i, part in enumerate(parts):
            out[:, i] = part
        return out.view(dtype)[:, 0]

    return pack


def _pack_words(low: Array, high: Array) -> Array:
    """Two 32-bit registers in one of 64 bits."""
    out = np.empty((len(low), 2), np.uint32)
    out[:, 0] = low
    out[:, 1] = high
    return out.view(np.uint64)[:, 0]


def _unpack_words(whole: Array) -> tuple[Array, ...]:
    parts = whole.view(np.uint32)
    return parts[0::2], parts[1::2]


def _unpack(size: int, count: int) -> Callable[[Array], tuple[Array, ...]]:
    unsigned = UNSIGNED[size]

    def unpack(whole: Array) -> tuple[Array, ...]:
        parts = np.ascontiguousarray(np.atleast_1d(whole)).view(unsigned).reshape(-1, count)
        return tuple(parts[:, i] for i in range(count))

    return unpack


def _mov(ins: Instruction) -> Step:
    kind = ins.parts[-1]
    if kind == "pred":
        return Step(np.copy, ins.args[:1], ((ins.args[1], np.bool_),), (np.bool_,))
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise UnsupportedInstructionError(ins.op)
    to, source = ins.args
    if to.startswith("{"):
        names = tuple(braces(to))
        size = itemsize(dtype) // len(names)
        results = (UNSIGNED[size],) * len(names)
        words = size == 4 and len(names) == 2 and source.startswith("%")
        return Step(
            _unpack_words if words else _unpack(size, len(names)),
            names,
            ((source, dtype),),
            results,
        )
    if source.startswith("{"):
        names = tuple(braces(source))
        size = itemsize(dtype) // len(names)
        sources = tuple((name, UNSIGNED[size]) for name in names)
        words = size == 4 and len(names) == 2 and all(name.startswith("%") for name in names)
        return Step(_pack_words if words else _pack(size, dtype), (to,), sources, (dtype,))
    return Step(np.positive, (to,), ((source, dtype),), (dtype,))


def _setp(ins: Instruction) -> Step:
    parts = ins.parts
    kind, name = parts[-1], parts[1]
    combine = parts[2] if len(parts) > 3 and parts[2] in ("and", "or", "xor") else None
    extra = set(parts[2:-1]) - {"and", "or", "xor", "ftz"}
    if extra:
        raise UnsupportedInstructionError(ins.op)
    compare = arithmetic.comparison(name, kind, parts)
    if "ftz" in parts:
        plain = compare
        compare = lambda a, b: plain(arithmetic.flush(a), arithmetic.flush(b))  # noqa: E731
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    destinations = tuple(d.strip() for d in ins.args[0].split("|"))
    sources: tuple[tuple[str, Dtype], ...] = tuple((a, DTYPES[kind]) for a in ins.args[1:3])
    if combine:
        sources += ((ins.args[3], np.bool_),)

    def setp(a: Array, b: Array, *c: Array) -> Any:
        truth = compare(a, b)
        first = joins[combine](truth, c[0]) if combine else truth
        if len(destinations) == 1:
            return np.asarray(first)
        return np.asarray(first), np.asarray(joins[combine](~truth, c[0]) if combine else ~truth)

    return Step(setp, destinations, sources, (np.bool_,) * len(destinations))


def _cvta(ins: Instruction) -> Step:
    parts = ins.parts
    spaces = set(parts[1:-1])
    dtype = DTYPES[parts[-1]]
    shared = bool(spaces & {"shared", "shared::cta", "shared::cluster"})
    if not shared and not spaces & {"global", "param", "const", "local"}:
        raise UnsupportedInstructionError(ins.op)
    if not shared:
        return Step(np.positive, ins.args[:1], ((ins.args[1], dtype),), (dtype,))
    window = np.uint64(SHARED_WINDOW)
    if "to" in spaces:
        return Step(lambda x: x - window, ins.args[:1], ((ins.args[1], dtype),), (dtype,))
    return Step(lambda x: x + window, ins.args[:1], ((ins.args[1], dtype),), (dtype,))


def _select(x: Array, y: Array, chosen: Array | None) -> Array:
    if chosen is None:
        raise TypeError("predicate")
    return np.where(chosen, x, y)


def _selp(ins: Instruction) -> Step:
    dtype = DTYPES[ins.parts[-1]]
    to, a, b, p = ins.args
    return Step(_select, (to,), ((a, dtype), (b, dtype), (p, np.bool_)), (dtype,))


def step(ins: Instruction) -> Step | None:
    """The instruction as a computing step, None when it is something else. Raises UnsupportedInstructionError."""
    special = {"mov": _mov, "setp": _setp, "cvta": _cvta, "selp": _selp}.get(ins.parts[0])
    if special is not None:
        return special(ins)
    sources = ins.args[1:]
    if ins.parts[0] == "cvt":
        if any(s.startswith("{") for s in sources):
            raise UnsupportedInstructionError(ins.op)
        pure: arithmetic.Pure | None = conversions.conversion(ins.parts, len(sources))
    else:
        try:
            pure = arithmetic.pure(ins.parts, len(sources))
        except KeyError:
            raise UnsupportedInstructionError(ins.op) from None
    if pure is None:
        return None
    if len(pure.sources) != len(sources):
        raise UnsupportedInstructionError(f"{ins.op} with {len(sources)} sources")
    return Step(
        pure.function, ins.args[:1], tuple(zip(sources, pure.sources, strict=True)), (pure.result,)
    )


def single(
    ins: Instruction, made: Step, operands: Operands
) -> Callable[[Bundle, Array | None], None]:
    """A handler for one step under any mask."""
    reads: list[Read] = [_reader(operands, text, dtype) for text, dtype in made.sources]
    writes = [operands.write(text) for text in made.destinations]
    function = made.function
    if made.results == (arithmetic.F32x2,):
        function = _as_words(function)

    def run(bundle: Bundle, mask: Array | None) -> None:
        value = function(*(read(bundle) for read in reads))
        if len(writes) == 1:
            writes[0](bundle, value, mask)
        else:
            for write, part in zip(writes, value, strict=True):
                write(bundle, part, mask)

    return run


def _reader(operands: Operands, text: str, dtype: Dtype) -> Read:
    if dtype is not arithmetic.F32x2:
        return operands.read(text, dtype)
    words = operands.read(text, np.uint64)
    return lambda bundle: words(bundle).view(np.float32)


def _as_words(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda *operands: function(*operands).view(np.uint64)


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType:
    return compile(source, "<ptx block>", "exec")


class BlockWriter:
    """Writes the source of one generated function for a run of steps."""

    def __init__(self, operands: Operands, names: dict[str, Any]) -> None:
        self.operands, self.names = operands, names
        self.lines: list[str] = []
        self.current: dict[int, tuple[str, Dtype]] = {}
        self.views: dict[tuple[int, Dtype], str] = {}
        self.dirty: set[int] = set()
        self.count = 0

    def _name(self, value: Any, prefix: str) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def _local(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def _dtype(self, dtype: Dtype) -> str:
        if dtype is arithmetic.F32x2:
            dtype = np.float32
        name = f"t_{np.dtype(dtype).name}"
        self.names[name] = np.dtype(dtype)
        return name

    def _source(self, text: str, dtype: Dtype) -> str:
        operands = self.operands
        if text.startswith("!"):
            return f"~{self._source(text[1:], dtype)}"
        slot = operands.slots.get(text)
        if slot is None:
            pair = dtype is arithmetic.F32x2
            constant = operands.constant(text, np.uint64 if pair else dtype)
            if constant is not None and pair:
                local = self._local()
                self.lines.append(
                    f"{local} = full({self._name(constant, 'c')}, n).view({self._dtype(dtype)})"
                )
                return local
            if constant is not None:
                return self._name(constant, "c")
            local = self._local()
            self.lines.append(f"{local} = {self._name(operands.special(text, dtype), 's')}(b)")
            return local
        width = operands.widths[slot]
        if (width == 0) != (dtype is np.bool_):
            raise UnsupportedInstructionError(f"operand {text!r}")
        if slot not in self.current:
            local = self._local()
            self.lines.append(f"{local} = R[{slot}]")
            self.current[slot] = (local, np.void)
        name, held = self.current[slot]
        if held is dtype or width == 0:
            return name
        view = self.views.get((slot, dtype))
        if view is None:
            view = self._local()
            if dtype is arithmetic.F32x2 or itemsize(dtype) == width:
                self.lines.append(f"{view} = {name}.view({self._dtype(dtype)})")
            elif itemsize(dtype) < width:
                whole, narrow = UNSIGNED[width], UNSIGNED[itemsize(dtype)]
                self.lines.append(
                    f"{view} = {name}.view({self._dtype(whole)}).astype({self._dtype(narrow)}).view({self._dtype(dtype)})"
                )
            else:
                raise UnsupportedInstructionError(
                    f"{8 * width}-bit register {text} as {np.dtype(dtype).name}"
                )
            self.views[(slot, dtype)] = view
        return view

    def add(self, ins: Instruction, made: Step) -> None:
        """Append one step, guarded or not."""
        guard = None
        if ins.guard is not None:
            guard = self._source(("!" if ins.guard_negated else "") + ins.guard, np.bool_)
        arguments = [self._source(text, dtype) for text, dtype in made.sources]
        varying = any(a[0] in "v~" for a in arguments)
        call = f"{self._name(made.function, 'f')}({', '.join(arguments)})"
        results = [self._local() for _ in made.destinations]
        self.lines.append(f"{', '.join(results)} = {call}")
        for text, local, result in zip(made.destinations, results, made.results, strict=True):
            if text == "_":
                continue
            slot = self.operands.slots.get(text)
            if slot is None:
                raise UnsupportedInstructionError(f"destination {text!r}")
            width = self.operands.widths[slot]
            if not varying:
                self.lines.append(f"{local} = full({local}, n)")
            held: Dtype = result
            if result is arithmetic.F32x2:
                if guard is not None:
                    self.lines.append(f"{local} = {local}.view({self._dtype(np.uint64)})")
                    held = np.uint64
            elif width and itemsize(result) != width:
                self.lines.append(f"{local} = fit({local}, {width})")
                held = np.void
            if guard is not None:
                old, _ = self.current.get(slot, (f"R[{slot}]", np.void))
                self.lines.append(f"{local} = merge({guard}, {local}, {old})")
            self.current[slot] = (local, held)
            for key in [k for k in self.views if k[0] == slot]:
                del self.views[key]
            self.dirty.add(slot)

    def compile(self, live: int) -> Callable[[Bundle], None]:
        """The function; it takes a bundle whose lanes are all active. Registers outside of `live` are not kept."""
        body = ["R = b.registers", "n = b.lanes", *self.lines]
        body += [
            f"R[{slot}] = {self.current[slot][0]}"
            for slot in sorted(self.dirty)
            if live >> slot & 1
        ]
        source = "def block(b):\n" + "\n".join(f"    {line}" for line in body)
        scope = self.names | {"fit": fit, "merge": merge, "full": _full}
        exec(_compiled(source), scope)
        block: Callable[[Bundle], None] = scope["block"]
        return block


def _full(value: Any, lanes: int) -> Array:
    return np.broadcast_to(np.asarray(value).reshape(-1)[:1], (lanes,)).copy()
