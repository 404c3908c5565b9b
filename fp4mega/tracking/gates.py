"""Gates: conditions on a comparison, written as short strings, each with a verdict.

    final_loss_gap=2%    final training loss within 2 % of the matched run's, above or below (or =0.05: in nats)
    valid_loss_gap=2%    the same for the validation loss
    loss_falls=0.5       every run's final loss is below its first logged loss by more than 0.5
    max_grad_norm=10     no gradient norm above 10 in any run
    band                 every other policy's final loss lies between the lowest and highest of >= 3 seeds of the first
    finite               every loss and gradient norm is finite

A value that is not finite passes no gate, and a run that stopped before the others fails the gates on final losses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fp4mega.tracking.events import nearest
from fp4mega.tracking.summary import CompareError, Comparison, RunSummary

BAND_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Gate:
    """A parsed gate; `limit` is None for one that takes no value."""

    text: str
    name: str
    limit: float | None
    percent: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a gate is passed, and the numbers that say so."""

    gate: Gate
    passed: bool
    detail: str


def parse_gate(text: str) -> Gate:
    """Parse one gate. Raises CompareError naming the gate, what is wrong with it and what is allowed."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if name not in _CHECKS:
        raise CompareError(f"gate {text!r}: unknown name {name!r}; {nearest(name, _CHECKS)}")
    if name not in _TAKES_LIMIT:
        if equals:
            raise CompareError(f"gate {text!r}: {name} takes no value")
        return Gate(text, name, None, False)
    percent = value.endswith("%")
    try:
        limit = float(value.removesuffix("%"))
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        raise CompareError(
            f"gate {text!r}: value={value!r}: expected a number >= 0, as in {name}={_TAKES_LIMIT[name]}"
        )
    if percent and name not in _TAKES_PERCENT:
        raise CompareError(f"gate {text!r}: value={value!r}: {name} takes no percentage")
    return Gate(text, name, limit, percent)


def check_gate(gate: Gate, comparison: Comparison) -> Verdict:
    """The verdict of one gate. Raises CompareError when these runs cannot answer it."""
    passed, detail = _CHECKS[gate.name](gate, comparison)
    return Verdict(gate, passed, detail)


def _needs_candidates(gate: Gate, comparison: Comparison) -> list[RunSummary]:
    if not comparison.candidates:
        raise CompareError(
            f"gate {gate.text!r} needs at least two runs, one to compare with the other"
        )
    return [comparison.summaries[i] for i in comparison.candidates]


def _cut_short(comparison: Comparison) -> str | None:
    if comparison.same_length:
        return None
    ends = ", ".join(f"{s.label} at {s.steps}" for s in comparison.summaries)
    return f"runs stopped at different steps ({ends}); --until compares them up to an earlier one"


def _gap_gate(
    gate: Gate, comparison: Comparison, gaps: Mapping[str, float | None]
) -> tuple[bool, str]:
    if missing := [label for label, gap in gaps.items() if gap is None]:
        raise CompareError(
            f"gate {gate.text!r}: no such loss in {', '.join(missing)} or the run it is compared with"
        )
    if short := _cut_short(comparison):
        return False, short
    assert gate.limit is not None
    unit = " %" if gate.percent else ""
    worst = max(gaps, key=lambda label: _badness(gaps[label]))
    # Written so that NaN fails.
    passed = all(gap is not None and abs(gap) <= gate.limit for gap in gaps.values())
    return passed, f"largest gap {gaps[worst]:+.4g}{unit} ({worst}), limit {gate.limit:g}{unit}"


def _badness(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else abs(value)


def _final_loss_gap(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    candidates = _needs_candidates(gate, comparison)
    return _gap_gate(
        gate, comparison, {s.label: s.gap_percent if gate.percent else s.gap for s in candidates}
    )


def _valid_loss_gap(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    candidates = _needs_candidates(gate, comparison)
    return _gap_gate(
        gate,
        comparison,
        {s.label: s.valid_gap_percent if gate.percent else s.valid_gap for s in candidates},
    )


def _loss_falls(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    if short := _cut_short(comparison):
        return False, short
    assert gate.limit is not None
    limit = gate.limit
    worst = max(comparison.summaries, key=lambda s: _rank(s.final_loss - s.first_loss))
    passed = all(s.final_loss < s.first_loss - limit for s in comparison.summaries)
    return (
        passed,
        f"{worst.label} fell from {worst.first_loss:.4f} to {worst.final_loss:.4f}, asked: by more than {limit:g}",
    )


def _max_grad_norm(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    norms = {s.label: s.max_grad_norm for s in comparison.summaries}
    if missing := [label for label, norm in norms.items() if norm is None]:
        raise CompareError(f"gate {gate.text!r}: no gradient norm in {', '.join(missing)}")
    assert gate.limit is not None
    worst = max(norms, key=lambda label: _badness(norms[label]))
    passed = all(norm is not None and norm <= gate.limit for norm in norms.values())
    return passed, f"largest {norms[worst]:.4g} ({worst}), limit {gate.limit:g}"


def _band(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    first = comparison.summaries[0].policy
    reference = [comparison.summaries[i].final_loss for i in comparison.references]
    candidates = [s for s in comparison.summaries if s.policy != first]
    if len(reference) < BAND_SEEDS or not candidates:
        raise CompareError(
            f"gate {gate.text!r} needs >= {BAND_SEEDS} seeds of the first policy and a run of another; "
            f"got {len(reference)} of {first!r} and {len(candidates)} of others"
        )
    if short := _cut_short(comparison):
        return False, short
    low, high = min(reference), max(reference)
    outside = [s for s in candidates if not low <= s.final_loss <= high]
    detail = f"band of {len(reference)} seeds of {first}: {low:.4f} to {high:.4f}; "
    detail += ", ".join(f"{s.label} {s.final_loss:.4f}" for s in outside or candidates)
    return not outside and all(map(math.isfinite, reference)), detail


def _finite(gate: Gate, comparison: Comparison) -> tuple[bool, str]:
    bad = [
        f"{s.label} from step {s.first_nonfinite}"
        for s in comparison.summaries
        if s.first_nonfinite is not None
    ]
    return (
        not bad,
        f"not finite: {', '.join(bad)}" if bad else "every loss and gradient norm is finite",
    )


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


_CHECKS: Mapping[str, Callable[[Gate, Comparison], tuple[bool, str]]] = MappingProxyType(
    {
        "final_loss_gap": _final_loss_gap,
        "valid_loss_gap": _valid_loss_gap,
        "loss_falls": _loss_falls,
        "max_grad_norm": _max_grad_norm,
        "band": _band,
        "finite": _finite,
    }
)
_TAKES_LIMIT = MappingProxyType(
    {"final_loss_gap": "2%", "valid_loss_gap": "0.05", "loss_falls": "0.5", "max_grad_norm": "10"}
)
_TAKES_PERCENT = ("final_loss_gap", "valid_loss_gap")
