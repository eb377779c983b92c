"""Write one window's packs as one shard.

Rows arrive flat (one array per column, plus offsets), leave as an uncompressed Arrow IPC stream of about 1M tokens a
record batch, and are hashed on the way out instead of read again. The name carries the hash, so a shard never changes
under its name. A pyarrow writer that is left on an exception ends its file validly, so nothing here ever writes to a
final name.
"""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import xxhash

from shards.publish import Store, fsync, write
from shards.schema import BATCH_TOKENS, FORMAT, INDEX_SCHEMA, VERSION, Layout

Spent = Callable[[str, float], None]  # takes the name of a stage and seconds


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The packs of one window, flat.

    Row r holds tokens `token_offsets[r]:token_offsets[r+1]` and segments `segment_offsets[r]:segment_offsets[r+1]`.
    """

    token_offsets: np.ndarray
    "int64 (num_rows + 1,)"
    segment_offsets: np.ndarray
    "int64 (num_rows + 1,)"
    input_ids: np.ndarray
    "uint16 or int32 (num_tokens,)"
    position_ids: np.ndarray
    "uint16 or int32 (num_tokens,); empty where the layout does not store them"
    loss_mask: np.ndarray
    "uint8 (num_tokens,)"
    cu_seqlens: np.ndarray
    "int32 (num_segments + num_rows,): the rows' arrays one after another, each with its leading 0"
    doc_ids: np.ndarray
    "int64 (num_segments,)"
    doc_offsets: np.ndarray
    "int32 (num_segments,)"
    max_seqlen: np.ndarray
    "int32 (num_rows,)"
    num_targets: np.ndarray
    "int32 (num_rows,)"
    num_target_segments: np.ndarray
    "int32 (num_rows,)"
    attention_pairs: np.ndarray
    "int64 (num_rows,)"

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    def index(self) -> pa.RecordBatch:
        """Return these rows of `index.arrow`."""
        columns = {
            "num_tokens": np.diff(self.token_offsets).astype(np.int32),
            "num_segments": np.diff(self.segment_offsets).astype(np.int32),
            "num_targets": self.num_targets,
            "num_target_segments": self.num_target_segments,
            "max_seqlen": self.max_seqlen,
            "attention_pairs": self.attention_pairs,
        }
        return pa.record_batch([_array(columns[name]) for name in INDEX_SCHEMA.names], schema=INDEX_SCHEMA)

    def batches(self, layout: Layout, schema: pa.Schema, batch_tokens: int) -> list[pa.RecordBatch]:
        """Return the rows as record batches of about `batch_tokens` tokens, without copying token arrays."""
        # the row offsets of cu_seqlens run one ahead per row: its leading zero
        cu_offsets = self.segment_offsets + np.arange(len(self) + 1)
        lists = {
            "input_ids": (self.input_ids, self.token_offsets),
            "position_ids": (self.position_ids, self.token_offsets),
            "cu_seqlens": (self.cu_seqlens, cu_offsets),
            "loss_mask": (self.loss_mask, self.token_offsets),
            "doc_ids": (self.doc_ids, self.segment_offsets),
            "doc_offsets": (self.doc_offsets, self.segment_offsets),
        }
        scalars = {
            "max_seqlen": self.max_seqlen,
            "num_targets": self.num_targets,
            "attention_pairs": self.attention_pairs,
            "bucket": layout.buckets(self.attention_pairs, self.max_seqlen),
        }
        result = []
        first = 0
        while first < len(self):
            stop = int(np.searchsorted(self.token_offsets, self.token_offsets[first] + batch_tokens, side="right")) - 1
            stop = min(max(stop, first + 1), len(self))
            arrays = [
                _list_array(*lists[name], first, stop) if name in lists else _array(scalars[name][first:stop])
                for name in schema.names
            ]
            result.append(pa.record_batch(arrays, schema=schema))
            first = stop
        return result


def _list_array(values: np.ndarray, offsets: np.ndarray, first: int, stop: int) -> pa.ListArray:
    begin, end = int(offsets[first]), int(offsets[stop])
    local = (offsets[first : stop + 1] - begin).astype(np.int32)
    return pa.ListArray.from_arrays(_array(local), _array(values[begin:end]))


def _array(values: np.ndarray) -> pa.Array:
    """Wrap an array without a copy; `pa.array` would import pandas first, a quarter of a second in every worker."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class _HashingFile:
    """What pyarrow writes to: passes bytes on and hashes them."""

    def __init__(self, file: IO[bytes], spent: Spent) -> None:
        self.file, self.spent = file, spent
        self.hash = xxhash.xxh3_128()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        write(self.file, view)
        begin = time.perf_counter()
        self.hash.update(view)
        self.spent("hash", time.perf_counter() - begin)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def write_stream(
    store: Store, name: str, schema: pa.Schema, batches: Any, spent: Spent = lambda *_: None
) -> tuple[str, dict[str, Any]]:
    """Write an Arrow stream aside, fsync it, and publish it.

    Args:
        store: Where to publish.
        name: Final name; `{hash}` in it becomes the first 16 digits of the content hash.
        schema: Schema of the stream.
        batches: Iterable of record batches.
        spent: Told the seconds that hashing takes.

    Returns:
        The final name, and its `bytes` and `xxh3_128`.
    """
    scratch = store.scratch(name.rsplit("/", 1)[-1].replace("{hash}", "new"))
    try:
        with scratch.open("wb", buffering=0) as file:
            sink = _HashingFile(file, spent)
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
    spent: Spent = lambda *_: None,
) -> dict[str, Any]:
    """Publish `rows` as the shard of `window`.

    Returns:
        The shard's record for sidecar and manifest: file, bytes, xxh3_128, rows, tokens, segments.
    """
    metadata = {"format": FORMAT, "version": str(VERSION), "plan_id": plan_id, "window": str(window)}
    schema = layout.schema(metadata)
    name, written = write_stream(
        store, f"shards/{window:08d}-{{hash}}.arrow", schema, rows.batches(layout, schema, batch_tokens), spent
    )
    counts = {"rows": len(rows), "tokens": int(rows.token_offsets[-1]), "segments": int(rows.segment_offsets[-1])}
    return {"file": name} | written | counts


def encode_index(batch: pa.RecordBatch) -> str:
    """Return index rows as base64 of an LZ4-compressed Arrow stream, to travel inside a sidecar."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode()


def decode_index(text: str) -> pa.Table:
    """Undo `encode_index`."""
    return pa.ipc.open_stream(base64.b64decode(text)).read_all()
