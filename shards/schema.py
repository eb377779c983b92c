"""The columns of a shard, format version 2 (`docs/format.md` is the normative text).

One row is one pack. Token ids and position ids take 16 bits where they fit, since they are nine tenths of a shard;
everything else has one fixed type. What a plan decides (`Layout`) is the same for all shards of a dataset. To add a
column, raise VERSION: an older reader refuses what it does not know.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shards.plan import FORMAT, VERSION, Plan, Stored, TokenizerPlan, stored_columns

BATCH_TOKENS = 1 << 20  # per record batch: few enough batches to open fast, far below the 2^31 of list offsets

TOKEN_COLUMNS = ("input_ids", "position_ids", "loss_mask", "loss_weights")
SEGMENT_COLUMNS = ("doc_ids", "doc_parts", "doc_offsets", "start_targets", "start_weights", "segment_lens")
ROW_COLUMNS = ("max_seqlen", "num_targets", "attention_pairs", "cost_class", "padded_length")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What fixes the column types of a dataset."""

    seq_len: int
    "Capacity of a pack, in tokens."
    max_token_id: int
    "Largest id the tokenizer can produce, added tokens included."
    position_ids: bool = True
    "Whether position ids are stored."
    loss_mask: bool = True
    "Whether the loss mask is stored; if not, every token but the first of each segment is a target."
    loss_weights: bool = False
    "Whether each token has a weight in the loss."
    turn_ends: bool = False
    "Whether the ends of turns are stored."
    align: int = 1
    "Multiple, in tokens, to which segments are padded; 1 for no padding."
    padded: bool = False
    "Whether rows get padded (packer `bucketed`), so that their padded length is stored."

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
        columns: dict[str, tuple[pa.DataType, bool]] = {
            "input_ids": (pa.list_(self.token_type), True),
            "position_ids": (pa.list_(self.position_type), self.position_ids),
            "cu_seqlens": (pa.list_(pa.int32()), True),
            "loss_mask": (pa.list_(pa.uint8()), self.loss_mask),
            "loss_weights": (pa.list_(pa.float16()), self.loss_weights),
            "doc_ids": (pa.list_(pa.int64()), True),
            "doc_parts": (pa.list_(pa.int32()), True),
            "doc_offsets": (pa.list_(pa.int32()), True),
            "start_targets": (pa.list_(pa.uint8()), True),
            "start_weights": (pa.list_(pa.float16()), self.loss_weights),
            "turn_ends": (pa.list_(pa.int32()), self.turn_ends),
            "segment_lens": (pa.list_(pa.int32()), self.align > 1),
            "max_seqlen": (pa.int32(), True),
            "num_targets": (pa.int32(), True),
            "attention_pairs": (pa.int64(), True),
            "cost_class": (pa.int32(), True),
            "padded_length": (pa.int32(), self.padded),
        }
        fields = [pa.field(name, kind, nullable=False) for name, (kind, stored) in columns.items() if stored]
        return pa.schema(fields, metadata=metadata)

    def index_schema(self) -> pa.Schema:
        """Return the Arrow schema of `index.arrow`."""
        wide = {"attention_pairs": pa.int64(), "weight_sum": pa.float64()}
        names = ["num_tokens", "num_segments", "num_targets", "num_target_segments", "max_seqlen", "attention_pairs"]
        names += ["weight_sum"] if self.loss_weights else []
        return pa.schema([pa.field(name, wide.get(name, pa.int32()), nullable=False) for name in names])


def layout_of(plan: Plan) -> Layout:
    """Return the column layout that a plan fixes."""
    return make_layout(plan["seq_len"], plan["packer"]["name"], plan["tokenizer"], stored_columns(plan))


def make_layout(seq_len: int, packer: str, tokenizer: TokenizerPlan, stored: Stored) -> Layout:
    """Return the column layout of a dataset, from its plan or its manifest."""
    return Layout(seq_len=seq_len, max_token_id=tokenizer["max_id"], padded=packer == "bucketed", **stored)


def shard_metadata(plan_id: str, window: int) -> dict[str, str]:
    """Return the schema metadata of a window's shard."""
    return {"format": FORMAT, "version": str(VERSION), "plan_id": plan_id, "window": str(window)}


def doc_id(window: int, record: int) -> int:
    """Return the id of the document that a record of a window gives."""
    return (window << 32) + record


def split_doc_id(doc_id: int) -> tuple[int, int]:
    """Return the window of a document, and its record's index there."""
    return doc_id >> 32, doc_id & 0xFFFFFFFF


def position_ids_of(cu_seqlens: np.ndarray) -> np.ndarray:
    """Derive position ids, int32 (num_tokens,), from one row's `cu_seqlens`."""
    lengths = np.diff(cu_seqlens)
    return np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths).astype(np.int32)


def loss_mask_of(cu_seqlens: np.ndarray) -> np.ndarray:
    """Return the mask of a row whose tokens are all targets but each segment's first; uint8 (num_tokens,)."""
    mask = np.ones(cu_seqlens[-1], np.uint8)
    mask[cu_seqlens[:-1]] = 0
    return mask
