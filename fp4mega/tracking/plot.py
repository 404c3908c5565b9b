"""The picture of a comparison: loss curves, gap to the matched run, gradient norms."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fp4mega.tracking.summary import Band, Comparison

# Okabe and Ito's palette without yellow: told apart by colour-blind readers and in grey.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
VALID: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "markeredgewidth": 1.3,
}
SMOOTH_SHARE = 0.05
# Past the palette's end colours come again, dashed, then dotted.
DASHES = ("-", "--", ":")
LOG_RANGE = 20.0
LOG_GAP = 1.0
LEGEND_INSIDE = 6


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Write the picture; the suffix of `path` gives the format (png, svg, pdf).

    Raises OSError when it cannot be written, ValueError for an unknown suffix.
    """
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    loss, gap, norm = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.4))
    looks = _looks(comparison)
    banded = {i for band in comparison.bands for i in band.members}

    for i, (run, summary) in enumerate(zip(comparison.runs, comparison.summaries, strict=True)):
        # In a band its mean has the label. A reference is wide, so that it shows under a curve that covers it.
        style: dict[str, Any] = {
            **looks[i],
            "label": None if i in banded else summary.label,
            "width": 3.0 if summary.partner == i else 1.4,
            "faint": i in banded,
        }
        _curve(loss, *run.series("train", "loss"), **style)
        _curve(norm, *run.series("train", "grad_norm"), **style)
        loss.plot(*run.series("eval", "loss", split="valid"), color=looks[i]["color"], **VALID)
        if summary.partner != i:
            _curve(gap, *_difference(comparison, i), **looks[i], label=summary.label, width=1.4)
    for band in comparison.bands:
        _draw_band(loss, comparison, band, looks[band.members[0]])

    if comparison.final_valid_step is not None:
        loss.plot([], [], color="grey", label="validation", **VALID)
    loss.set_ylabel("loss (nats per token)")
    handles, labels = loss.get_legend_handles_labels()
    if len(handles) <= LEGEND_INSIDE:
        loss.legend(loc="upper right", frameon=False, fontsize=9)
    else:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
    gap.axhline(0, color="grey", linewidth=0.8)
    gap.set_ylabel("gap in training loss\n(nats per token)")
    if not comparison.candidates:
        gap.set_title("no second run to compare with", y=0.4, fontsize=9, color="grey")
    elif np.abs(_drawn(gap)).max(initial=0.0) > LOG_GAP:
        # Beside a run that diverged the gaps of the others would be a flat line.
        gap.set_yscale("symlog", linthresh=LOG_GAP / 10)
    norm.set_ylabel("gradient norm")
    _log_scale_if_wide(norm)
    norm.set_xlabel("step")
    for axes in (loss, gap, norm):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    matched = all(s.matched for s in comparison.summaries)
    figure.suptitle(
        f"Training loss against {comparison.summaries[0].policy}"
        + ("" if matched else " (NOT MATCHED in initialization, data order or schedule)"),
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _looks(comparison: Comparison) -> list[dict[str, Any]]:
    """Colour and line style: one for each policy where its runs form a band, otherwise one for each run."""
    looks: dict[int, dict[str, Any]] = {}
    banded = {i: band.members[0] for band in comparison.bands for i in band.members}
    used = 0
    for i in range(len(comparison.runs)):
        first = banded.get(i, i)
        if first not in looks:
            dash = DASHES[used // len(COLORS) % len(DASHES)]
            looks[first] = {"color": COLORS[used % len(COLORS)], "linestyle": dash}
            used += 1
        looks[i] = looks[first]
    return [looks[i] for i in range(len(comparison.runs))]


def _curve(
    axes: Axes,
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    *,
    color: str,
    linestyle: str,
    label: str | None,
    width: float,
    faint: bool = False,
) -> None:
    """The values as they are, pale, and smoothed on top of them; `faint` for one of many in a band."""
    axes.plot(steps, values, color=color, alpha=0.15 if faint else 0.25, linewidth=0.8)
    alpha, linewidth = (0.35, 0.8) if faint else (1.0, width)
    axes.plot(
        steps,
        smooth(values),
        color=color,
        linestyle=linestyle,
        alpha=alpha,
        linewidth=linewidth,
        label=label,
    )


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centered moving average over about 5 % of the values. NaN spreads over its window.

    The window shrinks toward the start, where a loss is steep and a lopsided mean would hide its first values; at the
    flat end it is only cut, so that the last point is not the noise of one step.
    """
    half = round(len(values) * SMOOTH_SHARE / 2)
    widths = np.minimum(np.arange(len(values)), half)
    return np.array([values[i - w : i + w + 1].mean() for i, w in enumerate(widths)])


def _difference(
    comparison: Comparison, index: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    steps, losses = comparison.runs[index].series("train", "loss")
    other_steps, other = comparison.runs[comparison.summaries[index].partner].series(
        "train", "loss"
    )
    common = np.intersect1d(steps, other_steps)
    return common, losses[np.isin(steps, common)] - other[np.isin(other_steps, common)]


def _draw_band(axes: Axes, comparison: Comparison, band: Band, look: dict[str, Any]) -> None:
    series = [comparison.runs[i].series("train", "loss") for i in band.members]
    common = series[0][0]
    for steps, _ in series[1:]:
        common = np.intersect1d(common, steps)
    smoothed = np.stack([smooth(values[np.isin(steps, common)]) for steps, values in series])
    axes.fill_between(
        common, smoothed.min(0), smoothed.max(0), color=look["color"], alpha=0.15, linewidth=0
    )
    label = f"{band.policy}, mean of {len(band.members)} seeds"
    axes.plot(common, smoothed.mean(0), **look, linewidth=1.8, label=label)


def _drawn(axes: Axes) -> NDArray[np.float64]:
    """All finite values that curves of the axes have."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    values = np.concatenate(lines) if lines else np.array([])
    return values[np.isfinite(values)]


def _log_scale_if_wide(axes: Axes) -> None:
    values = _drawn(axes)
    if values.size and values.min() > 0 and values.max() / values.min() > LOG_RANGE:
        axes.set_yscale("log")
