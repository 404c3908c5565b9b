"""What the tests of the Triton kernels share: the policies that have kernels, and one small case that takes most paths."""

import pytest
import torch
from torch import Tensor

from fp4mega.attention import AttentionPolicy, get_policy
from fp4mega.attention.policy import _BUILT_IN as BUILT_IN
from fp4mega.formats import quantize
from fp4mega.kernels.triton import TritonBackend
from fp4mega.kernels.triton.support import explain_policy
from fp4mega.testing import Case, assert_bitwise

BACKEND = TritonBackend()
POLICIES = tuple(policy.name for policy in BUILT_IN if explain_policy(policy) is None)
"""Every built-in policy that the kernels run; not `list_policies()`, to which other tests of a process add their own."""
TRAINING = tuple(name for name in POLICIES if get_policy(name).direct_p is None)
"""Those with a backward."""
QUICK = Case(
    batch=2,
    seqlen_q=200,
    seqlen_k=330,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    causal="bottom_right",
    dtype=torch.bfloat16,
)


def policies(*names: str):
    """Parametrize `policy` over the policies of these names."""
    return pytest.mark.parametrize("policy", [get_policy(n) for n in names], ids=names)


def half(cases, dtype: torch.dtype = torch.bfloat16):
    """Parametrize `case` over these cases in a 16-bit dtype, without those that no kernel takes."""
    chosen = [c.replace(dtype=dtype) for c in cases if c.mask != "arbitrary"]
    return pytest.mark.parametrize("case", chosen, ids=[str(c) for c in chosen])


def assert_saved_bytes(case: Case, policy: AttentionPolicy, device: str = "cuda") -> None:
    """What the forward saves first is, bit for bit, `quantize` on the CPU of q, and of k and v with zeros where keys are hidden."""
    x = case.make(device=device)
    saved = list(BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).saved)
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
        if x.side.key_padding_mask is not None and name != "q":
            t = t.masked_fill(x.side.key_padding_mask[..., None, None], 0)
        operand = policy.operands[policy.backward_v if name == "v" else name]
        dims = (1, 3) if operand.scope else None
        axis = 1 if name == "v" else 3
        want = quantize(t.cpu(), operand.format, axis=axis, scale_dims=dims).tensors()
        for i, part in enumerate(want):
            assert_bitwise(saved.pop(0).cpu(), part, name=f"{case.values} {name}[{i}]")


def assert_expanded(
    saved: list[Tensor], largest: Tensor, operand: Tensor, inexact: Tensor, values: Tensor, *, nvfp4: bool
) -> None:  # fmt: skip
    """`expand_fp4` of what `publish_fp4` returned makes its scores operand and its flags again, and the E4M3 codes, transposed, of the
    represented `values`, float32 [B, rows, heads, dim] on the CPU.
    """
    from fp4mega.kernels.triton.publish_fp4 import expand_fp4

    rows, dim = values.shape[1], values.shape[3]
    again = torch.zeros_like(inexact)
    made, across, power = expand_fp4(
        saved, largest, dim, nvfp4=nvfp4, scores="bf16" if nvfp4 else "e4m3", gradient=True, inexact=again,
    )  # fmt: skip
    assert_bitwise(again, inexact, name="inexact")
    assert_bitwise(made.view(torch.uint8), operand.view(torch.uint8), name="made again")
    gradient = quantize(values, "e4m3", axis=3, scale_dims=(1, 3))
    codes = in_natural_order(across.view(torch.uint8)).cpu()
    turned, want = codes[:, :, :dim, :rows], gradient.codes.permute(0, 2, 3, 1)
    # The quotient by NVFP4's FP32 number loses the sign of a zero, which no product sees.
    turned, want = (t.masked_fill(t == 0x80, 0) if nvfp4 else t for t in (turned, want))
    assert_bitwise(turned, want, name="gradient")
    assert_bitwise(power.cpu(), gradient.global_scale.flatten(1), name="power")
    assert not codes[:, :, dim:].any()
    assert not codes[:, :, :, rows:].any()


def in_natural_order(across: Tensor) -> Tensor:
    """A transposed operand [..., rows] with its rows where they were: the inverse of the kernels' `in_operand_order`."""
    groups = across.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2)
    return groups.flatten(-4)
