"""Unit arithmetic of the speed model, against counts worked out by hand."""

import pytest

from fp4mega.bench.model_chip import GB200, Chip, busy, columns, mma_cycles, unit_of


@pytest.mark.parametrize(
    ("opcode", "unit", "cycles"),
    [
        ("FFMA", "fma", 1),
        ("FFMA2", "fma", 2),
        ("FMNMX3.NAN", "alu", 2),
        ("ISETP.GT.AND", "alu", 2),
        ("MUFU.EX2", "ex2", 8),
        ("F2FP.BF16.F32.PACK_AB", "cvt_bf16", 128 / 62),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "cvt_e4m3", 4),
        ("F2FP.SATFINITE.RELU.E2M1.F32.PACK_AB_MERGE_C", "cvt_e2m1", 128 / 57),
        ("LDTM.x32", "tensor_load", 32),
        ("LDTM", "tensor_load", 1),
        ("STTM.x16", "tensor_store", 16),
        ("STS.128", "shared", 16),
        ("STS", "shared", 4),
        ("UIADD3", "uniform", 2),
        ("UTCHMMA", "mma", 0),
        ("UTMALDG.4D", "tma", 0),
        ("SYNCS.ARRIVE.TRANS64.A1T0", "control", 0),
        ("R2UR", "control", 0),
    ],
)
def test_unit_and_cycles(opcode: str, unit: str, cycles: float) -> None:
    assert unit_of(opcode) == unit
    assert busy(opcode) == pytest.approx(cycles)


@pytest.mark.parametrize(
    ("opcode", "steps", "cycles"), [("UTCHMMA", 8, 512), ("UTCQMMA", 4, 256), ("UTCOMMA.4X", 2, 128)]
)  # fmt: skip
def test_a_tile_of_128_cubed(opcode: str, steps: int, cycles: float) -> None:
    """2 * 128^3 FLOP at 8192, 16384, 32768 a cycle; operands from shared memory take as long, and no longer."""
    for a_shared in (False, True):
        assert steps * mma_cycles(opcode, 128, a_shared=a_shared) == cycles


def test_narrow_products_are_bound_by_the_other_operand_in_shared_memory() -> None:
    assert mma_cycles("UTCOMMA", 16, a_shared=False) == 8
    # 144 rows of 32 bytes at 128 bytes a cycle.
    assert mma_cycles("UTCOMMA", 16, a_shared=True) == 36


def test_what_is_no_product_is_refused() -> None:
    with pytest.raises(ValueError, match="UTCCP"):
        mma_cycles("UTCCP.T.S", 128, a_shared=True)


def test_columns() -> None:
    assert [columns(o) for o in ("LDTM.x128", "STTM.x8", "LDTM")] == [128, 8, 1]


def test_time() -> None:
    assert GB200.milliseconds(2.062e6) == pytest.approx(1.0)
    assert Chip(latency_scale=0.5).latency("ex2") == GB200.latency("ex2") / 2


@pytest.mark.parametrize("field", ["sms", "clock", "fixed", "latency_scale"])
def test_chips_that_do_not_exist(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=-1"):
        Chip(**{field: -1})
