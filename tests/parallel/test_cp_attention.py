"""Two and four ranks of context parallelism give the output, the gradients and the bytes of one."""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.attention import AttentionPolicy, AttentionProblem, SideInputs, forward, get_policy
from fp4mega.attention.represent import scope_amax
from fp4mega.ops import attention_func
from fp4mega.parallel import context_parallel_attention
from fp4mega.parallel.operands import group_amax
from fp4mega.parallel.zigzag import to_ranks
from fp4mega.testing.distributed import World, enough_devices, run_distributed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


@dataclass(frozen=True)
class Case:
    """One comparison. `tolerance` is on max |difference| / max |one rank's|; rms on the ratio of norms instead."""

    policy: str
    causal: bool = True
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    rms: float | None = None
    sink: bool = False
    window: tuple[int | None, int | None] | None = None
    small_tiles: bool = True
    faint: tuple[str, ...] = ()
    head_dims: tuple[int, int] = (32, 32)
    kv_heads: int = 2

    def make_policy(self) -> AttentionPolicy:
        policy = get_policy(self.policy)
        if not self.small_tiles:
            return policy
        # Chunks of 64 then hold whole tiles, as in a real length they do with the tiles of 64 and 128.
        return replace(policy, name=f"{policy.name}-small_tiles", tile_m=32, tile_n=32)


def on_ranks(body: Any, ranks: int, device_type: str) -> None:
    if not enough_devices(device_type, ranks):
        pytest.skip(f"needs {ranks} devices of type {device_type}")
    run_distributed(body, ranks, device_type=device_type, timeout=300.0)


def make_inputs(case: Case, length: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    d, dv = case.head_dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Rows grow along the sequence, so that ranks have different largest magnitudes.
    grow = torch.linspace(0.4, 1.2, length, dtype=torch.float64)[None, :, None, None]
    made = {
        "q": normal(2, length, 4, d) * grow,
        "k": normal(2, length, 4, d)[:, :, : case.kv_heads] * grow,
        "v": normal(2, length, 4, dv)[:, :, : case.kv_heads] * grow,
        "dout": normal(2, length, 4, dv) * grow,
        "dlse": normal(2, length, 4),
        "sink": normal(4),
    }
    # Products of 4-bit numbers are often exactly zero, 2^0 is then on a tie of E2M1, and the noise of a sum in another order
    # decides it. Scores away from zero have no such ties.
    for name in "qk":
        made[name][..., 0] = 5 * grow[..., 0]
    # One rank of two then holds only what is subnormal under the scales of the whole, and normal under its own.
    middle = torch.arange(length) // (length // 4) % 3 != 0
    for name in case.faint:
        rows = ~middle if name.startswith("outer ") else middle
        name = name.removeprefix("outer ")
        made[name][:, rows] *= 2**-30 if name.startswith("d") else 2**-13
    return {name: x.to(case.dtype).to(device) for name, x in made.items()}


def differentiated(call: Any, x: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """call(q, k, v, sink) and its gradients."""
    q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    sink = x["sink"].to(wide).requires_grad_() if case.sink else None
    out, lse = call(q, k, v, sink)
    inputs = [t for t in (q, k, v, sink) if t is not None]
    gradients = torch.autograd.grad(
        (out, lse), inputs, (x["dout"], x["dlse"].transpose(1, 2).to(lse.dtype))
    )
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=False))


def compare(name: str, ours: Tensor, theirs: Tensor, case: Case) -> None:
    ours, theirs = ours.double(), theirs.double()
    scale = theirs.abs().max()
    assert scale > (0 if case.faint else 1e-3), f"{name} of {case} is zero: nothing is compared"
    largest = ((ours - theirs).abs().max() / scale).item()
    norm = ((ours - theirs).norm() / theirs.norm()).item()
    assert largest <= case.tolerance, f"{name} of {case}: {largest:.2e}"
    if case.rms is not None:
        assert norm <= case.rms, f"{name} of {case}: rms {norm:.2e}"


