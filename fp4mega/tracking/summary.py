"""The numbers of a comparison: what each run did, and how far it is from the run it is matched with.

Two runs are matched when they began from the same weights, saw the same batches (equal fingerprints) and had the same learning
rate at every step (see `tracking.schedule`). The first run's policy is the reference. Each other run is compared with the
reference run that it is matched with, so that with several seeds every gap is between equal seeds.

Losses are taken at the steps that all runs logged. The final loss is the mean over the last N of them; the last is the last
one that all reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4mega.tracking.events import EVENT_TYPES
from fp4mega.tracking.reader import Run
from fp4mega.tracking.schedule import differences

DEFAULT_LAST = 10
SPEED_WARMUP_EVENTS = 5
"""Train events left out of the median speed: compilation and allocation happen there. At most half of them."""
SHOWN_STEPS = 6


class CompareError(ValueError):
    """These runs cannot be compared, or not in the way asked for."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in numbers. Losses in nats per token; None is "not measured" and NaN "not finite"."""

    index: int
    label: str
    """The policy, with the run's name after it when another run has the same."""
    policy: str
    run: str
    hardware: str
    status: str
    partner: int
    """Index of the run that the gaps are to; its own index for a reference run."""
    matched: bool
    steps: int
    """Last step logged, whether or not the other runs reached it."""
    first_loss: float
    final_loss: float
    valid_loss: float | None
    gap: float | None
    gap_percent: float | None
    valid_gap: float | None
    valid_gap_percent: float | None
    mean_grad_norm: float | None
    max_grad_norm: float | None
    tokens_per_s: float
    speed_ratio: float | None
    """tokens_per_s over that of the first run; None on other hardware."""
    first_nonfinite: int | None
    """First step with a loss or a gradient norm that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Runs of one policy from different seeds, taken together."""

    policy: str
    members: tuple[int, ...]
    mean_final_loss: float
    min_final_loss: float
    max_final_loss: float
    mean_gap: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that the table, the gates and the plot are made from. `runs[i]` and `summaries[i]` belong together."""

    runs: tuple[Run, ...]
    summaries: tuple[RunSummary, ...]
    bands: tuple[Band, ...]
    last: int
    final_step: int
    final_valid_step: int | None
    same_length: bool
    shown_steps: tuple[int, ...]
    losses: NDArray[np.float64]
    """[run, shown step]"""
    notes: tuple[str, ...]

    @property
    def references(self) -> tuple[int, ...]:
        """Indices of the runs that gaps are taken to: one per seed of the first policy."""
        return tuple(s.index for s in self.summaries if s.partner == s.index)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Indices of the runs that have a gap to another one."""
        return tuple(s.index for s in self.summaries if s.partner != s.index)


