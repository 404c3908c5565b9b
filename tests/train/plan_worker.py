"""One of two real processes: builds and trains each recipe of argv[1] a step, and writes what it allocated and sent."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fp4mega.megatron import adapted_to_cpu
from fp4mega.train.imagined import Meter
from fp4mega.train.launch import find_launch, seed_everything, start_model_parallel
from fp4mega.train.model import build_training
from fp4mega.train.recipe import Recipe
from fp4mega.train.step import train_step


class MicroBatches:
    """Random tokens in the place of a dataset."""

    def __init__(self, recipe, copies):
        train = recipe.train
        self.count = train.global_batch_size // (train.micro_batch_size * copies)
        self.shape = (train.micro_batch_size, train.seq_length)
        self.vocab_size = recipe.model.vocab_size

    def load(self, batch, device):
        return [self._one() for _ in range(self.count)]

    def _one(self):
        tokens = torch.randint(self.vocab_size, self.shape)
        positions = torch.arange(self.shape[1]).expand(self.shape)
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "position_ids": positions,
            "loss_mask": torch.ones(self.shape),
        }


def measure(recipe):
    """Bytes of the tensors there are after two updates, and the messages and the peak of the second."""
    from megatron.core import parallel_state

    start_model_parallel(recipe.parallel)
    seed_everything(1, torch.device("cpu"))
    training = build_training(recipe, torch.device("cpu"))
    batches = MicroBatches(recipe, parallel_state.get_data_parallel_world_size())
    stop = SimpleNamespace(signal=0)
    with Meter() as meter:
        for step in range(2):
            meter.take_messages()
            before = meter.live
            meter.start_peak()
            train_step(training, recipe, batches, step, torch.device("cpu"), stop)
    optimizers = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    moments = [
        t.nbytes
        for o in optimizers
        for state in o.optimizer.state.values()
        for name, t in state.items()
        if name.startswith("exp_avg")
    ]
    parameters = [p for chunk in training.chunks for p in chunk.parameters()]
    found = {
        "numbers": sum(p.numel() for p in parameters),
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters),
        "moments": sum(moments),
        "working": meter.peak - before,
        "messages": [
            [m.kind, m.group, list(m.ranks), m.payload] for m in meter.messages if m.payload >= 1024
        ],
    }
    parallel_state.destroy_model_parallel()
    return found


def main():
    contents = json.loads(Path(sys.argv[1]).read_text())
    launch = find_launch()
    torch.set_num_threads(1)
    with adapted_to_cpu():
        dist.init_process_group("gloo")
        found = {name: measure(Recipe.parse(content)) for name, content in contents.items()}
        Path(f"{sys.argv[1]}.{launch.rank}").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
