"""Train with Accelerate, on one process or many: accelerate launch examples/with_accelerate.py DATASET MODEL.

Each process gets its own share of every step from `StepOrder`, balanced by cost, so the loader is not prepared:
nothing is left for Accelerate to shard. The loss is divided by the targets of the whole step over all processes; since
gradients are averaged over processes, it is multiplied by their number.
"""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from shards import Dataset, StepOrder
from trainer import PackedCollator, load_model

PACKS_PER_STEP = 4


def train(path: str, model: str, steps: int = 10, lr: float = 2e-5, cpu: bool = False) -> list[float]:
    """Train for some steps of the first epoch; return their losses."""
    accelerator = Accelerator(cpu=cpu)
    dataset, net = Dataset(path), load_model(model).model
    order = StepOrder(dataset.index, packs_per_step=PACKS_PER_STEP)
    rank, processes = accelerator.process_index, accelerator.num_processes
    mine = [order.batches(0, step, processes)[rank] for step in range(steps)]
    loader = DataLoader(
        dataset,
        batch_sampler=[batch.tolist() for step in mine for batch in step],
        collate_fn=PackedCollator(net),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    net, optimizer = accelerator.prepare(net, optimizer)
    losses, batches = [], iter(loader)
    for number, step in enumerate(mine):
        targets = int(dataset.index.num_targets[order.step_packs(0, number)].sum())
        total = torch.zeros((), device=accelerator.device)
        for left in reversed(range(len(step))):
            batch = {
                name: value.to(accelerator.device) if isinstance(value, torch.Tensor) else value
                for name, value in next(batches).items()
            }
            with accelerator.no_sync(net) if left else nullcontext():  # gradients are exchanged once a step
                loss = net(**batch, num_items_in_batch=targets).loss
                accelerator.backward(loss * processes)
            total += loss.detach()
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")))
    return losses


if __name__ == "__main__":
    print(train(*sys.argv[1:3]))
