"""Bias and noise of gradients: known splits, and the rules apart."""

from dataclasses import replace

import pytest
import torch

from fp4mega.attention import get_policy
from fp4mega.bench import bias
from fp4mega.bench.__main__ import main


@pytest.fixture(scope="module")
def batch():
    return bias.make_batch(batch=1, seqlen=128, heads=2, head_dim=32, device="cpu")


def test_unrounded_operands_have_neither(batch):
    policy = bias.exact_policy(get_policy("nvfp4_qk_fp8_pv"))
    gradients, total, size = bias._gradients(batch, policy, None)
    again = bias._gradients(batch, policy, None)[0]
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert total.norm() < 1e-5 * size.norm()


def test_drawn_policy_rounds_p_v_do_and_ds_and_nothing_else():
    policy = bias.drawn_policy(get_policy("nvfp4_qk_mxfp4_pv-paper"))
    assert set(policy.stochastic_operands) == {"p", "v", "do", "p_bwd", "ds", "v_bwd"}
    assert (policy.q, policy.q_bwd, policy.k_bwd) == ("nvfp4", "same", "same")


def test_the_paper_rule_has_row_sums_and_the_others_do_not(batch):
    names = ("nvfp4_qk_mxfp4_pv-paper", "nvfp4_qk_mxfp4_pv-centered", "nvfp4_qk_mxfp4_pv")
    paper, centered, represented = bias.run(names, batch, draws=6)
    assert paper.row_sum_nearest > 0.02
    assert paper.row_sum_noise > 0.02
    for row in (centered, represented):
        assert row.row_sum_nearest < 1e-5
        assert row.row_sum_noise < 1e-5
    # The row sum reaches dQ through the mean of K; dV does not see it.
    assert paper.nearest[0] > 2 * centered.nearest[0]
    assert paper.nearest[2] == pytest.approx(centered.nearest[2], rel=1e-5)


def test_a_bias_is_found_and_noise_is_not_taken_for_one(batch, monkeypatch):
    exact = (torch.ones(1, 4, 1, 1),) * 3

    def gradients(_, policy, key):
        if key is None:
            return exact, torch.zeros(4), torch.ones(4)
        generator = torch.Generator().manual_seed(int(key))
        drawn = tuple(x + 0.5 + 0.1 * torch.randn(x.shape, generator=generator) for x in exact)
        return drawn, 0.1 * torch.randn(4, generator=generator), torch.ones(4)

    monkeypatch.setattr(bias, "_gradients", gradients)
    row = bias.measure(batch, get_policy("nvfp4_qk_fp8_pv"), 400)
    assert row.bias == pytest.approx((0.5, 0.5, 0.5), abs=0.02)
    assert row.noise == pytest.approx((0.1, 0.1, 0.1), abs=0.02)
    assert row.row_sum_bias < 0.01
    assert row.row_sum_noise == pytest.approx(0.1, abs=0.02)


def test_command_line(tmp_path, capsys, batch):
    torch.save({n: getattr(batch, n) for n in ("q", "k", "v", "dout")}, tmp_path / "batch.pt")
    arguments = ["bias", "--policies", "nvfp4_qk_fp8_pv", "--draws", "2"]
    assert (
        main([*arguments, "--input", str(tmp_path / "batch.pt"), "--out", str(tmp_path / "t")]) == 0
    )
    assert "`nvfp4_qk_fp8_pv`" in capsys.readouterr().out
    assert "over 2 draws" in (tmp_path / "t").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draws", "1"], "draws=1"),
        (["--policies", "bf16"], "rounds none"),
        (["--policies", "nope"], "not registered"),
        (["--input", "/nowhere.pt"], "No such file"),
        (["--seqlen", "0"], "seqlen=0: expected 2 or more"),
        (["--seqlen", "1"], "seqlen=1: expected 2 or more"),
        (["--out", "no/x.md"], "no/x.md: the folder no does not exist"),
        (["--out", "/"], "is a folder, expected the name of a file"),
    ],
)
def test_bad_input(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bias", "--seqlen", "32", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as a file of torch.save"),
        (b"junk" * 9, "not readable as a file of torch.save"),
        ([1], "expected a mapping with the tensors q, k, v, dout"),
        ({"dout": 3}, "dout=int: expected tensors of four dims"),
        ({"k": torch.ones(1, 0, 2, 32)}, r"k=[1, 0, 2, 32]: expected tensors of four dims"),
        ({"v": torch.full((1, 32, 2, 32), torch.nan)}, "v: expected finite real numbers"),
        ({"dout": torch.ones(1, 16, 2, 32)}, "dout=[1, 16, 2, 32]: expected the shape of q"),
        (dict.fromkeys(("q", "k", "v", "dout"), torch.ones(1, 1, 2, 32)), "q has one row"),
    ],
)
def test_input_that_is_no_batch_is_refused(tmp_path, content, message, capsys):
    path = tmp_path / "batch.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        whole = dict.fromkeys(("q", "k", "v", "dout"), torch.ones(1, 32, 2, 32))
        torch.save({**whole, **content} if isinstance(content, dict) else content, path)
    with pytest.raises(SystemExit) as stopped:
        main(["bias", "--draws", "2", "--input", str(path)])
    assert stopped.value.code == 2
    assert f"{path}: " in (said := capsys.readouterr().err)
    assert message in said


def test_an_exact_gradient_of_zero_is_refused(batch):
    still = replace(batch, dout=torch.zeros_like(batch.dout))
    with pytest.raises(ValueError, match="dq of the exact gradient is zero or not finite"):
        bias.run(["nvfp4_qk_fp8_pv"], still, draws=2)


def test_the_input_is_not_written_over(tmp_path, batch, capsys):
    path = tmp_path / "batch.pt"
    torch.save({n: getattr(batch, n) for n in ("q", "k", "v", "dout")}, path)
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main(["bias", "--draws", "2", "--input", str(path), "--out", str(path)])
    assert f"{path}: is read as input, expected another file" in capsys.readouterr().err
    assert path.read_bytes() == before