def compare_runs(
    runs: Sequence[Run],
    *,
    last: int = DEFAULT_LAST,
    until: int | None = None,
    steps: Sequence[int] | None = None,
    allow_unmatched: bool = False,
) -> Comparison:
    """Compare runs with the first one's policy.

    Args:
        last: how many of the last common logged steps the final loss is the mean of.
        until: leave out everything after this step, in every run.
        steps: the steps whose losses are shown; None takes about six, evenly spread.
        allow_unmatched: compare with the first run where no matched one exists, and note it, instead of refusing.

    Raises CompareError for no runs, one run given twice, runs without a common logged step, a step that not all runs logged, and
    unmatched runs.
    """
    if not runs:
        raise CompareError("no runs to compare")
    seen: dict[Path, Run] = {}
    for run in runs:
        if (other := seen.setdefault(Path(run.path).resolve(), run)) is not run:
            raise CompareError(
                f"{other.path} and {run.path} are one run: expected each run once, its gap to itself says nothing"
            )
    if last < 1:
        raise CompareError(f"last={last}: expected a number of logged steps >= 1")
    if until is not None:
        runs = [_up_to(run, until) for run in runs]
    partners = match_runs(runs, allow_unmatched=allow_unmatched)

    train = [run.series("train", "loss") for run in runs]
    common = reduce(np.intersect1d, [s for s, _ in train])
    if common.size == 0:
        logged = ", ".join(
            f"{run.name}: {_span(s)}" for run, (s, _) in zip(runs, train, strict=True)
        )
        raise CompareError(f"the runs logged no training step in common ({logged})")
    shown = _shown_steps(common, steps)
    losses = np.stack([v[np.isin(s, shown)] for s, v in train])
    at_common = [v[np.isin(s, common)] for s, v in train]
    final = [float(np.mean(v[-last:])) for v in at_common]
    valid, valid_step = _final_valid(runs, int(common[-1]))

    ends = [int(s[-1]) for s, _ in train]
    labels = _labels(runs)
    speeds = [_speed(run) for run in runs]
    summaries = []
    for i, run in enumerate(runs):
        p = partners[i]
        _, norms = run.series("train", "grad_norm")
        gap, gap_percent = _gap(final[i], final[p]) if p != i else (None, None)
        valid_gap, valid_gap_percent = _gap(valid[i], valid[p]) if p != i else (None, None)
        summaries.append(
            RunSummary(
                index=i,
                label=labels[i],
                policy=run.policy,
                run=run.name,
                hardware=run.hardware,
                status=run.status,
                partner=p,
                matched=p == i or are_matched(runs[p], run),
                steps=ends[i],
                first_loss=float(train[i][1][0]),
                final_loss=final[i],
                valid_loss=valid[i],
                gap=gap,
                gap_percent=gap_percent,
                valid_gap=valid_gap,
                valid_gap_percent=valid_gap_percent,
                mean_grad_norm=float(np.mean(norms)) if norms.size else None,
                max_grad_norm=float(np.max(norms)) if norms.size else None,
                tokens_per_s=speeds[i],
                speed_ratio=speeds[i] / speeds[0]
                if run.hardware == runs[0].hardware and speeds[0] > 0
                else None,
                first_nonfinite=first_nonfinite(run),
            )
        )
    return Comparison(
        runs=tuple(runs),
        summaries=tuple(summaries),
        bands=_bands(runs, summaries),
        last=min(last, len(common)),
        final_step=int(common[-1]),
        final_valid_step=valid_step,
        same_length=len(set(ends)) == 1,
        shown_steps=tuple(int(s) for s in shown),
        losses=losses,
        notes=_notes(runs, summaries, ends, int(common[-1])),
    )


def _up_to(run: Run, step: int) -> Run:
    events = [e for e in run.events if e["step"] <= step or not EVENT_TYPES[e["type"]].history]
    lives = [life for life in run.manifest.get("lives", ()) if life["step"] < step]
    return Run(path=run.path, manifest={**run.manifest, "lives": lives}, events=events)


def fingerprints(run: Run) -> tuple[str | None, str | None]:
    """Fingerprints of the initial weights and of the data order; None where the manifest has none."""
    found = run.manifest.get("fingerprints") or {}
    return found.get("init"), found.get("data")


def are_matched(first: Run, second: Run) -> bool:
    """Whether the two began from the same weights, on the same batches, under the same schedule."""
    known = None not in fingerprints(second)
    equal = fingerprints(first) == fingerprints(second)
    return known and equal and not differences(first.manifest, second.manifest)


def match_runs(runs: Sequence[Run], *, allow_unmatched: bool) -> list[int]:
    """For every run the index of the run it is compared with, see the module docstring.

    A run of the first policy that matches no earlier one is a further seed of the reference, and its own partner. Raises
    CompareError for a run without a partner, unless `allow_unmatched` gives it the first run.
    """
    references: list[int] = []
    partners: list[int] = []
    for i, run in enumerate(runs):
        partner = next((r for r in references if are_matched(runs[r], run)), None)
        if (
            partner is None
            and run.policy == runs[0].policy
            and (i == 0 or _is_further_seed(run, [runs[r] for r in references]))
        ):
            references.append(i)
            partner = i
        if partner is None:
            if not allow_unmatched:
                raise CompareError(_why_unmatched([runs[r] for r in references], run))
            partner = 0
        partners.append(partner)
    return partners


def _is_further_seed(run: Run, references: Sequence[Run]) -> bool:
    known = None not in fingerprints(run)
    new = run.manifest["seed"] not in [r.manifest["seed"] for r in references]
    return known and new and not differences(references[0].manifest, run.manifest)


def _why_unmatched(references: Sequence[Run], run: Run) -> str:
    # With the one of its seed only what is wrong with this run differs.
    of_seed = (r for r in references if r.manifest["seed"] == run.manifest["seed"])
    first = next(of_seed, references[0])
    words = ("initialization (fingerprints.init)", "data order (fingerprints.data)")
    pairs = list(zip(words, fingerprints(first), fingerprints(run), strict=True))
    differing = [
        f"{word}: {a or 'none'} and {b or 'none'}" for word, a, b in pairs if a is None or a != b
    ]
    differing += [f"schedule: {text}" for text in differences(first.manifest, run.manifest)]
    return (
        f"runs {first.name!r} and {run.name!r} are not matched, so their gap says little about the policies; "
        f"{'; '.join(differing)}. Use equal seeds, data, model and schedule, or --allow-unmatched"
    )


