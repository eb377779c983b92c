"""Train with a plain `torch.utils.data.DataLoader`: python examples/with_dataloader.py DATASET MODEL.

A `Dataset` is a sequence that pickles as its path, so workers map the same files, forked or spawned. `StepOrder` says
which packs make a step, and the index how many targets they have: what the loss of the whole step is divided by.
"""

import sys

import torch
from torch.utils.data import DataLoader

from shards import Dataset, StepOrder
from trainer import PackedCollator, load_model

PACKS_PER_STEP = 4


def train(
    path: str, model: str, steps: int = 10, lr: float = 2e-5, workers: int = 2, start: str = "fork"
) -> list[float]:
    """Train for some steps of the first epoch; return their losses."""
    dataset, net = Dataset(path), load_model(model).model
    order = StepOrder(dataset.index, packs_per_step=PACKS_PER_STEP)
    packs = [order.step_packs(0, step) for step in range(steps)]
    loader = DataLoader(
        dataset,
        batch_sampler=[[int(pack)] for step in packs for pack in step],  # micro-batches of one pack each
        collate_fn=PackedCollator(net),
        num_workers=workers,
        multiprocessing_context=start if workers else None,
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses, batches = [], iter(loader)
    for step in packs:
        targets = int(dataset.index.num_targets[step].sum())
        total = 0.0
        for _ in step:
            loss = net(**next(batches), num_items_in_batch=targets).loss
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    print(train(*sys.argv[1:3]))
