"""Packed rows for other trainers: what `transformers.Trainer` and TRL's `SFTTrainer` expect of a batch.

Rows are laid end to end in one row of length T with `position_ids`, the four keyword arguments of variable-length
attention, and `labels` that are not shifted yet (these trainers shift). There is no attention mask: transformers
prefers one to the boundaries and documents would see each other; `use_cache` is off for the same reason. What those
trainers do to rows before they get here is checked, since each of it trains silently on something else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shards.errors import PackError
from shards.schema import loss_mask_of
from trainer.batch import IGNORED

_NEEDED = ("input_ids", "cu_seqlens")


class PackedCollator:
    """Collate rows of `shards.Dataset` or of `datasets.load_from_disk` into one flattened batch.

    The model must use the boundaries: load it with `trainer.load_model`, or with an attention implementation of
    transformers that reads `cu_seq_lens_q`. Given the model, the collator finds out whether it does. Evaluation by
    these trainers averages over batches, not over tokens; score packs with `trainer.evaluate`.

    Args:
        model: The model that gets the batches, on its device; None leaves it unchecked, which is said once.

    Raises:
        PackError: transformers would split batches over several GPUs of one process, or in this model documents of a
            row see each other.
    """

    def __init__(self, model: Any = None) -> None:
        if torch.cuda.device_count() > 1 and "LOCAL_RANK" not in os.environ:
            raise PackError(
                f"PackedCollator: {torch.cuda.device_count()} GPUs in one process; transformers would cut the row and "
                "its boundaries into pieces. Start with torchrun, or make one GPU visible (CUDA_VISIBLE_DEVICES=0)."
            )

        if model is not None:
            self._check_model(model)
        elif not PackedCollator._said:
            PackedCollator._said = True
            logging.getLogger(__name__).warning(
                "PackedCollator: got no model, so nobody has checked that it keeps the documents of a row apart; "
                "expected one. Pass model=…, or load it with trainer.load_model."
            )

    _said = False

    def _check_model(self, model: Any) -> None:
        """Refuse a model in which the second of two documents changes when the first does.

        Raises:
            PackError: It does.
        """
        weight = model.get_input_embeddings().weight
        ids = np.arange(12) % min(len(weight), 50)
        logits, training = [], model.training
        model.eval()
        with torch.no_grad():
            for first in (ids[:5], ids[1:6]):
                row = {"input_ids": np.concatenate([first, ids[5:]]), "cu_seqlens": np.array([0, 5, 12])}
                batch = self([row | {"loss_mask": np.array([0, *[1] * 4, 0, *[1] * 6], np.uint8)}])
                on_device = {
                    name: value.to(weight.device) if isinstance(value, torch.Tensor) else value
                    for name, value in batch.items()
                    if name != "labels"
                }
                logits.append(model(**on_device).logits[0, 5:].float())
        model.train(training)
        moved, scale = float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())
        if not moved <= 2 * torch.finfo(weight.dtype).eps * scale:
            raise PackError(
                f"PackedCollator: in {type(model).__name__} with {model.config._attn_implementation} attention, "
                "documents of a row see each other; expected boundaries that hold. Load it with trainer.load_model."
            )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one batch.

        Args:
            rows: Packs with at least `input_ids`, `cu_seqlens` and, where the dataset stores it, `loss_mask`, as
                arrays, tensors or lists.

        Returns:
            `input_ids`, `position_ids`, `labels`: int64 (1, T); `cu_seq_lens_q` and `cu_seq_lens_k`, the same int32
            (segments + 1,); `max_length_q` and `max_length_k`, the longest segment; `use_cache`, False. `labels` holds
            the id of every target in its own slot, -100 elsewhere. Of a dataset with weights the labels are called
            `weighted_labels`, beside `loss_weights`, float32 (1, T): a trainer that is no `WeightedTrainer` finds no
            labels and stops, instead of passing over the weights.

        Raises:
            PackError: The trainer removed columns, or cut or packed the rows again.
        """
        ids, labels, weights, offsets = [], [], [], [np.zeros(1, np.int64)]
        at = 0
        for row in rows:
            _check(row)
            tokens, mask = np.asarray(row["input_ids"]).astype(np.int64), _loss_mask(row)
            ids.append(tokens)
            labels.append(np.where(mask != 0, tokens, IGNORED))
            if "loss_weights" in row:
                weights.append(np.asarray(row["loss_weights"], np.float32))
            offsets.append(np.asarray(row["cu_seqlens"])[1:].astype(np.int64) + at)
            at += len(tokens)
        cu_seqlens = np.concatenate(offsets)
        lengths = np.diff(cu_seqlens)
        positions = np.arange(at) - np.repeat(cu_seqlens[:-1], lengths)
        boundaries, longest = torch.from_numpy(cu_seqlens.astype(np.int32)), int(lengths.max())
        targets = {"weighted_labels" if weights else "labels": torch.from_numpy(np.concatenate(labels))[None]}
        if weights:
            targets["loss_weights"] = torch.from_numpy(np.concatenate(weights))[None]
        return {
            **targets,
            "input_ids": torch.from_numpy(np.concatenate(ids))[None],
            "position_ids": torch.from_numpy(positions)[None],
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }


