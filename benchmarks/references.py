"""Ways of feeding that other projects offer, run by their own code, as `trainer.bench.strategies` takes them.

`REFERENCES` stands beside `STRATEGIES`. Documents come as Python lists, which is what `datasets` hands out; making
these lists is not on the clock.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shards.quiet import quiet
from shards.reader import Pack
from trainer.batch import IGNORED, Batch
from trainer.bench.strategies import (
    MakeStrategy,
    Sizes,
    SkippedStrategy,
    StepPacks,
    Strategy,
    native_attention,
    split_evenly,
    split_pack,
)
from trainer.model.loading import LoadedModel


class Flattened:
    """The reference of transformers: its collator, its attention and its loss.

    It is right only with `use_cache=False`, without an attention mask and with labels that mask each first token (the
    collator does): a bare forward takes the cache from the model's configuration, and then documents see each other
    without an error, unless flash attention is installed and gets all four boundary arguments.
    """

    def __init__(self, name: str, loaded: LoadedModel, sizes: Sizes) -> None:
        import transformers
        from transformers.utils import is_flash_attn_2_available

        self.name, self._sizes, self._model = name, sizes, loaded.model
        flattening: Any = transformers.DataCollatorWithFlattening
        self._collator: Callable[..., Batch] = flattening(return_flash_attn_kwargs=True)
        self._device = next(loaded.model.parameters()).device
        on_gpu = self._device.type == "cuda" and is_flash_attn_2_available()
        self._attention = (
            "flash_attention_2" if on_gpu and loaded.model._supports_flash_attn else native_attention(loaded.model)
        )

    def cut(self, step: StepPacks) -> list[Any]:
        """Take the documents of as many packs as other strategies, as lists."""
        return [
            [features(document) for row in rows for document in split_pack(row)]
            for rows in split_evenly(step.packs, self._sizes.rows)
        ]

    def collate(self, micro: Any) -> Batch:
        """Flatten with the reference's own collator."""
        batch = self._collator(micro)
        moved = {key: value.to(self._device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        return moved | {"num_tokens": batch["input_ids"].numel()}

    def loss(self, batch: Batch, divisor: int, **cache: bool) -> Tensor:
        """Return the model's own loss; `use_cache` may be given to show what happens without it."""
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        inputs = {key: value for key, value in batch.items() if key != "num_tokens"}
        loss: Tensor = self._model(**inputs, **({"use_cache": False} | cache), num_items_in_batch=divisor).loss
        return loss


class TrlPacked(Flattened):
    """The reference of TRL: its best-fit packing and padding-free collator, as `SFTTrainer(packing=True)` has them."""

    def __init__(self, name: str, loaded: LoadedModel, sizes: Sizes) -> None:
        super().__init__(name, loaded, sizes)
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        self._collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def cut(self, step: StepPacks) -> list[Any]:
        """Pack the step's documents with TRL."""
        import datasets
        from trl.data_utils import pack_dataset

        rows = [features(document) for document in step.documents]
        with quiet(bars=True):
            table = datasets.Dataset.from_list(rows)
            packed = list(pack_dataset(table, self._sizes.seq_len, "bfd", {"keep_in_memory": True}))
        return [packed[i : i + self._sizes.rows] for i in range(0, len(packed), self._sizes.rows)]


def features(document: Pack) -> dict[str, list[int]]:
    """Return a document as other trainers take it: ids, and labels that they shift."""
    ids = document[0].astype(np.int64)
    return {"input_ids": ids.tolist(), "labels": np.where(document[2] != 0, ids, IGNORED).tolist()}


def _reference(name: str, loaded: LoadedModel, sizes: Sizes, package: str) -> Iterator[Strategy | SkippedStrategy]:
    if importlib.util.find_spec(package) is None:
        yield SkippedStrategy(name, f"{package} is not installed")
    elif not loaded.report.accepted:
        yield SkippedStrategy(name, f"the model {loaded.report.reason}")
    else:
        yield (TrlPacked if package == "trl" else Flattened)(name, loaded, sizes)


REFERENCES: dict[str, MakeStrategy] = {
    "hf-flattening": lambda name, loaded, sizes, dtype: _reference(name, loaded, sizes, "transformers"),
    "trl-packed": lambda name, loaded, sizes, dtype: _reference(name, loaded, sizes, "trl"),
}


def losses_by_cache(loaded: LoadedModel, sizes: Sizes, step: StepPacks) -> tuple[float, float]:
    """Return the loss of a step fed by transformers' collator, with `use_cache=False` and with the model's default.

    They differ where documents see each other, which happens without an error.
    """
    strategy = Flattened("hf-flattening", loaded, sizes)
    targets = max(1, sum(int(document[2].sum()) for document in step.documents))
    with torch.no_grad():
        batches = [strategy.collate(micro) for micro in strategy.cut(step)]
        right = sum(float(strategy.loss(batch, targets)) for batch in batches)
        default = sum(float(strategy.loss(batch, targets, use_cache=True)) for batch in batches)
    return right, default
