"""Stand-ins for a device in the benchmark's tests: a stopwatch with a clock of its own, and backends that are wrong on purpose."""

from collections.abc import Callable

import torch

from fp4mega.kernels import Forward, Gradients, ReferenceBackend


class CountingStopwatch:
    """Calls what it is given and hands out 1, 2, 3, ... milliseconds in the order of the calls; remembers that order."""

    def __init__(self) -> None:
        self.order: list[object] = []

    def time(self, call: Callable[[], object]) -> tuple[int, int]:
        call()
        self.order.append(call)
        return 0, len(self.order)

    def samples(self, pairs):
        return [float(end - start) for start, end in pairs]

    def kernels(self, call):
        call()
        return [{"kernel": 0.5, "other": 0.25}, {"kernel": 1.5}]

    def copy_bandwidth(self) -> float:
        return 4e12


class WrongBackend(ReferenceBackend):
    """The reference with one planted fault."""

    name = "wrong"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def forward(self, q, k, v, side, problem, policy) -> Forward:
        out, lse, saved = super().forward(q, k, v, side, problem, policy)
        if self.fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if self.fault == "scaled output":
            out = out * 1.3
        elif self.fault == "one unchecked head":
            out = out.clone()
            out[0, :, 1] = out[0, :, 0]
        elif self.fault == "nan in an unchecked head":
            out = out.clone()
            out[0, 3, 1] = torch.nan
        elif self.fault == "lse":
            lse = lse + 0.1
        return Forward(out, lse, saved)

    def backward(self, *args) -> Gradients:
        gradients = super().backward(*args)
        if self.fault == "dk of one row":
            gradients.dk[0, 5] *= 2
        elif self.fault == "dq sign":
            return gradients._replace(dq=-gradients.dq)
        return gradients
