"""cuDNN's FP8 attention as a peer, through the graphs of nvidia-cudnn-frontend: E4M3 throughout, dO in E5M2, a scale per tensor.

Inputs are quantized once, before anything is timed, and gradients are left in E4M3: the times are those of cuDNN's kernels alone, which
favours this peer over an arm that starts from BF16 and ends there. Scales of O, dS, dQ, dK and dV come from the largest magnitudes that
cuDNN reports itself in earlier runs, as delayed scaling would have them.
"""

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4mega.bench.arms import Arm
from fp4mega.bench.gate import Answer
from fp4mega.bench.shapes import Shape, Tensors

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
P_SCALE = 256.0
"""P lies in [0, 1]; this power of two uses E4M3's range."""
HOPPER_DIM = 128
CALIBRATION_RUNS = 3
"""dS must be in range before the gradients' magnitudes mean anything, and those before their scales do."""


def explain_shape(shape: Shape) -> str | None:
    """Shapes that cuDNN's FP8 graphs take; below sm_100 the backward exists for D 128 alone."""
    if shape.dim % 16 or shape.dim > HOPPER_DIM:
        return f"D={shape.dim}: FP8 attention takes multiples of 16 up to {HOPPER_DIM}"
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 10
    if hopper and shape.dim != HOPPER_DIM:
        return f"D={shape.dim}: on this GPU the FP8 backward takes D={HOPPER_DIM} only"
    return None


class Quantized(NamedTuple):
    """FP8 codes in the caller's layout, and what multiplies them back, float32 [1, 1, 1, 1]."""

    codes: Tensor
    descale: Tensor


def quantize(x: Tensor, dtype: torch.dtype, largest: float) -> Quantized:
    """One scale for the whole tensor, so that its largest magnitude becomes the largest code."""
    amax = x.abs().amax().float().clamp_min(1e-30)
    codes = (x.float() * (largest / amax)).clamp(-largest, largest).to(dtype)
    return Quantized(codes, (amax / largest).view(1, 1, 1, 1))


