"""Every refused argument: the message names the argument, its value and what is allowed."""

import dataclasses
import re

import pytest
import torch

from fp4mega import attention_func, get_policy
from fp4mega.testing import PACKED_CASES, Case

Q, K = torch.zeros(2, 8, 4, 16), torch.zeros(2, 12, 2, 16)


def call(**changes) -> torch.Tensor:
    arguments = {"q": Q, "k": K, "v": K, **changes}
    return attention_func(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "q=list: expected a torch.Tensor", {"q": [1.0]}),
        (ValueError, "k.shape=(12, 2, 16): expected 4 dims", {"k": K[0]}),
        (ValueError, "q.dtype=torch.int32: allowed: torch.bfloat16", {"q": Q.int()}),
        (
            ValueError,
            "k.dtype=torch.bfloat16: expected q's dtype, torch.float32",
            {"k": K.bfloat16()},
        ),
        (ValueError, "v.device=meta: expected q's device, cpu", {"v": K.to("meta")}),
        (ValueError, "k.shape=(1, 12, 2, 16): expected q's batch, 2", {"k": K[:1]}),
        (ValueError, "k.shape=(2, 12, 2, 8): expected q's head dim, 16", {"k": K[..., :8]}),
        (ValueError, "v.shape=(2, 11, 2, 16): expected k's length, 12", {"v": K[:, :11]}),
        (ValueError, "v.shape=(2, 12, 1, 16): expected k's heads, 2", {"v": K[:, :, :1]}),
        (ValueError, "num_heads=3, num_kv_heads=2", {"q": Q[:, :, :3]}),
        (ValueError, "head_dim=0: allowed: 1 to 256", {"q": Q[..., :0], "k": K[..., :0]}),
        (ValueError, "head_dim_v=272: allowed: 1 to 256", {"v": K.repeat(1, 1, 1, 17)}),
        (
            ValueError,
            "policy='nvfp4_qk_fp8_p' is not registered; nearest is",
            {"policy": "nvfp4_qk_fp8_p"},
        ),
        (TypeError, "policy=4: expected the name of a policy", {"policy": 4}),
        (
            ValueError,
            "backend='referense' is unknown; nearest is 'reference'",
            {"backend": "referense"},
        ),
        (ValueError, "causal='bottom': allowed: False, True, 'none'", {"causal": "bottom"}),
        (ValueError, "causal=1: allowed: False, True", {"causal": 1}),
        (ValueError, "softmax_scale=0.0: expected a finite positive number", {"softmax_scale": 0}),
        (ValueError, "softmax_scale=nan: expected", {"softmax_scale": float("nan")}),
        (TypeError, "softmax_scale='1': expected a number or None", {"softmax_scale": "1"}),
        (ValueError, "window=4: expected None or a pair", {"window": 4}),
        (ValueError, "window=(-1, 0): each side is None", {"window": (-1, 0)}),
        (TypeError, "window=(0.5, 0): each side is an integer", {"window": (0.5, 0)}),
        *(
            (
                ValueError,
                f"window=({n}, 0): each side is None (no limit) or from 0 to",
                {"window": (n, 0)},
            )
            for n in (2**30, 2**31 - 1, 2**63 - 1, 2**70)
        ),
        (
            ValueError,
            "softmax_scale: expected a finite positive number",
            {"softmax_scale": 10**400},
        ),
        (TypeError, "backend=None: expected 'auto' or the name", {"backend": None}),
        (TypeError, "check_finite='yes': expected True or False", {"check_finite": "yes"}),
        (TypeError, "sink=float: expected a torch.Tensor or None", {"sink": 1.0}),
        (ValueError, "sink.shape=(2,): expected [4]", {"sink": torch.zeros(2)}),
        (
            ValueError,
            "sink.dtype=torch.float16: allowed: torch.float32",
            {"sink": torch.zeros(4).half()},
        ),
        (
            ValueError,
            "key_padding_mask.dtype=torch.float32: allowed: torch.bool",
            {"key_padding_mask": torch.zeros(2, 12)},
        ),
        (
            ValueError,
            "key_padding_mask.shape=(2, 8): expected [2, 12]",
            {"key_padding_mask": torch.zeros(2, 8).bool()},
        ),
        (
            ValueError,
            "attention_mask.shape=(8, 12): expected [2, 4, 8, 12] or [2, 1, 8, 12] or [1, 4",
            {"attention_mask": torch.zeros(8, 12).bool()},
        ),
        (
            ValueError,
            "attention_mask.device=meta",
            {"attention_mask": torch.zeros(1, 1, 8, 12).bool().to("meta")},
        ),
        (
            ValueError,
            "rounding_key.dtype=torch.int32: allowed: torch.int64",
            {"rounding_key": torch.tensor(1).int()},
        ),
        (ValueError, "rounding_key.shape=(1,): expected []", {"rounding_key": torch.tensor([1])}),
        (ValueError, "max_seqlen_q=8: only for packed sequences", {"max_seqlen_q": 8}),
    ],
    ids=lambda value: value[:45] if isinstance(value, str) else "",
)
def test_refused(error: type[Exception], message: str, changes: dict) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("cu_seqlens_k=None: packed sequences need both", {"cu_seqlens_k": None}),
        (
            "cu_seqlens_q.dtype=torch.int64: allowed: torch.int32",
            {"cu_seqlens_q": int32(0, 3, 8).long()},
        ),
        ("cu_seqlens_q.shape=(1,): expected [N + 1]", {"cu_seqlens_q": int32(0)}),
        ("cu_seqlens_k.shape=(2,): expected as many sequences", {"cu_seqlens_k": int32(0, 12)}),
        ("cu_seqlens_q=[1, 3, 8]: expected to start at 0", {"cu_seqlens_q": int32(1, 3, 8)}),
        (
            "cu_seqlens_q=[0, 3, 7]: expected to start at 0, never to decrease, and to end at the 8 rows of q",
            {"cu_seqlens_q": int32(0, 3, 7)},
        ),
        (
            "cu_seqlens_k=[0, 13, 12]: expected to start at 0, never to decrease",
            {"cu_seqlens_k": int32(0, 13, 12)},
        ),
        ("max_seqlen_q=4: cu_seqlens_q holds a sequence of 5 rows", {"max_seqlen_q": 4}),
        ("max_seqlen_k=-1: expected an integer", {"max_seqlen_k": -1}),
        (
            "q.shape=(2, 8, 4, 16): packed sequences have a batch of 1, not 2",
            {"q": Q, "k": K, "v": K},
        ),
        (
            "key_padding_mask and attention_mask do not combine with packed",
            {"key_padding_mask": torch.zeros(1, 12).bool()},
        ),
    ],
    ids=lambda value: value[:45] if isinstance(value, str) else "",
)
def test_refused_packed(message: str, changes: dict) -> None:
    packed = {
        "q": Q[:1],
        "k": K[:1],
        "v": K[:1],
        "cu_seqlens_q": int32(0, 3, 8),
        "cu_seqlens_k": int32(0, 12, 12),
    }
    assert call(**packed).shape == (1, 8, 4, 16)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**{**packed, **changes})


