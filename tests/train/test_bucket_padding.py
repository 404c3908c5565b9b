"""Cutting parameters out of gathered state, with a Megatron that leaves out the padding when it cuts and one that does not."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from fp4mega.train.bucket_padding import sharded_optimizer_state


class Optimizer(DistributedOptimizer):
    """Three parameters in two buckets of a buffer, each with padding at its end: a a a - | b c c - ."""

    def __init__(self, subtracts_padding, gathered):
        self.subtracts_padding, self.gathered = subtracts_padding, gathered
        buckets = [
            SimpleNamespace(offset=0, numel_unpadded=3),
            SimpleNamespace(offset=4, numel_unpadded=3),
        ]
        places = {"a": (0, 3, 0), "b": (4, 5, 1), "c": (5, 7, 1)}
        self.buffers = [SimpleNamespace(buckets=buckets, param_index_map=places, numel=8)]

    def get_parameter_state_dp_zero(self):
        return {0: {torch.float32: {"exp_avg": torch.tensor(self.gathered), "numel_unpadded": 6}}}

    def sharded_param_state_fully_reshardable(self):
        whole = self.get_parameter_state_dp_zero()[0][torch.float32]["exp_avg"]
        state = {}
        for i, (start, end, bucket) in enumerate(self.buffers[0].param_index_map.values()):
            padding = bucket if self.subtracts_padding else 0
            data = whole[start - padding : end - padding].reshape(1, end - start)
            state[i] = {"exp_avg": SimpleNamespace(data=data)}
        return state

    def sharded_state_dict(self, models):
        return self.sharded_param_state_fully_reshardable()


@pytest.mark.parametrize("subtracts_padding", [False, True])
def test_each_parameter_gets_its_own_state(subtracts_padding):
    optimizer = Optimizer(subtracts_padding, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    state = sharded_optimizer_state(optimizer, {})
    assert [item["exp_avg"].data.tolist() for item in state.values()] == [
        [[1.0, 2.0, 3.0]],
        [[4.0]],
        [[5.0, 6.0]],
    ]
    assert "get_parameter_state_dp_zero" not in vars(optimizer)


def test_another_layout_is_refused():
    with pytest.raises(RuntimeError, match="gathered 7 elements of exp_avg .* which has 6 without"):
        sharded_optimizer_state(Optimizer(False, [0.0] * 7), {})
