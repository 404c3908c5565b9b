"""What the answer is: problem, policy, mask, the reference forward and its explicit backward, Direct-P, probes."""

from fp4mega.attention.backward_probes import probe_backward
from fp4mega.attention.operand import Operand, parse_operand
from fp4mega.attention.policy import (
    DIVERGENT_PV_REASON,
    AttentionPolicy,
    DirectP,
    get_policy,
    list_policies,
    register_policy,
)
from fp4mega.attention.probes import probe
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.reference import Saved, backward, explain, forward, saved_spec

__all__ = [
    "DIVERGENT_PV_REASON",
    "AttentionPolicy",
    "AttentionProblem",
    "DirectP",
    "Operand",
    "Saved",
    "SideInputs",
    "backward",
    "explain",
    "forward",
    "get_policy",
    "list_policies",
    "parse_operand",
    "probe",
    "probe_backward",
    "register_policy",
    "saved_spec",
]
