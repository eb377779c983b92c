"""Check a dataset against the rules F1 to F17 of `docs/format.md`, one to one.

Levels: `size` reads metadata and file sizes; `sample` also hashes and checks a spread of shards; `full` hashes and
checks every row. Checksums live outside the shards because Arrow notices almost no corruption (two thirds of single bit
flips read back as different data, without an error). Everything wrong is listed, not only the first finding.
"""

from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shards.counts import add_counts, empty_counts, imbalance
from shards.errors import FormatError, SourceError, reason_of
from shards.fetching.cache import Cache
from shards.fetching.mirror import Mirror
from shards.fetching.remote import hide_secrets, io_errors, is_url
from shards.manifest import INDEX_FILE, Manifest, SourceSums, datasets_files, digest_files
from shards.metadata import read_index, read_manifest, read_plan, read_shard_list
from shards.plan import Plan
from shards.publish import LocalStore, Store, canonical, hash_file
from shards.rows import check_rows
from shards.schema import layout_of, shard_metadata
from shards.shard import Shard
from shards.sidecar import ShardRecord, Sidecar, read_sidecar, sidecar_name
from shards.tables.index import Index
from shards.tables.mapped import RESTORE, TableEntry, check_size
from shards.tables.shard_list import SHARDS_FILE, ShardEntry, ShardList, dataset_id

Level = Literal["size", "sample", "full"]
SAMPLE_SHARDS = 8


@dataclass(frozen=True)
class Problem:
    """One broken rule."""

    rule: str
    message: str


@dataclass
class VerifyReport:
    """What `verify` looked at and what it found wrong."""

    path: str
    level: Level
    shards_checked: int = 0
    packs_checked: int = 0
    tokens_checked: int = 0
    against: str = ""
    "What a comparison with the sources found, where one was asked for."
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.problems

    def add(self, rule: str, where: str, what: str, remedy: str = RESTORE) -> None:
        """Note a broken rule, and what fixes it."""
        self.problems.append(Problem(rule, f"{where}: {what} (rule {rule}). {remedy}"))

    def add_error(self, error: FormatError) -> None:
        """Note a broken rule that a reader ran into."""
        self.problems.append(Problem(error.rule or "F1", str(error)))


def verify(
    path: str | Path, level: Level = "full", vocab_size: int | None = None, cache: Cache | None = None
) -> VerifyReport:
    """Check a dataset rule by rule.

    Args:
        path: The dataset directory, or a URL.
        level: How much to read: size, sample or full.
        vocab_size: Also demand that every token id is below this (a model's vocabulary).
        cache: Where shards of a URL are kept on this machine; None for the usual place.

    Returns:
        The report; `report.ok` is False when any rule is broken.
    """
    report = VerifyReport(hide_secrets(str(path)), level)
    try:
        mirror = Mirror(str(path), cache or Cache()) if is_url(str(path)) else None
        root = Path(path) if mirror is None else mirror.path
        store: Store = LocalStore(root) if mirror is None else mirror.store
        if mirror is not None:
            mirror.file("plan.json")
        manifest = read_manifest(root)
        plan = read_plan(root, manifest)
        shards = read_shard_list(root, manifest)
    except FormatError as error:
        report.add_error(error)
        return report
    _check_tokenizer(root, manifest, report)
    intact = _check_files(store, shards, report)
    _check_table(root / SHARDS_FILE, manifest["shards"], "F17", level, report)
    _check_sidecars(store, plan, manifest, shards, report)
    _check_sums(store, plan, manifest, shards, report)
    index = _check_index(root, plan, manifest, level, report)
    check = _ShardCheck(root, mirror, plan, manifest, index, vocab_size, report)
    for number in _chosen(len(shards), level):
        entry: ShardEntry = shards[number]
        if entry["file"] in intact:
            check.run(entry, int(shards.columns["first_pack"][number]))
    return report


def _chosen(num_shards: int, level: Level) -> list[int]:
    if level == "full":
        return list(range(num_shards))
    if level == "size" or not num_shards:
        return []
    return sorted({int(k) for k in np.linspace(0, num_shards - 1, min(SAMPLE_SHARDS, num_shards))})


def _check_tokenizer(root: Path, manifest: Manifest, report: VerifyReport) -> None:
    directory = root / "tokenizer"
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    strangers = [file.name for file in files if file.is_symlink() or not file.is_file()]
    if strangers:
        report.add("F15", str(directory), f"holds {strangers[0]!r}, which is no regular file", "Remove it.")
        return
    found = digest_files({file.name: file.read_bytes() for file in files})
    if found != manifest["tokenizer_files"]:
        report.add("F15", str(directory), "does not hold exactly the tokenizer files that the manifest lists")


