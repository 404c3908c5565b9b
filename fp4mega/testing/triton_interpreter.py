"""Makes Triton's interpreter compute what a GPU does, where it does not: casts, products, fused multiply-adds, loop bounds.

The kernels run on a machine without a GPU when TRITON_INTERPRET=1 is set before Triton is imported; `install` then replaces, in the
interpreter alone, what is wrong there (3.6 to 3.9, read and measured):

- casts between float32, BF16, FP16, E4M3 and E5M2: it rounds about 4 % of float32 numbers to the wrong FP8 code and does not
  saturate. They go through the integer arithmetic of `fp4mega.formats`, whose rounding is the GPU's;
- products of BF16 factors, whose bits it multiplies as integers, and of FP8 factors: here in float64, rounded to float32 once;
- fused multiply-adds, which it rounds twice up to 3.6;
- loop bounds held in arrays of one element, which numpy from 2.4 on does not turn into integers.

For speed alone, more than twice: the language's functions are replaced once, not at every call of a device function, and numpy dtypes
are remembered.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from fp4mega.formats import E4M3, E5M2, decode, encode

_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_FP8 = {"fp8e4nv": E4M3, "fp8e5": E5M2}
_VALUES = {
    name: decode(torch.arange(256, dtype=torch.int32).to(torch.uint8), element).numpy()
    for name, element in _FP8.items()
}


def install() -> None:
    """Replace the interpreter's casts, products, fused multiply-adds and loop bounds for the rest of this process.

    Raises RuntimeError unless Triton was imported with TRITON_INTERPRET=1.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is not set: expected TRITON_INTERPRET=1 before triton is imported"
        )
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang = _patch_language
    interpreter._get_np_dtype = _numpy_dtype


def convert(data: np.ndarray, source: Any, target: Any, _rounding: Any) -> np.ndarray:
    """Bits of `data` (an array of the Triton dtype `source`) rounded to nearest even in `target`, as unsigned integers.

    FP8 saturates, infinity included, and NaN becomes 0x7F, as `cvt.rn.satfinite` has it.
    """
    if source.name in _FP8:
        values = torch.from_numpy(_VALUES[source.name][data])
    else:
        bits = np.ascontiguousarray(data).view(_BITS[source.primitive_bitwidth])
        values = torch.from_numpy(bits.copy()).view(_TORCH[source.name])
    if target.name in _FP8:
        codes = encode(values, _FP8[target.name]).numpy()
    else:
        codes = values.to(_TORCH[target.name]).reshape(-1).view(torch.uint8).numpy()
        codes = codes.view(_BITS[target.primitive_bitwidth])
    return codes.reshape(data.shape)


def _float64(handle: Any) -> np.ndarray:
    dtype = handle.dtype.scalar
    if dtype.name in ("fp32", "fp64"):
        return handle.data.astype(np.float64)
    return convert(handle.data, dtype, tl.float32, None).view(np.float32).astype(np.float64)


def _dot(_self: Any, a: Any, b: Any, c: Any, _precision: Any, _imprecise: Any) -> Any:
    product = np.matmul(_float64(a), _float64(b)).astype(c.data.dtype)
    return interpreter.TensorHandle(product + c.data, c.dtype.scalar)


def _fma(_self: Any, a: Any, b: Any, c: Any) -> Any:
    return interpreter.TensorHandle(fma(a.data, b.data, c.data), c.dtype.scalar)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: exact product and sum rounded to odd in float64, then to float32."""
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    # What the sum lost (Knuth's TwoSum): exact, and 0 where nothing was.
    virtual = total - product
    lost = (product - (total - virtual)) + (wide - virtual)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where(inexact, bits + away, bits).view(np.float64)
    return odd.reshape(total.shape).astype(np.float32)


_PATCH_TENSOR, _PATCH_LANGUAGE = interpreter._patch_lang_tensor, interpreter._patch_lang
_NUMPY_DTYPE = interpreter._get_np_dtype
_patched: set[frozenset[str]] = set()
_seen: set[Any] = set()
_dtypes: dict[str, np.dtype] = {}


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_language(function: Any) -> Any:
    """For good, the first time that a function with these language modules among its globals is called."""
    if function not in _seen:
        _seen.add(function)
        found = (m for m in function.__globals__.values() if m is tl or m is tl.core)
        modules = frozenset(module.__name__ for module in found)
        if modules not in _patched:
            _patched.add(modules)
            _PATCH_LANGUAGE(function)
    return interpreter._LangPatchScope()


def _numpy_dtype(dtype: Any) -> np.dtype:
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _NUMPY_DTYPE(dtype)
    return _dtypes[dtype.name]
