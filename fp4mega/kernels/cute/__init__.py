"""CuTe DSL kernels for NVIDIA Blackwell (sm_100); importing this package needs no CUTLASS."""

from fp4mega.kernels.cute.backend import CuteSm100Backend

__all__ = ["CuteSm100Backend"]