def _check_files(store: Store, shards: ShardList, report: VerifyReport) -> set[str]:
    intact, listed = set(), set()
    there = _listed(store)
    for entry in shards:
        listed |= {entry["file"], sidecar_name(entry["window"])}
        size = there.get(entry["file"].removeprefix("shards/"))
        try:
            if isinstance(store, LocalStore):
                check_size(store.root / entry["file"], entry["bytes"])
            elif size is None:
                report.add("F3", entry["file"], f"is missing; the manifest lists {entry['bytes']:,} bytes")
                continue
            elif size != entry["bytes"]:
                report.add("F3", entry["file"], f"has {size:,} bytes, the manifest says {entry['bytes']:,}")
                continue
            intact.add(entry["file"])
        except FormatError as error:
            report.add_error(error)
    for name in sorted(there):
        if f"shards/{name}" not in listed:
            report.add("F3", f"shards/{name}", "is not in the shard list", "Move it away.")
    return intact


def _listed(store: Store) -> dict[str, int]:
    """Return the bytes of every file among the shards.

    Raises:
        SourceError: The store lets nobody list it.
    """
    try:
        return store.sizes("shards")
    except io_errors() as error:
        fault = hide_secrets(f"{store.location}/shards: cannot be listed ({reason_of(error)})")
        raise SourceError(f"{fault}; verifying compares what is there. Allow listing, or verify a copy.") from None


def _check_table(file: Path, entry: TableEntry, rule: str, level: Level, report: VerifyReport) -> None:
    """Hash a table; the reader does so only where it is small."""
    if level != "size" and file.is_file() and hash_file(file) != entry["xxh3_128"]:
        report.add(rule, file.name, "does not match its checksum in the manifest")


def _check_sidecars(store: Store, plan: Plan, manifest: Manifest, shards: ShardList, report: VerifyReport) -> None:
    """F5, and that the figures of each source are the sums of its sidecars' (F14)."""
    sums = SourceSums([source["name"] for source in plan["sources"]])
    complete = True
    for entry in shards:
        where = sidecar_name(entry["window"])
        try:
            sidecar = read_sidecar(store, entry["window"])
        except FormatError as error:
            report.add_error(error)
            complete = False
            continue
        if sidecar is None:
            report.add("F5", where, "is missing", "Restore it, or build with --resume.")
            complete = False
        elif wrong := _sidecar_problem(sidecar, entry, manifest):
            report.add("F5", where, wrong)
            complete = False
        else:
            sums.add(sidecar)
    if complete and sums.figures() != manifest["sources"]:
        expected = {figures["name"]: figures for figures in sums.figures()}
        for source in manifest["sources"]:
            if expected.get(source["name"]) != source:
                report.add("F14", "manifest.json", f"source {source['name']!r} is not the sum of its sidecars")


def _sidecar_problem(sidecar: Sidecar, entry: ShardEntry, manifest: Manifest) -> str | None:
    if sidecar["plan_id"] != manifest["plan_id"]:
        return f"belongs to plan {sidecar['plan_id'][:12]}…, not {manifest['plan_id'][:12]}…"
    record: ShardRecord = {
        "file": entry["file"], "bytes": entry["bytes"], "xxh3_128": entry["xxh3_128"], "rows": entry["rows"],
        "tokens": entry["tokens"], "segments": entry["segments"],
    }  # fmt: skip
    described = (sidecar["window"], sidecar["source"], sidecar["shard"])
    if described != (entry["window"], entry["source"], record):
        return "does not describe the shard that the shard list names"
    return None


def _check_sums(store: Store, plan: Plan, manifest: Manifest, shards: ShardList, report: VerifyReport) -> None:
    totals = reduce(add_counts, (source["counts"] for source in manifest["sources"]), empty_counts())
    if wrong := imbalance(manifest["totals"]):
        report.add("F14", "manifest.json", wrong)
    if totals != manifest["totals"]:
        report.add("F14", "manifest.json", "the totals are not the sums of the sources")
    columns = shards.columns
    found = {name: int(columns[name].sum()) for name in ("packs", "segments", "tokens")}
    told = {"packs": totals["packs"], "segments": totals["segments"], "tokens": totals["tokens"]["packed"]}
    for name, value in found.items():
        if value != told[name]:
            report.add("F14", "manifest.json", f"counts {told[name]:,} {name}, its shards have {value:,}")
    if manifest["dataset_id"] != dataset_id(manifest["plan_id"], [columns]):
        report.add("F1", "manifest.json", "dataset_id is not the digest of plan and shards")
    for name, content in datasets_files(plan, manifest["dataset_id"], shards.files()).items():
        if store.get(name) != canonical(content):
            report.add("F16", name, "does not describe this dataset; datasets.load_from_disk would fail or mislead")


