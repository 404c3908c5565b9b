"""Packed sequences over ranks, each padded and cut on its own, give the output, the gradients and the bytes of one rank."""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.attention import AttentionProblem, SideInputs, forward, get_policy
from fp4mega.ops import attention_func
from fp4mega.parallel import context_parallel_attention
from fp4mega.parallel.packed import PackedZigzag
from fp4mega.testing.distributed import World, enough_devices, run_distributed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H, G = 4, 2


@dataclass(frozen=True)
class Pack:
    """Lengths of packed sequences and, with their padding, how long they lie in memory."""

    lengths: tuple[int, ...]
    places: tuple[int, ...]

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.tensor((0, *rows), device=device).cumsum(0).to(torch.int32)
            for rows in (self.lengths, self.places)
        )


# With two ranks chunks of 64, 32, none and 32: whole tiles of 32, whole blocks of MXFP4, padding in two sequences.
TILES = Pack((201, 128, 0, 77), (256, 128, 0, 128))
# Four ranks: chunks of 32 and 64.
MORE_RANKS = Pack((256, 381, 1), (256, 512, 256))
# Chunks of 2, 1, 6 and 9 rows: no tile is whole.
ODD = Pack((5, 4, 24, 33), (8, 4, 24, 36))
UNPADDED = Pack((128, 256), (128, 256))


@dataclass(frozen=True)
class Case:
    """One comparison with one rank. `tolerance`: max |difference| / max |one rank's|."""

    policy: str
    pack: Pack = TILES
    causal: bool = True
    tolerance: float = 1e-10
    sink: bool = False
    window: tuple[int | None, int | None] | None = None
    head_dims: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float64


EXACT = [
    Case("nvfp4_qk_fp8_pv"),
    Case("nvfp4_qk_fp8_pv", causal=False, head_dims=(48, 32), pack=UNPADDED),
    Case("nvfp4_qk_fp8_pv", sink=True, window=(40, None)),
    Case("nvfp4_qk_fp8_pv-paper"),
    Case("nvfp4_qk_mxfp4_pv", sink=True),
    Case("nvfp4_qk_mxfp4_pv", causal=False, window=(70, 20)),
    Case("nvfp4_qk_mxfp4_pv-centered"),
    Case("cp-rows"),
    Case("bf16", pack=ODD),
    Case("exact", sink=True, window=(11, None), pack=ODD),
    Case("exact", causal=False, pack=ODD),
]
# What a ring changes for packed sequences is what it changes for others: P relative to other running references.
RING = [
    *[case for case in EXACT if "mxfp4_pv" in case.policy or case.policy == "exact"],
    *[replace(case, tolerance=2e-4) for case in EXACT if "fp8_pv" in case.policy],
    *[replace(case, tolerance=2e-4) for case in EXACT if case.policy == "cp-rows"],
    *[replace(case, tolerance=2e-2) for case in EXACT if case.policy == "bf16"],
]
# Heads are split, but every rank sees whole sequences: neither blocks nor tiles are cut.
WHOLE = [Case("nvfp4_qk_mxfp4_pv", pack=ODD, sink=True), Case("nvfp4_qk_fp8_pv", pack=ODD)]
FOUR = [Case("nvfp4_qk_mxfp4_pv", pack=MORE_RANKS, sink=True), Case("exact", pack=MORE_RANKS)]


def make_inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, (d, dv) = sum(case.pack.lengths), case.head_dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Rows grow along the pack: sequences, and ranks of one sequence, have different largest magnitudes.
    grow = torch.linspace(0.4, 1.4, tokens, dtype=torch.float64)[None, :, None, None]
    made = {
        "q": normal(1, tokens, H, d) * grow,
        "k": normal(1, tokens, G, d) * grow,
        "v": normal(1, tokens, G, dv) * grow,
        "dout": normal(1, tokens, H, dv) * grow,
        "dlse": normal(1, tokens, H),
        "sink": normal(H),
    }
    for name in "qk":  # no scores near zero: see test_cp_attention
        made[name][..., 0] = 5 * grow[..., 0]
    return {name: x.to(case.dtype).to(device) for name, x in made.items()}


# Scales of single rows: the dense batch has rows that a rank with a shorter sequence does not.
ROWS = replace(
    get_policy("nvfp4_qk_fp8_pv-paper"),
    name="cp-rows",
    q="e4m3/row",
    k="nvfp4/row",
    q_bwd="e4m3/row",
)


