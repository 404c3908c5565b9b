"""Tables, CSV and picture of made-up times."""

import csv
import io

import pytest
from rich.console import Console

from fp4mega.bench import report
from fp4mega.bench.attention import Results, Row
from fp4mega.bench.gate import Verdict
from fp4mega.bench.traffic import PublisherRow, SavedRow

SHAPE = "4,32/8,4096,128:causal"
GREEN = Verdict(((0, 0), (3, 7)), 32)


@pytest.fixture
def results() -> Results:
    made = Results(copy=4.3e12, notes=["peer fa4 left out: not installed"])
    for i, arm in enumerate(("triton/mxfp4_qk_fp8_pv", "triton/bf16", "cudnn_bf16", "cudnn_fp8")):
        for j, phase in enumerate(("forward", "backward", "both")):
            for scope in ("call", "kernels"):
                p50 = (1 + i) * (1 + j) * (1.0 if scope == "call" else 0.5)
                made.rows.append(
                    Row(SHAPE, arm, phase, scope, p50 - 0.1, p50, p50 + 0.2, 600 / p50)
                )
    made.verdicts[SHAPE, "triton/mxfp4_qk_fp8_pv"] = GREEN
    made.verdicts[SHAPE, "triton/bf16"] = Verdict(((0, 0),), 32, failure="dk: rms 1 | too much")
    made.publishers.append(
        PublisherRow(
            SHAPE, "triton/mxfp4_qk_fp8_pv", "forward", 0.4, 430_000_000, 860_000_000, 4.3e12
        )
    )
    made.saved.append(SavedRow(SHAPE, "triton/mxfp4_qk_fp8_pv", 590, 1000))
    return made


def table(text: str, title: str) -> list[list[str]]:
    """Cells of the Markdown table under a title, without its rule."""
    block = text.partition(f"**{title}")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
    assert all(len(row) == len(rows[0]) for row in rows)
    return [row for i, row in enumerate(rows) if i != 1]


def test_ratios_come_first_and_only_with_a_green_gate(results):
    head, ours, refused, cudnn, fp8 = table(report.markdown(results), "backward, with publishers")
    assert head == ["shape", "arm", "x cudnn_bf16", "x cudnn_fp8", "p20 ms", "p50 ms", "p80 ms", "TF/s"]  # fmt: skip
    assert ours == [SHAPE, "triton/mxfp4_qk_fp8_pv", "3.00", "4.00", "1.900", "2.000", "2.200", "300"]  # fmt: skip
    assert refused[2:4] == ["", ""]
    assert cudnn[2:4] == ["", "1.33"]
    assert fp8[2:4] == ["0.75", ""]


def test_kernels_alone_have_their_own_ratios(results):
    rows = table(report.markdown(results), "forward + backward, attention kernels alone")
    assert rows[1][1:6] == ["triton/mxfp4_qk_fp8_pv", "3.00", "4.00", "1.400", "1.500"]


def test_publishers_saved_bytes_gate_and_notes(results):
    text = report.markdown(results)
    assert "a device copy moves 4300 GB/s" in text
    (_, row) = table(text, "publishers")
    assert row[2:] == ["forward", "0.400", "0.100", "430", "860", "2150", "50%"]
    assert table(text, "kept for backward")[1][-1] == "0.590"
    verdicts = table(text, "gate")
    assert verdicts[1][2] == "ok: kv heads 0.0, 3.7 (batch entry.head) of 32 by the rule of two"
    # A bar would break the table.
    assert verdicts[2][2] == "FAILED: dk: rms 1 / too much"
    assert text.endswith("- peer fa4 left out: not installed\n")


def test_csv_holds_every_row_and_unrounded_ratios(results):
    rows = list(csv.DictReader(io.StringIO(report.as_csv(results))))
    assert len(rows) == len(results.rows) == 24
    first = rows[0]
    assert first["arm"] == "triton/mxfp4_qk_fp8_pv"
    assert first["scope"] == "call"
    assert (first["ratio_cudnn_bf16"], first["ratio_cudnn_fp8"]) == ("3.0", "4.0")
    assert all(r["ratio_cudnn_fp8"] == "" for r in rows if r["arm"] in ("cudnn_fp8", "triton/bf16"))
    for row, made in zip(rows, results.rows, strict=True):
        assert float(row["p80"]) == made.p80


def test_the_terminal_shows_the_same_cells(results):
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(results, console)
    shown = console.export_text()
    for cell in ("x cudnn_fp8", "3.00", "1.900", "0.590", "50%", "FAILED: dk", "not installed"):
        assert cell in shown


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_has_a_bar_for_every_arm(results, tmp_path, suffix):
    path = tmp_path / f"figure.{suffix}"
    report.plot(results, path)
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        assert all(f"<!-- {arm} -->" in text for arm in ("triton/bf16", "cudnn_fp8"))
        assert "<!-- forward + backward -->" in text


def test_a_picture_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing was timed"):
        report.plot(Results(), tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())
