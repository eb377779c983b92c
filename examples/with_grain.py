"""Packs for JAX, as a random-access source for grain, which MaxText takes: python examples/with_grain.py DATASET.

Everything has one shape, as compiled programs want it: rows are padded to `seq_len`, and segments are numbered from 1,
as attention with segment ids takes them. `targets` are shifted: slot i holds what is predicted there, and
`targets_segmentation` is 0 where nothing is.

    segments [5, 6, 7] and [8, 9], all trained, seq_len 6
    inputs                [5, 6, 7, 8, 9, 0]      targets               [6, 7, 0, 9, 0, 0]
    inputs_segmentation   [1, 1, 1, 2, 2, 0]      targets_segmentation  [1, 1, 0, 2, 0, 0]
    inputs_position       [0, 1, 2, 0, 1, 0]
"""

import sys

import grain
import numpy as np

from shards import Dataset, StepOrder

PACKS_PER_STEP = 4
Features = dict[str, np.ndarray]


class PackSource:
    """The packs of an epoch in training order: a `grain.sources.RandomAccessDataSource`."""

    def __init__(self, path: str, epoch: int = 0) -> None:
        self.dataset = Dataset(path)
        order = StepOrder(self.dataset.index, packs_per_step=PACKS_PER_STEP)
        self.packs = np.concatenate([order.step_packs(epoch, step) for step in range(order.steps_per_epoch)])

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, place: int) -> Features:
        return features(self.dataset[int(self.packs[place])], self.dataset.seq_len)


def features(row: dict, seq_len: int) -> Features:
    """Return a pack as arrays of `seq_len`, int32."""
    lengths, tokens = np.diff(row["cu_seqlens"]), len(row["input_ids"])
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    trained = row["loss_mask"][1:] != 0  # of slots 0 to tokens - 2; no segment's first token is a target
    columns = {
        "inputs": row["input_ids"],
        "inputs_segmentation": segments,
        "inputs_position": row["position_ids"],
        "targets": np.where(trained, row["input_ids"][1:], 0),
        "targets_segmentation": np.where(trained, segments[:-1], 0),
    }
    padded = {name: np.zeros(seq_len, np.int32) for name in columns}
    for name, values in columns.items():
        padded[name][: min(tokens, len(values))] = values
    return padded


def load(path: str, packs_per_batch: int = PACKS_PER_STEP) -> grain.IterDataset:
    """Return batches of (packs_per_batch, seq_len) arrays, read ahead by threads; grain shards them over hosts."""
    return grain.MapDataset.source(PackSource(path)).batch(packs_per_batch).to_iter_dataset()


if __name__ == "__main__":
    for batch in load(sys.argv[1]):
        print({name: values.shape for name, values in batch.items()})
