"""Train with Lightning, on one device or many: python examples/with_lightning.py DATASET MODEL.

Lightning divides a loss by the micro-batches that it accumulates and averages gradients over processes; a packed step
is divided by its targets instead, whatever micro-batch and process they lie in, so the loss is multiplied back.
"""

import sys
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from shards import Dataset, StepOrder
from trainer import PackedCollator, load_model

PACKS_PER_STEP = 4


class PackedModel(lightning.LightningModule):
    """A causal language model on packed rows."""

    def __init__(self, path: str, model: str, lr: float = 2e-5) -> None:
        super().__init__()
        self.dataset, self.net, self.lr = Dataset(path), load_model(model).model, lr
        self.order = StepOrder(self.dataset.index, packs_per_step=PACKS_PER_STEP)
        self.losses: dict[int, float] = {}

    def train_dataloader(self) -> DataLoader:
        """Return this process's micro-batches of an epoch, one pack each."""
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        mine = [self.order.batches(0, step, processes)[rank] for step in range(self.order.steps_per_epoch)]
        batches = [batch.tolist() for step in mine for batch in step]
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=PackedCollator(self.net))

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a micro-batch; `global_step` counts optimizer steps."""
        step = self.global_step
        targets = int(self.dataset.index.num_targets[self.order.step_packs(0, step)].sum())
        loss = self.net(**batch, num_items_in_batch=targets).loss
        self.losses[step] = self.losses.get(step, 0.0) + float(loss.detach())
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)


def train(path: str, model: str, steps: int = 10, lr: float = 2e-5, devices: int = 1, **options: Any) -> list[float]:
    """Train for some steps of the first epoch; return this process's share of their losses.

    `options` go to the Trainer.
    """
    module = PackedModel(path, model, lr)
    lightning.Trainer(
        max_steps=steps,
        devices=devices,
        accumulate_grad_batches=PACKS_PER_STEP // devices,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # each process has its own packs already
        **options,
    ).fit(module)
    return list(module.losses.values())


if __name__ == "__main__":
    print(train(*sys.argv[1:3]))
