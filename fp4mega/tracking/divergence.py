"""`python -m fp4mega.tracking.divergence`: when each arm of a study leaves the band of those that train, and what left it first.

`thin RUN ... --out FOLDER` copies runs with fewer events (see `tracking.thinning`). `report RUN ... --out FOLDER` writes `<name>.md`
with two tables, `<name>_loss.png` (see `tracking.compare`) and `<name>_probes.png`.

The band is made of the runs of the policies `--band`: at every step the largest value that any of them had so far or has later
counts, so that a spike that every run survives is inside. A run has left it from the first step after which it never comes back:

- loss: above the band's loss at that step (smoothed alike) by `LOSS_MARGIN` nats;
- gradient norm: above `NORM_FACTOR` times the band's largest from that step on;
- a probe: above `PROBE_FACTOR` times the largest that any layer of the band ever had; the first layer that does is named.

What is not finite is outside.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fp4mega.tracking.events import nearest
from fp4mega.tracking.reader import Run, read_run
from fp4mega.tracking.summary import CompareError, compare_runs, first_nonfinite
from fp4mega.tracking.thinning import thin_all

LOSS_MARGIN = 0.1
NORM_FACTOR = 3.0
PROBE_FACTOR = 3.0
DEFAULT_BAND = ("bf16", "nvfp4_qk_fp8_pv")
DEFAULT_PROBE = "ds_row_sum"


@dataclass(frozen=True, slots=True)
class Departure:
    """Where one run left the band, by quantity; None where it never did. layer counts from 0."""

    run: str
    policy: str
    seed: int
    probe: int | None
    layer: int | None
    grad_norm: int | None
    loss: int | None
    nonfinite: int | None
    last: int


def departures(runs: Sequence[Run], band: Sequence[str], probe: str) -> list[Departure]:
    """One entry for each run that is not in the band.

    Raises CompareError when no run of the band is there or one of them is not finite, and when the band or another run has no
    gradient norm or no such probe: a figure that nobody has would never leave the band.
    """
    inside = [run for run in runs if run.policy in band]
    if not inside:
        policies = ", ".join(dict.fromkeys(run.policy for run in runs))
        raise CompareError(f"band={','.join(band)}: no such run; policies given: {policies}")
    for run in inside:
        if (bad := first_nonfinite(run)) is not None:
            raise CompareError(
                f"band={','.join(band)}: run {run.name!r} is not finite from step {bad}; a band is made of runs that train"
            )
    outside = [run for run in runs if run.policy not in band]
    for members in (inside, *([run] for run in outside)):
        _require_figures(members, probe)
    losses = [_smoothed(run) for run in inside]
    norms = [n for run in inside if len((n := run.series("train", "grad_norm"))[0])]
    figures = [value for run in inside for _, _, value in _probe(run, probe)]
    # numpy's, which does not pass over a NaN.
    ceiling = PROBE_FACTOR * float(np.max(figures))
    if not math.isfinite(ceiling):
        raise CompareError(f"probe={probe!r}: not finite in a run of the band {','.join(band)}")
    found = []
    for run in outside:
        steps, loss = _smoothed(run)
        norm_steps, norm = run.series("train", "grad_norm")
        limit = _envelope(losses, steps) + LOSS_MARGIN
        norm_limit = NORM_FACTOR * _from_here_on(norms, norm_steps)
        step, layer = _probe_departure(_probe(run, probe), ceiling)
        found.append(
            Departure(
                run=run.name,
                policy=run.policy,
                seed=int(run.manifest["seed"]),
                probe=step,
                layer=layer,
                grad_norm=_never_back(norm_steps, norm, norm_limit),
                loss=_never_back(steps, loss, limit),
                nonfinite=first_nonfinite(run),
                last=int(steps[-1]) if len(steps) else 0,
            )
        )
    return found


def _require_figures(members: Sequence[Run], probe: str) -> None:
    names = ", ".join(repr(run.name) for run in members)
    if not any(_probe(run, probe) for run in members):
        logged = {name for run in members for event in run.of_type("probe") for name in event}
        figures = logged - {"type", "step", "time", "nonfinite", "layer"}
        told = nearest(probe, figures) if figures else "no probe was logged at all"
        raise CompareError(f"probe={probe!r}: no such figure in {names}; {told}")
    if not any(len(run.series("train", "grad_norm")[0]) for run in members):
        raise CompareError(f"no gradient norm was logged in {names}")


def _smoothed(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    from fp4mega.tracking.plot import smooth

    steps, loss = run.series("train", "loss")
    return steps, smooth(loss) if len(loss) else loss


def _envelope(
    series: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], at: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The largest of the series at each step, straight between logged steps and level beyond the ends."""
    return np.max([np.interp(at, steps, values) for steps, values in series], axis=0)


