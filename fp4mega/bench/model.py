"""`python -m fp4mega.bench model`: what a GB200 may do with these kernels, predicted without one, behind the model's error on published times.

Tables in Markdown. docs/blackwell_model.md says what is modelled and what the figures are worth.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from fp4mega.attention.policy import get_policy
from fp4mega.bench.model_chip import GB200, Chip, busy, unit_of
from fp4mega.bench.model_kernels import (
    DEFAULT_KERNELS,
    QUERY_TILES,
    Kernel,
    compile_flash_attention_4,
    compile_ours,
)
from fp4mega.bench.model_predict import (
    CALIBRATION,
    POINTS,
    RATIOS,
    Calibration,
    Order,
    Roles,
    calibrate,
    error,
    verdict,
    waves,
)
from fp4mega.bench.model_sass import ROLES
from fp4mega.bench.model_schedules import SCHEDULES
from fp4mega.bench.model_simulate import Partition, Step
from fp4mega.bench.outputs import check_outputs
from fp4mega.bench.shapes import Shape
from fp4mega.kernels.cute.support import explain_policy

DEFAULT_SHAPES = ("1,64/64,8192,128", "1,24/24,4096,128", "1,32/8,4096,128:causal")
POLYNOMIAL = (0, 2, 3, 4, 6)
UNITS = (
    "mma", "ex2", "fma", "alu", "cvt_bf16", "cvt_e4m3", "cvt_e2m1", "shared", "tensor_load", "tensor_store", "slot",
)  # fmt: skip
SPAN = "model's error on published points"
SAME = 0.02
"""Gain below which two schedules are called the same."""


@dataclass(slots=True)
class Model:
    """Kernels compiled so far, the calibrations, and the errors on published points."""

    calibrations: tuple[Calibration, Calibration]
    peer: Kernel
    errors: list[float] = field(default_factory=list)
    _periods: dict[tuple[str, str, str], tuple[float, ...]] = field(default_factory=dict)

    def periods(self, kernel: Kernel, schedule: str = "as compiled") -> tuple[float, ...]:
        """Cycles of a key tile, all query tiles of a CTA, under either calibration; simulated once."""
        key = (kernel.name, kernel.variant, schedule)
        if key not in self._periods:
            roles, counts = SCHEDULES[schedule][1](kernel.roles()), kernel.description.counts
            self._periods[key] = tuple(c.simulate(roles, counts).period for c in self.calibrations)
        return self._periods[key]

    def milliseconds(
        self,
        kernel: Kernel,
        shape: Shape,
        *,
        schedule: str = "as compiled",
        order: Order | None = None,
    ) -> list[float]:
        """Predicted times under either calibration, by default in the order that the kernel has."""
        order = order or ("persistent" if kernel.persistent else "longest first")
        pairs = zip(self.calibrations, self.periods(kernel, schedule), strict=True)
        return [c.milliseconds(period, shape, order=order) for c, period in pairs]

    def heads(self, what: str = "") -> list[str]:
        """Column titles, one a calibration."""
        return [f"{what}{c.fitted} fitted" for c in self.calibrations]

    @property
    def span(self) -> str:
        """Of the errors, for the column beside every prediction. Raises RuntimeError before they are known."""
        if not self.errors:
            raise RuntimeError("no prediction before the errors on published points are known")
        return f"{min(self.errors):+.0%} to {max(self.errors):+.0%}"


@functools.cache
def _ours(policy: str, causal: bool = False, polynomial_of_8: int | None = None) -> Kernel:
    return compile_ours(policy, causal=causal, polynomial_of_8=polynomial_of_8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `model`."""
    parser.add_argument("--kernels", nargs="+", default=DEFAULT_KERNELS, help="policies of ours")
    parser.add_argument("--shapes", nargs="+", default=DEFAULT_SHAPES, help="B,H/G,S,128[:causal]")
    parser.add_argument("--schedules", action="store_true", help="compare schedules as well")
    parser.add_argument("--sms", type=int, default=GB200.sms, help="default %(default)s")
    parser.add_argument("--clock", type=float, default=GB200.clock, help="GHz, default %(default)s")
    parser.add_argument(
        "--latency-scale", type=float, default=1.0, help="factor on every assumed latency"
    )
    parser.add_argument("--out", type=Path, help="file that the tables are written to as well")


