"""How attention is computed: the contract of a backend, and which backend runs a problem."""

from fp4mega.kernels.contract import Backend, Forward, Gradients, TensorSpec
from fp4mega.kernels.reference import ReferenceBackend
from fp4mega.kernels.registry import get_backend, list_backends, select_backend

__all__ = [
    "Backend",
    "Forward",
    "Gradients",
    "ReferenceBackend",
    "TensorSpec",
    "get_backend",
    "list_backends",
    "select_backend",
]
