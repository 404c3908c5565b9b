"""Device times: percentiles over calls, arms in turn in one run, L2 emptied before every call; and one kernel at a time.

Each timed call is preceded by a read and write of a buffer larger than the L2 and by a short spin on the device, so that the host
runs ahead and its own launch cost is not in the time, as in training. Order rotates from round to round, so that a drift of the clock
falls on all arms alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

WARMUP = 3
FLUSH_BYTES = 1 << 28
SPIN_CYCLES = 1_000_000
COPY_BYTES = 1 << 30
KERNEL_CALLS = 7
"""Calls under the profiler."""


class Times(NamedTuple):
    """Milliseconds."""

    p20: float
    p50: float
    p80: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics, as numpy's default. Raises ValueError without samples."""
    if not samples:
        raise ValueError("percentile of no samples")
    ordered = sorted(samples)
    at = percent / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def times(samples: Sequence[float]) -> Times:
    """p20, p50 and p80 of samples."""
    return Times(*(percentile(samples, p) for p in (20, 50, 80)))


class Activity(NamedTuple):
    """One thing that ran on the device: its name, and its start and length in microseconds."""

    name: str
    start: float
    length: float


def split_calls(activities: Sequence[Activity], flush: str) -> list[dict[str, float]]:
    """What ran between one flush and the next, by name. Raises RuntimeError when the profiler saw no flush or nothing else."""
    calls: list[dict[str, float]] = []
    for activity in sorted(activities, key=lambda a: a.start):
        if activity.name == flush:
            calls.append({})
        elif calls:
            calls[-1][activity.name] = calls[-1].get(activity.name, 0.0) + activity.length / 1e3
    if not calls or not all(calls):
        raise RuntimeError(
            f"the profiler saw {len(calls)} calls, {sum(map(bool, calls))} with kernels: its times cannot be used"
        )
    return calls


class Stopwatch:
    """Times of calls on the current CUDA device. `samples` and `kernels` wait for it."""

    def __init__(self) -> None:
        self.filler = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.flush_kernel: str | None = None

    def _flush(self) -> None:
        """Displace what the L2 holds."""
        self.filler.bitwise_not_()

    def time(self, call: Callable[[], object]) -> tuple[Any, Any]:
        """Events at start and end of one call, after a flush."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush()
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        call()
        end.record()
        return start, end

    def samples(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        """Milliseconds of every pair."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def kernels(self, call: Callable[[], object]) -> list[dict[str, float]]:
        """Milliseconds of every kernel name, summed in each of a few calls, under the profiler and with the L2 emptied.

        Raises RuntimeError when the profiler does not see what ran.
        """
        if self.flush_kernel is None:
            self._flush()
            seen = {activity.name for activity in self._profile(self._flush)}
            if len(seen) != 1:
                raise RuntimeError(
                    f"one kernel ran and the profiler saw {sorted(seen) or 'nothing'}"
                )
            (self.flush_kernel,) = seen
        call()

        def flushed() -> None:
            for _ in range(KERNEL_CALLS):
                self._flush()
                call()

        return split_calls(self._profile(flushed), self.flush_kernel)

    def _profile(self, body: Callable[[], object]) -> list[Activity]:
        """Everything that ran on the device for `body`."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            body()
            torch.cuda.synchronize()
        return [
            Activity(e.name, e.time_range.start, e.time_range.elapsed_us())
            for e in profiler.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        ]

    def copy_bandwidth(self, *, repeats: int = 10) -> float:
        """Bytes a second that a device-to-device copy moves, read and written, median."""
        source = torch.ones(COPY_BYTES // 4, dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        pairs = [self.time(lambda: target.copy_(source)) for _ in range(WARMUP + repeats)]
        return 2 * COPY_BYTES / (percentile(self.samples(pairs)[WARMUP:], 50) / 1e3)


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, stopwatch: Any
) -> dict[str, list[float]]:
    """`repeats` samples of every call, one of each in a round, in an order that rotates."""
    names = list(calls)
    for name in names:
        for _ in range(WARMUP):
            calls[name]()
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for round_ in range(repeats):
        shift = round_ % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            pairs[name].append(stopwatch.time(calls[name]))
    return {name: stopwatch.samples(pairs[name]) for name in names}
