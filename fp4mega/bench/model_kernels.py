"""Kernels that the speed model knows: how each is compiled, and what its barriers and products mean, in the order of its machine code.

A barrier's name ends with the query tile it belongs to. The counts of what a description lists are checked against the machine code, so a
kernel that was changed is refused instead of misread.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp4mega.attention.policy import get_policy
from fp4mega.bench.model_chip import K_OF, mma_cycles
from fp4mega.bench.model_sass import Instruction, Listing, disassemble, role_loop, usage
from fp4mega.bench.model_simulate import Step

ARCH = "sm_100a"
QUERY_TILE, KEY_TILE, QUERY_TILES = 128, 128, 2
THREADS = 512
"""Of a CTA, in every kernel here."""
DEFAULT_KERNELS = ("direct_p_fast", "direct_p_accurate", "nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
_COPY_CYCLES = 4.0
"""Of 512 bytes of scales through shared memory."""

Mark = tuple[str, int] | None
"""Barrier and how many tiles later its phase is; None for one that never makes anybody wait (loads, and their buffers)."""


@dataclass(frozen=True, slots=True)
class Description:
    """What instructions mean. `{i}` is the query tile of a softmax warp. `products`: (N, A in shared memory) of every MMA, in order."""

    softmax: tuple[tuple[Mark, ...], tuple[Mark, ...]]
    """Of either query tile."""
    correction: tuple[Mark, ...]
    waits: tuple[Mark, ...]
    commits: tuple[Mark, ...]
    products: tuple[tuple[int, bool], ...]
    counts: dict[str, int]
    """Arrivals of barriers that more than one role arrives at."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel. `source` says what it is, in words."""

    name: str
    source: str
    description: Description
    listing: Listing
    registers: int
    stack: int
    shared_bytes: int | None
    """None where its host code alone knows."""
    tensor_columns: int
    loaded: int
    """Bytes that a CTA loads for a key tile."""
    variant: str = ""
    """What else distinguishes it from kernels of the same name."""
    persistent: bool = False
    """Its CTAs take item after item; otherwise each has one."""

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit a multiprocessor: 65,536 registers, 233,472 bytes of shared memory of which a CTA costs 1,024, 512 columns."""
        limits = [65_536 // (self.registers * THREADS), 512 // self.tensor_columns]
        if self.shared_bytes is not None:
            limits.append(233_472 // (self.shared_bytes + 1024))
        return min(limits)

    def loop(self, role: str) -> tuple[Instruction, ...]:
        """Machine code of a role for one key tile."""
        return role_loop(self.listing, role)

    def roles(self) -> dict[str, list[Step]]:
        """Steps of every warp of partition 0. Raises ValueError when the machine code does not fit the description."""
        d = self.description
        softmax, multiply = self.loop("softmax"), self.loop("multiply")
        correction = self.loop("correction")
        return {
            **{f"softmax {i}": self._plain(f"softmax {i}", softmax, d.softmax[i]) for i in (0, 1)},
            "correction": self._plain("correction", correction, d.correction),
            "multiply": self._multiply(multiply),
        }

    def _plain(self, role: str, loop: Sequence[Instruction], marks: Sequence[Mark]) -> list[Step]:
        places = [i for i, x in enumerate(loop) if x.base in ("SYNCS", "BAR")]
        self._fits(role, "barrier operations", len(places), len(marks))
        marked = dict(zip(places, marks, strict=True))
        return [_marked(x, marked.get(i)) for i, x in enumerate(loop)]

    def _multiply(self, loop: Sequence[Instruction]) -> list[Step]:
        d = self.description
        for what, wanted, test in (
            ("waits", d.waits, lambda x: x.base == "SYNCS"),
            ("commits", d.commits, lambda x: x.base == "UTCBAR"),
            ("products", d.products, lambda x: x.base in K_OF),
        ):  # fmt: skip
            self._fits("multiply", what, sum(map(test, loop)), len(wanted))
        waits, commits, products = iter(d.waits), iter(d.commits), iter(d.products)
        steps = []
        for x in loop:
            if x.base == "SYNCS":
                steps.append(_marked(x, next(waits)))
            elif x.base == "UTCBAR":
                mark = next(commits)
                step = Step(x, commits=True)
                steps.append(step if mark is None else replace(step, arrives=mark[0], ahead=mark[1]))  # fmt: skip
            elif x.base in K_OF:
                n, a_shared = next(products)
                steps.append(Step(x, mma=mma_cycles(x.opcode, n, a_shared=a_shared)))
            else:
                steps.append(Step(x, mma=_COPY_CYCLES if x.base == "UTCCP" else 0.0))
        return steps

    def _fits(self, role: str, what: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise ValueError(
                f"kernel {self.name!r}: {role} has {found} {what}, its description {wanted}; the kernel has changed, its description must follow"
            )


def _marked(instruction: Instruction, mark: Mark) -> Step:
    if mark is None:
        return Step(instruction)
    name, ahead = mark
    arrives = ".ARRIVE" in instruction.opcode or ".ARV" in instruction.opcode
    return Step(instruction, arrives=name if arrives else None, waits=None if arrives else name, ahead=ahead)  # fmt: skip


def _ours(direct: bool, dim: int = 128) -> Description:
    """`fp4mega.kernels.cute.forward`: row sums are products too, and lie in the other query tile's columns."""

    def softmax(i: int) -> tuple[Mark, ...]:
        rise: tuple[Mark, ...] = () if direct else ((f"rise{i}", 0),)
        halves = ((f"first{i}", 0), (f"last{i}", 0))
        return ((f"scores{i}", 0), (f"read{i}", 0), *rise, *halves)

    correction: list[Mark] = []
    for i in (0, 1):
        correction += [(f"out{i}", -1), (f"total{i}", -1)]
        if not direct:
            correction += [(f"rise{i}", 0), (f"ready{i}", 0)]
    # Direct-P waits for it once an item, as both do for Q.
    ready = [((f"ready{i}", 0),) if not direct else () for i in (0, 1)]
    steps = KEY_TILE // (64 if direct else 32)
    products = ([(dim, False)] * steps + [(16, False)] * steps + [(KEY_TILE, True)] * (dim // 64)) * 2  # fmt: skip
    return Description(
        softmax=(softmax(0), softmax(1)),
        correction=tuple(correction),
        waits=(
            None, *ready[0], ("first0", 0), ("last0", 0), ("read1", 0), ("total1", -1), None,
            *ready[1], ("first1", 0), ("last1", 0), ("read0", 1), ("total0", 0),
        ),
        commits=(("out0", 0), ("scores0", 1), ("out1", 0), None, None, ("scores1", 1), None),
        products=tuple(products),
        counts={},
    )  # fmt: skip


FLASH_ATTENTION_4 = Description(
    softmax=(
        (("scores0", 0), ("rise0", 0), ("first0", 0), ("last0", 0), ("free0", 0)),
        (("scores1", 0), ("rise1", 0), ("first1", 0), ("last1", 0), ("free1", 1)),
    ),
    correction=(("rise0", 0), ("first0", 0), ("free1", 0), ("rise1", 0), ("first1", 0), ("free0", 0)),
    waits=(None, ("first0", 0), ("last0", 0), None, ("first1", 0), ("last1", 0)),
    commits=(("scores0", 1), None, ("scores1", 1), None),
    products=(((128, False),) * 8 + ((128, True),) * 8) * 2,
    counts={"first0": 2, "first1": 2},
)  # fmt: skip
"""flash-attn-4 4.0.0b36, BF16, one CTA, head dim 128. `first`: 96 keys of P are written, and O is rescaled."""


def _compile(function: Any, *arguments: Any) -> Any:
    from fp4mega.testing import ptx

    return ptx.compile_for(ARCH, function, *arguments, options="--keep-cubin")


def compile_ours(policy: str, *, polynomial_of_8: int | None = None, causal: bool = False) -> Kernel:  # fmt: skip
    """Compile this project's forward kernel of a policy, D = 128, for sm_100a; no GPU needed, about five seconds.

    Raises ValueError for a policy without a kernel, RuntimeError when CUTLASS or nvdisasm is missing.
    """
    from fp4mega.kernels.cute.config import SCALE_ATOM, Columns, ForwardConfig
    from fp4mega.kernels.cute.support import explain_policy

    found = get_policy(policy)
    _needs_cutlass()
    if why := explain_policy(found):
        raise ValueError(f"policy={policy!r}: {why}")
    config = ForwardConfig(
        nvfp4=found.operands["q"].format == "nvfp4",
        right=causal,
        statistics=found.backward == "represented",
        p_exponent=found.p_exponent,
        exact_total=found.normalizer == "exact",
        direct_p=found.direct_p,
    )
    if polynomial_of_8 is not None:
        config = replace(config, polynomial_of_8=polynomial_of_8)
    from fp4mega.kernels.cute.compile import fake_arguments, host_function
    from fp4mega.kernels.cute.storage import shared_storage

    cubin = _compile(host_function(config), *fake_arguments(config)).__cubin__
    registers, stack = usage(cubin)
    return Kernel(
        name=policy,
        source="this project's kernel, compiled here",
        description=_ours(found.direct_p is not None),
        listing=disassemble(cubin),
        registers=registers,
        stack=stack,
        shared_bytes=shared_storage(config).size_in_bytes(),
        tensor_columns=Columns(config).allocated,
        loaded=KEY_TILE * config.row_bytes
        + config.scale_atoms * SCALE_ATOM
        + config.v_bytes
        + (SCALE_ATOM if found.direct_p is not None else 0),
        variant=f"causal={causal}, polynomial_of_8={config.polynomial_of_8}",
        persistent=True,
    )


def compile_flash_attention_4() -> Kernel:
    """flash-attn-4's forward, BF16, D = 128, not causal, one CTA. Raises RuntimeError when it or a tool it needs is missing."""
    _needs_cutlass()
    os.environ.setdefault("FLASH_ATTENTION_ARCH", "sm_100")
    os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", "148")
    try:
        module = importlib.import_module("flash_attn.cute.flash_fwd_sm100")
    except ImportError as error:
        raise RuntimeError(f"flash-attn-4 is not installed: {error}") from error
    import cuda.bindings.driver as cuda
    from cutlass import BFloat16, Float32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    kernel = module.FlashAttentionForwardSm100(
        128, 128, qhead_per_kvhead=1, is_causal=False, is_static_persistent=False,
        use_clc_scheduler=False, q_stage=2,
    )  # fmt: skip

    @cute.jit
    def host(
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
        scale: Float32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        kernel(q, k, v, out, lse, scale, stream=stream)

    def tensor(dtype: Any, *fixed: int, alignment: int) -> Any:
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), *fixed)
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=alignment)

    rows = [tensor(BFloat16, 128, alignment=16) for _ in range(4)]
    lse = tensor(Float32, alignment=4)
    cubin = _compile(host, *rows, lse, Float32(0), make_fake_stream()).__cubin__
    registers, stack = usage(cubin)
    return Kernel(
        name="flash_attention_4",
        source="flash-attn-4, BF16, compiled here",
        description=FLASH_ATTENTION_4,
        listing=disassemble(cubin),
        registers=registers,
        stack=stack,
        shared_bytes=None,
        tensor_columns=512,
        loaded=2 * KEY_TILE * 128 * 2,
    )


def _needs_cutlass() -> None:
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"the CuTe DSL is not installed (pip install 'fp4mega[kernels]'): {error}"
        ) from error
