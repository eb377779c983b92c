"""Figures per pack of a whole dataset: `index.arrow`, mapped."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Index:
    """Per-pack figures, in pack order; each an array of (num_packs,), in a dataset a view on the mapped file.

    Look up the packs at hand (`take`, or an array indexed by pack ids) instead of computing over whole columns: those
    of a large dataset do not fit in memory.
    """

    num_tokens: np.ndarray
    "int32: real tokens"
    num_segments: np.ndarray
    "int32"
    num_targets: np.ndarray
    "int32"
    num_target_segments: np.ndarray
    "int32: segments with a target"
    max_seqlen: np.ndarray
    "int32: longest segment, in tokens"
    attention_pairs: np.ndarray
    "int64"
    weight_sum: np.ndarray | None = None
    "float64: sum of the loss weights; None in a dataset without them"

    def __len__(self) -> int:
        return len(self.num_tokens)

    def take(self, packs: np.ndarray | slice) -> "Index":
        """Return the figures of some packs, in their order."""
        return Index(**{name: column[packs] for name, column in self.columns().items()})

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns by name."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if column is not None}
