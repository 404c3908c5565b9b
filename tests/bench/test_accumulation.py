"""The accumulation study: that its four products are attention's, its measures, its command; on a GPU, its two levels."""

import csv

import pytest
import torch

from fp4mega.bench.__main__ import main
from fp4mega.bench.accumulation import (
    PRODUCTS,
    Row,
    as_csv,
    check,
    errors,
    markdown,
    operands,
    reference,
    run,
    write,
)
from fp4mega.testing import rel_l2

SIZES = {"seqlen": 256, "dim": 64, "rows": 128}


def attention_gradients(mean: float) -> dict[str, torch.Tensor]:
    """O and the gradients of plain float64 attention on the study's inputs, by autograd."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(256, 64, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    k = k - k.mean(dim=1, keepdim=True)
    q, k, v, dout = (t + mean for t in (q, k, v, dout))
    for t in (q, k, v):
        t.requires_grad_()
    out = torch.softmax(q @ k.T / 8, dim=1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    # The scale of the scores is not part of the sums, and they are scaled by powers of two.
    return {"PV": out.detach(), "dV": dv, "dK": dk, "dQ": dq}


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_products_are_those_of_attention(mean: float) -> None:
    want = attention_gradients(mean)
    made = operands(**SIZES, mean=mean, device="cpu")
    assert tuple(made) == PRODUCTS
    for name, factors in made.items():
        assert factors.a.shape == (128, 256)
        assert factors.b.shape == (64, 256)
        got = reference(factors)
        expected = want[name][:128]
        scale = float((got * expected).sum() / (expected * expected).sum())
        # What 8-bit factors lose, and no more; a wrong factor or a transposed one is wrong by 1.
        assert rel_l2(got / scale, expected) < 0.06, name


def test_a_mean_of_q_and_k_leaves_the_softmax() -> None:
    """Normalized P's codes do not move with the mean, so that it is the sums alone that change."""
    zero, ten = (operands(**SIZES, mean=m, device="cpu") for m in (0.0, 10.0))
    same = zero["dV"].a.view(torch.uint8) == ten["dV"].a.view(torch.uint8)
    assert same.double().mean() > 0.9999
    # V is multiplied at 2^4, the power of two that its largest value leaves room for.
    assert reference(ten["PV"]).mean() == pytest.approx(10 * 2**4, rel=0.02)
    assert zero["dV"].b.dtype == torch.float8_e5m2


def test_the_reference_divides_by_the_sum_of_the_codes() -> None:
    made = operands(**SIZES, mean=0.0, device="cpu")["PV"]
    ones = made._replace(b=torch.ones(64, 256).to(torch.float8_e4m3fn))
    torch.testing.assert_close(reference(ones), torch.ones(128, 64, dtype=torch.float64))


def test_measures() -> None:
    ref = torch.tensor([[3.0, -4.0], [3.0, 4.0]], dtype=torch.float64)
    got = ref * torch.tensor([[0.9, 0.9], [1.0, 1.0]], dtype=torch.float64)
    rel, largest, shrinkage, deviation = errors(got, ref)
    assert rel == pytest.approx(0.5 / 50**0.5)
    assert largest == pytest.approx(0.4 / 12.5**0.5)
    assert shrinkage == pytest.approx(0.7 / 14)
    assert deviation == pytest.approx(0.5 / 32**0.5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 128, 64, [64]), "seqlen=100"),
        ((128, 96, 64, [64]), "dim=96"),
        ((128, 128, 192, [64]), "rows=192"),
        ((128, 128, 32, [64]), "rows=32"),
        ((256, 128, 64, [192]), "interval=192"),
        ((256, 128, 64, [32]), "interval=32"),
    ],
)
def test_sizes_are_refused_by_name(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(*sizes)


def test_tables(tmp_path) -> None:
    rows = [
        Row("PV", 10.0, "fp8", 128, 1e-4, 2e-3, -3e-5, 4e-2),
        Row("PV", 10.0, "rounding", 0, 1.5e-3, 0, 0, 0),
    ]
    assert (
        markdown(rows).splitlines()[2]
        == "| PV | 10 | fp8 | 128 | 1.00e-04 | 2.00e-03 | -3.00e-05 | 4.00e-02 |"
    )
    read = list(csv.DictReader(as_csv(rows).splitlines()))
    assert read[1]["arm"] == "rounding"
    assert float(read[0]["rel_l2"]) == 1e-4
    write(rows, tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").iterdir()} == {
        "accumulation.csv",
        "accumulation.md",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen", "1000"], "seqlen=1000"),
        (["--dim", "100"], "dim=100"),
        (["--intervals", "96"], "interval=96"),
    ],
)
def test_the_command_refuses_bad_sizes(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["accumulation", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_needs_a_gpu(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["accumulation"])
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_two_levels_are_never_worse_and_bf16_is_the_control(capsys) -> None:
    rows = run(seqlen=8192, dim=128, rows=128, means=(0.0, 10.0), intervals=(128,))
    print(markdown(rows))
    by = {(r.product, r.mean, r.arm, r.interval): r for r in rows}
    assert len(by) == len(rows) == 2 * 4 * 4
    for product in PRODUCTS:
        for mean in (0.0, 10.0):
            two, one = by[product, mean, "fp8", 128], by[product, mean, "fp8", 8192]
            assert by[product, mean, "bf16", 8192].rel_l2 < min(1e-3, one.rel_l2)
            assert two.rel_l2 <= 1.01 * one.rel_l2
            if product in ("PV", "dV"):
                assert two.rel_l2 < by[product, mean, "rounding", 0].rel_l2
