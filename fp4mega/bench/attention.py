"""Speed of backends beside other people's attention, in one run: everything is checked first, then everything is timed.

    python -m fp4mega.bench attention --shapes 4,32/8,4096,128:causal --backends triton --policies mxfp4_qk_fp8_pv --peers available

A shape is `B,H/G,S,D` with `:causal` behind it. `plan` refuses what cannot be meant before anything touches the device. Then every
backend and policy passes the gate (`gate.py`) on every shape, and every peer runs it once and must agree with float32 attention. What
fails the gate is not timed and the command ends with status 1. Then times (`timing.py`): all arms of a shape in turn, forward,
backward and both, whole calls with publishers and the attention kernels alone.
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp4mega.attention import get_policy
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.bench import peers as peers_module
from fp4mega.bench.arms import Arm, arm_name, backend_arm
from fp4mega.bench.gate import (
    Answer,
    Verdict,
    assert_agrees,
    check_shape,
    chosen_heads,
    evaluate,
    head_errors,
    trains,
    unquantized,
)
from fp4mega.bench.peers import Peer
from fp4mega.bench.shapes import DEFAULT_SHAPES, PHASES, Shape
from fp4mega.bench.timing import Stopwatch, interleaved, times
from fp4mega.bench.traffic import (
    Launches,
    PublisherRow,
    SavedRow,
    minimum_traffic,
    recorded_launches,
    saved_row,
)
from fp4mega.kernels import Backend, get_backend

DEFAULT_POLICIES = ("mxfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper", "bf16")
CALL, KERNELS = "call", "kernels"


class Row(NamedTuple):
    """Milliseconds of one arm in one phase: of whole calls (`call`), or of its attention kernels alone (`kernels`)."""

    shape: str
    arm: str
    phase: str
    scope: str
    p20: float
    p50: float
    p80: float
    tflops: float
    """By p50."""


@dataclass(frozen=True)
class Contestant:
    """A backend under a policy, with the shapes it takes and why it does not take the others."""

    backend: Backend
    policy: AttentionPolicy
    shapes: tuple[Shape, ...]
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in tables."""
        return arm_name(self.backend, self.policy)


@dataclass(frozen=True)
class Plan:
    """What a run does, decided without a device."""

    shapes: tuple[Shape, ...]
    contestants: tuple[Contestant, ...]
    peers: tuple[Peer, ...]
    left_out: dict[str, str]
    """Peers that are not installed, with the reason."""
    strict: bool
    """Peers were asked for by name, so one that fails is an error."""
    repeats: int
    heads: int
    device: str


