"""The accuracy tables: what stands in the docs, and that the command computes it."""

import re
from pathlib import Path

import pytest

from fp4mega.attention.policy import _BUILT_IN as BUILT_IN
from fp4mega.bench.__main__ import main
from fp4mega.bench.accuracy import (
    BEGIN,
    END,
    PAPER,
    forward_rows,
    gradient_rows,
    write_between_markers,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "numerics.md"


def documented() -> list[list[str]]:
    """Cells of every row that names a policy."""
    section = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    return [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]


def test_every_built_in_policy_stands_in_the_tables():
    # Not `list_policies()`: other tests of this process register policies of their own.
    names = [policy.name for policy in BUILT_IN if policy.name != "exact"]
    assert [row[0] for row in documented() if len(row) == 9] == names
    assert [row[0] for row in documented() if len(row) == 5] == [n for n in names if "-" not in n]


def test_documented_direct_p_is_within_a_hundredth_of_the_paper():
    rows = {row[0]: row for row in documented() if len(row) == 5}
    for name, (cos, rel) in PAPER.items():
        assert float(rows[name][1]) == pytest.approx(cos, abs=0.01)
        assert float(rows[name][2]) == pytest.approx(rel, abs=0.01)


def test_rows_are_computed():
    small = forward_rows(
        ["bf16", "nvfp4_qk_fp8_pv", "direct_p_fast"], seqlen=256, heads=1, device="cpu"
    )
    errors = {row.policy: row.rel for row in small}
    assert (
        errors["bf16"]
        < 0.01
        < 0.08
        < errors["nvfp4_qk_fp8_pv"]
        < 0.2
        < errors["direct_p_fast"]
        < 0.5
    )
    gradients = gradient_rows(
        ["exact", "nvfp4_qk_fp8_pv"], "randn", seqlen=128, heads=4, device="cpu"
    )
    assert gradients[0].errors == (0, 0, 0, 0)
    assert all(0.05 < e < 0.3 for e in gradients[1].errors)


def test_writing_needs_markers(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    write_between_markers(path, "new")
    assert path.read_text() == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match=re.escape(f"no '{BEGIN}'")):
        write_between_markers(path, "new")
    assert path.read_text() == "nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--device", "nowhere"], "nowhere"), (["--write", "nowhere.md"], "nowhere.md")],
)
def test_bad_arguments_are_refused_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["accuracy", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
