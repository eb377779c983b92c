"""Train in a loop of one's own: python examples/own_loop.py DATASET MODEL.

The loader gives micro-batches that keep documents apart and never split a step; the loss of a step is the sum over its
targets, divided by their number in the whole step, known before it begins.
"""

import sys

import torch

from shards import Dataset
from trainer import PackedLM, PackLoader, load_model


def train(path: str, model: str, steps: int = 10) -> list[float]:
    """Train for some steps; return their losses."""
    dataset, loaded = Dataset(path), load_model(model)
    loader = PackLoader(dataset, tokens_per_batch=dataset.seq_len, packs_per_step=2, device="cpu")
    lm = PackedLM(loaded.model, backend=loaded.backend, plain_head=loaded.report.plain_head)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-5)
    losses, total = [], torch.zeros(())
    while True:  # each pass over the loader is an epoch
        for number, batch in enumerate(loader, 1):
            loss = lm(batch, divisor=batch["step"].divisor)
            loss.backward()
            total += loss.detach()
            if number % loader.batches_per_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
            total.zero_()
            if len(losses) == steps:
                return losses


if __name__ == "__main__":
    print(train(*sys.argv[1:3]))