@dataclass
class Results:
    """Everything that a run found. Rows exist for arms whose gate was green."""

    rows: list[Row] = field(default_factory=list)
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    """(shape, arm) to the gate's word."""
    publishers: list[PublisherRow] = field(default_factory=list)
    saved: list[SavedRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not run, and why."""
    copy: float | None = None
    """Bytes a second of a device copy."""

    @property
    def green(self) -> bool:
        """True when no gate failed."""
        return all(verdict.green for verdict in self.verdicts.values())

    def ratio(self, row: Row, peer: str) -> float | None:
        """Median of a peer over that of the row, same shape, phase and scope: above 1 the row is faster. None without both, or a green gate."""
        verdict = self.verdicts.get((row.shape, row.arm))
        if verdict is not None and not verdict.green:
            return None
        key = (row.shape, peer, row.phase, row.scope)
        other = next((r for r in self.rows if r[:4] == key), None)
        return None if other is None else other.p50 / row.p50


def plan(
    *,
    shapes: Iterable[str] = DEFAULT_SHAPES,
    policies: Iterable[str] = DEFAULT_POLICIES,
    backends: Iterable[str | Backend] = ("triton",),
    peers: Iterable[str] = (peers_module.AVAILABLE,),
    repeats: int = 20,
    heads: int = 2,
    device: str = "cuda",
) -> Plan:
    """Check every argument. Raises ValueError naming the field, before anything touches a device.

    A policy that a backend does not run on any of the shapes is an error with the backend's reason; on some of them, a note.
    """
    if repeats < 1 or heads < 1:
        raise ValueError(f"repeats={repeats}, gate_heads={heads}: expected 1 or more")
    parsed = tuple(Shape.parse(text) for text in dict.fromkeys(shapes))
    chosen_backends = [get_backend(b) if isinstance(b, str) else b for b in backends]
    chosen_policies = [get_policy(name) for name in dict.fromkeys(policies)]
    chosen_peers, left_out, strict = peers_module.choose(peers)
    for field_, values in (
        ("shapes", parsed),
        ("backends", chosen_backends),
        ("policies", chosen_policies),
    ):
        if not values:
            raise ValueError(f"{field_} is empty: nothing to measure")
    contestants = []
    for backend in chosen_backends:
        for policy in chosen_policies:
            answers = {
                shape: backend.explain(shape.problem, policy, torch.device(device))
                for shape in parsed
            }
            declined = {str(s): why for s, why in answers.items() if why is not None}
            able = tuple(s for s, why in answers.items() if why is None)
            if not able:
                reason = next(iter(declined.values()))
                raise ValueError(
                    f"policy={policy.name!r} does not run on backend {backend.name!r}: {reason}"
                )
            contestants.append(Contestant(backend, policy, able, declined))
    return Plan(
        parsed, tuple(contestants), tuple(chosen_peers), left_out, strict, repeats, heads, device
    )


def run(
    chosen: Plan,
    results: Results,
    *,
    stopwatch: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Check all, then time all, into `results`, which keeps what was found when something fails on the way.

    `say` hears one line a step. Raises RuntimeError when a peer asked for by name fails.
    """
    for name, why in chosen.left_out.items():
        results.notes.append(f"peer {name} left out: {why}")
    for contestant in chosen.contestants:
        for text, why in contestant.declined.items():
            results.notes.append(f"{contestant.name} not run on {text}: {why}")
    able_peers = _check(chosen, results, say)
    results.saved = [
        saved_row(shape, contestant.name, contestant.policy, contestant.backend)
        for contestant in chosen.contestants
        for shape in contestant.shapes
        if trains(contestant.policy)
    ]
    stopwatch = Stopwatch() if stopwatch is None else stopwatch
    results.copy = stopwatch.copy_bandwidth()
    for shape in chosen.shapes:
        contestants = [
            c
            for c in chosen.contestants
            if shape in c.shapes and results.verdicts[str(shape), c.name].green
        ]
        say(f"timing {shape}")
        _time(shape, contestants, able_peers[shape], chosen, stopwatch, results)
        gc.collect()


def _check(chosen: Plan, results: Results, say: Callable[[str], None]) -> dict[Shape, list[Peer]]:
    """Gate of every contestant on every shape, and the peers that answer each shape rightly."""
    able: dict[Shape, list[Peer]] = {}
    for shape in chosen.shapes:
        for contestant in chosen.contestants:
            if shape not in contestant.shapes:
                continue
            verdict = _gate(contestant, shape, chosen)
            results.verdicts[str(shape), contestant.name] = verdict
            say(f"gate {shape} {contestant.name}: {verdict}")
        able[shape] = []
        for peer in chosen.peers:
            why = peer.explain_shape(shape) or _try_peer(peer, shape, chosen.device)
            if why is None:
                able[shape].append(peer)
                continue
            if chosen.strict:
                raise RuntimeError(f"peer {peer.name} on {shape}: {why}")
            results.notes.append(f"peer {peer.name} not run on {shape}: {why}")
        gc.collect()
    return able


def _gate(contestant: Contestant, shape: Shape, chosen: Plan) -> Verdict:
    """The gate's word; a backend that raises has failed too, and the others go on."""
    try:
        return check_shape(
            contestant.backend, shape, contestant.policy, chosen.device, heads=chosen.heads
        )
    except Exception as error:
        return Verdict((), shape.batch * shape.kv_heads, failure=_words(error))


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _try_peer(peer: Peer, shape: Shape, device: str) -> str | None:
    """Why a peer cannot be timed on a shape: what it raised, or how wrong it is."""
    x = shape.tensors(device, seed=1)
    try:
        answer = peer.open(shape, x).answer()
    except Exception as error:  # other people's code raises what it likes; its words are the reason
        return _words(error)
    return peer_error(answer, peer, shape, x)


def peer_error(answer: Answer, peer: Peer, shape: Shape, x: Any) -> str | None:
    """In words, when a peer's output or gradients are further from float32 attention on one kv head than its limit; otherwise None."""
    b, g = chosen_heads(shape, 2)[-1]

    def cut(t: Any) -> Any:
        heads = t.shape[2] // shape.kv_heads
        return t[b : b + 1, :, g * heads : (g + 1) * heads]

    wanted = unquantized(type(x)(*(cut(t).float() for t in x)), causal=shape.causal)
    for name in ("out", "dq", "dk", "dv"):
        error = float(head_errors(cut(getattr(answer, name)), getattr(wanted, name), 1))
        if not error <= peer.limit:
            return f"{name} has relL2 {error:.3g} against float32 attention, allowed {peer.limit}"
    return None


def _time(
    shape: Shape,
    contestants: list[Contestant],
    able_peers: list[Peer],
    chosen: Plan,
    stopwatch: Any,
    results: Results,
) -> None:
    x = shape.tensors(chosen.device)
    arms: list[tuple[Arm, Contestant | None]] = [
        (backend_arm(c.backend, c.policy, shape, x), c) for c in contestants
    ]
    arms += [(peer.open(shape, x), None) for peer in able_peers]
    calls = {arm.name: arm.calls() for arm, _ in arms}
    for phase in PHASES:
        timed = {name: phases[phase] for name, phases in calls.items() if phase in phases}
        for name, samples in interleaved(
            timed, repeats=chosen.repeats, stopwatch=stopwatch
        ).items():
            results.rows.append(_row(shape, name, phase, CALL, samples))
        for arm, contestant in arms:
            if phase in calls[arm.name]:
                call = calls[arm.name][phase]
                _kernels(shape, arm.name, phase, call, contestant, stopwatch, results)


def _row(shape: Shape, arm: str, phase: str, scope: str, samples: list[float]) -> Row:
    found = times(samples)
    return Row(str(shape), arm, phase, scope, *found, shape.flops(phase) / found.p50 / 1e9)


def _kernels(
    shape: Shape,
    arm: str,
    phase: str,
    call: Callable[[], object],
    contestant: Contestant | None,
    stopwatch: Any,
    results: Results,
) -> None:
    """Rows of the attention kernels alone and of the publishers; of a peer, everything that it launches."""
    launches = Launches()
    if contestant is not None:
        with recorded_launches() as launches:
            call()
    try:
        samples = stopwatch.kernels(call)
    except RuntimeError as error:
        results.notes.append(f"{arm} {phase} on {shape}, kernels alone: {error}")
        return
    if not launches.modules:
        alone = [sum(s.values()) for s in samples]
    else:
        alone = [sum(t for n, t in s.items() if not launches.is_publisher(n)) for s in samples]
        rest = times([sum(t for n, t in s.items() if launches.is_publisher(n)) for s in samples])
        assert contestant is not None
        if phase != "both" and (least := minimum_traffic(shape.problem, contestant.policy, phase)):
            assert results.copy is not None
            results.publishers.append(
                PublisherRow(
                    str(shape), arm, phase, rest.p50, least, launches.publisher_bytes, results.copy
                )
            )
    if not min(alone) > 0:
        seen = ", ".join(samples[0])
        results.notes.append(f"{arm} {phase} on {shape}: no attention kernel among {seen}")
        return
    results.rows.append(_row(shape, arm, phase, KERNELS, alone))


__all__ = [
    "DEFAULT_POLICIES",
    "DEFAULT_SHAPES",
    "Contestant",
    "Plan",
    "Results",
    "Row",
    "assert_agrees",
    "evaluate",
    "peer_error",
    "plan",
    "run",
]