class WeightedTrainer:
    """Weigh each target in a trainer of transformers or TRL, whose own losses know no weights.

    To be named before the trainer: `class Mine(WeightedTrainer, Trainer): ...`. The loss of an optimizer step is what
    `pack train` takes: the sum of weight times token loss over all micro-batches and processes, divided by the sum of
    the weights. Evaluation divides by the weights of each batch. Batches without weights go to the trainer as ever.
    """

    loss_is_scaled_for_ga = True  # the divisor is that of the whole step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step, and the sum of their weights over all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if not batches or "loss_weights" not in batches[0]:
            return batches, items
        total = sum(batch["loss_weights"].double().sum() for batch in batches)
        return batches, self.accelerator.gather(total.to(device, torch.float32)).sum()  # type: ignore[attr-defined]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighted loss of a micro-batch; see `transformers.Trainer.compute_loss`."""
        if "loss_weights" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        rest = {name: value for name, value in inputs.items() if name not in ("weighted_labels", "loss_weights")}
        outputs = model(**rest)
        weights, labels = inputs["loss_weights"][:, 1:], inputs["weighted_labels"][:, 1:]
        losses = F.cross_entropy(outputs.logits[0, :-1].float(), labels[0], ignore_index=IGNORED, reduction="none")
        total = (losses * weights[0]).sum()
        if num_items_in_batch is None:
            loss = total / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        else:  # the trainer averages gradients over its processes
            loss = total / num_items_in_batch * self.accelerator.num_processes  # type: ignore[attr-defined]
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return the weighted loss of an evaluation batch; see `transformers.Trainer.prediction_step`."""
        if "loss_weights" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        return loss.detach(), None, None


def _loss_mask(row: Mapping[str, Any]) -> np.ndarray:
    """Return a row's mask; a dataset of plain text stores none, since every token but segment starts is a target."""
    if "loss_mask" in row:
        return np.asarray(row["loss_mask"])
    return loss_mask_of(np.asarray(row["cu_seqlens"]))


def _check(row: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        raise PackError(
            f"PackedCollator: a row came without {', '.join(missing)}; the trainer removes columns that the model "
            "does not name. Set remove_unused_columns=False."
        )
    length, segments = len(row["input_ids"]), len(row["cu_seqlens"]) - 1
    if "loss_mask" not in row and int(row.get("num_targets", -1)) != length - segments:
        raise PackError(
            "PackedCollator: a row came without its loss_mask; the trainer removed the column. "
            "Set remove_unused_columns=False."
        )
    if int(row["cu_seqlens"][-1]) != length or len(_loss_mask(row)) != length:
        raise PackError(
            f"PackedCollator: a row has {length} ids, its boundaries end at {int(row['cu_seqlens'][-1])}; the trainer "
            "cut or packed it again. Set dataset_kwargs={'skip_prepare_dataset': True} and packing=False (TRL)."
        )
