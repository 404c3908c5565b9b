"""The distributed optimizer's state by parameter, where Megatron pads the buckets of its gradient buffers.

A buffer's buckets are each padded so that the data-parallel processes can share them. For a checkpoint Megatron puts the state
of a buffer's buckets end to end, without that padding, but up to megatron-core 0.19.2 cuts the parameters out of it where
they are in the padded buffer: from the second bucket on each is saved with its neighbour's moments, and the last ones with
zeros (NVIDIA/Megatron-LM pull request 5077). Here the parameters are cut out where they are. That is what Megatron itself does
where it is repaired, so nothing depends on the version.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn.functional import pad

from fp4mega.train.optimizer_state import parts_of


def sharded_optimizer_state(optimizer: Any, models: Any, **options: Any) -> Any:
    """The optimizer's `sharded_state_dict` over the models', with each parameter's own state. Collective.

    Raises RuntimeError when Megatron gathers tensors of another length than that of a buffer without padding.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, DistributedOptimizer) and any(map(_is_padded, part.buffers)):
                cut = _Cut(part)
                stack.enter_context(patch.object(part, "get_parameter_state_dp_zero", cut.gather))
                stack.enter_context(
                    patch.object(part, "sharded_param_state_fully_reshardable", cut.by_parameter)
                )
        return optimizer.sharded_state_dict(models, **options)


def _starts(buffer: Any) -> Iterator[int]:
    """Where each bucket begins when they are put end to end without their padding."""
    start = 0
    for bucket in buffer.buckets:
        yield start
        start += bucket.numel_unpadded


def _is_padded(buffer: Any) -> bool:
    """Whether a bucket begins elsewhere in the buffer than without padding."""
    return any(
        bucket.offset != start
        for bucket, start in zip(buffer.buckets, _starts(buffer), strict=True)
    )


class _Cut:
    """Stands between the two methods of one distributed optimizer, the one that gathers and the one that cuts."""

    def __init__(self, part: Any) -> None:
        self._buffers = part.buffers
        self._gather = part.get_parameter_state_dp_zero
        self._by_parameter = part.sharded_param_state_fully_reshardable
        self._gathered: list[dict[str, Tensor]] = []

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's gathered state, lengthened to that of the padded buffer, so that no cut ends beyond it."""
        state = self._gather(*args, **kwargs)
        if state is None:  # this process is not given it
            return None
        self._gathered = []
        for i, buffer in enumerate(self._buffers):
            ((dtype, found),) = state[i].items()
            tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
            unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
            for key, value in tensors.items():
                if len(value) != unpadded:
                    raise RuntimeError(
                        f"Megatron gathered {len(value)} elements of {key} of a buffer of {dtype}, which has {unpadded} "
                        f"without the padding of its {len(buffer.buckets)} buckets: not the layout known here"
                    )
                found[key] = tensors[key] = pad(value, (0, buffer.numel - unpadded))
            self._gathered.append(tensors)
        return state

    def by_parameter(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's state by parameter, each cut out where it is."""
        state = self._by_parameter(*args, **kwargs)
        if state is None:
            return None
        saved = iter(state.values())
        for buffer, tensors in zip(self._buffers, self._gathered, strict=True):
            starts = list(_starts(buffer))
            for begin, end, bucket in buffer.param_index_map.values():
                padding = buffer.buckets[bucket].offset - starts[bucket]
                for key, item in next(saved).items():
                    own = tensors[key][begin - padding : end - padding]
                    item.data = own.reshape(item.data.shape)
        return state
