"""Choosing a backend: fastest able first, by name or an error, never silently."""

import logging

import pytest
import torch

from fp4mega import get_policy
from fp4mega.kernels import ReferenceBackend, get_backend, list_backends, registry, select_backend
from fp4mega.testing import PACKED_CASES, Case

CPU = torch.device("cpu")
PROBLEM, POLICY = Case().problem, get_policy("nvfp4_qk_fp8_pv")


class Picky(ReferenceBackend):
    """Runs only what `reason` leaves it."""

    def __init__(self, name: str, reason: str | None) -> None:
        self.name = name
        self.reason = reason

    def explain(self, problem, policy, device) -> str | None:
        return self.reason


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch):
    """Replace the registry's backends by those given."""

    def install(*installed: Picky) -> None:
        monkeypatch.setattr(registry, "_FASTEST_FIRST", installed)
        monkeypatch.setattr(registry, "_logged", set())

    return install


def test_the_reference_is_there_and_runs_on_every_device() -> None:
    assert list_backends() == ["cute_sm100", "triton", "reference"]
    for device in ("cpu", "cuda", "meta"):
        chosen = select_backend("reference", PROBLEM, POLICY, torch.device(device))
        assert chosen is get_backend("reference")


def test_auto_takes_the_fastest_able_and_logs_it_once(backends, caplog) -> None:
    fast, middle, slow = Picky("fast", "needs sm_100"), Picky("middle", None), Picky("slow", None)
    backends(fast, middle, slow)
    with caplog.at_level(logging.INFO, logger="fp4mega.kernels.registry"):
        for _ in range(3):
            assert select_backend("auto", PROBLEM, POLICY, CPU) is middle
        assert [r.message for r in caplog.records] == [
            "attention policy nvfp4_qk_fp8_pv runs on backend middle (cpu); fast declined: needs sm_100"
        ]
        select_backend("auto", PROBLEM, get_policy("bf16"), CPU)
        select_backend("slow", PROBLEM, POLICY, CPU)
    assert len(caplog.records) == 3


def test_by_name_is_that_backend_or_an_error(backends) -> None:
    backends(Picky("fast", "head dim 32 is not a multiple of 64"), Picky("slow", None))
    with pytest.raises(NotImplementedError) as error:
        select_backend("fast", PROBLEM, POLICY, CPU)
    for part in ("backend='fast'", "nvfp4_qk_fp8_pv", "head dim 32 is not", "D32/32", "Able: slow"):
        assert part in str(error.value)


def test_nothing_able_lists_every_reason(backends) -> None:
    backends(Picky("fast", "needs sm_100"), Picky("slow", "needs a GPU"))
    with pytest.raises(NotImplementedError, match="fast: needs sm_100; slow: needs a GPU"):
        select_backend("auto", PROBLEM, POLICY, CPU)


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="backend='refrence' is unknown; nearest is 'reference'; allowed: auto"
    ):
        select_backend("refrence", PROBLEM, POLICY, CPU)


def test_the_reference_declines_what_a_policy_does_not_define() -> None:
    with pytest.raises(NotImplementedError, match="reference: policy 'direct_p_guarded' samples"):
        select_backend("auto", PACKED_CASES[0].problem, get_policy("direct_p_guarded"), CPU)


def test_auto_takes_a_forward_only_backend_for_inference_alone(backends, caplog) -> None:
    forward_only = Picky("forward_only", None)
    forward_only.has_backward = False
    backends(forward_only, Picky("slow", None))
    with caplog.at_level(logging.INFO, logger="fp4mega.kernels.registry"):
        assert select_backend("auto", PROBLEM, POLICY, CPU).name == "slow"
    assert "forward_only declined: it has no backward" in caplog.text
    assert select_backend("auto", PROBLEM, get_policy("direct_p_fast"), CPU) is forward_only
    assert select_backend("forward_only", PROBLEM, POLICY, CPU) is forward_only
