"""Portable Triton kernels for NVIDIA GPUs from sm_89 on; importing this package needs no Triton."""

from fp4mega.kernels.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
