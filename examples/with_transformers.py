"""Train with `transformers.Trainer` on packed shards: python examples/with_transformers.py DATASET MODEL OUT.

Three things make it right. The model comes from `load_model`, which gives it the attention that keeps documents apart
and refuses models where that cannot work. `remove_unused_columns=False` lets boundaries and loss mask reach the
collator. And the loss is divided by the targets of the whole step, which the Trainer takes from the collator's labels.
"""

import sys

import torch
from transformers import Trainer, TrainingArguments

from shards import Dataset
from trainer import PackedCollator, load_model


def train(dataset: str, model: str, out: str, **arguments: object) -> Trainer:
    """Train and return the trainer; `arguments` go to TrainingArguments."""
    net = load_model(model).model
    settings = {"bf16": torch.cuda.is_available()}  # in fp32 a GPU has no kernel for packed rows, but a slow loop
    trainer = Trainer(
        model=net,
        args=TrainingArguments(output_dir=out, remove_unused_columns=False, **settings | arguments),
        train_dataset=Dataset(dataset),
        data_collator=PackedCollator(net),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:4], per_device_train_batch_size=2, gradient_accumulation_steps=4)
