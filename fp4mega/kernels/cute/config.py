"""What is compiled into one forward kernel, and where things lie in tensor memory. Needs no CUTLASS."""

from dataclasses import dataclass
from typing import Literal

from fp4mega.attention.policy import DirectP
from fp4mega.kernels.cute.descriptors import Kind

TILE_M, TILE_N = 128, 128
QUERY_STAGES = 2
"""Query tiles of one CTA: while one of them is turned into P, the tensor core multiplies for the other."""
ITEM_BUFFERS = 2
"""Buffers for what a work item has one of: Q of the item and of the next, row maxima of the item and of the one before."""
ONES = 16
"""Columns of ones that P is also multiplied with: the least N of an MMA."""
SCALE_ATOM = 512
"""Bytes of 128 rows x 4 block scales in tensor-core order: four columns of tensor memory."""
ATOM_COLUMNS = 4
DIMS, DIMS_V = (64, 128, 192), (64, 128)


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """One kernel for each. Raises ValueError for dims without a kernel."""

    nvfp4: bool
    """Q and K in NVFP4 (blocks of 16, E4M3 scales, a global each) or MXFP4 (blocks of 32, E8M0 scales)."""
    dim: int = 128
    dim_v: int = 128
    right: bool = False
    """A limit on later keys (causal, or a window's right side)."""
    left: bool = False
    """A limit on earlier keys (a window's left side)."""
    lengths: bool = False
    """Rows and keys of every batch entry are counted by tensors (packed sequences)."""
    hidden: bool = False
    """A bit for every key of a batch entry says whether nobody sees it (padding)."""
    sink: bool = False
    statistics: bool = True
    """Write (m, L) of every row for a backward that rounds P again."""
    p_exponent: int = 8
    """E4M3 P is published as P * 2^p_exponent."""
    exact_total: bool = False
    """L sums the unrounded P, which only the softmax warps know."""
    direct_p: DirectP | None = None
    """MXFP4 P straight from scores; V is MXFP4 too, keys packed along the fast axis."""
    polynomial_of_8: int = 3
    """How many of eight E4M3 probabilities take 2^x from a polynomial on the FMA units instead of the EX2 unit."""
    stages: int = 3
    """Depth of the K and V rings."""

    def __post_init__(self) -> None:
        for name, allowed in (("dim", DIMS), ("dim_v", DIMS_V)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)}: kernels exist for {', '.join(map(str, allowed))}"
                )
        if not 0 <= self.polynomial_of_8 <= 8:
            raise ValueError(f"polynomial_of_8={self.polynomial_of_8}: expected 0 to 8")

    @property
    def kind(self) -> Kind:
        """MMA kind of the scores."""
        return Kind.MXF4NVF4 if self.nvfp4 else Kind.MXF4

    @property
    def block(self) -> int:
        """Quantization block of Q and K along D."""
        return 16 if self.nvfp4 else 32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of Q or K."""
        return self.dim // 2

    @property
    def chunk_bytes(self) -> int:
        """Width of the boxes that a tile of Q or K is loaded in: a swizzle's width, and a whole number of MMA steps."""
        return self.row_bytes if self.row_bytes in (32, 64) else 32

    @property
    def chunks(self) -> int:
        """Boxes of one tile of Q or K, one behind the other in shared memory."""
        return self.row_bytes // self.chunk_bytes

    @property
    def scale_atoms(self) -> int:
        """Scale atoms of 128 rows of Q or K."""
        return -(-self.dim // self.block // 4)

    @property
    def v_rows(self) -> int:
        """Rows of one V tile as it lies in memory: keys, or head dims for Direct-P, whose V is transposed."""
        return TILE_N if self.direct_p is None else self.dim_v

    @property
    def v_row_bytes(self) -> int:
        """Bytes of such a row."""
        return self.dim_v if self.direct_p is None else TILE_N // 2

    @property
    def v_bytes(self) -> int:
        """Bytes of one V tile."""
        return self.v_rows * self.v_row_bytes

    @property
    def p_columns(self) -> int:
        """Tensor-memory columns of 128 keys of P."""
        return TILE_N // 4 if self.direct_p is None else TILE_N // 8


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """One publishing kernel: `amax` of every head, Q or K `rows`, FP8 `values`, or Direct-P's `transposed` values."""

    kind: Literal["amax", "rows", "values", "transposed"]
    dim: int
    nvfp4: bool = False
    """Rows in NVFP4, otherwise MXFP4."""

    def __post_init__(self) -> None:
        allowed = DIMS if self.kind in ("amax", "rows") else DIMS_V
        if self.dim not in allowed:
            raise ValueError(
                f"dim={self.dim}: kernels of kind {self.kind!r} exist for {', '.join(map(str, allowed))}"
            )


KernelConfig = ForwardConfig | PublishConfig


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensor memory of one CTA in 32-bit columns; all of it is used at D = Dv = 128.

        0        128       256          256 + Dv
        | S0     | S1      | O0         | O1        |

    The 128 columns of a score tile are free as soon as the softmax warps hold the scores in registers. Until the next scores
    of that query tile are written they carry: its P and P's scales, V's scales (Direct-P), and, for the *other* query
    tile, the row sums of its P (`total`) and the scales of its next Q K^T.
    """

    config: ForwardConfig

    @property
    def out(self) -> tuple[int, int]:
        """First column of O of either query tile."""
        first = QUERY_STAGES * TILE_N
        return first, first + self.config.dim_v

    @property
    def allocated(self) -> int:
        """Columns to allocate: a power of two."""
        return 1 << (self.out[1] + self.config.dim_v - 1).bit_length()

    # Offsets inside a retired score tile.
    p: int = 0
    p_scale: int = 32
    """Two atoms: one for each half of 64 keys, because the halves are published one after the other."""
    v_scale: int = 40
    one_scale: int = 44
    total: int = 64
    q_scale: int = 80

    @property
    def k_scale(self) -> int:
        """Behind Q's."""
        return self.q_scale + ATOM_COLUMNS * self.config.scale_atoms