def test_max_seqlen_is_not_read_from_a_device() -> None:
    inputs = PACKED_CASES[0].make(device="meta")
    arguments = PACKED_CASES[0].arguments(inputs.side)
    assert attention_func(*inputs[:3], **arguments).shape == inputs.q.shape
    arguments["max_seqlen_k"] = None
    with pytest.raises(ValueError, match="max_seqlen_k=None: expected the length of the longest"):
        attention_func(*inputs[:3], **arguments)


def test_check_finite_names_what_it_found() -> None:
    q, v = Q.clone(), K.clone()
    q[0, 0, 0, 0] = float("nan")
    v[:, 0, 0, :3] = float("-inf")
    assert call(q=torch.ones_like(Q), k=K + 1, v=K + 1, check_finite=True).isfinite().all()
    with pytest.raises(
        ValueError, match=r"q holds 1 NaN and 0 Inf of 1024 values; v holds 0 NaN and 6 Inf"
    ):
        call(q=q, v=v, check_finite=True)


def test_stochastic_rounding_needs_a_key() -> None:
    with pytest.raises(
        ValueError, match="rounding_key=None: policy 'stochastic' rounds p, ds stochastically"
    ):
        call(policy="stochastic")


def test_changed_numbers_under_a_taken_name() -> None:
    policy = dataclasses.replace(get_policy("bf16"), tile_n=32)
    with pytest.raises(ValueError, match="already registered with other numbers \\(tile_n\\)"):
        call(policy=policy)


def test_what_the_reference_cannot_do_is_refused_with_the_reason() -> None:
    case = PACKED_CASES[0].replace(policy="direct_p_accurate")
    inputs = case.make()
    with pytest.raises(
        NotImplementedError, match="reference: policy 'direct_p_accurate' samples its row reference"
    ):
        attention_func(*inputs[:3], **case.arguments(inputs.side))


def test_second_derivative_is_refused() -> None:
    inputs = Case(policy="nvfp4_qk_fp8_pv").make(requires_grad=True)
    out = attention_func(*inputs[:3])
    (dq,) = torch.autograd.grad(out.sum(), inputs.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_func has no second derivative"):
        dq.sum().backward()


def test_forward_mode_is_refused() -> None:
    """torch would answer with a tangent of zero for an operator that has no rule."""
    with pytest.raises(NotImplementedError, match="attention_func has no forward-mode derivative"):
        torch.func.jvp(lambda q: attention_func(q, K, K), (Q,), (torch.ones_like(Q),))
    sink = torch.zeros(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(sink, torch.ones_like(sink))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention_func(Q, K, K, sink=dual)
        assert attention_func(Q, K, K, sink=sink).shape == Q.shape


def test_vmap_is_refused() -> None:
    with pytest.raises(RuntimeError, match="fp4mega::attention_forward"):
        torch.vmap(lambda q: attention_func(q, K, K))(Q[None])