def ranks_equal_one(device: torch.device, cases: dict[str, list[Case]], length: int) -> None:
    """Every case of every exchange; the one-rank answer of a case is computed once."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    answers: dict[Case, dict[str, Tensor]] = {}
    # Both sides on the reference: on a GPU `auto` may take another backend for whole heads, which is compared elsewhere.
    for exchange, case in [(name, case) for name, listed in cases.items() for case in listed]:
        x, policy = make_inputs(case, length, device), case.make_policy()
        options = {"policy": policy, "causal": case.causal, "window": case.window}
        question = replace(case, tolerance=0.0, rms=None)
        if question not in answers:
            answers[question] = differentiated(
                lambda q, k, v, sink, o=options: attention_func(
                    q, k, v, sink=sink, backend="reference", return_lse=True, **o
                ),
                x,
                case,
            )
        expected = answers[question]
        mine = {name: to_ranks(t, ranks)[rank] for name, t in x.items() if name != "sink"}
        ours = differentiated(
            lambda q, k, v, sink, o={**options, "exchange": exchange}: context_parallel_attention(
                q, k, v, sink=sink, group=group, backend="reference", **o
            ),
            {**mine, "sink": x["sink"]},
            case,
        )
        assert ours.keys() == expected.keys()
        for name, theirs in expected.items():
            if name == "dsink":
                dist.all_reduce(ours[name], group=group)
            elif name == "lse":
                theirs = to_ranks(theirs.transpose(1, 2), ranks)[rank].transpose(1, 2)
            else:
                theirs = to_ranks(theirs, ranks)[rank]
            compare(f"{exchange} {name}", ours[name], theirs, case)


EXACT = [
    Case("nvfp4_qk_fp8_pv"),
    Case("nvfp4_qk_fp8_pv", causal=False, head_dims=(48, 32)),
    Case("nvfp4_qk_fp8_pv", sink=True, window=(40, None)),
    Case("nvfp4_qk_fp8_pv", causal=False, window=(70, 20)),
    Case("nvfp4_qk_fp8_pv-paper"),
    Case("nvfp4_qk_fp8_pv-centered"),
    Case("nvfp4_qk_mxfp4_pv", sink=True),
    Case("nvfp4_qk_mxfp4_pv", causal=False),
    Case("nvfp4_qk_mxfp4_pv", faint=("q", "k", "dout", "dlse")),
    Case("nvfp4_qk_mxfp4_pv", faint=("q", "outer dout", "outer dlse")),
    Case("nvfp4_qk_mxfp4_pv-paper", sink=True),
    Case("nvfp4_qk_mxfp4_pv-centered"),
    Case("mxfp4_qk_fp8_pv"),
    Case("bf16"),
    Case("bf16", causal=False),
    Case("exact", sink=True, window=(40, None)),
    # A window inside a chunk: rows at a chunk's start see the end of another rank's, others only their own.
    Case("exact", window=(3, None)),
    Case("nvfp4_qk_mxfp4_pv", sink=True, causal=False, window=(3, 5)),
    # Multi-latent attention: every head has keys of its own, wider than its values.
    Case("nvfp4_qk_fp8_pv", head_dims=(192, 128), kv_heads=4),
    Case("nvfp4_qk_mxfp4_pv", head_dims=(192, 128), kv_heads=4, sink=True),
]


# A ring meets keys in another order, so P is rounded relative to other running references. Where those are powers of two apart
# and P has a block scale, nothing changes; E4M3 P changes in its subnormals, and BF16 P under an exact maximum everywhere.
RING = [
    *[case for case in EXACT if "mxfp4_pv" in case.policy or case.policy == "exact"],
    *[
        replace(case, tolerance=2e-4, rms=5e-5)
        for case in EXACT
        if "fp8_pv" in case.policy and "mxfp4_pv" not in case.policy
    ],
    Case("bf16", tolerance=2e-2, rms=5e-3),
]

# Sums in another order move a score by FP32's rounding, and a code of P or dS by one where it lay on the edge.
SINGLE = [
    Case("nvfp4_qk_fp8_pv", dtype=torch.float32, tolerance=2e-2, rms=1e-3, small_tiles=False),
    Case("nvfp4_qk_fp8_pv", dtype=torch.bfloat16, tolerance=2e-2, rms=2e-3, causal=False),
    Case("nvfp4_qk_mxfp4_pv", dtype=torch.float32, tolerance=2e-2, rms=1e-3),
    Case("exact", dtype=torch.float32, tolerance=2e-5, rms=1e-5),
    Case("bf16", dtype=torch.bfloat16, tolerance=2e-2, rms=5e-3),
]

FOUR = [
    Case("nvfp4_qk_mxfp4_pv", sink=True),
    Case("nvfp4_qk_mxfp4_pv-centered", causal=False),
    Case("exact", window=(100, None)),
    Case("exact", window=(3, None), sink=True),
    Case("nvfp4_qk_mxfp4_pv", head_dims=(192, 128), kv_heads=4),
]


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_equal_one(device):
    on_ranks(two_ranks, 2, device)


def two_ranks(world: World) -> None:
    ranks_equal_one(world.device, {"all_gather": EXACT, "a2a": EXACT, "p2p": RING}, 256)
    ranks_equal_one(world.device, dict.fromkeys(("all_gather", "a2a", "p2p"), SINGLE), 256)


@pytest.mark.parametrize("device", DEVICES)
def test_four_ranks_equal_one(device):
    on_ranks(four_ranks, 4, device)


def four_ranks(world: World) -> None:
    """A ring of two cannot tell left from right."""
    for exchange in ("all_gather", "p2p"):
        saved_bytes_are_slices(world.device, "nvfp4_qk_mxfp4_pv", exchange)
    heads_are_whole_sequences(world.device)
    ranks_equal_one(world.device, dict.fromkeys(("all_gather", "p2p"), FOUR), 256)


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_and_scales_and_traffic(device):
    on_ranks(bytes_and_traffic, 2, device)


def bytes_and_traffic(world: World) -> None:
    for name in ("nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "nvfp4_qk_mxfp4_pv-paper"):
        for exchange in ("all_gather", "p2p"):
            saved_bytes_are_slices(world.device, name, exchange)
    heads_are_whole_sequences(world.device)
    backward_scales_are_the_groups(world.device)
    not_a_number_reaches_every_rank(world.device)
    traffic_is_as_documented(world.device)


def saved_bytes_are_slices(device: torch.device, name: str, exchange: str) -> None:
    """Codes and block scales of a rank are rows of the one-rank bytes, the FP32 scale of a head is the same, bit for bit."""
    rank, ranks, policy = dist.get_rank(), dist.get_world_size(), get_policy(name)
    x = make_inputs(Case(name, dtype=torch.bfloat16), 256, device)
    problem = AttentionProblem(
        batch=2,
        seqlen_q=256,
        seqlen_k=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        head_dim_v=32,
        dtype=torch.bfloat16,
        softmax_scale=32**-0.5,
        causal="top_left",
    )
    whole = forward(x["q"], x["k"], x["v"], SideInputs(), problem, policy)[2]
    q, k, v = (to_ranks(x[n], ranks)[rank].clone().requires_grad_() for n in "qkv")
    out, _ = context_parallel_attention(
        q, k, v, group=dist.group.WORLD, exchange=exchange, policy=policy, causal=True
    )
    mine = out.grad_fn.saved_tensors[3:]
    assert len(mine) == len(whole)
    kept = 0
    for ours, theirs in zip(mine, whole, strict=True):
        if theirs.dim() == 5:  # m and L, of which m is an integer; saved with the rows first
            theirs = to_ranks(theirs.movedim((1, 4), (0, 1)), ranks)[rank]
            assert torch.equal(ours[:, :, 0], theirs[:, :, 0]), (
                f"references of {name} by {exchange}"
            )
            continue
        if theirs.shape[1] > 1:
            theirs = to_ranks(theirs, ranks)[rank]
        assert torch.equal(ours, theirs), f"a saved tensor of {name} by {exchange}"
        kept += ours.numel() * ours.element_size()
    # Q and K at 4.5 bits, V at 8 (4.25), and a number a head: less than half of BF16's 2 bytes a value.
    assert kept < sum(2 * t.numel() for t in (q, k, v)) / 2


def heads_are_whole_sequences(device: torch.device) -> None:
    """What a2a hands to ordinary attention is one rank's input, bit for bit; all scales are within a head."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = make_inputs(Case("exact", dtype=torch.bfloat16, kv_heads=4), 256, device)
    given = []

    def record(*tensors: Tensor, **options: Any) -> Any:
        given.extend(tensors)
        return attention_func(*tensors, **options)

    with mock.patch("fp4mega.parallel.attention.attention_func", record):
        context_parallel_attention(
            *(to_ranks(x[n], ranks)[rank] for n in "qkv"), group=dist.group.WORLD, exchange="a2a"
        )
    for name, ours in zip("qkv", given, strict=True):
        assert torch.equal(ours, x[name].chunk(ranks, dim=2)[rank])


