"""Which backends there are, fastest first, and which one runs a problem.

A backend is added by one entry here. Choosing is never silent: `auto` logs what it took and why a faster one declined,
and a backend asked for by name either runs or is an error.
"""

import logging
from difflib import get_close_matches

import torch

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.kernels.contract import Backend
from fp4mega.kernels.cute import CuteSm100Backend
from fp4mega.kernels.reference import ReferenceBackend
from fp4mega.kernels.triton import TritonBackend

logger = logging.getLogger(__name__)

AUTO = "auto"

_FASTEST_FIRST: tuple[Backend, ...] = (
    CuteSm100Backend(),
    TritonBackend(),
    ReferenceBackend(),
)

_logged: set[tuple[str, str]] = set()


def list_backends() -> list[str]:
    """Names of all backends, fastest first."""
    return [backend.name for backend in _FASTEST_FIRST]


def get_backend(name: str) -> Backend:
    """The backend of that name. Raises ValueError with the nearest name when there is none."""
    for backend in _FASTEST_FIRST:
        if backend.name == name:
            return backend
    allowed = [AUTO, *list_backends()]
    near = get_close_matches(str(name), allowed, n=1)
    hint = f"; nearest is {near[0]!r}" if near else ""
    raise ValueError(f"backend={name!r} is unknown{hint}; allowed: {', '.join(allowed)}")


def select_backend(
    name: str, problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
) -> Backend:
    """The backend of that name, or with `auto` the fastest one that can run this problem.

    A backend without a backward is left out by `auto` unless the policy serves inference (Direct-P): a forward is chosen
    before anyone knows whether a gradient follows. Raises ValueError for an unknown name, and NotImplementedError with every
    backend's reason when the one asked for, or with `auto` any, cannot run. The choice is logged once for each (backend, policy).
    """
    candidates = _FASTEST_FIRST if name == AUTO else (get_backend(name),)
    reasons: dict[str, str] = {}
    for backend in candidates:
        reason = backend.explain(problem, policy, device)
        if name == AUTO and reason is None and not (backend.has_backward or policy.direct_p):
            reason = f"it has no backward; ask for it by name: backend={backend.name!r}"
        if reason is None:
            _log_choice(backend, policy, device, reasons)
            return backend
        reasons[backend.name] = reason
    listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    others = [
        backend.name
        for backend in _FASTEST_FIRST
        if backend.name not in reasons and backend.explain(problem, policy, device) is None
    ]
    able = f". Able: {', '.join(others)}" if others else ""
    raise NotImplementedError(
        f"backend={name!r} cannot run policy {policy.name!r} on {device.type} for {problem}: {listed}{able}"
    )


def _log_choice(
    backend: Backend, policy: AttentionPolicy, device: torch.device, declined: dict[str, str]
) -> None:
    if (backend.name, policy.name) in _logged:
        return
    _logged.add((backend.name, policy.name))
    why = "".join(f"; {name} declined: {reason}" for name, reason in declined.items())
    logger.info(
        "attention policy %s runs on backend %s (%s)%s", policy.name, backend.name, device.type, why
    )
