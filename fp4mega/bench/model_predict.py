"""From cycles of a key tile to the time of a shape, the one free parameter of the speed model, and its error on published times.

A work item is 256 query rows of one head against their key tiles. Items go to multiprocessors in launch order as these become free, a CTA
each, or are dealt beforehand to a persistent grid; both give wave quantization and the tail of causal schedules.

One published time, flash-attention-4's BF16 kernel at B1 H64 S8192, fixes one parameter. Two are open, and nothing published tells them apart,
so there are two calibrations and every prediction is a pair: the whole gap between simulation and publication is laid to the hand-off
between warps and units at the highest clock, or to the clock, with a hand-off that is assumed.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from fp4mega.bench.model_chip import GB200, Chip
from fp4mega.bench.model_kernels import KEY_TILE, QUERY_TILE, QUERY_TILES, Kernel
from fp4mega.bench.model_simulate import Partition, Result, Step
from fp4mega.bench.shapes import Shape
from fp4mega.kernels.cute.schedule import deal

Order = Literal["longest first", "shortest first", "persistent"]
"""The first two: a CTA an item, launched in that order. persistent: a CTA a multiprocessor, items as `schedule.deal` gives them."""
ASSUMED_HAND_OFF = 100.0
"""Cycles from an arrival until who waited for it goes on, assumed where the clock is fitted."""
MAX_HAND_OFF = 2000.0
TILES = 32
WORTHLESS = 0.25
"""Largest error on published points with which a prediction says something about speed."""
Roles = dict[str, list[Step]]


class Published(NamedTuple):
    """One published time in milliseconds. `kernel`: ours of the same policy, which stands in for it, or the peer itself."""

    name: str
    shape: str
    kernel: str
    milliseconds: float
    note: str


CALIBRATION = Published("BF16, B1 H64 S8192", "1,64/64,8192,128", "flash_attention_4", 1.611, "given")  # fmt: skip
POINTS = (
    Published("BF16, B1 H24 S4096", "1,24/24,4096,128", "flash_attention_4", 0.0922 * 1.83, "fast time x ratio 1.83"),
    Published("fast, B1 H64 S8192", "1,64/64,8192,128", "direct_p_fast", 0.758, "given"),
    Published("fast, B1 H24 S4096", "1,24/24,4096,128", "direct_p_fast", 0.0922, "given"),
    Published("accurate, B1 H24 S4096", "1,24/24,4096,128", "direct_p_accurate", 0.0922 * 1.83 / 1.53, "fast time x 1.83 / 1.53"),
)  # fmt: skip
"""Robert Hu, "Hardware-Aware FP4 FlashAttention-4" (2026), GB200. The kernels are not public."""
RATIOS = {"direct_p_fast": 2.023, "direct_p_accurate": 1.669}
"""BF16 time over theirs, geometric mean over nine shapes, of which two are known."""


def key_tiles(shape: Shape) -> list[int]:
    """Key tiles of every item: row tiles slowest, the first rows first.

    Raises ValueError for a head dim whose kernels the model does not know.
    """
    if shape.dim != 128:
        raise ValueError(f"shape={shape}: head dim {shape.dim}; the model knows kernels of 128")
    found, rows = [], QUERY_TILES * QUERY_TILE
    for first in range(0, shape.seqlen, rows):
        last = min(first + rows, shape.seqlen) if shape.causal else shape.seqlen
        found += [-(-last // KEY_TILE)] * (shape.heads * shape.batch)
    return found


def makespan(jobs: Sequence[float], workers: int) -> float:
    """End of the last job, when each goes to the first free worker in the order given."""
    free = [0.0] * min(workers, len(jobs))
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def cycles(shape: Shape, period: float, chip: Chip, *, order: Order = "longest first") -> float:  # fmt: skip
    """Cycles of a launch whose CTAs take `period` for one key tile against their query tiles. Raises ValueError for another order.

    Between the items of a persistent CTA nothing is lost: all of its roles go on at once, and the output is stored meanwhile.
    """
    if order not in get_args(Order):
        raise ValueError(f"order={order!r}: expected one of {', '.join(get_args(Order))}")
    counts = sorted(key_tiles(shape), reverse=order != "shortest first")
    if order == "persistent":
        dealt = deal(len(counts), min(chip.sms, len(counts)))
        return chip.fixed + period * max(sum(counts[rank] for rank in ranks) for ranks in dealt)
    return makespan([chip.fixed + period * n for n in counts], chip.sms)


def waves(shape: Shape, chip: Chip) -> tuple[float, int]:
    """(items over SMs, that rounded up)."""
    count = len(key_tiles(shape))
    return count / chip.sms, -(-count // chip.sms)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A chip and a hand-off with which the calibration point comes out; `fitted` says which of the two was free."""

    fitted: Literal["hand-off", "clock"]
    chip: Chip
    hand_off: float

    def __str__(self) -> str:
        return f"{self.fitted} fitted: hand-off {self.hand_off:.0f} cycles, clock {self.chip.clock:.3f} GHz"

    def simulate(self, roles: Roles, counts: dict[str, int]) -> Result:
        """Steady state of a CTA."""
        return Partition(roles, counts, self.chip, self.hand_off).run(TILES)

    def milliseconds(self, period: float, shape: Shape, *, order: Order = "longest first") -> float:
        """Predicted time of a forward kernel that takes `period` cycles for a key tile against the query tiles of an item."""
        return self.chip.milliseconds(cycles(shape, period, self.chip, order=order))


