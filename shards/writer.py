"""Write one window's packs as one shard.

Rows arrive flat (one array per column, plus offsets), leave as an uncompressed Arrow IPC stream of about 1M tokens a
record batch, and are hashed on the way out instead of read again. The name carries the hash, so a shard never changes
under its name. A pyarrow writer that is left on an exception ends its file validly, so nothing here ever writes to a
final name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, TypedDict

import numpy as np
import pyarrow as pa
import xxhash

from shards.cost import cost_class, padded_length
from shards.publish import Store, fsync, write
from shards.schema import BATCH_TOKENS, SEGMENT_COLUMNS, TOKEN_COLUMNS, Layout, shard_metadata
from shards.sidecar import ShardRecord


class Written(TypedDict):
    """What was written of a file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The packs of one window, flat.

    Row r holds tokens `token_offsets[r]:token_offsets[r+1]` and segments `segment_offsets[r]:segment_offsets[r+1]`.
    What a layout does not store may stay None.
    """

    token_offsets: np.ndarray
    "int64 (num_rows + 1,)"
    segment_offsets: np.ndarray
    "int64 (num_rows + 1,)"
    input_ids: np.ndarray
    "uint16 or int32 (num_tokens,)"
    position_ids: np.ndarray | None = None
    "uint16 or int32 (num_tokens,)"
    loss_mask: np.ndarray | None = None
    "uint8 (num_tokens,)"
    loss_weights: np.ndarray | None = None
    "float16 (num_tokens,)"
    cu_seqlens: np.ndarray
    "int32 (num_segments + num_rows,): the rows' arrays one after another, each with its leading 0"
    doc_ids: np.ndarray
    "int64 (num_segments,)"
    doc_parts: np.ndarray
    "int32 (num_segments,)"
    doc_offsets: np.ndarray
    "int32 (num_segments,)"
    start_targets: np.ndarray
    "uint8 (num_segments,): 1 where a cut made a target the segment's first token"
    start_weights: np.ndarray | None = None
    "float16 (num_segments,): the weight of that target, 0 where there is none"
    turn_ends: np.ndarray | None = None
    "int32, flat: where turns end, counted from the row's beginning"
    turn_offsets: np.ndarray | None = None
    "int64 (num_rows + 1,): where each row's turns start in `turn_ends`"
    segment_lens: np.ndarray | None = None
    "int32 (num_segments,): real tokens of each segment, where segments are padded"
    num_tokens: np.ndarray
    "int32 (num_rows,): real tokens"
    max_seqlen: np.ndarray
    "int32 (num_rows,)"
    num_targets: np.ndarray
    "int32 (num_rows,)"
    num_target_segments: np.ndarray
    "int32 (num_rows,)"
    attention_pairs: np.ndarray
    "int64 (num_rows,)"
    weight_sum: np.ndarray | None = None
    "float64 (num_rows,): sum of `loss_weights`"

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    def index(self, layout: Layout) -> pa.RecordBatch:
        """Return these rows of `index.arrow`."""
        schema = layout.index_schema()
        columns = {name: getattr(self, name) for name in schema.names if name != "num_segments"}
        columns["num_segments"] = np.diff(self.segment_offsets).astype(np.int32)
        return pa.record_batch([_array(columns[name]) for name in schema.names], schema=schema)

    def batches(self, layout: Layout, schema: pa.Schema, batch_tokens: int) -> list[pa.RecordBatch]:
        """Return the rows as record batches of about `batch_tokens` tokens, without copying token arrays."""
        # the row offsets of cu_seqlens run one ahead per row: its leading zero
        offsets = {"cu_seqlens": self.segment_offsets + np.arange(len(self) + 1), "turn_ends": self.turn_offsets}
        offsets |= dict.fromkeys(TOKEN_COLUMNS, self.token_offsets) | dict.fromkeys(
            SEGMENT_COLUMNS, self.segment_offsets
        )
        scalars = {
            "max_seqlen": self.max_seqlen,
            "num_targets": self.num_targets,
            "attention_pairs": self.attention_pairs,
            "cost_class": cost_class(self.attention_pairs),
            "padded_length": padded_length(self.max_seqlen, layout.seq_len).astype(np.int32),
        }
        result = []
        first = 0
        while first < len(self):
            stop = int(np.searchsorted(self.token_offsets, self.token_offsets[first] + batch_tokens, side="right")) - 1
            stop = min(max(stop, first + 1), len(self))
            arrays = [
                _array(scalars[name][first:stop])
                if name in scalars
                else _list_array(getattr(self, name), offsets[name], first, stop)
                for name in schema.names
            ]
            result.append(pa.record_batch(arrays, schema=schema))
            first = stop
        return result


def _list_array(values: np.ndarray, offsets: np.ndarray | None, first: int, stop: int) -> pa.ListArray:
    assert offsets is not None  # a layout that stores the column comes with rows that have it
    begin, end = int(offsets[first]), int(offsets[stop])
    local = (offsets[first : stop + 1] - begin).astype(np.int32)
    return pa.ListArray.from_arrays(_array(local), _array(values[begin:end]))


def _array(values: np.ndarray) -> pa.Array:
    """Wrap an array without a copy; `pa.array` would import pandas first, a quarter of a second in every worker."""
    values = np.ascontiguousarray(values)
    return arrow_array(values, pa.from_numpy_dtype(values.dtype), len(values))


def arrow_array(buffer: Any, kind: pa.DataType, length: int) -> pa.Array:
    """Wrap a buffer of values as an Arrow array of a primitive or fixed-size type, without a copy."""
    return pa.Array.from_buffers(kind, length, [None, pa.py_buffer(buffer)])


class _HashingFile:
    """What pyarrow writes to: passes bytes on and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = xxhash.xxh3_128()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        write(self.file, view)
        self.hash.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def write_stream(store: Store, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[str, Written]:
    """Write an Arrow stream aside, fsync it, and publish it.

    Args:
        store: Where to publish.
        name: Final name; `{hash}` in it becomes the first 16 digits of the content hash.
        schema: Schema of the stream.
        batches: Iterable of record batches.

    Returns:
        The final name, and its `bytes` and `xxh3_128`.
    """
    scratch = store.scratch(name.rsplit("/", 1)[-1].replace("{hash}", "new"))
    try:
        with scratch.open("wb", buffering=0) as file:
            sink = _HashingFile(file)
            with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
            fsync(file)
        digest = sink.hash.hexdigest()
        final = name.replace("{hash}", digest[:16])
        store.publish(scratch, final)
    finally:
        scratch.unlink(missing_ok=True)
    return final, {"bytes": sink.bytes, "xxh3_128": digest}


def write_shard(
    store: Store,
    layout: Layout,
    plan_id: str,
    window: int,
    rows: PackedRows,
    batch_tokens: int = BATCH_TOKENS,
) -> ShardRecord:
    """Publish `rows` as the shard of `window`.

    Returns:
        The shard's record for sidecar and shard list.
    """
    schema = layout.schema(shard_metadata(plan_id, window))
    name, written = write_stream(
        store, f"shards/{window:08d}-{{hash}}.arrow", schema, rows.batches(layout, schema, batch_tokens)
    )
    return {
        "file": name,
        **written,
        "rows": len(rows),
        "tokens": int(rows.num_tokens.sum(dtype=np.int64)),
        "segments": int(rows.segment_offsets[-1]),
    }
