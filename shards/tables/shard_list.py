"""The shards of a dataset, in window order: `shards.arrow`, mapped.

56 bytes a shard, so that a million shards are a table of 56 MB of which opening touches a few pages. A shard's name
follows from its window and its hash; `first_pack` is what finds the shard of a pack by bisection.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from shards.errors import FormatError
from shards.sidecar import ShardRecord, shard_name

SHARDS_FILE = "shards.arrow"
SHARDS_SCHEMA = pa.schema(
    [
        pa.field("xxh3_128", pa.binary(16), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("first_pack", pa.int64(), nullable=False),
        pa.field("packs", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("segments", pa.int64(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
    ]
)


class ShardEntry(TypedDict):
    """One shard of a dataset."""

    window: int
    source: str
    file: str
    bytes: int
    xxh3_128: str
    rows: int
    tokens: int
    segments: int


class SourceRun(NamedTuple):
    """Consecutive packs of one source."""

    source: str
    start: int
    "First pack."
    stop: int
    "One past the last."


class ShardList(Sequence[ShardEntry]):
    """The shards of a dataset, in window order.

    Args:
        columns: The columns of `shards.arrow`.
        sources: Names of the sources that `source` counts.
        where: The file, for messages.

    Raises:
        FormatError: The entries do not follow on each other, or name a source that is not there.
    """

    def __init__(self, columns: dict[str, np.ndarray], sources: Sequence[str], where: str) -> None:
        self.columns, self.sources = columns, list(sources)
        packs, first = columns["packs"], columns["first_pack"]
        if len(packs):
            bad = first[0] != 0 or (packs < 0).any() or not np.array_equal(first[1:], first[:-1] + packs[:-1])
            source = columns["source"]
            if bad or (columns["bytes"] <= 0).any() or source.min() < 0 or source.max() >= len(self.sources):
                raise FormatError(
                    f"{where}: its entries do not follow on each other, or name no source (rule F17). Restore it, or "
                    "delete it and build with --resume.",
                    "F17",
                )
        self.num_packs = int(first[-1] + packs[-1]) if len(packs) else 0
        "Packs of all shards."

    def __len__(self) -> int:
        return len(self.columns["packs"])

    def __getitem__(self, number: Any) -> Any:
        """Return an entry, or of a slice a list of them."""
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        digest = self.columns["xxh3_128"][number].tobytes().hex()
        entry: ShardEntry = {
            "window": number,
            "source": self.sources[int(self.columns["source"][number])],
            "file": shard_name(number, digest),
            "bytes": int(self.columns["bytes"][number]),
            "xxh3_128": digest,
            "rows": int(self.columns["packs"][number]),
            "tokens": int(self.columns["tokens"][number]),
            "segments": int(self.columns["segments"][number]),
        }
        return entry

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[number] for number in range(len(self)))

    @property
    def first_packs(self) -> memoryview:
        """First pack of each shard, mapped like its column, but faster where one is asked for."""
        return self.columns["first_pack"].data

    def files(self) -> list[str]:
        """Return the shard files, in window order."""
        digits = self.columns["xxh3_128"].tobytes().hex()
        return [shard_name(number, digits[32 * number : 32 * number + 32]) for number in range(len(self))]

    def number_of(self, pack: int) -> int:
        """Return the number of the shard that holds `pack`; empty shards are passed over."""
        return bisect_right(self.first_packs, pack) - 1

    def runs(self) -> list[SourceRun]:
        """Return the runs of consecutive shards from one source, empty ones left out."""
        source, first = self.columns["source"], self.columns["first_pack"]
        starts = np.flatnonzero(np.diff(source, prepend=-1))
        stops = np.append(first[starts[1:]], self.num_packs)
        runs = [
            SourceRun(self.sources[int(source[shard])], int(first[shard]), int(stop))
            for shard, stop in zip(starts, stops, strict=True)
        ]
        return [run for run in runs if run.stop > run.start]


def list_columns(shards: Sequence[ShardRecord], sources: Sequence[int], first_pack: int) -> dict[str, np.ndarray]:
    """Return entries of `shards.arrow` as columns.

    Args:
        shards: What the sidecars say of their shards, in window order.
        sources: The source of each.
        first_pack: Packs of all shards before.
    """
    packs = np.array([shard["rows"] for shard in shards], np.int64)
    digests = b"".join(bytes.fromhex(shard["xxh3_128"]) for shard in shards)
    return {
        "xxh3_128": np.frombuffer(digests, np.uint8).reshape(-1, 16),
        "bytes": np.array([shard["bytes"] for shard in shards], np.int64),
        "first_pack": first_pack + np.cumsum(packs) - packs,
        "packs": packs,
        "tokens": np.array([shard["tokens"] for shard in shards], np.int64),
        "segments": np.array([shard["segments"] for shard in shards], np.int64),
        "source": np.array(sources, np.int32),
    }


def dataset_id(plan_id: str, parts: Iterable[dict[str, np.ndarray]]) -> str:
    """Return the identity of a dataset: sha256 over its plan and, in order, each shard's hash, packs and tokens.

    Args:
        plan_id: Identity of its plan.
        parts: The columns of `shards.arrow`, in any number of parts.
    """
    digest = hashlib.sha256(plan_id.encode())
    for part in parts:
        lines = np.empty(len(part["packs"]), np.dtype([("hash", "V16"), ("packs", "<i8"), ("tokens", "<i8")]))
        lines["hash"] = np.ascontiguousarray(part["xxh3_128"]).view("V16").reshape(-1)
        lines["packs"], lines["tokens"] = part["packs"], part["tokens"]
        digest.update(lines.tobytes())
    return digest.hexdigest()
