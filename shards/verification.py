"""Check a dataset against the rules F1 to F16 of `docs/format.md`, one to one.

Levels: `size` reads metadata and file sizes; `sample` also hashes and checks a spread of shards; `full` hashes and
checks every row. Checksums live outside the shards because Arrow notices almost no corruption (two thirds of single bit
flips read back as different data, without an error). Everything wrong is listed, not only the first finding.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from shards.cost import attention_pairs
from shards.errors import FormatError
from shards.manifest import add_counts, dataset_id, datasets_files, digest_files, empty_counts, imbalance, read_sidecar
from shards.plan import Plan, check_version, parse_plan, plan_id
from shards.publish import LocalStore, canonical
from shards.reader import Shard, check_size, read_index, read_manifest
from shards.schema import FORMAT, VERSION, Layout, layout_of, position_ids_of

Level = Literal["size", "sample", "full"]
SAMPLE_SHARDS = 8
MEND = "Restore it, or delete it and build with --resume."


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

    def add(self, rule: str, where: str, what: str, remedy: str = MEND) -> None:
        """Note a broken rule, and what mends it."""
        self.problems.append(Problem(rule, f"{where}: {what} (rule {rule}). {remedy}"))

    def add_error(self, error: FormatError) -> None:
        """Note a broken rule that a reader ran into."""
        self.problems.append(Problem(error.rule or "F1", str(error)))


def verify(path: str | Path, level: Level = "full", vocab_size: int | None = None) -> VerifyReport:
    """Check a dataset rule by rule.

    Args:
        path: The dataset directory.
        level: How much to read: size, sample or full.
        vocab_size: Also demand that every token id is below this (a model's vocabulary).

    Returns:
        The report; `report.ok` is False when any rule is broken.
    """
    root = Path(path)
    report = VerifyReport(str(path), level)
    try:
        manifest = read_manifest(root)
        plan = _check_plan(root, manifest)
    except FormatError as error:
        report.add_error(error)
        return report
    _check_tokenizer(root, manifest, report)
    whole = _check_files(root, manifest, report)
    _check_sidecars(root, manifest, report)
    _check_sums(root, plan, manifest, report)
    index = _check_index(root, manifest, report)
    chosen = _chosen(len(manifest["shards"]), level)
    first = 0
    for number, record in enumerate(manifest["shards"]):
        if number in chosen and record["file"] in whole:
            part = None if index is None else index.slice(first, record["rows"])
            _check_shard(root, plan, record, part, vocab_size, report)
        first += record["rows"]
    return report


def _chosen(num_shards: int, level: Level) -> set[int]:
    if level == "full":
        return set(range(num_shards))
    if level == "size" or not num_shards:
        return set()
    return {int(k) for k in np.linspace(0, num_shards - 1, min(SAMPLE_SHARDS, num_shards))}


def _check_plan(root: Path, manifest: dict[str, Any]) -> Plan:
    file = root / "plan.json"
    try:
        plan = parse_plan(file.read_bytes(), str(file))
    except FileNotFoundError as error:
        raise FormatError(f"{file}: is missing (rule F2). Restore it, or build again.", "F2") from error
    if plan_id(plan) != manifest["plan_id"]:
        raise FormatError(
            f"{file}: is not the plan that the manifest names (rule F2). Restore it, or build again.", "F2"
        )
    return plan


def _check_tokenizer(root: Path, manifest: dict[str, Any], report: VerifyReport) -> None:
    directory = root / "tokenizer"
    found = {file.name: file.read_bytes() for file in directory.glob("*")} if directory.is_dir() else {}
    if digest_files(found) != manifest["tokenizer_files"]:
        report.add("F15", str(directory), "does not hold the tokenizer files that the manifest lists")


def _check_files(root: Path, manifest: dict[str, Any], report: VerifyReport) -> set[str]:
    whole = set()
    for record in manifest["shards"]:
        try:
            check_size(root / record["file"], record["bytes"])
            whole.add(record["file"])
        except FormatError as error:
            report.add_error(error)
    listed = {record["file"] for record in manifest["shards"]}
    listed |= {f"shards/{record['window']:08d}.json" for record in manifest["shards"]}
    for name in sorted(LocalStore(root).sizes("shards")):
        if f"shards/{name}" not in listed:
            report.add("F3", f"shards/{name}", "is not listed in the manifest", "Move it away.")
    windows = [record["window"] for record in manifest["shards"]]
    if windows != list(range(len(windows))):
        report.add("F3", "manifest.json", f"lists windows {windows[:8]}…; expected each from 0 on, once")
    return whole


def _check_sidecars(root: Path, manifest: dict[str, Any], report: VerifyReport) -> None:
    store = LocalStore(root)
    by_source = {source["name"]: empty_counts() for source in manifest["sources"]}
    for record in manifest["shards"]:
        where = f"shards/{record['window']:08d}.json"
        try:
            sidecar = read_sidecar(store, record["window"])
            if sidecar is None:
                report.add("F5", where, "is missing", "Restore it, or build with --resume.")
                continue
            check_version(sidecar, where, "F5")
        except FormatError as error:
            report.add_error(error)
            continue
        if sidecar["plan_id"] != manifest["plan_id"]:
            report.add("F5", where, f"belongs to plan {sidecar['plan_id'][:12]}…, not {manifest['plan_id'][:12]}…")
        expected = {key: value for key, value in record.items() if key not in ("window", "source")}
        if sidecar["shard"] != expected or sidecar["source"] != record["source"]:
            report.add("F5", where, "does not describe the shard that the manifest lists")
        by_source[sidecar["source"]] = add_counts(by_source.get(sidecar["source"], empty_counts()), sidecar["counts"])
    for source in manifest["sources"]:
        if (
            not any(problem.rule == "F5" for problem in report.problems)
            and by_source[source["name"]] != source["counts"]
        ):
            report.add(
                "F14", "manifest.json", f"the counts of source {source['name']!r} are not the sum of its sidecars'"
            )


def _check_sums(root: Path, plan: Plan, manifest: dict[str, Any], report: VerifyReport) -> None:
    totals = empty_counts()
    for source in manifest["sources"]:
        totals = add_counts(totals, source["counts"])
    if wrong := imbalance(manifest["totals"]):
        report.add("F14", "manifest.json", wrong)
    sums = {
        key: sum(record[column] for record in manifest["shards"])
        for key, column in (("packs", "rows"), ("segments", "segments"))
    }
    if totals != manifest["totals"] or any(totals[key] != value for key, value in sums.items()):
        report.add("F14", "manifest.json", "the totals are not the sums of sources and shards")
    if totals["tokens"]["packed"] != sum(record["tokens"] for record in manifest["shards"]):
        report.add("F14", "manifest.json", "tokens packed is not the sum over shards")
    if manifest["dataset_id"] != dataset_id(manifest["plan_id"], manifest["shards"]):
        report.add("F1", "manifest.json", "dataset_id is not the digest of plan and shards")
    for name, content in datasets_files(plan, manifest).items():
        if LocalStore(root).get(name) != canonical(content):
            report.add("F16", name, "does not describe this dataset; datasets.load_from_disk would fail or mislead")


def _check_index(root: Path, manifest: dict[str, Any], report: VerifyReport) -> pa.Table | None:
    try:
        table = read_index(root, manifest["index"])
    except FormatError as error:
        report.add_error(error)
        return None
    if table.num_rows != manifest["totals"]["packs"]:
        report.add("F13", "index.arrow", f"has {table.num_rows:,} rows for {manifest['totals']['packs']:,} packs")
        return None
    return table


def _check_shard(
    root: Path, plan: Plan, record: dict[str, Any], index: pa.Table | None, vocab_size: int | None, report: VerifyReport
) -> None:
    file, layout = root / record["file"], layout_of(plan)
    if _hash(file) != record["xxh3_128"]:
        report.add("F4", record["file"], "does not match its checksum in the manifest")
        return
    try:
        shard = Shard(file, record["bytes"])
    except FormatError as error:
        report.add_error(error)
        return
    metadata = {"format": FORMAT, "version": str(VERSION), "plan_id": plan_id(plan), "window": str(record["window"])}
    if not shard.schema.equals(layout.schema(metadata), check_metadata=True):
        report.add(
            "F6", record["file"], f"has columns {shard.schema.names} of other types or metadata than the plan fixes"
        )
        return
    if len(shard) != record["rows"]:
        report.add("F6", record["file"], f"has {len(shard):,} rows, the manifest says {record['rows']:,}")
        return
    limit = min(vocab_size or 1 << 62, layout.max_token_id + 1)
    entries = {} if index is None else {name: index[name].to_numpy() for name in index.schema.names}
    segments = []
    for row in range(len(shard)):
        batch, local = shard.locate(row)
        columns: dict[str, Any] = {name: int(values[local]) for name, values in batch.rows.items()}
        columns |= {
            name: values[offsets[local] : offsets[local + 1]] for name, (values, offsets) in batch.lists.items()
        }
        for rule, what in _row_problems(columns, layout, limit, record["window"]):
            report.add(rule, f"{record['file']}, row {row}", what)
        for wrong in _index_problems(columns, entries, row):
            report.add("F13", f"index.arrow, pack of {record['file']} row {row}", wrong)
        segments.append((columns["doc_ids"], columns["doc_offsets"], np.diff(columns["cu_seqlens"])))
        report.tokens_checked += len(columns["input_ids"])
        report.packs_checked += 1
    _check_documents(record["file"], segments, report)
    report.shards_checked += 1


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()


def _row_problems(row: dict[str, Any], layout: Layout, limit: int, window: int) -> Iterator[tuple[str, str]]:
    cu, mask, num_tokens = row["cu_seqlens"].astype(np.int64), row["loss_mask"], len(row["input_ids"])
    if not 1 <= num_tokens <= layout.seq_len:
        yield "F7", f"holds {num_tokens} tokens; expected 1 to {layout.seq_len}"
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != num_tokens or (np.diff(cu) <= 0).any():
        yield "F7", f"cu_seqlens ends at {cu[-1] if len(cu) else None} for {num_tokens} tokens, or does not rise from 0"
        return
    lengths = np.diff(cu)
    if "position_ids" in row and not np.array_equal(row["position_ids"], position_ids_of(cu)):
        yield "F8", "position_ids do not restart at 0 in every segment"
    if len(mask) != num_tokens or (mask > 1).any() or mask[cu[:-1]].any():
        yield "F9", "loss_mask is not 0 or 1 for every token, or has a target at a segment start"
    figures = {
        "max_seqlen": int(lengths.max()),
        "num_targets": int(mask.sum()),
        "attention_pairs": int(attention_pairs(lengths).sum()),
    }
    figures["bucket"] = int(
        layout.buckets(np.array([figures["attention_pairs"]]), np.array([figures["max_seqlen"]]))[0]
    )
    for name, value in figures.items():
        if row[name] != value:
            yield "F10", f"{name} is {row[name]}; counted {value}"
    if (row["input_ids"] < 0).any() or (row["input_ids"] >= limit).any():
        place = int(np.flatnonzero((row["input_ids"] < 0) | (row["input_ids"] >= limit))[0])
        segment = int(np.searchsorted(cu, place, side="right")) - 1
        document = int(row["doc_ids"][segment]) if segment < len(row["doc_ids"]) else -1
        yield (
            "F11",
            f"token {place} (document {document}) is id {int(row['input_ids'][place])}; expected 0 to {limit - 1}",
        )
    if len(row["doc_ids"]) != len(lengths) or len(row["doc_offsets"]) != len(lengths):
        yield "F12", f"names {len(row['doc_ids'])} documents for {len(lengths)} segments"
    elif (row["doc_ids"] >> 32 != window).any() or (row["doc_offsets"] < 0).any():
        yield "F12", "doc_ids name another window, or doc_offsets are negative"


def _index_problems(row: dict[str, Any], entries: dict[str, np.ndarray], number: int) -> Iterator[str]:
    cu, mask = row["cu_seqlens"], row["loss_mask"]
    if len(cu) < 2 or cu[-1] != len(mask) or (np.diff(cu) <= 0).any():
        return  # F7 says so
    figures = {
        "num_tokens": len(mask),
        "num_segments": len(cu) - 1,
        "num_targets": row["num_targets"],
        "num_target_segments": int((np.add.reduceat(mask, cu[:-1], dtype=np.int64) > 0).sum()),
        "max_seqlen": row["max_seqlen"],
        "attention_pairs": row["attention_pairs"],
    }
    for name, values in entries.items():
        if values[number] != figures[name]:
            yield f"{name} is {values[number]}; counted {figures[name]}"


def _check_documents(
    file: str, segments: list[tuple[np.ndarray, np.ndarray, np.ndarray]], report: VerifyReport
) -> None:
    """F12: the segments of one document never overlap, so no token of it is there twice."""
    if not segments:
        return
    ids, offsets, lengths = (np.concatenate([part[k] for part in segments]) for k in range(3))
    if not len(ids) == len(offsets) == len(lengths):
        return  # already reported row by row
    order = np.lexsort((offsets, ids))
    ids, offsets, lengths = ids[order], offsets[order].astype(np.int64), lengths[order]
    overlap = (ids[1:] == ids[:-1]) & (offsets[1:] < offsets[:-1] + lengths[:-1])
    if overlap.any():
        report.add("F12", file, f"document {int(ids[1:][overlap][0])} has tokens that are packed twice")