def small_tiles(name: str) -> Any:
    policy = ROWS if name == ROWS.name else get_policy(name)
    return replace(policy, name=f"{name}-small_tiles", tile_m=32, tile_n=32)


def differentiated(call: Any, x: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
    sink = x["sink"].clone().requires_grad_() if case.sink else None
    out, lse = call(q, k, v, sink)
    inputs = [t for t in (q, k, v, sink) if t is not None]
    found = torch.autograd.grad((out, lse), inputs, (x["dout"], x["dlse"].transpose(1, 2)))
    rows = {"out": out.detach(), "lse": lse.detach().transpose(1, 2)}
    return rows | dict(zip(("dq", "dk", "dv", "dsink"), found, strict=False))


def ranks_equal_one(device: torch.device, exchange: str, case: Case) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, (bounds, places) = make_inputs(case, device), case.pack.bounds(device)
    options = {"policy": small_tiles(case.policy), "causal": case.causal, "window": case.window}
    longest = max(case.pack.lengths)
    expected = differentiated(
        lambda q, k, v, sink: attention_func(
            q,
            k,
            v,
            sink=sink,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            backend="reference",
            return_lse=True,
            **options,
        ),
        x,
        case,
    )
    tokens = sum(case.pack.places) // ranks
    layout = PackedZigzag.of(bounds, places, ranks=ranks, rank=rank, tokens=tokens)
    counts = layout.distribute(torch.ones_like(x["dlse"]))[rank][..., 0] > 0
    # Whatever is in the padding, of the inputs and of the gradients that arrive, must not matter.
    mine = {n: layout.distribute(t, torch.nan)[rank] for n, t in x.items() if n != "sink"}
    ours = differentiated(
        lambda q, k, v, sink: context_parallel_attention(
            q,
            k,
            v,
            sink=sink,
            cu_seqlens=bounds,
            cu_seqlens_padded=None if case.pack == UNPADDED else places,
            group=group,
            exchange=exchange,
            backend="reference",
            **options,
        ),
        {**mine, "sink": x["sink"]},
        case,
    )
    assert ours.keys() == expected.keys()
    for name, theirs in expected.items():
        where = f"{exchange} {name} of {case}"
        if name == "dsink":
            dist.all_reduce(ours[name], group=group)
        else:
            theirs = layout.distribute(theirs)[rank]
            padding = ours[name][~counts]
            assert (padding == (-torch.inf if name == "lse" else 0)).all(), where
            theirs, ours[name] = theirs[counts], ours[name][counts]
        scale = expected[name].abs().max()
        assert scale > 1e-3, f"{where} is zero: nothing is compared"
        largest = ((ours[name] - theirs).abs().max() / scale).item()
        assert largest <= case.tolerance, f"{where}: {largest:.2e}"


def two_ranks(world: World) -> None:
    for exchange, cases in {"all_gather": EXACT, "p2p": RING, "a2a": EXACT + WHOLE}.items():
        for case in cases:
            ranks_equal_one(world.device, exchange, case)
    for name in ("nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "bf16"):
        for exchange in ("all_gather", "p2p"):
            saved_bytes_are_those_of_one(world.device, name, exchange, TILES)
    only_real_rows_travel(world.device)
    blocks_that_a_cut_would_split(world.device)


def four_ranks(world: World) -> None:
    for exchange in ("all_gather", "p2p"):
        saved_bytes_are_those_of_one(world.device, "nvfp4_qk_mxfp4_pv", exchange, MORE_RANKS)
        for case in FOUR:
            ranks_equal_one(world.device, exchange, case)


def saved_bytes_are_those_of_one(
    device: torch.device, name: str, exchange: str, pack: Pack
) -> None:
    """Codes and scales of every row, and of its padding, are those of the row on one rank; rows of no sequence are not kept."""
    rank, ranks, policy = dist.get_rank(), dist.get_world_size(), small_tiles(name)
    x = make_inputs(Case(name, pack, dtype=torch.bfloat16), device)
    bounds, places = pack.bounds(device)
    tokens = places[-1].item() // ranks
    layout = PackedZigzag.of(bounds, places, ranks=ranks, rank=rank, tokens=tokens)
    side = SideInputs(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    problem = AttentionProblem.of(
        (x["q"].shape, x["k"].shape, x["v"].shape),
        torch.bfloat16,
        side,
        softmax_scale=32**-0.5,
        causal="top_left",
        window=(None, None),
        max_seqlen_q=layout.whole().rows,
        max_seqlen_k=layout.whole().rows,
    )
    whole = forward(x["q"], x["k"], x["v"], side, problem, policy)[2]
    q, k, v = (layout.distribute(x[n])[rank].requires_grad_() for n in "qkv")
    out, _ = context_parallel_attention(
        q,
        k,
        v,
        cu_seqlens=bounds,
        cu_seqlens_padded=places,
        group=dist.group.WORLD,
        exchange=exchange,
        policy=policy,
        causal=True,
    )
    mine = out.grad_fn.saved_tensors[3:]
    if name == "bf16":  # one rank keeps the caller's own tensors instead
        mine = mine[3:]
    assert len(mine) == len(whole)
    positions = layout.placement(rank).positions(device)
    for ours, theirs in zip(mine, whole, strict=True):
        statistics = theirs.dim() == 5
        if statistics:
            theirs = theirs.movedim((1, 4), (0, 1))
        theirs = theirs[[place > 0 for place in pack.places]]
        if theirs.shape[1] == 1:
            assert torch.equal(ours, theirs)
            continue
        shared = layout.whole().rows // theirs.shape[1]
        sequence, row = (positions[:, ::shared] < 1 << 32).nonzero(as_tuple=True)
        theirs = theirs[sequence, positions[:, ::shared][sequence, row] // shared]
        ours = ours[0]
        assert ours.shape == theirs.shape
        assert ours.shape[0] == tokens // shared
        if statistics:  # m is an integer under the integer rule; L a sum
            ours, theirs = ours[:, 0], theirs[:, 0]
            if policy.max_rule != "integer":
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
                continue
        assert torch.equal(ours, theirs), f"a saved tensor of {name} by {exchange}"


def only_real_rows_travel(device: torch.device) -> None:
    """K at 4.5 bits and V at 8 of the 256 tokens of a rank, though a dense batch of the three sequences has 384 rows."""
    x = make_inputs(Case("nvfp4_qk_fp8_pv", dtype=torch.bfloat16), device)
    bounds, places = TILES.bounds(device)
    rank, tokens = dist.get_rank(), 256
    layout = PackedZigzag.of(bounds, places, ranks=2, rank=rank, tokens=tokens)
    assert layout.batch * layout.rows == 384
    sent = []
    original = dist.all_gather

    def counted(out: list[Tensor], message: Tensor, **options: Any) -> Any:
        sent.append(message.nbytes)
        return original(out, message, **options)

    with mock.patch.object(dist, "all_gather", counted):
        context_parallel_attention(
            *(layout.distribute(x[n])[rank] for n in "qkv"),
            cu_seqlens=bounds,
            cu_seqlens_padded=places,
            group=dist.group.WORLD,
        )
    assert sent == [tokens * G * 32 * (4.5 + 8) / 8]


def blocks_that_a_cut_would_split(device: torch.device) -> None:
    case = Case("nvfp4_qk_mxfp4_pv", pack=ODD)
    x, (bounds, places) = make_inputs(case, device), ODD.bounds(device)
    q, k, v = (torch.nn.functional.pad(x[n], (0, 0, 0, 0, 0, 6))[:, :36] for n in "qkv")
    with pytest.raises(NotImplementedError, match="sequence length 4 on 2 .* blocks of 32 keys"):
        context_parallel_attention(
            q,
            k,
            v,
            cu_seqlens=bounds,
            cu_seqlens_padded=places,
            group=dist.group.WORLD,
            policy=case.policy,
        )
    with pytest.raises(ValueError, match=r"q.shape=\(2, .*packed sequences have a batch of 1"):
        context_parallel_attention(
            *(t.expand(2, -1, -1, -1) for t in (q, k, v)),
            cu_seqlens=places,
            group=dist.group.WORLD,
        )
    with pytest.raises(ValueError, match="cu_seqlens=None: cu_seqlens_padded needs cu_seqlens"):
        context_parallel_attention(q, k, v, cu_seqlens_padded=places, group=dist.group.WORLD)


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize(("body", "ranks"), [(two_ranks, 2), (four_ranks, 4)])
def test_packed_sequences_equal_one_rank(body, ranks, device_type):
    if not enough_devices(device_type, ranks):
        pytest.skip(f"needs {ranks} devices of type {device_type}")
    run_distributed(body, ranks, device_type=device_type, timeout=300.0)
