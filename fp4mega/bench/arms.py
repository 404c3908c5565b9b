"""What is timed: an arm is a forward and a backward that take nothing but what the arm already holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp4mega.attention import SideInputs
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.bench.gate import Answer, kept, trains
from fp4mega.bench.shapes import Shape, Tensors
from fp4mega.kernels import Backend


@dataclass(frozen=True)
class Arm:
    """One contestant on one shape. `backward` takes what `forward` returned; None where there is only a forward."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None
    answer: Callable[[], Answer]
    """One evaluation as [B, S, heads, D] tensors, for a check; lse may be empty."""

    def calls(self) -> dict[str, Callable[[], Any]]:
        """The call of each phase that the arm has. Backward runs on the result of one forward made here."""
        phases: dict[str, Callable[[], Any]] = {"forward": self.forward}
        backward = self.backward
        if backward is not None:
            result = self.forward()
            phases["backward"] = lambda: backward(result)
            phases["both"] = lambda: backward(self.forward())
        return phases


def arm_name(backend: Backend, policy: AttentionPolicy) -> str:
    """`backend/policy`, as it stands in tables."""
    return f"{backend.name}/{policy.name}"


def backend_arm(backend: Backend, policy: AttentionPolicy, shape: Shape, x: Tensors) -> Arm:
    """A backend under a policy, from BF16 tensors to BF16 gradients: publishers are part of it."""
    problem, side = shape.problem, SideInputs()
    inputs = kept(policy, x.q, x.k, x.v)

    def forward() -> Any:
        return backend.forward(x.q, x.k, x.v, side, problem, policy)

    def backward(result: Any) -> Any:
        return backend.backward(x.dout, None, result, inputs, side, problem, policy)

    def answer() -> Answer:
        result = forward()
        gradients = backward(result) if trains(policy) else ()
        return Answer(result.out, result.lse, *gradients)

    return Arm(arm_name(backend, policy), forward, backward if trains(policy) else None, answer)
