"""The Triton kernels on the CPU, through Triton's interpreter: collected only in a process that has TRITON_INTERPRET=1.

`tests/kernels/triton/test_interpreted.py` starts those processes. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/interpreted
"""

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from fp4mega.testing.triton_interpreter import install

    install()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory that nothing has written yet is NaN, and 0x7F as FP8 or a byte: an element that no kernel writes shows."""
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        if x.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
            x.view(torch.uint8).fill_(0x7F)
        elif x.dtype.is_floating_point:
            x.fill_(torch.nan)
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "new_empty", lambda self, *a, **k: poisoned(new_empty(self, *a, **k))
        )
        patch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
        yield


@pytest.fixture(autouse=True)
def _small_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are rounded to float32 only: an eighth of the noise that a GPU is allowed."""
    monkeypatch.setattr("fp4mega.bench.gate.NOISE", 2.0**-14)