def backward_scales_are_the_groups(device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = make_inputs(Case("nvfp4_qk_fp8_pv"), 256, device)
    operands = get_policy("nvfp4_qk_fp8_pv").operands
    named = [("do", operands["do"], "dout"), ("q_bwd", operands["q_bwd"], "q")]
    found = group_amax(
        [(n, o, to_ranks(x[source], ranks)[rank]) for n, o, source in named],
        torch.float64,
        dist.group.WORLD,
    )
    for name, operand, source in named:
        assert torch.equal(found[name], scope_amax(name, operand, x[source]))
        # Rank 0 holds the last chunk, and with it the largest values.
        local = scope_amax(name, operand, to_ranks(x[source], ranks)[1])
        assert not torch.equal(found[name], local), "rank 1 alone has the same scales"


def not_a_number_reaches_every_rank(device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = make_inputs(Case("nvfp4_qk_fp8_pv", dtype=torch.float32), 256, device)
    x["k"][0, 5, 0, 3] = torch.nan  # on rank 0, seen by no row before it
    q, k, v = (to_ranks(x[n], ranks)[rank] for n in "qkv")
    for exchange in ("all_gather", "p2p"):
        out, _ = context_parallel_attention(
            q, k, v, group=dist.group.WORLD, exchange=exchange, causal=True
        )
        assert out[0, :, :2].isnan().all()
        assert out[0, :, 2:].isfinite().all()
        assert out[1].isfinite().all()


def traffic_is_as_documented(device: torch.device) -> None:
    """Bytes that a rank hands to each collective: K at 4.5 bits and V at 8, twice, and FP32 dK and dV once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = make_inputs(Case("nvfp4_qk_fp8_pv", dtype=torch.bfloat16), 256, device)
    q, k, v = (to_ranks(x[n], ranks)[rank].clone().requires_grad_() for n in "qkv")
    values = k.numel()
    keys_and_values = values * 4.5 / 8 + values * 8 / 8
    sent: dict[str, list[int]] = {}

    def counted(name: str, size: Any) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            sent.setdefault(name, []).append(size(*arguments))
            return original(*arguments, **keywords)

        return mock.patch.object(dist, name, call)

    def nbytes(t: Tensor) -> int:
        return t.numel() * t.element_size()

    with (
        counted("all_gather", lambda out, message: nbytes(message)),
        counted("reduce_scatter", lambda out, parts: sum(map(nbytes, parts))),
        counted("batch_isend_irecv", lambda works: nbytes(works[0].tensor)),
        counted("all_to_all_single", lambda out, x: nbytes(x)),
        counted("all_reduce", lambda x: x.numel()),
    ):
        for exchange in ("all_gather", "p2p", "a2a"):
            out, _ = context_parallel_attention(
                q, k, v, group=dist.group.WORLD, exchange=exchange, causal=True
            )
            out.float().sum().backward()
        documented, sent = sent, {}
        context_parallel_attention(
            q, k, v, group=dist.group.WORLD, policy="nvfp4_qk_fp8_pv-centered"
        )[0].float().sum().backward()
    assert sent["all_gather"] == [keys_and_values] * 3
    sent = documented
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    magnitudes = [batch * (heads + 2 * kv_heads), batch * (2 * heads + kv_heads)]
    assert sent["all_reduce"] == magnitudes * 2  # none by a2a
    gradients = 4 * 2 * values
    assert sent["all_gather"] == [keys_and_values] * 2
    assert 2 * (k.numel() + v.numel()) / keys_and_values == 2.56
    assert sent["reduce_scatter"] == [ranks * gradients]
    # A ring of two: one block forward; backward a block, and the gradients after each of two steps.
    assert sorted(sent["batch_isend_irecv"]) == sorted([keys_and_values] * 2 + [gradients] * 2)
    # q, k, v, out and lse, and back the gradients of the first four; lse has none here.
    forward_bytes = [2 * t.numel() for t in (q, k, v, q)]
    lse_bytes = 4 * q[..., 0].numel()
    assert sorted(sent["all_to_all_single"]) == sorted([*forward_bytes * 2, lse_bytes])
