"""Load a kernel, launch it on the interpreter, read the report.

    program = ptx.load(cute.compile(host, ..., options="--keep-ptx --gpu-arch sm_100a"))
    report = ptx.launch(program, q, k, v, out, policy="random-1")
    report.check()

The arguments are those of the compiled host function, on the CPU; outputs are written in place.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp4mega.testing.ptx.context import Context, place
from fp4mega.testing.ptx.errors import Finding, Findings, ProtocolError
from fp4mega.testing.ptx.host import HostFunction, Launch
from fp4mega.testing.ptx.machine import Cluster, Cta, Geometry, Vector3
from fp4mega.testing.ptx.memory import SHARED_LIMIT, GlobalMemory
from fp4mega.testing.ptx.operands import Operands
from fp4mega.testing.ptx.parser import Kernel, Module, parse
from fp4mega.testing.ptx.policy import Policy
from fp4mega.testing.ptx.scheduler import Code, Scheduler
from fp4mega.testing.ptx.types import PARAM_WINDOW, SHARED_BASE, Array

# Findings that known-good kernels have too: they are listed, but check() lets them pass. "transactions": a producer that ends with
# an acquire announces bytes for a stage that it never fills.
NOTES = ("transactions",)


class FindingsError(AssertionError):
    """A report has findings that were not allowed."""


@dataclass(slots=True)
class Report:
    """What a launch did: instructions executed (warp instructions), findings, launches made by the host code."""

    policy: str
    instructions: int = 0
    launches: list[Launch] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()

    def check(self, allow: tuple[str, ...] = ()) -> "Report":
        """Raise FindingsError when there is a finding whose kind is neither in NOTES nor in `allow`; returns the report."""
        bad = [str(f) for f in self.findings if f.kind not in (*NOTES, *allow)]
        if bad:
            raise FindingsError(f"policy {self.policy}: {len(bad)} findings\n" + "\n".join(bad))
        return self

    def kinds(self) -> Counter[str]:
        """How many findings of each kind."""
        return Counter(f.kind for f in self.findings)


@dataclass(slots=True)
class Program:
    """A parsed module, and the host function that launches its kernels when it was compiled by the DSL."""

    module: Module
    host: HostFunction | None = None
    # Decoded code and module-scope variables, kept from launch to launch.
    codes: dict[Any, Code] = field(default_factory=dict, repr=False)
    data: dict[str, Array] = field(default_factory=dict, repr=False)

    def kernel(self, name: str | None = None) -> Kernel:
        """A kernel by name, or the only one. Raises KeyError or ValueError."""
        kernels = self.module.kernels
        if name is None:
            if len(kernels) != 1:
                raise ValueError(f"name a kernel: {', '.join(kernels)}")
            return next(iter(kernels.values()))
        return kernels[name]

    def mutate(self, old: str, new: str, count: int | None = 1) -> "Program":
        """The same program with PTX text replaced; `count` is how many places there must be (None: any number above 0).

        Raises ValueError when the text does not occur that often.
        """
        found = self.module.text.count(old)
        if found == 0 or (count is not None and found != count):
            raise ValueError(f"{old!r} occurs {found} times in the PTX, expected {count or 'some'}")
        return Program(parse(self.module.text.replace(old, new)), self.host)

    def with_text(self, text: str) -> "Program":
        """The same host function with other PTX."""
        return Program(parse(text), self.host)


def load(source: Any, *, sms: int = 148) -> Program:
    """A program from PTX text, a path to it, or a function compiled by cute.compile with PTX kept (`--keep-ptx`).

    sms: number of multiprocessors that the host code of a compiled function is told.
    Raises ValueError when a compiled function has no PTX, UnsupportedInstructionError for declarations outside of the subset.
    """
    if isinstance(source, Path):
        return Program(parse(source.read_text()))
    if isinstance(source, str):
        return Program(parse(source))
    text = getattr(source, "__ptx__", None)
    if not text:
        raise ValueError(
            'the compiled function has no PTX: compile with options="--keep-ptx --gpu-arch sm_100a"'
        )
    module = parse(text)
    return Program(module, HostFunction(source, module.kernels, sms))


def compile_for(arch: str, function: Any, *arguments: Any, options: str = "") -> Any:
    """cute.compile for an architecture that this machine does not have, PTX kept in memory.

    arch: "sm_100a" or another that the DSL knows. The DSL reads CUTE_DSL_ARCH when it is imported; set it before importing cutlass
    when helpers of the DSL ask for the architecture at import.
    """
    import tempfile

    import cutlass.cute as cute

    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        with tempfile.TemporaryDirectory(prefix="fp4mega_dsl_") as folder:
            flags = f"--keep-ptx --gpu-arch {arch} --dump-dir {folder} {options}".strip()
            return cute.compile(function, *arguments, options=flags)
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before


def launch(
    program: Program,
    *arguments: Any,
    policy: str = "eager",
    track: bool = True,
    buffers: dict[str, Array] | None = None,
) -> Report:
    """Call the compiled host function with `arguments` and execute every launch it makes.

    policy: "eager", "lazy" or "random-<seed>". track: look for races and missing proxy fences (slower). buffers: further memory that the
    kernel may touch through pointers. Raises what execute() raises.
    """
    if program.host is None:
        raise ValueError(
            "the program has no host function: use ptx.execute with grid, block and parameters"
        )
    launches, memory = program.host(*arguments)
    report = Report(policy, launches=launches)
    findings = Findings()
    for one in launches:
        report.instructions += _execute(
            program, one, memory | (buffers or {}), Policy.parse(policy), findings, track
        )
    report.findings = findings.list()
    return report


def execute(
    program: Program,
    *,
    grid: Vector3,
    block: Vector3,
    parameters: bytes | list[bytes],
    buffers: dict[str, Array],
    name: str | None = None,
    cluster: Vector3 = (1, 1, 1),
    shared_bytes: int = 0,
    policy: str = "eager",
    track: bool = True,
) -> Report:
    """Execute one kernel of a program without host code.

    parameters: the parameter block, or one bytes object per parameter. buffers: all global memory that the kernel may touch.
    Raises DeadlockError, OutOfBoundsError, ProtocolError, UnsupportedInstructionError.
    """
    kernel = program.kernel(name)
    if isinstance(parameters, list):
        if [len(p) for p in parameters] != [p.size for p in kernel.parameters]:
            raise ValueError(
                f"parameters of {[len(p) for p in parameters]} bytes given, the kernel takes {[p.size for p in kernel.parameters]}"
            )
        raw = bytearray(kernel.parameter_bytes)
        for parameter, value in zip(kernel.parameters, parameters, strict=True):
            raw[parameter.offset : parameter.offset + parameter.size] = value
        parameters = bytes(raw)
    one = Launch(kernel.name, grid, block, cluster, shared_bytes, parameters)
    findings = Findings()
    count = _execute(program, one, buffers, Policy.parse(policy), findings, track)
    return Report(policy, count, [one], findings.list())


def aligned(shape: tuple[int, ...] | int, dtype: Any = np.uint8, alignment: int = 1024) -> Array:
    """A numpy array of zeros whose address is a multiple of `alignment` bytes."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(dims)


