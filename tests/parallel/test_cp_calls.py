"""One call over ranks: a group of one, what is kept for backward, padding beside a NaN, arguments refused before anything is sent."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.ops import attention_func
from fp4mega.parallel import context_parallel_attention
from fp4mega.parallel.packed import PackedZigzag
from fp4mega.testing.distributed import World, enough_devices, run_distributed

EXCHANGES = ("all_gather", "p2p", "a2a")
H, G, D = 4, 2, 16


def qkv(rows: int, device: torch.device, **options: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(1, rows, heads, D, generator=generator).to(device, **options)
        for name, heads in (("q", H), ("k", G), ("v", G))
    }


def two_ranks(world: World) -> None:
    # A packed one first: no collective may depend on what came before it.
    padding_beside_a_nan(world)
    kept_are_bytes_of_own_rows(world)
    wrong_arguments(world)
    a_group_of_one(world)


def a_group_of_one(world: World) -> None:
    """Out, lse and gradients of ordinary attention, as contiguous as those."""
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    x = {n: t.requires_grad_() for n, t in qkv(8, world.device, dtype=torch.float64).items()}
    expected = attention_func(*x.values(), causal=True, backend="reference", return_lse=True)
    wanted = torch.autograd.grad(sum(t.sin().sum() for t in expected), list(x.values()))
    for exchange in EXCHANGES:
        found = context_parallel_attention(
            *x.values(), group=alone, exchange=exchange, causal=True, backend="reference"
        )
        got = torch.autograd.grad(sum(t.sin().sum() for t in found), list(x.values()))
        assert all(t.is_contiguous() for t in found), exchange
        for ours, theirs in zip((*found, *got), (*expected, *wanted), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def kept_are_bytes_of_own_rows(world: World) -> None:
    """Nothing but the saved tensors outlives the forward: one long sequence among short ones makes large indices of all."""
    places = [512, *[4] * 16]
    bounds = torch.tensor([0, *places], device=world.device).cumsum(0).to(torch.int32)
    rows = sum(places) // world.size
    x = {n: t.requires_grad_() for n, t in qkv(rows, world.device).items()}
    for exchange in ("all_gather", "p2p"):
        out, _ = context_parallel_attention(
            *x.values(), cu_seqlens=bounds, group=dist.group.WORLD, exchange=exchange, causal=True
        )
        assert out.grad_fn is not None
        beside = sum(t.nbytes for t in _tensors(out.grad_fn.job))  # type: ignore[attr-defined]
        assert beside == 0, exchange
        # Q and K at 4.5 bits, V at 8, and their FP32 scales; out, lse, m and L.
        scales = 4 * len(places) * (H + 2 * G)
        expected = rows * D * ((H + G) * 4.5 + G * 8) / 8 + scales + rows * H * 4 * (D + 3)
        saved = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
        assert sum(t.untyped_storage().nbytes() for t in saved if t is not None) == expected
        out.sum().backward()
        assert not _tensors(out.grad_fn.job)  # type: ignore[attr-defined]


def _tensors(job: Any) -> list[Tensor]:
    """All that a call's description holds on to; what belongs to torch and to modules is shared, not held."""

    def reached() -> Iterator[Tensor]:
        seen: set[int] = set()
        waiting = [job.layout, job.problem]
        while waiting:
            found = waiting.pop()
            if id(found) in seen or isinstance(found, type):
                continue
            seen.add(id(found))
            if isinstance(found, Tensor):
                yield found
            else:
                waiting += gc.get_referents(found)

    return list(reached())


def padding_beside_a_nan(world: World) -> None:
    """Padding has output and gradients 0 and lse -inf, also where its sequence is NaN."""
    lengths, places = (13, 16), (16, 16)
    bounds, padded = (
        torch.tensor([0, *rows], device=world.device).cumsum(0).to(torch.int32)
        for rows in (lengths, places)
    )
    layout = PackedZigzag.of(bounds, padded, ranks=world.size, rank=world.rank, tokens=16)
    whole = qkv(sum(lengths), world.device)
    whole["k"][0, 5, 0, 3] = math.nan
    counts = layout.distribute(torch.ones(1, sum(lengths), 1, device=world.device))[world.rank] > 0
    counts = counts[0, :, 0]
    assert counts.all().item() == (world.rank != 0)  # rank 0 has the last chunk
    for exchange in EXCHANGES:
        x = {n: layout.distribute(t)[world.rank].requires_grad_() for n, t in whole.items()}
        out, lse = context_parallel_attention(
            *x.values(),
            cu_seqlens=bounds,
            cu_seqlens_padded=padded,
            group=dist.group.WORLD,
            exchange=exchange,
        )
        gradients = torch.autograd.grad(out.sum(), list(x.values()))
        for t in (out, *gradients):
            assert (t[0, ~counts] == 0).all(), exchange
            assert t[0, counts].isnan().any(), exchange
        assert (lse[0, :, ~counts] == -math.inf).all(), exchange


def wrong_arguments(world: World) -> None:
    """In the words of `attention_func`, and the same by every exchange: the ranks go on in step afterwards."""
    x = qkv(8, world.device)
    group = dist.group.WORLD
    bounds = torch.tensor([0, 16], dtype=torch.int32, device="meta")
    six_heads, four_heads = (torch.ones(1, 8, heads, D, device=world.device) for heads in (6, 4))
    for exchange in EXCHANGES:
        for error, message, changed in (
            (
                TypeError,
                r"window=\(True, None\): each side is an integer",
                {"window": (True, None)},
            ),
            (TypeError, r"window=\(1.5, None\): each side is an int", {"window": (1.5, None)}),
            (ValueError, r"window=\(3,\): expected None or a pair", {"window": (3,)}),
            (ValueError, r"window=5: expected None or a pair", {"window": 5}),
            (ValueError, r"window=\(-1, 0\): each side", {"window": (-1, 0)}),
            (TypeError, "softmax_scale='x': expected a number", {"softmax_scale": "x"}),
            (TypeError, "softmax_scale=True: expected a number", {"softmax_scale": True}),
            (ValueError, "softmax_scale=-1.0: expected a finite pos", {"softmax_scale": -1.0}),
            (TypeError, "group=None: expected a torch.distributed.Proc", {"group": None}),
            (TypeError, "cu_seqlens=list: expected a torch.Tensor", {"cu_seqlens": [0, 16]}),
            (ValueError, "cu_seqlens.device=meta: expected q's", {"cu_seqlens": bounds}),
            (
                ValueError,
                "num_heads=6, num_kv_heads=4: query heads",
                {"q": six_heads, "k": four_heads, "v": four_heads},
            ),
            (
                NotImplementedError,
                "length 0: .* multiple of 4 above 0",
                {n: t[:, :0] for n, t in x.items()},
            ),
            (ValueError, "head_dim=0: allowed", {n: x[n][..., :0] for n in "qk"}),
        ):
            given = {**x, "group": group, "exchange": exchange, **changed}
            with pytest.raises(error, match=message):
                context_parallel_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_calls_on_two_ranks(device_type):
    if not enough_devices(device_type, 2):
        pytest.skip(f"needs 2 devices of type {device_type}")
    run_distributed(two_ranks, 2, device_type=device_type)
