"""Random block-scaled operands with their exact values, by fp4mega.formats."""

import numpy as np
import torch

from fp4mega.formats import E2M1, E4M3, E8M0, decode, pack_nibbles, to_tcgen05


def block_scaled(rng, rows, columns, element, scale, vector):
    """(bytes [rows, n], scale bytes in tcgen05 order, values float64 [rows, columns]).

    element "e2m1" or "e4m3"; scale "e4m3" or "e8m0", one per `vector` columns. Every code that is a number occurs, zeros and both signs too.
    """
    if element == "e2m1":
        codes = torch.from_numpy(rng.integers(0, 16, (rows, columns)).astype(np.uint8))
        data, values = pack_nibbles(codes, 1), decode(codes, E2M1)
    else:
        codes = rng.integers(0, 0x58, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7
        codes = torch.from_numpy(codes.astype(np.uint8))
        data, values = codes, decode(codes, E4M3)
    low, high = (0x28, 0x48) if scale == "e4m3" else (124, 131)
    scales = torch.from_numpy(rng.integers(low, high, (rows, columns // vector)).astype(np.uint8))
    factors = decode(scales, E4M3 if scale == "e4m3" else E8M0)
    values = values.double() * factors.double().repeat_interleave(vector, dim=1)
    return data.numpy().copy(), to_tcgen05(scales).numpy().reshape(-1).copy(), values.numpy()
