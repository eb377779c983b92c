"""The columns of a shard, format version 1 (`docs/format.md` is the normative text).

One row is one pack. Token ids and position ids take 16 bits where they fit, since they are nine tenths of a shard;
everything else has one fixed type. To add a column, raise VERSION: an older reader refuses what it does not know.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shards.cost import cost_class, padded_length

FORMAT = "shardpack"
VERSION = 1
BATCH_TOKENS = 1 << 20  # per record batch: few enough batches to open fast, far below the 2^31 of list offsets

TOKEN_COLUMNS = ("input_ids", "position_ids", "loss_mask")
SEGMENT_COLUMNS = ("doc_ids", "doc_offsets")
ROW_COLUMNS = ("max_seqlen", "num_targets", "attention_pairs", "bucket")

INDEX_SCHEMA = pa.schema(
    [
        pa.field(name, pa.int64() if name == "attention_pairs" else pa.int32(), nullable=False)
        for name in (
            "num_tokens",
            "num_segments",
            "num_targets",
            "num_target_segments",
            "max_seqlen",
            "attention_pairs",
        )
    ]
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What fixes the column types of a dataset."""

    seq_len: int
    "Capacity of a pack, in tokens."
    max_token_id: int
    "Largest id the tokenizer can produce, added tokens included."
    position_ids: bool = True
    "Whether position ids are stored."
    padded: bool = False
    "Whether `bucket` is a padded length (packer `bucketed`) instead of a cost class."

    @property
    def token_type(self) -> pa.DataType:
        """Arrow type of one token id."""
        return pa.uint16() if self.max_token_id < 1 << 16 else pa.int32()

    @property
    def position_type(self) -> pa.DataType:
        """Arrow type of one position id."""
        return pa.uint16() if self.seq_len <= 1 << 16 else pa.int32()

    def schema(self, metadata: dict[str, str] | None = None) -> pa.Schema:
        """Return the Arrow schema of every shard of the dataset, with `metadata` attached."""
        columns: dict[str, pa.DataType] = {"input_ids": pa.list_(self.token_type)}
        if self.position_ids:
            columns["position_ids"] = pa.list_(self.position_type)
        columns |= {
            "cu_seqlens": pa.list_(pa.int32()),
            "loss_mask": pa.list_(pa.uint8()),
            "doc_ids": pa.list_(pa.int64()),
            "doc_offsets": pa.list_(pa.int32()),
            "max_seqlen": pa.int32(),
            "num_targets": pa.int32(),
            "attention_pairs": pa.int64(),
            "bucket": pa.int32(),
        }
        fields = [pa.field(name, kind, nullable=False) for name, kind in columns.items()]
        return pa.schema(fields, metadata=metadata)

    def buckets(self, attention_pairs: np.ndarray, max_seqlen: np.ndarray) -> np.ndarray:
        """Return the bucket of each row: its padded length where rows get padded, else its cost class.

        Args:
            attention_pairs: int64 (num_rows,).
            max_seqlen: int32 (num_rows,), tokens.

        Returns:
            int32 (num_rows,). Cost classes are quarter octaves of attention pairs, the same in every window.
        """
        if self.padded:
            return padded_length(max_seqlen, self.seq_len).astype(np.int32)
        return cost_class(attention_pairs)


def layout_of(plan: dict[str, Any]) -> Layout:
    """Return the column layout that a plan fixes."""
    return Layout(
        seq_len=plan["seq_len"],
        max_token_id=plan["tokenizer"]["max_id"],
        position_ids=plan["position_ids"],
        padded=plan["packer"]["name"] == "bucketed",
    )


def position_ids_of(cu_seqlens: np.ndarray) -> np.ndarray:
    """Derive position ids, int32 (num_tokens,), from one row's `cu_seqlens`."""
    lengths = np.diff(cu_seqlens)
    return np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths).astype(np.int32)
