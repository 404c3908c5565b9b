"""Every way in which Megatron cuts a model, against one rank: losses, gradient norms, and each parameter's gradient."""

import pytest
import torch

from fp4mega.testing.distributed import enough_devices, run_distributed
from tests.distributed.training_harness import content, train

NVFP4 = "nvfp4_qk_fp8_pv"

# Data, pipeline and expert parallelism leave every matrix product and every quantization scope as it was: what differs is
# the order in which gradients of micro-batches are added in FP32.
SAME = 1e-6
# Tensor parallelism adds up halves of products, in FP32 with another last bit, from the second layer on.
HALVES = 1e-5
# That last bit now and then moves a number over the threshold between two 4-bit codes, and the update that follows carries
# it into every weight. The same model with the policy `exact`, which has no codes, must agree to HALVES.
CODES = 2e-2

DISTRIBUTED = {"optimizer": {"distributed": True}}
EXPERTS = {
    "model": {"num_moe_experts": 4, "moe_ffn_hidden_size": 24},
    "parallel": {"expert": 2},
}
# id: (ranks, sections of the recipe, overlapped communication, policy, tolerance)
CASES = {
    "data": (2, {}, False, NVFP4, SAME),
    "data-distributed-optimizer": (2, DISTRIBUTED, False, NVFP4, SAME),
    "data-distributed-optimizer-overlap": (2, DISTRIBUTED, True, NVFP4, SAME),
    "tensor": (2, {"parallel": {"tensor": 2}}, False, NVFP4, CODES),
    "tensor-exact": (2, {"parallel": {"tensor": 2}}, False, "exact", HALVES),
    "tensor-sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}, False, NVFP4, CODES),
    "tensor-sequence-exact": (
        2,
        {"parallel": {"tensor": 2, "sequence": True}},
        False,
        "exact",
        HALVES,
    ),
    "pipeline": (2, {"parallel": {"pipeline": 2}}, False, NVFP4, SAME),
    "pipeline-tied": (
        2,
        {"parallel": {"pipeline": 2}, "model": {"tie_embeddings": True}},
        False,
        NVFP4,
        SAME,
    ),
    "pipeline-interleaved": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
        False,
        NVFP4,
        SAME,
    ),
    "expert": (2, EXPERTS, False, NVFP4, SAME),
    "expert-distributed-optimizer": (2, {**EXPERTS, **DISTRIBUTED}, False, NVFP4, SAME),
    # The gradient of the router has the load-balancing loss in it.
    "experts-tensor-sequence": (
        2,
        {"model": EXPERTS["model"], "parallel": {"tensor": 2, "sequence": True}},
        False,
        "exact",
        HALVES,
    ),
    "experts-context": (
        2,
        {"model": EXPERTS["model"], "parallel": {"context": 2}},
        False,
        "exact",
        HALVES,
    ),
    "tensor-pipeline": (4, {"parallel": {"tensor": 2, "pipeline": 2}}, False, "exact", HALVES),
    "tensor-data": (4, {"parallel": {"tensor": 2}, **DISTRIBUTED}, True, "exact", HALVES),
    "data-pipeline": (4, {"parallel": {"pipeline": 2}}, False, NVFP4, SAME),
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The result of one rank, computed once for each model and policy, and where the weights it began with are."""
    known = {}
    folder = tmp_path_factory.mktemp("starts")

    def result(sections, policy, device_type):
        model = sections.get("model", {})
        key = (repr(sorted(model.items())), policy, device_type)
        if key not in known:
            start = str(folder / str(len(known)))
            recipe = content(model=model, attention={"policy": policy})
            known[key] = (
                run_distributed(train, 1, recipe, start, device_type=device_type)[0],
                start,
            )
        return known[key]

    return result


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_a_cut_model_trains_as_one_rank_does(case, device_type, one_rank):
    ranks, sections, overlap, policy, tolerance = CASES[case]
    if not enough_devices(device_type, ranks):
        pytest.skip(f"needs {ranks} devices of type {device_type}")
    if (
        device_type == "cuda"
    ):  # where sums are added in any order, and products of other shapes by other kernels
        tolerance = CODES if policy == NVFP4 else 1e-3
    expected, start = one_rank(sections, policy, device_type)
    recipe = content(**{**sections, "attention": {"policy": policy}})
    results = run_distributed(train, ranks, recipe, start, overlap, device_type=device_type)
    assert all(result["curve"] == results[0]["curve"] for result in results)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(
        results[0]["curve"], expected["curve"], strict=True
    ):
        assert loss == pytest.approx(wanted_loss, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=tolerance)
    gradients = results[0]["gradients"]
    assert gradients.keys() == expected["gradients"].keys()
    for name, wanted in expected["gradients"].items():
        assert wanted.norm() > 0, name
        error = torch.linalg.vector_norm(gradients[name] - wanted) / torch.linalg.vector_norm(
            wanted
        )
        assert error < tolerance, f"{name}: relative error {error:.3g}"