def crossing(function: Callable[[float], float], wanted: float, high: float, steps: int = 12) -> float:  # fmt: skip
    """A point between 0 and `high` where a function that rises on the whole passes `wanted`.

    Raises ValueError when `wanted` is not between the values at the ends.
    """
    low = 0.0
    ends = function(low), function(high)
    if not ends[0] <= wanted <= ends[1]:
        raise ValueError(
            f"{wanted:.4g} lies outside of {ends[0]:.4g} to {ends[1]:.4g}: no parameter reproduces it"
        )
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def calibrate(peer: Kernel, chip: Chip = GB200) -> tuple[Calibration, Calibration]:
    """Both calibrations, from the peer's kernel at the calibration point only.

    Raises ValueError when a chip is so fast or slow that no hand-off from 0 to MAX_HAND_OFF gives the published time.
    """
    shape, roles, counts = Shape.parse(CALIBRATION.shape), peer.roles(), peer.description.counts

    def time(hand_off: float) -> float:
        tried = Calibration("hand-off", chip, hand_off)
        return tried.milliseconds(tried.simulate(roles, counts).period, shape)

    fitted = crossing(time, CALIBRATION.milliseconds, MAX_HAND_OFF)
    simulated = Calibration("clock", chip, ASSUMED_HAND_OFF)
    period = simulated.simulate(roles, counts).period
    clock = cycles(shape, period, chip) / (CALIBRATION.milliseconds * 1e6)
    return Calibration("hand-off", chip, fitted), replace(simulated, chip=replace(chip, clock=clock))  # fmt: skip


def error(predicted: float, published: float) -> float:
    """Relative, positive when the model is too slow."""
    return predicted / published - 1


def verdict(errors: Sequence[float]) -> str:
    """What the errors on published points leave of a prediction. `errors`: relative, of the points that were not calibrated on."""
    low, high = min(errors), max(errors)
    span = f"{low:+.0%} to {high:+.0%}"
    if max(abs(low), abs(high)) > WORTHLESS:
        return (
            f"VERDICT: the model misses published times that it was not calibrated on by {span}. As statements about speed its predictions are "
            "worthless. What is left are comparisons of schedules of one kernel, and only where both calibrations agree."
        )
    return f"VERDICT: the model misses published times that it was not calibrated on by {span}; predictions below carry that error."