def check(kernels: Sequence[str], shapes: Sequence[str]) -> list[Shape]:
    """Parsed shapes. Raises ValueError for a kernel or a shape that the model does not know, before anything is compiled."""
    for name in kernels:
        if why := explain_policy(get_policy(name)):
            raise ValueError(f"kernel {name!r}: {why}")
    parsed = [Shape.parse(text) for text in shapes]
    for shape in parsed:
        if shape.dim != 128:
            raise ValueError(f"shape={shape}: head dim {shape.dim}; the model knows kernels of 128")
    return parsed


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def published(model: Model) -> Iterator[str]:
    """The calibration point and the error on every other; fills `model.errors`."""
    yield "## Calibration, on flash-attention-4's BF16 kernel only"
    yield "\n".join(f"- {c}" for c in model.calibrations)
    yield "## Error on published points"
    rows = []
    for point in (CALIBRATION, *POINTS):
        shape, peer = Shape.parse(point.shape), point.kernel == model.peer.name
        kernel = model.peer if peer else _ours(point.kernel)
        times = model.milliseconds(kernel, shape)
        errors = [error(t, point.milliseconds) for t in times]
        name = f"{point.name} (calibrated on)"
        if point is not CALIBRATION:
            name = point.name
            model.errors += errors
        # The published low-precision kernels are not public: ours of the same policy stands in.
        stand_in = "itself" if peer else f"our {kernel.name}"
        cells = [f"{t:.4f} ({e:+.0%})" for t, e in zip(times, errors, strict=True)]
        rows.append([name, f"{point.milliseconds:.4f}", point.note, stand_in, *cells])
    head = ["point", "published ms", "how known", "stand-in", *model.heads("ms (error), ")]
    yield _table(head, rows)
    yield _ratios(model)
    yield verdict(model.errors)


def _ratios(model: Model) -> str:
    """Published geometric means over nine shapes against the model's over the two of them that are known."""
    rows = []
    shapes = [Shape.parse(s) for s in (CALIBRATION.shape, POINTS[0].shape)]
    for name, ratio in RATIOS.items():
        means = [1.0 for _ in model.calibrations]
        for shape in shapes:
            peer = model.milliseconds(model.peer, shape)
            ours = model.milliseconds(_ours(name), shape)
            for i, (theirs, time) in enumerate(zip(peer, ours, strict=True)):
                means[i] *= (theirs / time) ** (1 / len(shapes))
        cells = [f"{m:.2f} ({error(m, ratio):+.0%})" for m in means]
        rows.append([name, f"{ratio:.3f}", *cells])
    head = ["BF16 time over ours of", "published, nine shapes", *model.heads("two shapes, ")]
    return _table(head, rows)


def counts(kernels: Sequence[Kernel]) -> Iterator[str]:
    """What the machine code says: no model in it but the rates of the units."""
    yield "## Machine code"
    rows = []
    for k in kernels:
        shared = "?" if k.shared_bytes is None else str(k.shared_bytes)
        loops = [str(len(k.loop(role))) for role in ROLES]
        rows.append([k.name, str(k.registers), str(k.stack), shared, str(k.tensor_columns), str(k.ctas_per_sm), *loops])  # fmt: skip
    head = ["kernel", "registers", "stack bytes", "shared bytes", "tensor columns", "CTAs an SM"]
    yield _table([*head, *(f"{role}: instructions a key tile" for role in ROLES)], rows)
    yield (
        "softmax: each of eight warps, for its query tile. The other roles: for both query tiles. Stack bytes are spills. Cycles that one "
        "partition's unit is busy for a 128 x 128 tile at D = 128; chain: a softmax warp alone in the partition."
    )
    rows = []
    for k in kernels:
        use = unit_cycles(k.roles())
        rows.append([k.name, *(f"{use.get(u, 0):.0f}" for u in UNITS), f"{chain(k.roles()):.0f}", f"{k.loaded}"])  # fmt: skip
    yield _table(["kernel", *UNITS, "chain", "loaded bytes a key tile"], rows)


def unit_cycles(roles: Roles) -> dict[str, float]:
    """Cycles that every unit of a partition is busy for one 128 x 128 tile; `slot` is the issue slot, `mma` the tensor core."""
    found: dict[str, float] = {}
    for steps in roles.values():
        for step in steps:
            unit = unit_of(step.instruction.opcode)
            cost = step.mma if unit == "mma" else busy(step.instruction.opcode)
            found[unit] = found.get(unit, 0.0) + cost / QUERY_TILES
            found["slot"] = found.get("slot", 0.0) + 1 / QUERY_TILES
    return found


def chain(roles: Roles) -> float:
    """Cycles of a softmax warp for its tile when it has the partition for itself and never waits for anybody."""
    alone = [Step(s.instruction) for s in roles["softmax 0"]]
    return Partition({"softmax 0": alone}, {}, GB200, 0.0).run(8).period


