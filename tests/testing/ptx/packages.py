"""Kernels that nobody here wrote, imported from their packages without what those packages import for a GPU."""

import importlib.util
import os
import sys
import types


def bare(*names: str) -> None:
    """Make packages importable without running their __init__ (which asks for a driver, or for Triton)."""
    for name in names:
        if name in sys.modules:
            continue
        parent, _, last = name.rpartition(".")
        if parent:
            path = [os.path.join(p, last) for p in sys.modules[parent].__path__]
        else:
            path = list(importlib.util.find_spec(name).submodule_search_locations)
        module = types.ModuleType(name)
        module.__path__ = path
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)


def flash_attention_4():
    """flash-attn-4's FlashAttentionForwardSm100."""
    os.environ.setdefault("FLASH_ATTENTION_ARCH", "sm_100")
    os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", "148")
    bare("quack")
    importlib.import_module("quack.dsl")  # installs indexing sugar that FA4's kernels use
    importlib.import_module("flash_attn")
    bare("flash_attn.cute")
    return importlib.import_module("flash_attn.cute.flash_fwd_sm100").FlashAttentionForwardSm100


def cudnn_block_scaled_gemm():
    """cuDNN's block-scaled GEMM with an amax epilogue, written in the CuTe DSL."""
    bare(
        "cudnn",
        "cudnn.gemm",
        "cudnn.gemm.cutedsl",
        "cudnn.gemm.cutedsl.dense",
        "cudnn.gemm.cutedsl.dense.amax",
    )
    name = "cudnn.gemm.cutedsl.dense.amax.dense_blockscaled_gemm_persistent_amax"
    return importlib.import_module(name).Sm100BlockScaledPersistentDenseGemmKernel
