import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from fp4mega.tracking import read_run
from fp4mega.tracking.plot import plot_comparison, smooth
from fp4mega.tracking.summary import compare_runs


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws runs and returns the figure and the picture's pixels."""
    figures = []
    save = Figure.savefig

    def savefig(self, *arguments, **options):
        figures.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def draw(*paths, **options):
        plot_comparison(compare_runs([read_run(p) for p in paths], **options), tmp_path / "out.png")
        return figures[-1], matplotlib.image.imread(tmp_path / "out.png")

    return draw


def _labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_pair(make_run, drawn):
    a = make_run("a", [5.0, 4.0, 3.0, 2.0], valid={2: 4.5, 4: 2.5})
    b = make_run("b", [5.0, 4.2, 3.3, 2.4], valid={2: 4.6, 4: 2.9}, policy="nvfp4_qk_fp8_pv")
    figure, pixels = drawn(a, b)
    assert min(pixels.shape[:2]) > 800
    assert pixels[..., :3].var() > 1e-3
    loss, gap, norm = figure.axes
    assert _labels(loss) == ["bf16", "nvfp4_qk_fp8_pv", "validation"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss (nats per token)",
        "gap in training loss\n(nats per token)",
        "gradient norm",
    ]
    assert norm.get_xlabel() == "step"
    raw_gap = gap.get_lines()[0]
    np.testing.assert_array_equal(raw_gap.get_xdata(), [1, 2, 3, 4])
    np.testing.assert_allclose(raw_gap.get_ydata(), [0.0, 0.2, 0.3, 0.4])
    markers = [
        line for line in loss.get_lines() if line.get_marker() == "o" and len(line.get_xdata())
    ]
    assert [line.get_ydata().tolist() for line in markers] == [[4.5, 2.5], [4.6, 2.9]]


def test_seeds_are_a_band_with_a_mean(make_run, drawn):
    runs = [
        make_run(f"a{n}", [5.0, float(n)], seed=n, fingerprints={"init": f"i{n}", "data": f"d{n}"})
        for n in (1, 2, 3)
    ]
    figure, _ = drawn(*runs)
    loss, gap, _ = figure.axes
    assert _labels(loss) == ["bf16, mean of 3 seeds"]
    [mean] = [line for line in loss.get_lines() if line.get_label().startswith("bf16")]
    assert mean.get_ydata().tolist() == [5.0, 2.0]
    [band] = loss.collections
    assert sorted({y for _, y in band.get_paths()[0].vertices.tolist()}) == [1.0, 3.0, 5.0]
    assert gap.get_title() == "no second run to compare with"


def test_unmatched_is_in_the_title(make_run, drawn):
    a = make_run("a", [5.0, 4.0])
    b = make_run("b", [5.0, 4.0], policy="p", fingerprints={"init": "x", "data": "y"})
    figure, _ = drawn(a, b, allow_unmatched=True)
    assert "NOT MATCHED" in figure.get_suptitle()


def test_nan_and_wide_norms_are_drawn(make_run, drawn):
    a = make_run("a", [5.0, math.nan, 3.0], fields={"grad_norm": [1000.0, 1.0, math.nan]})
    figure, pixels = drawn(a)
    assert figure.axes[2].get_yscale() == "log"
    assert pixels[..., :3].var() > 1e-3


def test_smooth_keeps_the_first_value_and_averages_inside():
    values = np.arange(100.0)
    values[50] += 10
    result = smooth(values)
    assert result[0] == 0.0
    # 5 % of 100 values: two neighbours on either side.
    assert result[50] == pytest.approx(52.0)
    assert result[-1] == pytest.approx((97 + 98 + 99) / 3)
    np.testing.assert_array_equal(smooth(np.array([3.0, 1.0])), [3.0, 1.0])


def test_many_arms_look_different_and_a_diverged_one_hides_no_gap(make_run, drawn):
    losses = [[5.0, 4.0, 3.0 + n / 1000] for n in range(9)] + [[5.0, 6.0, 9.0]]
    runs = [make_run(f"arm{n}", values, policy=f"p{n}") for n, values in enumerate(losses)]
    figure, _ = drawn(*runs)
    loss, gap, _ = figure.axes
    looks = [
        (line.get_color(), line.get_linestyle())
        for line in loss.get_lines()
        if line.get_label().startswith("p")
    ]
    assert len(set(looks)) == 10
    assert loss.get_legend() is None
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"p{n}" for n in range(10)]
    assert gap.get_yscale() == "symlog"