def predictions(model: Model, names: Sequence[str], shapes: Sequence[Shape]) -> Iterator[str]:
    """Times of our kernels; every row carries the model's error."""
    yield "## Predictions for our kernels (forward kernel alone, publishers not counted)"
    rows = []
    for shape in shapes:
        items, rounded = waves(shape, model.calibrations[0].chip)
        for name in names:
            kernel = _ours(name, shape.causal)
            tile = [f"{period / QUERY_TILES:.0f}" for period in model.periods(kernel)]
            times = [f"{t:.4f}" for t in model.milliseconds(kernel, shape)]
            rows.append([str(shape), name, f"{items:.2f} -> {rounded}", *tile, *times, model.span])
    head = ["shape", "kernel", "waves", *model.heads("predicted cycles a tile, ")]
    yield _table([*head, *model.heads("predicted ms, "), SPAN], rows)


def schedules(model: Model, names: Sequence[str], shapes: Sequence[Shape]) -> Iterator[str]:
    """Cycles of a tile under other schedules, and the gain if both calibrations agree on its sign."""
    yield "## Schedules: predicted cycles of a 128 x 128 tile (gain over as compiled)"
    head = ["kernel", "schedule", *model.heads(), "both agree", SPAN]
    rows = []
    for name in names:
        kernel = _ours(name)
        base: list[float] = []
        seen: list[Roles] = []
        for label, (tiles, change) in SCHEDULES.items():
            changed = change(kernel.roles())
            if changed not in seen:
                seen.append(changed)
                found = [period / tiles for period in model.periods(kernel, label)]
                base = base or found
                rows.append([name, label, *_gains(found, base), model.span])
    yield _table(head, rows)
    rows = []
    for name in (n for n in names if get_policy(n).direct_p is None):
        base = []
        for share in POLYNOMIAL:
            found = [p / QUERY_TILES for p in model.periods(_ours(name, polynomial_of_8=share))]
            base = base or found
            rows.append([name, f"polynomial for {share} of 8", *_gains(found, base), model.span])
    if rows:
        yield "## Exponentials from a polynomial: predicted cycles of a 128 x 128 tile (gain over none)"
        yield _table(head, rows)
    yield from _causal(model, names, shapes)


def _gains(found: Sequence[float], base: Sequence[float]) -> list[str]:
    gains = [b / f - 1 for f, b in zip(found, base, strict=True)]
    if all(abs(g) < SAME for g in gains):
        word = "same"
    elif all(g >= SAME for g in gains):
        word = "faster"
    elif all(g <= -SAME for g in gains):
        word = "slower"
    else:
        word = "no"
    return [*(f"{f:.0f} ({g:+.0%})" for f, g in zip(found, gains, strict=True)), word]


def _causal(model: Model, names: Sequence[str], shapes: Sequence[Shape]) -> Iterator[str]:
    rows = []
    for shape in (s for s in shapes if s.causal):
        for name in names:
            for order in get_args(Order):
                times = model.milliseconds(_ours(name, causal=True), shape, order=order)
                rows.append([str(shape), name, order, *(f"{t:.4f}" for t in times), model.span])
    if rows:
        yield "## Order of causal items: predicted ms (persistent: the kernel's own; the others: a CTA an item)"
        yield _table(["shape", "kernel", "order", *model.heads(), SPAN], rows)


def report(names: Sequence[str], shapes: Sequence[Shape], chip: Chip, *, with_schedules: bool) -> Iterator[str]:  # fmt: skip
    """Everything, paragraph by paragraph: the errors before any figure of ours. Raises ValueError and RuntimeError of what it calls."""
    peer = compile_flash_attention_4()
    model = Model(calibrate(peer, chip), peer)
    yield "# Predicted, not measured: forward kernels on a GB200"
    yield from published(model)
    yield from counts([peer, *(_ours(name) for name in names)])
    yield from predictions(model, names, shapes)
    if with_schedules:
        yield from schedules(model, names, shapes)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the report; bad arguments and missing tools end through `parser.error`."""
    parts = []
    try:
        check_outputs([options.out])
        chip = Chip(sms=options.sms, clock=options.clock, latency_scale=options.latency_scale)
        shapes = check(options.kernels, options.shapes)
        for part in report(options.kernels, shapes, chip, with_schedules=options.schedules):
            sys.stdout.write(part + "\n\n")
            sys.stdout.flush()
            parts.append(part)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if options.out is not None:
        options.out.write_text("\n\n".join(parts) + "\n")
    return 0
