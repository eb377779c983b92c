"""A dataset under a URL, as it stands in the cache of this machine.

The manifest is read anew at every opening, so that another dataset under the same URL is another folder of the cache.
Tables and tokenizer are fetched whole and checked against it; shards when they are asked for, each checked against its
xxh3 before anything maps it. Nothing is ever listed: names and digests are all in the tables.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import xxhash

from shards.errors import FormatError, OptionError, counted
from shards.fetching.cache import Cache, Kept
from shards.fetching.remote import RemoteStore
from shards.manifest import INDEX_FILE, Manifest
from shards.metadata import parse_manifest
from shards.tables.mapped import RESTORE, TableEntry
from shards.tables.shard_list import SHARDS_FILE, ShardEntry, ShardList


class Mirror:
    """The local side of a dataset that lies elsewhere.

    Args:
        url: Where the dataset lies.
        cache: Where its files go.

    Raises:
        FormatError: There is no finished dataset, or it is damaged.
        SourceError: The place cannot be read.
    """

    def __init__(self, url: str, cache: Cache) -> None:
        self.store, self.cache = RemoteStore(url), cache
        data = self.store.read("manifest.json")
        if data is None:
            unfinished = self.store.read("plan.json") is not None
            state = "holds a dataset that is still being built" if unfinished else "is not a shardpack dataset"
            advice = "Wait for its build, or finish it with pack build … --resume." if unfinished else "Check the URL."
            raise FormatError(f"{self.store.shown}: {state}; expected manifest.json (rule F1). {advice}", "F1")
        manifest = parse_manifest(data, f"{self.store.shown}/manifest.json")
        self.dataset_id = manifest["dataset_id"]
        self.path = cache.folder(self.dataset_id)
        "The directory in the cache that stands for the dataset's own."
        self.fetched_bytes = 0
        "Bytes of shards fetched by this object."
        self._lock = Lock()
        self._place("manifest.json", data)
        self._fetch_metadata(manifest)

    def _fetch_metadata(self, manifest: Manifest) -> None:
        for name, table in ((SHARDS_FILE, manifest["shards"]), (INDEX_FILE, manifest["index"])):
            target = self.path / name
            if not target.is_file() or target.stat().st_size != table["bytes"]:
                rule = "F17" if name == SHARDS_FILE else "F13"
                self._aside(target, partial(self._fetch_table, name, table, rule))
        for name, digest in manifest["tokenizer_files"].items():
            self.file(f"tokenizer/{Path(name).name}", digest)

    def _fetch_table(self, name: str, table: TableEntry, rule: str, part: Path) -> None:
        self.store.fetch(name, part, table["bytes"], table["xxh3_128"], rule)

    def file(self, name: str, digest: str | None = None) -> Path:
        """Return a small file of the dataset, fetched unless it is here.

        Args:
            name: Its name in the dataset.
            digest: What its content must come to; None where it carries a seal of its own.

        Raises:
            FormatError: It is missing, or another one.
        """
        target = self.path / name
        data = target.read_bytes() if target.is_file() else None
        if data is None or not _fits(data, digest):
            data = self.store.read(name)
            if data is None:
                raise FormatError(f"{self.store.shown}/{name}: is missing. {RESTORE}", "F2")
            if not _fits(data, digest):
                raise FormatError(
                    f"{self.store.shown}/{name}: does not match the manifest (rule F15). {RESTORE}", "F15"
                )
            self._place(name, data)
        return target

    def shard(self, entry: ShardEntry, *, waited_for: bool = True) -> Kept:
        """Return a shard of the dataset, which stays in the cache until it is released.

        Raises:
            FormatError: It is missing, or not the one that the shard list names.
            NoRoomError: Nobody waits for it, and all else in the cache is in use.
        """

        def fetch(path: Path) -> None:
            self.store.fetch(entry["file"], path, entry["bytes"], entry["xxh3_128"], "F4")
            with self._lock:
                self.fetched_bytes += entry["bytes"]

        return self.cache.hold(self.dataset_id, entry, fetch, waited_for=waited_for)

    def _place(self, name: str, data: bytes) -> None:
        self._aside(self.path / name, lambda part: part.write_bytes(data))

    def _aside(self, target: Path, write: Callable[[Path], object]) -> None:
        """Let a file appear whole: processes that start together may write it at once."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}-{id(self):x}.part")
        try:
            write(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def check_blocks(shards: ShardList, cache: Cache, order: str, block_shards: int, sources: list[str]) -> None:
    """Check that a cache can serve an order.

    Args:
        shards: The shards of the dataset.
        cache: Where they go.
        order: The order of packs.
        block_shards: Shards whose packs are shuffled together.
        sources: Sources that are mixed, each with blocks of its own; empty where all are one.

    Raises:
        OptionError: The cache cannot hold two blocks of each source, or the dataset, where the order knows no blocks.
    """
    sizes, source = shards.columns["bytes"], shards.columns["source"]
    groups = [sizes[source == shards.sources.index(name)] for name in sources if name in shards.sources] or [sizes]
    blocks = order.startswith("block-")
    needed = sum(int(np.sort(group)[-2 * block_shards if blocks else 0 :].sum()) for group in groups)
    if needed > cache.limit:
        what = (
            f"two blocks of {counted(block_shards, 'shard')}"
            if blocks
            else f"the whole dataset, since the order {order} reads all of it all the time"
        )
        way = "Raise it, or lower `shuffle_block_shards`." if blocks else "Raise it, or use the order block-shuffled."
        raise OptionError("cache_limit", f"{cache.limit:,} bytes; expected at least {needed:,}, room for {what}. {way}")


def _fits(data: bytes, digest: str | None) -> bool:
    return digest is None or xxhash.xxh3_128_hexdigest(data) == digest