class _Graphs:
    """The two graphs of one shape with their buffers. Layout of all tensors: [B, S, heads, D] memory, [B, heads, S, D] dims."""

    def __init__(self, shape: Shape, x: Tensors) -> None:
        self.cudnn: Any = importlib.import_module("cudnn")
        self.shape, self.device = shape, x.q.device
        self.handle = self.cudnn.create_handle()
        self.cudnn.set_stream(
            handle=self.handle, stream=torch.cuda.current_stream(self.device).cuda_stream
        )
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        self.buffers: dict[str, Tensor] = {}
        for name, value in (("q", x.q), ("k", x.k), ("v", x.v)):
            self._hold(name, quantize(value, e4m3, E4M3_MAX))
        self._hold("dO", quantize(x.dout, e5m2, E5M2_MAX))
        for name, like in (("o", x.q), ("dQ", x.q), ("dK", x.k), ("dV", x.v)):
            self.buffers[name] = torch.empty_like(like, dtype=e4m3)
        rows = (shape.batch, shape.heads, shape.seqlen, 1)
        self.buffers["stats"] = torch.empty(rows, device=self.device)
        for name, scale in (("s", P_SCALE), ("o", 1.0), ("dP", 1.0), ("dQ", 1.0), ("dK", 1.0), ("dV", 1.0)):  # fmt: skip
            self._set_scale(name, scale)
            self.buffers[f"amax_{name}"] = torch.zeros(1, 1, 1, 1, device=self.device)
        self.forward_graph = self._build(self._forward_nodes)
        self.backward_graph = self._build(self._backward_nodes)
        self._calibrate()

    def _hold(self, name: str, value: Quantized) -> None:
        self.buffers[name], self.buffers[f"descale_{name}"] = value

    def _set_scale(self, name: str, scale: float) -> None:
        for key, value in ((f"scale_{name}", scale), (f"descale_{name}", 1.0 / scale)):
            if key in self.buffers:
                self.buffers[key].fill_(value)
            else:
                self.buffers[key] = torch.full((1, 1, 1, 1), value, device=self.device)

    def _build(self, nodes: Any) -> tuple[Any, dict[int, int], Tensor]:
        kind = self.cudnn.data_type
        graph = self.cudnn.pygraph(
            io_data_type=kind.FP8_E4M3,
            intermediate_data_type=kind.FLOAT,
            compute_data_type=kind.FLOAT,
            handle=self.handle,
        )
        bound = nodes(graph)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        # Numbers and addresses, so that no release has to know FP8 tensors of torch; `buffers` keeps the memory.
        pack = {node.get_uid(): self.buffers[name].data_ptr() for name, node in bound.items()}
        return graph, pack, workspace

    def _input(self, graph: Any, name: str) -> Any:
        kind = self.cudnn.data_type
        buffer = self.buffers[name]
        if name == "stats" or buffer.numel() == 1:
            return graph.tensor(
                name=name,
                dim=list(buffer.shape),
                stride=list(buffer.stride()),
                data_type=kind.FLOAT,
            )
        dims, strides = _heads_first(buffer)
        dtype = kind.FP8_E5M2 if buffer.dtype == torch.float8_e5m2 else kind.FP8_E4M3
        return graph.tensor(name=name, dim=dims, stride=strides, data_type=dtype)

    def _output(self, node: Any, name: str) -> Any:
        kind = self.cudnn.data_type
        buffer = self.buffers[name]
        scalar = name == "stats" or buffer.numel() == 1
        dims, strides = (
            (list(buffer.shape), list(buffer.stride())) if scalar else _heads_first(buffer)
        )
        node.set_output(True).set_dim(dims).set_stride(strides)
        node.set_data_type(kind.FLOAT if scalar else kind.FP8_E4M3)
        return node

    def _forward_nodes(self, graph: Any) -> dict[str, Any]:
        names = ("q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")  # fmt: skip
        inputs = {name: self._input(graph, name) for name in names}
        outputs = graph.sdpa_fp8(
            **inputs,
            generate_stats=True,
            attn_scale=1.0 / math.sqrt(self.shape.dim),
            use_causal_mask=self.shape.causal,
        )
        made = ("o", "stats", "amax_s", "amax_o")
        return inputs | {n: self._output(t, n) for n, t in zip(made, outputs, strict=True)}

    def _backward_nodes(self, graph: Any) -> dict[str, Any]:
        names = ("q", "k", "v", "o", "dO", "stats")
        scales = [f"descale_{n}" for n in ("q", "k", "v", "o", "dO", "s", "dP")]
        scales += [f"scale_{n}" for n in ("s", "dQ", "dK", "dV", "dP")]
        inputs = {name: self._input(graph, name) for name in (*names, *scales)}
        outputs = graph.sdpa_fp8_backward(
            **inputs,
            attn_scale=1.0 / math.sqrt(self.shape.dim),
            use_causal_mask=self.shape.causal,
        )
        made = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
        return inputs | {n: self._output(t, n) for n, t in zip(made, outputs, strict=True)}

    def _run(self, built: tuple[Any, dict[int, int], Tensor]) -> None:
        graph, pack, workspace = built
        graph.execute(pack, workspace.data_ptr(), handle=self.handle)

    def forward(self) -> "_Graphs":
        """O in E4M3 and the row statistics, into this object's buffers."""
        self._run(self.forward_graph)
        return self

    def backward(self, _: Any) -> None:
        """dQ, dK, dV in E4M3, into this object's buffers."""
        self._run(self.backward_graph)

    def _calibrate(self) -> None:
        for _ in range(CALIBRATION_RUNS):
            for name in ("o", "dP", "dQ", "dK", "dV"):
                self.buffers[f"amax_{name}"].zero_()
            self.forward()
            self.backward(None)
            torch.cuda.synchronize(self.device)
            for name in ("o", "dP", "dQ", "dK", "dV"):
                amax = float(self.buffers[f"amax_{name}"])
                if math.isfinite(amax) and amax > 0:
                    # A power of two below the largest: a run on the same inputs stays in range.
                    self._set_scale(name, 2.0 ** math.floor(math.log2(E4M3_MAX / amax)))

    def answer(self) -> Answer:
        """One evaluation, decoded to float32."""
        self.forward()
        self.backward(None)
        decoded = [
            self.buffers[name].float() * self.buffers[f"descale_{name}"].view(1, 1, 1, 1)
            for name in ("o", "dQ", "dK", "dV")
        ]
        return Answer(decoded[0], self.buffers["stats"].squeeze(-1), *decoded[1:])


def _heads_first(buffer: Tensor) -> tuple[list[int], list[int]]:
    """Dims [B, heads, S, D] and strides of a [B, S, heads, D] tensor."""
    view = buffer.transpose(1, 2)
    return list(view.shape), list(view.stride())


def open_arm(shape: Shape, x: Tensors) -> Arm:
    """Build, calibrate and hold both graphs of a shape. Raises what cuDNN raises when it has no such kernel."""
    graphs = _Graphs(shape, x)
    return Arm("cudnn_fp8", graphs.forward, graphs.backward, graphs.answer)
