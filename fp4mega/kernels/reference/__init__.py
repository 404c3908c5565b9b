"""The backend that computes attention in plain torch, on any device; every other backend is compared with it."""

from fp4mega.kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
