"""Fine-tune with TRL's `SFTTrainer` on packed shards: python examples/with_trl.py DATASET MODEL OUT.

`skip_prepare_dataset` keeps TRL from cutting rows at its `max_length` (1024 by default), `packing=False` from packing
them again, and `remove_unused_columns=False` lets boundaries and loss mask reach the collator. The model comes from
`load_model` for the attention that keeps documents apart.
"""

import sys

import datasets
import torch
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from trainer import PackedCollator, load_model


def train(dataset: str, model: str, out: str, **arguments: object) -> SFTTrainer:
    """Train and return the trainer; `arguments` go to SFTConfig."""
    net = load_model(model).model
    trainer = SFTTrainer(
        model=net,
        args=SFTConfig(
            output_dir=out,
            remove_unused_columns=False,
            packing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            **{"bf16": torch.cuda.is_available(), "use_cpu": not torch.cuda.is_available()} | arguments,
        ),
        train_dataset=datasets.load_from_disk(dataset).with_format("numpy"),
        data_collator=PackedCollator(net),
        processing_class=AutoTokenizer.from_pretrained(f"{dataset}/tokenizer"),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:4], per_device_train_batch_size=2, gradient_accumulation_steps=4)