def _from_here_on(
    series: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], at: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The largest value that any series has at or after each step."""
    highest = _envelope(series, at)
    return np.maximum.accumulate(highest[::-1])[::-1]


def _never_back(
    steps: NDArray[np.int64], values: NDArray[np.float64], limit: NDArray[np.float64]
) -> int | None:
    """The first step from which on every value is above its limit or not finite; None when the last one is inside."""
    inside = np.flatnonzero(values <= limit)
    first = 0 if inside.size == 0 else int(inside[-1]) + 1
    return int(steps[first]) if first < len(steps) else None


def _probe(run: Run, name: str) -> list[tuple[int, int, float]]:
    """(step, layer, value) of every probe event that has the figure."""
    return [
        (e["step"], e["layer"], e[name]) for e in run.of_type("probe") if e.get(name) is not None
    ]


def _probe_departure(
    points: Sequence[tuple[int, int, float]], ceiling: float
) -> tuple[int | None, int | None]:
    outside = [(step, -value, layer) for step, layer, value in points if not value <= ceiling]
    if not outside:
        return None, None
    step, _, layer = min(outside)
    return step, layer


def outcome_table(runs: Sequence[Run]) -> list[str]:
    """One line for each policy: seeds, how they ended, validation loss and its gap to the first policy's run of the same seed."""
    reference = {
        run.manifest["seed"]: _final_valid(run) for run in runs if run.policy == runs[0].policy
    }
    lines = [
        "| policy | seeds | steps | tokens | outcome | validation loss | gap to "
        f"`{runs[0].policy}` | largest gradient norm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for policy in dict.fromkeys(run.policy for run in runs):
        members = [run for run in runs if run.policy == policy]
        broken = [(r.manifest["seed"], s) for r in members if (s := first_nonfinite(r)) is not None]
        outcome = (
            "finite"
            if not broken
            else "not finite: " + ", ".join(f"seed {seed} at {step}" for seed, step in broken)
        )
        ended = [r for r in members if first_nonfinite(r) is None]
        unfinished = [str(r.manifest["seed"]) for r in ended if r.status != "finished"]
        if unfinished:
            outcome += f"; unfinished: seed {', '.join(unfinished)}"
        finals = {r.manifest["seed"]: _final_valid(r) for r in ended if r.status == "finished"}
        gaps = [
            value - other
            for seed, value in finals.items()
            if value is not None and (other := reference.get(seed)) is not None
        ]
        train = [r.of_type("train") for r in members]
        steps = [events[-1]["step"] if events else 0 for events in train]
        tokens = [events[-1]["tokens"] if events else 0 for events in train]
        logged = [norm for r in members if len(norm := r.series("train", "grad_norm")[1])]
        norms = [float(np.nanmax(norm)) for norm in logged]
        lines.append(
            f"| `{policy}` | {len(members)} | {_span(steps, ',d')} | {_span([t / 1e6 for t in tokens], '.1f')} M | {outcome} "
            f"| {_span([v for v in finals.values() if v is not None], '.4f')} "
            f"| {'reference' if policy == runs[0].policy else _span(gaps, '+.4f')} | {_span(norms, '.3g')} |"
        )
    return lines


def _final_valid(run: Run) -> float | None:
    _, values = run.series("eval", "loss", split="valid")
    return float(values[-1]) if len(values) else None


def _span(values: Sequence[float], spec: str) -> str:
    """`mean (lowest to highest)`, one number when they are equal, a dash when there are none."""
    if not values:
        return "-"
    low, high = format(min(values), spec), format(max(values), spec)
    if low == high:
        return low
    mean = np.mean(values)
    return f"{format(int(mean) if spec.endswith('d') else mean, spec)} ({low} to {high})"


def departure_table(found: Sequence[Departure], band: Sequence[str], probe: str) -> list[str]:
    """One line for each run outside the band."""
    lines = [
        f"| run | `{probe}` (layer) | gradient norm | loss | not finite | last step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for d in found:
        where = "-" if d.probe is None else f"{d.probe} ({d.layer})"
        cells = ["-" if x is None else str(x) for x in (d.grad_norm, d.loss, d.nonfinite)]
        lines.append(f"| `{d.policy}`, seed {d.seed} | {where} | {' | '.join(cells)} | {d.last} |")
    band_text = ", ".join(f"`{name}`" for name in band)
    note = f"First step from which on a run stays outside the band of {band_text}; for the probe the first step outside."
    return [note, "", *lines]


def plot_probes(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """One row for each policy (its first run) and one column for each figure, a line for each layer.

    Raises OSError when it cannot be written, ValueError for an unknown suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first: Mapping[str, Run] = {run.policy: run for run in reversed(runs)}
    policies = list(dict.fromkeys(run.policy for run in runs))
    figure = Figure(figsize=(3.4 * len(names), 1.7 * len(policies) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(policies), len(names), sharex=True, sharey="col", squeeze=False)
    for row, policy in zip(grid, policies, strict=True):
        run = first[policy]
        for axes, name in zip(row, names, strict=True):
            points = _probe(run, name)
            layers = sorted({layer for _, layer, _ in points})
            for layer in layers:
                line = [(s, v) for s, at, v in points if at == layer]
                # From the first layer, dark, to the last, light.
                shade = 0.85 * layer / max(1, layers[-1])
                axes.plot(*zip(*line, strict=True), color=(shade, 0.35, 1 - shade), linewidth=0.9)
            stopped = first_nonfinite(run)
            if stopped is not None:
                axes.axvline(stopped, color="#D55E00", linewidth=1.2, linestyle="--")
            if any(v > 0 for *_, v in points):
                axes.set_yscale("log")
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=7, which="both")
        row[0].set_ylabel(policy, fontsize=7)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=8)
    figure.suptitle(
        "A line a layer, first blue to last red; dashed: not finite from here", fontsize=9
    )
    figure.savefig(path, dpi=120)


def report(runs: Sequence[Run], out: Path, name: str, band: Sequence[str], probe: str) -> list[str]:
    """Write tables and pictures of matched runs, the first of which is the reference; returns the lines of the tables.

    Raises ValueError for a name that is no file name, CompareError as `compare_runs` and `departures` do.
    """
    from fp4mega.tracking.plot import plot_comparison

    if not name or Path(name).name != name:
        raise ValueError(f"name={name!r}: expected the beginning of file names, without a folder")
    comparison = compare_runs(runs)
    lines = [*outcome_table(runs), "", *departure_table(departures(runs, band, probe), band, probe)]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    plot_comparison(comparison, out / f"{name}_loss.png")
    plot_probes(runs, (probe, "dq_error", "qkv_grad_norm"), out / f"{name}_probes.png")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m fp4mega.tracking.divergence")
    commands = parser.add_subparsers(dest="command", required=True)
    small = commands.add_parser("thin", help="copy runs with fewer events")
    small.add_argument("--every", type=int, default=5, help="steps between training events kept")
    small.add_argument("--probe-every", type=int, default=1, help="steps between probes kept")
    told = commands.add_parser("report", help="tables and pictures of matched runs")
    told.add_argument("--name", required=True, help="names the files")
    told.add_argument("--band", default=",".join(DEFAULT_BAND), help="policies that make the band")
    told.add_argument("--probe", default=DEFAULT_PROBE, help="figure whose departure is looked for")
    for command in (small, told):
        command.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
        command.add_argument("--out", type=Path, required=True, help="folder for what is written")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(path) for path in options.runs]
        if options.command == "thin":
            thin_all(runs, options.out, options.every, options.probe_every)
        else:
            lines = report(runs, options.out, options.name, options.band.split(","), options.probe)
            sys.stdout.write("\n".join(lines) + "\n")
    except (CompareError, ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
