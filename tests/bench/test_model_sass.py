"""Reading machine code: scheduling fields, loops of the roles, blocks that most key tiles jump over."""

import pytest

from fp4mega.bench.model_sass import NO_SCOREBOARD, histogram, loops, parse, role_loop, usage
from tests.bench.model_doubles import kernel_text, line


def test_fields() -> None:
    """A word that nvdisasm printed for sm_100a: stall 1, yield, no scoreboard; then one made with every field set."""
    real = "        /*0000*/                   LDC R1, c[0x0][0x37c] ;   /* 0x0000df00ff017b82 */\n          /* 0x000fe20000000800 */"
    first = parse(real).instructions[0]
    assert (first.stall, first.write, first.read, first.wait) == (1, NO_SCOREBOARD, NO_SCOREBOARD, 0)  # fmt: skip
    made = parse(line("@!UP0 F2FP.BF16.F32.PACK_AB R1, R2, R3", stall=13, write=2, read=5, wait=0b101001)).instructions[0]  # fmt: skip
    assert (made.stall, made.write, made.read, made.wait) == (13, 2, 5, 0b101001)
    assert made.opcode == "F2FP.BF16.F32.PACK_AB"
    assert made.base == "F2FP"


def test_text_without_instructions_is_refused() -> None:
    with pytest.raises(ValueError, match="nvdisasm"):
        parse("ELF 64-bit\n")


def test_roles_are_told_apart() -> None:
    listing = parse(kernel_text(20))
    assert histogram(role_loop(listing, "softmax"))["MUFU"] == 20
    assert histogram(role_loop(listing, "multiply"))["UTCHMMA"] == 32
    assert histogram(role_loop(listing, "correction"))["FADD"] == 12
    assert histogram(role_loop(listing, "load"))["UTMALDG"] == 14
    # The retry's jump back is no loop.
    assert len(list(loops(listing))) == 4


def test_a_mask_behind_a_branch_is_left_out_a_predicated_one_is_not() -> None:
    plain = len(role_loop(parse(kernel_text(20)), "softmax"))
    behind = role_loop(parse(kernel_text(20, mask=30)), "softmax")
    assert len(behind) == plain + 1
    assert histogram(behind)["ISETP"] == 0
    predicated = role_loop(parse(kernel_text(20, mask=30, predicated=True)), "softmax")
    assert histogram(predicated)["ISETP"] == histogram(predicated)["FSEL"] == 30


def test_what_the_tensor_cores_warp_does_once_an_item_is_left_out() -> None:
    """A wait that a uniform branch jumps over; not one behind two predicates, and no block with a product."""
    wait = line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5")
    product = line("UTCHMMA tmem[UR4], gdesc[UR6], tmem[UR8]")

    def loop(jump: str, block: list[str]) -> str:
        body = [*[line("NOP")] * 12, line(jump), *block, ".L_x_2:", line("UTCBAR [UR41], URZ")]
        return "\n".join([".L_x_1:", *body, line("BRA.U UP0, `(.L_x_1)")])

    def waits(jump: str, block: list[str]) -> int:
        return histogram(role_loop(parse(loop(jump, block)), "multiply"))["SYNCS"]

    assert waits("BRA.U UP1, `(.L_x_2)", [wait]) == 0
    assert waits("@!P3 BRA P1, `(.L_x_2)", [wait]) == 1
    assert waits("BRA.U UP1, `(.L_x_2)", [wait, product]) == 1


def test_refusals() -> None:
    listing = parse(kernel_text(20))
    with pytest.raises(ValueError, match="role='epilogue'"):
        role_loop(listing, "epilogue")
    with pytest.raises(ValueError, match=r"role='softmax'.*F2FP"):
        role_loop(parse(line("EXIT")), "softmax")
    with pytest.raises(ValueError, match="ELF"):
        usage(b"PTX")
