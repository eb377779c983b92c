"""Read a dataset through memory maps.

Opening reads the manifest and maps shard list and index, no more; a shard is mapped when one of its rows is first asked
for. Sizes are checked before mapping because a file truncated under a map kills the process with SIGBUS; each record
batch is checked when it is first read (`shards.rows`), so that damage is an error and never another token. A row comes
back as numpy views on the map: no copy, no list. `pack` is the path of the training loop; `[i]` gives every column. A
dataset pickles as its path, so workers share the page cache instead of copies.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, overload

import numpy as np

from shards.errors import FormatError
from shards.fetching.cache import Cache, Kept
from shards.fetching.mirror import Mirror
from shards.metadata import read_index, read_manifest, read_plan, read_shard_list
from shards.plan import Plan
from shards.publish import hash_file
from shards.rows import check_rows
from shards.schema import loss_mask_of, make_layout, position_ids_of, shard_metadata
from shards.shard import ArrowBatch, Check, Shard, columns_of
from shards.tables.index import Index
from shards.tables.mapped import RESTORE, check_size
from shards.tables.shard_list import ShardEntry, ShardList, SourceRun

Row = dict[str, Any]
MAX_MAPS = 2048  # below the usual limits on maps and open files
MAX_SIZES_CHECKED = 10_000  # shards of which the size is checked at opening: some 20 ms


class Pack(NamedTuple):
    """What training needs of one pack."""

    input_ids: np.ndarray
    "uint16 or int32 (num_tokens,)"
    position_ids: np.ndarray
    "uint16 or int32 (num_tokens,): place in the segment"
    loss_mask: np.ndarray
    "uint8 (num_tokens,): 1 where the token in this slot is a target"
    cu_seqlens: np.ndarray
    "int32 (num_segments + 1,)"
    loss_weights: np.ndarray | None = None
    "float16 (num_tokens,), 0 where there is no target; None in a dataset without weights"


class Dataset:
    """A finished dataset: a sequence of packs.

    Args:
        path: The dataset directory, or the URL of one (s3://, gs://, hf://, http://): its shards are then fetched
            whole when they are asked for.
        cache: For a URL: where shards are kept on this machine; a directory, a `Cache`, or None for
            `~/.cache/shardpack/datasets` and 100 GB.

    Raises:
        FormatError: No dataset, an unfinished one, another format version, tables that do not fit each other, or a
            shard of the wrong size.
    """

    def __init__(self, path: str | Path, *, cache: Cache | str | Path | None = None) -> None:
        self._mirror: Mirror | None = None
        self._url = str(path) if "://" in str(path) else None
        self.location = str(path)
        "Where the dataset lies, as it may be shown."
        if self._url is not None:
            self._mirror = Mirror(self._url, cache if isinstance(cache, Cache) else Cache(cache))
            self.location = self._mirror.store.shown
        self.path = Path(path) if self._mirror is None else self._mirror.path
        "Its directory; of a URL the one in the cache that stands for it."
        self.manifest = read_manifest(self.path)
        "The commit of the dataset: totals, sources, facts."
        manifest = self.manifest
        self.layout = make_layout(manifest["seq_len"], manifest["packer"], manifest["tokenizer"], manifest["stored"])
        "Which columns its shards have."
        self.dataset_id: str = self.manifest["dataset_id"]
        self.seq_len: int = self.manifest["seq_len"]
        self.packer: str = self.manifest["packer"]
        self.max_token_id: int = self.manifest["tokenizer"]["max_id"]
        self.shards: ShardList = read_shard_list(self.path, self.manifest)
        "Its shards, in window order."
        self.index: Index = read_index(self.path, self.manifest, self.layout)
        "Figures per pack."
        packs = {len(self.index), self.shards.num_packs, self.manifest["totals"]["packs"]}
        if len(packs) > 1:
            raise FormatError(
                f"{self.path}: the index has {len(self.index):,} packs, the shards {self.shards.num_packs:,}, the "
                f"manifest {self.manifest['totals']['packs']:,} (rule F13). {RESTORE}",
                "F13",
            )
        if self._mirror is None and len(self.shards) <= MAX_SIZES_CHECKED:
            _check_sizes(self.path, self.shards)
        self._maps: OrderedDict[int, Shard] = OrderedDict()
        self._kept: dict[int, Kept] = {}
        self._hashed: set[int] = set()
        self._lock = Lock()  # the prefetch thread and the caller may map at once

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mirror is None:
            return (Dataset, (self.path,))
        return (partial(Dataset, cache=self._mirror.cache), (self._url,))

    def __len__(self) -> int:
        return self.shards.num_packs

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"Dataset({self.location!r}, {', '.join(f'{name} {value}' for name, value in self._figures())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._figures())
        return f"<table><caption>{escape(self.location)}</caption>{rows}</table>"

    def _figures(self) -> list[tuple[str, str]]:
        """What a person wants to know first, by name."""
        totals = self.manifest["totals"]
        tokens, packs = totals["tokens"]["packed"], len(self)
        return [
            ("packs", f"{packs:,}"),
            ("seq_len", f"{self.seq_len:,}"),
            ("tokens", f"{tokens:,}"),
            ("targets", f"{totals['targets']['packed']:,}"),
            ("documents", f"{totals['documents']['packed']:,}"),
            ("fill_rate", f"{tokens / max(1, packs * self.seq_len):.2%}"),
            ("packer", self.packer),
            ("dataset_id", self.dataset_id[:12]),
        ]

    @cached_property
    def plan(self) -> Plan:
        """What determined the dataset's bytes; read when it is first asked for, since it lists every window."""
        self.file("plan.json")
        return read_plan(self.path, self.manifest)

    @property
    def mirror(self) -> Mirror | None:
        """Where the shards of a URL are fetched to; None for a directory."""
        return self._mirror

    def file(self, name: str) -> Path:
        """Return a small file of the dataset, such as a sidecar; that of a URL is fetched first.

        Raises:
            FormatError: A URL has no such file.
        """
        return self.path / name if self._mirror is None else self._mirror.file(name)

    @cached_property
    def sources(self) -> list[SourceRun]:
        """Name, first pack and one past the last pack of each run of shards from one source."""
        return self.shards.runs()

    def shard_of(self, pack: int) -> tuple[ShardEntry, int]:
        """Return the entry of the shard that holds `pack`, and the pack's row in it."""
        entry: ShardEntry = self.shards[self._number(pack)]
        return entry, pack - self.shards.first_packs[entry["window"]]

    def _number(self, pack: int) -> int:
        if not 0 <= pack < len(self):
            raise IndexError(f"{self.path}: has {len(self):,} packs; there is no pack {pack}")
        return self.shards.number_of(pack)

    def _shard(self, number: int) -> Shard:
        with self._lock:
            shard = self._maps.get(number)
            if shard is not None:
                self._maps.move_to_end(number)
                return shard
            entry: ShardEntry = self.shards[number]
            schema = self.layout.schema(shard_metadata(self.manifest["plan_id"], number))
            kept = None if self._mirror is None else self._mirror.shard(entry)
            shard = Shard(self.path / entry["file"], entry["bytes"], schema, self._row_check(entry))
            if len(shard) != entry["rows"]:
                raise FormatError(
                    f"{shard.path}: has {len(shard):,} rows, the shard list says {entry['rows']:,} (rule F6). "
                    f"{RESTORE}",
                    "F6",
                )
            self._maps[number] = shard
            if kept is not None:
                self._kept[number] = kept
            while len(self._maps) > MAX_MAPS or self._maps_crowd_the_cache():
                gone, _ = self._maps.popitem(last=False)  # views that are still in use keep their map alive
                self._kept.pop(gone, None)
        return shard

    def _maps_crowd_the_cache(self) -> bool:
        """Whether more than half of the cache is mapped: the rest is for shards to come."""
        if self._mirror is None or len(self._maps) < 2:
            return False
        sizes = self.shards.columns["bytes"]
        return sum(int(sizes[number]) for number in self._maps) > self._mirror.cache.limit // 2

    def _row_check(self, entry: ShardEntry) -> Check:
        """Return what checks the batches of a shard; it holds no reference to the dataset, which holds the shard."""
        layout, index, path, limit = self.layout, self.index, self.path / entry["file"], self.max_token_id + 1
        window, first = entry["window"], self.shards.first_packs[entry["window"]]

        def check(batch: ArrowBatch, begin: int) -> None:
            entries = index.take(slice(first + begin, first + begin + batch.num_rows)).columns()
            for problem in check_rows(batch, layout, window, limit, entries):
                raise FormatError(
                    f"{path}, row {begin + problem.row}: {problem.what} (rule {problem.rule}). {RESTORE}", problem.rule
                )

        return check

    def _locate(self, pack: int) -> tuple[ArrowBatch, int]:
        """Return the batch that holds a pack, checked, and the pack's row in it."""
        number = self._number(pack)
        shard, row = self._shard(number), pack - self.shards.first_packs[number]
        place = shard.batch_of(row)
        return shard.batch(place), row - shard.starts[place]

    def batches(self, shard: int) -> Iterator[tuple[int, ArrowBatch]]:
        """Yield the record batches of a shard, checked, each with its first pack."""
        opened, first = self._shard(shard), self.shards.first_packs[shard]
        for place in range(opened.num_batches):
            yield first + opened.starts[place], opened.batch(place)

    def check_hashes(self, packs: Iterable[int]) -> None:
        """Check the shards that hold these packs against their hashes, each once in the life of this object.

        Arrow notices no flipped bit in a token. Reading a whole shard takes as long as the disk needs, about 8 GB/s
        where it is in memory: training does so in its prefetch thread.

        Raises:
            FormatError: A shard is not the one that the shard list names.
        """
        for number in {self._number(int(pack)) for pack in packs} - self._hashed:
            entry: ShardEntry = self.shards[number]
            file = self.path / entry["file"]
            kept = None if self._mirror is None else self._mirror.shard(entry)
            check_size(file, entry["bytes"])
            if hash_file(file) != entry["xxh3_128"]:
                if self._mirror is None or kept is None:
                    raise FormatError(
                        f"{file}: does not match its checksum in the shard list (rule F4). {RESTORE}", "F4"
                    )
                self._mirror.cache.discard(kept)  # damaged here, on a disk that may be written to at any time
                with self._lock:
                    self._maps.pop(number, None)
                    self._kept.pop(number, None)
                self._mirror.shard(entry)  # checked as it comes
            self._hashed.add(number)

    def pack(self, pack: int) -> Pack:
        """Return what training needs of one pack, as read-only views on the map; positions not stored are derived."""
        return _pack_of(*self._locate(pack))

    @overload
    def __getitem__(self, pack: int) -> Row: ...

    @overload
    def __getitem__(self, pack: slice) -> list[Row]: ...

    def __getitem__(self, pack: int | slice) -> Row | list[Row]:
        """Return every column of one pack: arrays as views, per-row figures as ints; of a slice, a list of them.

        Raises:
            IndexError: There is no such pack.
            FormatError: The shard that holds it is damaged.
        """
        if isinstance(pack, slice):
            return [self[number] for number in range(*pack.indices(len(self)))]
        pack = pack + len(self) if pack < 0 else pack
        batch, local = self._locate(pack)
        named = _pack_of(batch, local)._asdict()
        return columns_of(batch, local) | {name: column for name, column in named.items() if column is not None}

    def advise(self, packs: Iterable[int]) -> None:
        """Start reading the given packs from disk, without waiting."""
        for pack in packs:
            number = self._number(int(pack))
            self._shard(number).advise([int(pack) - self.shards.first_packs[number]])


def _check_sizes(path: Path, shards: ShardList) -> None:
    """Check that every shard is there with its size, by one listing of their directory."""
    try:
        with os.scandir(path / "shards") as entries:
            there = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".arrow")}
    except FileNotFoundError:
        there = {}
    for file, size in zip(shards.files(), shards.columns["bytes"].tolist(), strict=True):
        if there.get(file.removeprefix("shards/")) != size:
            check_size(path / file, size)


def _pack_of(batch: ArrowBatch, local: int) -> Pack:
    lists = batch.lists
    ids, offsets = lists["input_ids"]
    begin, end = offsets.item(local), offsets.item(local + 1)  # of all token columns, as checked when mapping
    cu = batch.row("cu_seqlens", local)
    return Pack(
        input_ids=ids[begin:end],
        position_ids=lists["position_ids"][0][begin:end] if "position_ids" in lists else position_ids_of(cu),
        loss_mask=lists["loss_mask"][0][begin:end] if "loss_mask" in lists else loss_mask_of(cu),
        cu_seqlens=cu,
        loss_weights=lists["loss_weights"][0][begin:end] if "loss_weights" in lists else None,
    )
