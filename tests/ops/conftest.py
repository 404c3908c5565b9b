"""Policies that a test registers are forgotten after it, so that no other test's list of policies grows."""

import dataclasses

import pytest

from fp4mega import AttentionPolicy, get_policy, register_policy
from fp4mega.attention import policy as policy_module


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the registered policies for each test."""
    monkeypatch.setattr(policy_module, "_registry", dict(policy_module._registry))


@pytest.fixture(autouse=True)
def stochastic_policy(registry_of_its_own: None) -> AttentionPolicy:
    """A policy whose P and dS round stochastically, registered as `stochastic`."""
    base = get_policy("nvfp4_qk_fp8_pv")
    return register_policy(
        dataclasses.replace(base, name="stochastic", ds="e4m3/tile+sr", p="e4m3/unit+sr")
    )