def _check_index(root: Path, plan: Plan, manifest: Manifest, level: Level, report: VerifyReport) -> Index | None:
    try:
        index = read_index(root, manifest, layout_of(plan))
    except FormatError as error:
        report.add_error(error)
        return None
    _check_table(root / INDEX_FILE, manifest["index"], "F13", level, report)
    if len(index) != manifest["totals"]["packs"]:
        report.add("F13", INDEX_FILE, f"has {len(index):,} rows for {manifest['totals']['packs']:,} packs")
        return None
    maxima = {name: int(getattr(index, name).max(initial=0)) for name in ("max_seqlen", "num_segments")}
    if maxima != manifest["maxima"]:
        report.add("F13", "manifest.json", f"maxima are {manifest['maxima']}; expected {maxima}")
    return index


class _ShardCheck:
    """Checks shards of one dataset, rows and all."""

    def __init__(
        self,
        root: Path,
        mirror: Mirror | None,
        plan: Plan,
        manifest: Manifest,
        index: Index | None,
        vocab_size: int | None,
        report: VerifyReport,
    ) -> None:
        self.mirror = mirror
        self.root, self.layout, self.plan_id = root, layout_of(plan), manifest["plan_id"]
        self.index, self.report = index, report
        self.token_limit = min(vocab_size or 1 << 62, self.layout.max_token_id + 1)

    def run(self, entry: ShardEntry, first_pack: int) -> None:
        """Check one shard."""
        file, report = self.root / entry["file"], self.report
        try:
            kept = None if self.mirror is None else self.mirror.shard(entry)
        except FormatError as error:
            report.add_error(error)
            return
        if hash_file(file) != entry["xxh3_128"]:
            report.add("F4", entry["file"], "does not match its checksum in the shard list")
            return
        try:
            shard = Shard(file, entry["bytes"], self.layout.schema(shard_metadata(self.plan_id, entry["window"])))
            if len(shard) != entry["rows"]:
                report.add("F6", entry["file"], f"has {len(shard):,} rows, the shard list says {entry['rows']:,}")
                return
            segments = [self._check_batch(entry, shard, number, first_pack) for number in range(shard.num_batches)]
        except FormatError as error:
            report.add_error(error)
            return
        tokens = sum(int(part["lengths"].sum()) for part in segments)
        if not any(problem.rule == "F7" for problem in report.problems):
            found = (tokens, sum(len(part["lengths"]) for part in segments))
            if found != (entry["tokens"], entry["segments"]):
                report.add("F17", entry["file"], f"has {found[0]:,} tokens in {found[1]:,} segments; listed otherwise")
            _check_documents(entry["file"], segments, report)
        report.shards_checked += 1
        report.packs_checked += len(shard)
        report.tokens_checked += tokens
        if kept is not None:
            kept.release()

    def _check_batch(self, entry: ShardEntry, shard: Shard, number: int, first_pack: int) -> dict[str, Any]:
        """Check a batch; return where the segments of which documents begin, and their real lengths."""
        batch, begin = shard.batch(number), shard.starts[number]
        first = first_pack + begin
        index = None if self.index is None else self.index.take(slice(first, first + batch.num_rows)).columns()
        for problem in check_rows(batch, self.layout, entry["window"], self.token_limit, index):
            where = f"index.arrow, pack of {entry['file']} row" if problem.rule == "F13" else f"{entry['file']}, row"
            self.report.add(problem.rule, f"{where} {begin + problem.row}", problem.what)
        cu = batch.lists["cu_seqlens"][0]
        lengths = batch.lists["segment_lens"][0] if "segment_lens" in batch.lists else np.diff(cu)[np.diff(cu) > 0]
        names = ("doc_ids", "doc_parts", "doc_offsets")
        return {name: batch.lists[name][0] for name in names} | {"lengths": lengths}


def _check_documents(file: str, segments: list[dict[str, Any]], report: VerifyReport) -> None:
    """F12: the segments of one document never overlap, so no token of it is there twice."""
    if not segments:
        return
    names = ("doc_ids", "doc_parts", "doc_offsets", "lengths")
    ids, parts, offsets, lengths = (np.concatenate([part[name] for part in segments]) for name in names)
    if not len(ids) == len(parts) == len(offsets) == len(lengths):
        return  # reported row by row
    order = np.lexsort((offsets, parts, ids))
    ids, parts, offsets, lengths = ids[order], parts[order], offsets[order].astype(np.int64), lengths[order]
    same = (ids[1:] == ids[:-1]) & (parts[1:] == parts[:-1])
    overlap = same & (offsets[1:] < offsets[:-1] + lengths[:-1])
    if overlap.any():
        report.add("F12", file, f"document {int(ids[1:][overlap][0])} has tokens that are packed twice")
