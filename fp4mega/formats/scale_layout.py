"""Block scales in the order that Blackwell's tensor cores (tcgen05 block-scaled MMA) read them.

Atoms of 512 bytes hold 128 rows x 4 scales; inside one, row r and scale k lie at (r % 32) * 16 + (r % 128) // 32 * 4 + k % 4. Atom
(i, j) covers rows 128 i to 128 i + 127 and scales 4 j to 4 j + 3, and atoms follow each other K-major: j runs fastest, so
the atom starts at (i * ceil(k / 4) + j) * 512. Rows are padded to 128 and scales to 4 with zero bytes.
Source: CUTLASS's blockscaled layout, ((32, 4), (vec, 4)) : ((16, 4), (0, 1)); PTX ISA, "scale factor layout".
"""

import torch.nn.functional as F
from torch import Tensor

ATOM_ROWS = 128
ATOM_SCALES = 4


def to_tcgen05(scale: Tensor) -> Tensor:
    """Row-major scales [rows, k] (1-byte dtype) -> flat [ceil(rows / 128) * ceil(k / 4) * 512] in tcgen05 order.

    Raises ValueError unless `scale` has two dims and 1-byte elements.
    """
    if scale.ndim != 2 or scale.element_size() != 1:
        raise ValueError(
            f"scale: {tuple(scale.shape)} {scale.dtype}: expected two dims [rows, k] and a 1-byte dtype"
        )
    rows, k = scale.shape
    padded = F.pad(scale, (0, -k % ATOM_SCALES, 0, -rows % ATOM_ROWS))
    # [i, quarter, lane, j, k % 4] -> [i, j, lane, quarter, k % 4]
    split = padded.view(
        padded.shape[0] // ATOM_ROWS, 4, 32, padded.shape[1] // ATOM_SCALES, ATOM_SCALES
    )
    return split.permute(0, 3, 2, 1, 4).reshape(-1)


def from_tcgen05(flat: Tensor, rows: int, k: int) -> Tensor:
    """Inverse of `to_tcgen05`: [rows, k], padding dropped. Raises ValueError when `flat` has another length."""
    row_atoms, k_atoms = -(-rows // ATOM_ROWS), -(-k // ATOM_SCALES)
    if flat.ndim != 1 or flat.numel() != row_atoms * k_atoms * ATOM_ROWS * ATOM_SCALES:
        raise ValueError(
            f"flat.shape={tuple(flat.shape)}: {rows} rows x {k} scales take [{row_atoms * k_atoms * ATOM_ROWS * ATOM_SCALES}]"
        )
    split = flat.view(row_atoms, k_atoms, 32, 4, ATOM_SCALES).permute(0, 3, 2, 1, 4)
    return split.reshape(row_atoms * ATOM_ROWS, k_atoms * ATOM_SCALES)[:rows, :k].contiguous()