def _symbols(kernel: Kernel, dynamic_bytes: int) -> tuple[dict[str, int], int]:
    """(shared-memory offset of each symbol, bytes of shared memory in all)."""
    symbols, offset = {}, SHARED_BASE
    for symbol in [s for s in kernel.shared if s.size]:
        offset = (offset + symbol.align - 1) // symbol.align * symbol.align
        symbols[symbol.name] = offset
        offset += symbol.size
    dynamic = [s for s in kernel.shared if not s.size]
    if dynamic:
        align = max(max(s.align for s in dynamic), 1024)
        offset = (offset + align - 1) // align * align
        symbols |= {s.name: offset for s in dynamic}
    return symbols, offset + dynamic_bytes - SHARED_BASE


def _execute(
    program: Program,
    one: Launch,
    buffers: dict[str, Array],
    policy: Policy,
    findings: Findings,
    track: bool,
) -> int:
    kernel = program.kernel(one.kernel)
    cluster = one.cluster if one.cluster != (1, 1, 1) else kernel.cluster or (1, 1, 1)
    geometry = Geometry(one.grid, one.block, cluster)
    if any(g % c for g, c in zip(one.grid, cluster, strict=True)):
        raise ProtocolError(f"grid {one.grid} is no multiple of the cluster {cluster}")
    memory = GlobalMemory()
    for name, buffer in buffers.items():
        memory.register(buffer, name)
    if one.parameters:
        memory.register(
            np.frombuffer(one.parameters, np.uint8), "parameters", PARAM_WINDOW, read_only=True
        )
    shared, used = _symbols(kernel, one.shared_bytes)
    if used > SHARED_LIMIT:
        raise ProtocolError(
            f"{kernel.name[:60]} asks for {used} bytes of shared memory: the limit is {SHARED_LIMIT}"
        )
    addresses = dict(shared)
    for data in program.module.data:
        values = program.data.setdefault(data.name, np.empty(data.size, np.uint8))
        values[:] = np.frombuffer(data.data, np.uint8)
        addresses[data.name] = memory.register(values, data.name)
    addresses |= {p.name: PARAM_WINDOW + p.offset for p in kernel.parameters}
    key = (kernel.name, geometry.block, cluster, tuple(addresses.items()))
    code = program.codes.get(key)
    if code is None:
        operands = Operands(kernel, geometry, addresses, frozenset(shared))
        code = Code(Context(kernel, geometry, operands, one.parameters, memory, policy))
        program.codes[key] = code
    code.context.renew(geometry, one.parameters, memory, policy)
    for loaded, signal in code.signals:
        findings.add(
            "early-signal",
            f"{place(signal)} may tell others before this load is done",
            place(loaded),
        )
    steps = 0
    x, y, z = cluster
    with np.errstate(all="ignore"):
        for k in range(0, one.grid[2], z):
            for j in range(0, one.grid[1], y):
                for i in range(0, one.grid[0], x):
                    group = Cluster(geometry, (i, j, k), used, memory, findings, track)
                    steps += Scheduler(code, group).run()
                    for cta in group.ctas:
                        _leftovers(cta, findings)
    return steps


def _leftovers(cta: Cta, findings: Findings) -> None:
    """What must be clean when a CTA ends."""
    where = "the end of the kernel"
    if cta.tensor.allocations:
        held = ", ".join(f"{n} columns from {s}" for s, n in sorted(cta.tensor.allocations.items()))
        findings.add("tensor-leak", f"tensor memory not deallocated: {held}", where)
    for address, barrier in sorted(cta.mbarriers.items()):
        if barrier.tx:
            findings.add(
                "transactions",
                f"mbarrier {address:#x} ends with transaction count {barrier.tx}",
                where,
            )
