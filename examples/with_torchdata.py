"""Stop and go on with torchdata's `StatefulDataLoader`: python examples/with_torchdata.py DATASET MODEL.

The loader's state belongs into the checkpoint beside the weights; a new loader with that state goes on with the packs
that are still to come. Take it between two steps: the sum of a half-finished step is in no checkpoint.
"""

import sys
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from shards import Dataset, StepOrder
from trainer import PackedCollator, load_model

PACKS_PER_STEP = 4


class Run:
    """A training run that can be stopped after any step."""

    def __init__(self, path: str, model: str, lr: float = 2e-5, workers: int = 0) -> None:
        self.dataset, self.net = Dataset(path), load_model(model).model
        self.order = StepOrder(self.dataset.index, packs_per_step=PACKS_PER_STEP)
        self.steps_taken = 0
        steps = [self.order.step_packs(0, step) for step in range(self.order.steps_per_epoch)]
        self.loader = StatefulDataLoader(
            self.dataset,
            batch_sampler=[[int(pack)] for step in steps for pack in step],  # micro-batches of one pack each
            collate_fn=PackedCollator(self.net),
            num_workers=workers,
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def train(self, steps: int) -> list[float]:
        """Take some more steps; return their losses."""
        losses, batches = [], iter(self.loader)
        for _ in range(steps):
            targets = int(self.dataset.index.num_targets[self.order.step_packs(0, self.steps_taken)].sum())
            total = 0.0
            for _ in range(PACKS_PER_STEP):
                loss = self.net(**next(batches), num_items_in_batch=targets).loss
                loss.backward()
                total += float(loss)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps_taken += 1
            losses.append(total)
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs."""
        return {
            "steps_taken": self.steps_taken,
            "loader": self.loader.state_dict(),
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run stopped."""
        self.steps_taken = state["steps_taken"]
        for name in ("loader", "net", "optimizer"):
            getattr(self, name).load_state_dict(state[name])


if __name__ == "__main__":
    print(Run(*sys.argv[1:3]).train(10))
