"""Sidecars: the JSON beside a shard that commits its window.

A sidecar says everything about its window that the manifest needs, its rows of the index included, so committing a
dataset reads sidecars one after another and never opens a shard.
"""

import base64
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict, cast

import pyarrow as pa

from shards.counts import Counts, Histogram
from shards.errors import FormatError
from shards.plan import FORMAT, VERSION, check_version
from shards.publish import Store, unseal
from shards.records import mismatch, uneven

TABLES = {"lengths": 3, "segment_lengths": 3, "spans": 5}  # tables of a sidecar, and numbers in a row
ONE_THREAD = pa.ipc.IpcReadOptions(use_threads=False)  # waking threads costs more than these few columns
MAX_LONGEST = 10  # over-long documents named in a report


class ShardRecord(TypedDict):
    """What a sidecar says of its shard."""

    file: str
    bytes: int
    xxh3_128: str
    rows: int
    tokens: int
    segments: int


class LongDocument(TypedDict):
    """A document longer than `seq_len`."""

    doc_id: int
    tokens: int


class Rejection(TypedDict):
    """A record that gave no document because something is wrong with it."""

    doc_id: int
    where: str
    reason: str
    record: str


class GuardFact(TypedDict):
    """How the ids of a fast tokenizer engine were compared with the reference's."""

    result: str
    compares_all: NotRequired[bool]


class EngineFact(TypedDict):
    """The tokenizer engine that wrote a window."""

    engine: str
    version: str
    guard: GuardFact


class UnrolledFact(TypedDict, total=False):
    """Conversations that became several documents; empty where none did."""

    conversations: int
    turns: int
    documents: int
    tokens: int
    tokens_once: int


class SpelledFact(TypedDict, total=False):
    """Texts that spell a control token without becoming one; empty where none does."""

    texts: int
    example: str


class WindowFacts(TypedDict):
    """What a window's task says of itself that determines no byte; of this, what somebody reads."""

    stages_s: dict[str, float]
    tokenizer: NotRequired[EngineFact]
    trained_end_ids: NotRequired[list[int]]
    unrolled: NotRequired[UnrolledFact]
    spelled_controls: NotRequired[SpelledFact]
    unread_fields: NotRequired[dict[str, int]]
    files: NotRequired[list[list[int]]]


class Sidecar(TypedDict):
    """The commit of one window."""

    format: str
    version: int
    plan_id: str
    window: int
    source: str
    shard: ShardRecord
    counts: Counts
    bound_packs: int
    lengths: Histogram
    segment_lengths: Histogram
    longest: list[LongDocument]
    spans: list[list[int]]
    input_xxh3: str
    raw_bytes: int
    rejected: list[Rejection]
    index: str
    facts: WindowFacts


def make_sidecar(
    *,
    plan_id: str,
    window: int,
    source: str,
    shard: ShardRecord,
    counts: Counts,
    index: pa.RecordBatch,
    bound_packs: int = 0,
    lengths: Histogram | None = None,
    segment_lengths: Histogram | None = None,
    longest: Sequence[LongDocument] = (),
    spans: Sequence[Sequence[int]] = (),
    input_xxh3: str = "",
    raw_bytes: int = 0,
    rejected: Sequence[Rejection] = (),
    facts: dict[str, Any] | None = None,
) -> Sidecar:
    """Return the sidecar of a window.

    Args:
        plan_id: Identity of the plan.
        window: Its number.
        source: Name of its source.
        shard: What `write_shard` returned.
        counts: Its balance sheet.
        index: Its rows of `index.arrow`.
        bound_packs: Fewest packs that could hold its segments.
        lengths: Histogram of document lengths, as tokenized.
        segment_lengths: Histogram of segment lengths, as packed.
        longest: The longest documents above `seq_len`, at most `MAX_LONGEST`, longest first.
        spans: Which records came from where: [file, start, stop, first record, number of records].
        input_xxh3: Hash of the raw bytes read.
        raw_bytes: How many these were.
        rejected: Bad records.
        facts: What does not determine bytes; `tokenizer` and `stages_s` are gathered into the manifest.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "plan_id": plan_id,
        "window": window,
        "source": source,
        "shard": shard,
        "counts": counts,
        "bound_packs": bound_packs,
        "lengths": lengths or [],
        "segment_lengths": segment_lengths or [],
        "longest": list(longest),
        "spans": [list(span) for span in spans],
        "input_xxh3": input_xxh3,
        "raw_bytes": raw_bytes,
        "rejected": list(rejected),
        "index": encode_index(index),
        "facts": cast("WindowFacts", {"stages_s": {}} | (facts or {})),
    }


def sidecar_name(window: int) -> str:
    """Return the sidecar's place in the dataset."""
    return f"shards/{window:08d}.json"


def shard_name(window: int, xxh3_128: str) -> str:
    """Return the shard's place in the dataset; it follows from its content, so no file can name another's place."""
    return f"shards/{window:08d}-{xxh3_128[:16]}.arrow"


def read_sidecar(store: Store, window: int) -> Sidecar | None:
    """Return a window's sidecar, or None where the window is not committed.

    Raises:
        FormatError: The sidecar is damaged.
    """
    name = sidecar_name(window)
    data = store.get(name)
    if data is None:
        return None
    return parse_sidecar(data, f"{store.location}/{name}")


def parse_sidecar(data: bytes, where: str) -> Sidecar:
    """Parse a sidecar and check its seal, version and fields.

    Raises:
        FormatError: It is damaged, or another version wrote it.
    """
    sidecar = unseal(data, where, "F5")
    check_version(sidecar, where, "F5")
    wrong = mismatch(sidecar, Sidecar)
    wrong = wrong or next(filter(None, (uneven(sidecar[name], width, name) for name, width in TABLES.items())), None)
    if wrong:
        raise FormatError(f"{where}: {wrong} (rule F5). Delete it and build with --resume.", "F5")
    return cast("Sidecar", sidecar)


def encode_index(batch: pa.RecordBatch) -> str:
    """Return index rows as base64 of an LZ4-compressed Arrow stream, to travel inside a sidecar."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode()


def decode_index(sidecar: Sidecar, schema: pa.Schema, where: str) -> pa.Table:
    """Return a sidecar's rows of the index.

    Raises:
        FormatError: They are not what the sidecar says they are.
    """
    try:
        data = base64.b64decode(sidecar["index"], validate=True)
        table = pa.ipc.open_stream(data, options=ONE_THREAD).read_all()
        table.validate(full=True)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FormatError(
            f"{where}: its index is not a readable Arrow stream (rule F5). Delete it and build with --resume.", "F5"
        ) from error
    if not table.schema.equals(schema) or table.num_rows != sidecar["shard"]["rows"]:
        raise FormatError(
            f"{where}: its index has {table.num_rows:,} rows of {table.schema.names}; expected "
            f"{sidecar['shard']['rows']:,} of {schema.names} (rule F5). Delete it and build with --resume.",
            "F5",
        )
    return table
