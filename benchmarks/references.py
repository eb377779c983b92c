"""Ways of feeding that other projects offer, run by their own code, as `trainer.bench.strategies` takes them.

Documents come as Python lists, which is what `datasets` hands out; making these lists is not on the clock.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from shards.reader import Pack
from trainer.batch import IGNORED, Batch
from trainer.bench.strategies import Sizes, StepPacks, native_attention, split_evenly, split_pack
from trainer.model.loading import LoadedModel


class Flattened:
    """The reference of transformers: its collator, its attention and its loss.

    It is right only with `use_cache=False`, without an attention mask and with labels that mask each first token (the
    collator does): a bare forward takes the cache from the model's configuration, and then documents see each other
    without an error, unless flash attention is installed and gets all four boundary arguments.
    """

    def __init__(self, name: str, loaded: LoadedModel, sizes: Sizes) -> None:
        import transformers

        self.name, self._sizes, self._model = name, sizes, loaded.model
        flattening: Any = transformers.DataCollatorWithFlattening
        self._collator: Callable[..., Batch] = flattening(return_flash_attn_kwargs=True)
        self._device = next(loaded.model.parameters()).device
        on_gpu = self._device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
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
        shown = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            table = datasets.Dataset.from_list(rows)
            packed = list(pack_dataset(table, self._sizes.seq_len, "bfd", {"keep_in_memory": True}))
        finally:
            if not shown:
                datasets.enable_progress_bars()
        return [packed[i : i + self._sizes.rows] for i in range(0, len(packed), self._sizes.rows)]


def features(document: Pack) -> dict[str, list[int]]:
    """Return a document as other trainers take it: ids, and labels that they shift."""
    ids = document[0].astype(np.int64)
    return {"input_ids": ids.tolist(), "labels": np.where(document[2] != 0, ids, IGNORED).tolist()}
