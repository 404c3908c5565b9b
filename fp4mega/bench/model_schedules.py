"""Schedules that a kernel does not have, made from the machine code of the one that it has.

Each takes the steps of a CTA's warps and returns new ones. Instructions are moved or left out, registers are not allocated anew: a schedule
that would spill is not noticed.
"""

from collections.abc import Callable
from dataclasses import replace

from fp4mega.bench.model_predict import Roles
from fp4mega.bench.model_simulate import Step

_P_BARRIERS = ("first", "last", "ready")


def _softmax(roles: Roles, change: Callable[[list[Step]], list[Step]]) -> Roles:
    return {n: change(s) if n.startswith("softmax") else s for n, s in roles.items()}


def mask_skipped(roles: Roles) -> Roles:
    """Without the predicated compares and selects of -inf, which do nothing on whole tiles. Nothing changes where a branch jumps over them."""

    def masks(step: Step) -> bool:
        text = step.instruction.text
        selects = step.instruction.base == "FSEL" and "-INF" in text
        return text.startswith("@") and (selects or step.instruction.base == "ISETP")

    def change(steps: list[Step]) -> list[Step]:
        return [s for s in steps if not masks(s)]

    return _softmax(roles, change)


def scores_loaded_first(roles: Roles) -> Roles:
    """All loads of scores directly behind the first, and the tensor core told at once that they are in registers.

    Raises ValueError when the softmax steps load no scores.
    """

    def change(steps: list[Step]) -> list[Step]:
        loads = [s for s in steps if s.instruction.base == "LDTM"]
        if not loads:
            raise ValueError("softmax steps have no LDTM: there are no scores to load")
        told = [s for s in steps if (s.arrives or "").startswith("read")]
        rest = [s for s in steps if s not in loads and s not in told]
        first = next(i for i, s in enumerate(steps) if s.instruction.base == "LDTM")
        waiting = 0
        for load in loads:
            if load.instruction.write < 6:
                waiting |= 1 << load.instruction.write
        told = [replace(s, instruction=replace(s.instruction, wait=waiting)) for s in told]
        return [*rest[:first], *loads, *told, *rest[first:]]

    return _softmax(roles, change)


def whole_tile(roles: Roles) -> Roles:
    """P handed over once a key tile instead of in halves."""
    steps = roles["multiply"]
    late = [
        replace(s, waits="last" + s.waits[-1]) if s.waits and s.waits.startswith("first") else s
        for s in steps
    ]
    return {**roles, "multiply": late}


def sums_wait_for_nobody(roles: Roles) -> Roles:
    """Row sums written where no other warp reads or writes: the tensor core does not wait for scores or sums to be read."""
    free = [
        replace(s, waits=None) if s.waits and s.waits.startswith(("read", "total")) else s
        for s in roles["multiply"]
    ]
    return {**roles, "multiply": free}


def one_query_tile(roles: Roles) -> Roles:
    """One query tile a CTA: what is left of each loop before the second tile's part.

    Raises ValueError when correction frees the first tile only after it has seen the second, as flash-attention-4's does.
    """

    def before_second(steps: list[Step], names: tuple[str, ...]) -> list[Step]:
        kept = []
        for step in steps:
            name = step.waits or step.arrives or ""
            if name.endswith("1") and name[:-1] in names:
                break
            kept.append(replace(step, waits=None, arrives=None) if name.endswith("1") else step)
        return kept

    correction = before_second(roles["correction"], ("out", "rise"))
    multiply = before_second(roles["multiply"], _P_BARRIERS)
    waited = {s.waits for s in roles["softmax 0"] if s.waits}
    arriving = {s.arrives for s in (*correction, *multiply) if s.arrives}
    if missing := waited - arriving:
        raise ValueError(f"one query tile: nobody would arrive at {', '.join(sorted(missing))}")
    return {"softmax 0": roles["softmax 0"], "correction": correction, "multiply": multiply}


SCHEDULES: dict[str, tuple[int, Callable[[Roles], Roles]]] = {
    "as compiled": (2, lambda roles: roles),
    "mask skipped on whole tiles": (2, mask_skipped),
    "scores loaded first": (2, scores_loaded_first),
    "both": (2, lambda roles: scores_loaded_first(mask_skipped(roles))),
    "both, row sums wait for nobody": (2, lambda roles: sums_wait_for_nobody(scores_loaded_first(mask_skipped(roles)))),
    "P published whole instead of K64 halves": (2, whole_tile),
    "both, P published whole": (2, lambda roles: whole_tile(scores_loaded_first(mask_skipped(roles)))),
    "one query tile a CTA": (1, one_query_tile),
}  # fmt: skip
"""Name to (query tiles of a CTA, change)."""