def _shown_steps(common: NDArray[np.int64], asked: Sequence[int] | None) -> NDArray[np.int64]:
    if asked is None:
        picks = np.linspace(0, len(common) - 1, min(SHOWN_STEPS, len(common))).round().astype(int)
        return common[picks]
    if missing := sorted(set(asked) - {int(s) for s in common}):
        raise CompareError(
            f"steps={missing}: not logged by every run; logged by all: {_span(common)}"
        )
    return np.array(sorted(set(asked)), dtype=np.int64)


def _span(steps: NDArray[np.int64]) -> str:
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) else "no step"


def _final_valid(runs: Sequence[Run], until: int) -> tuple[list[float | None], int | None]:
    """The validation loss of each run at the last step up to `until` at which all runs that evaluate did."""
    series = [run.series("eval", "loss", split="valid") for run in runs]
    evaluated = [s[s <= until] for s, _ in series if s.size]
    common = reduce(np.intersect1d, evaluated) if evaluated else np.array([], dtype=np.int64)
    if common.size == 0:
        return [None] * len(runs), None
    step = int(common[-1])
    return [float(v[s == step][0]) if s.size else None for s, v in series], step


def _gap(value: float | None, reference: float | None) -> tuple[float | None, float | None]:
    if value is None or reference is None:
        return None, None
    gap = value - reference
    return gap, 100 * gap / abs(reference) if reference else float("nan")


def _speed(run: Run) -> float:
    _, speed = run.series("train", "tokens_per_s")
    return float(np.median(speed[min(SPEED_WARMUP_EVENTS, len(speed) // 2) :]))


def first_nonfinite(run: Run) -> int | None:
    """First step with a loss or a gradient norm that is not finite; None when all are."""
    series = [
        run.series("train", "loss"),
        run.series("train", "grad_norm"),
        run.series("eval", "loss", split="valid"),
    ]
    return min(
        (int(s[~np.isfinite(v)][0]) for s, v in series if not np.isfinite(v).all()), default=None
    )


def _labels(runs: Sequence[Run]) -> list[str]:
    policies = [run.policy for run in runs]
    return [
        run.policy if policies.count(run.policy) == 1 else f"{run.policy} [{run.name}]"
        for run in runs
    ]


def _bands(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> tuple[Band, ...]:
    bands = []
    for policy in dict.fromkeys(s.policy for s in summaries):
        members = tuple(i for i, s in enumerate(summaries) if s.policy == policy)
        if len(members) < 2 or len({fingerprints(runs[i]) for i in members}) < len(members):
            continue
        final = [summaries[i].final_loss for i in members]
        gaps = [gap for i in members if (gap := summaries[i].gap) is not None]
        bands.append(
            Band(
                policy=policy,
                members=members,
                mean_final_loss=float(np.mean(final)),
                min_final_loss=float(np.min(final)),
                max_final_loss=float(np.max(final)),
                mean_gap=float(np.mean(gaps)) if gaps else None,
            )
        )
    return tuple(bands)


def _notes(
    runs: Sequence[Run], summaries: Sequence[RunSummary], ends: Sequence[int], final_step: int
) -> tuple[str, ...]:
    notes = []
    if unmatched := [s.label for s in summaries if not s.matched]:
        notes.append(
            f"NOT MATCHED in initialization, data order or schedule: {', '.join(unmatched)}"
        )
    if len(set(ends)) > 1:
        notes.append(
            f"runs differ in length; losses are compared at step {final_step}, the last one that all logged"
        )
    if len({s.hardware for s in summaries}) > 1:
        notes.append("runs differ in hardware; their speeds are not comparable")
    for run, summary in zip(runs, summaries, strict=True):
        if summary.status != "finished":
            notes.append(f"{summary.label}: status {summary.status} at step {summary.steps}")
        if summary.first_nonfinite is not None:
            notes.append(f"{summary.label}: not finite from step {summary.first_nonfinite}")
        notes += [f"{summary.label}: {text}" for text in _changes(run)]
    return tuple(notes)


def _changes(run: Run) -> list[str]:
    lives: list[dict[str, Any]] = run.manifest.get("lives", [])
    return [
        f"at its resume from step {life['step']} {change}"
        for life in lives
        for change in life["changes"]
    ]
