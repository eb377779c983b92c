"""Another dataset from the tokens of one: other `seq_len`, packer, seed, cut or alignment, and no tokenizer runs.

Window by window the segments of a document are joined again, wherever they were packed, and cut and packed anew. The
plan is the one that a build with these settings would have written, so where the first build lost nothing, the shards
and the dataset id are those of that build, byte for byte. What it did lose stays lost, and is counted as it was.
"""

import platform
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.building.driver import ALGORITHM_VERSION, BuildResult, explain_failure
from pipeline.building.output import Request, decide, finished_dataset, leftovers, prepare, read_output
from pipeline.building.progress import Progress
from pipeline.building.sidecars import all_sidecars
from pipeline.building.stages import Stages
from pipeline.config import RecordOptions, RepackConfig
from pipeline.packing.accounting import Balance, cut_documents
from pipeline.packing.packers import PACKERS, lower_bound
from pipeline.packing.rows import align_up, assemble_rows
from pipeline.tokens import Documents
from shards.counts import Counts, length_histogram
from shards.errors import PackError, counted
from shards.fetching.remote import io_errors, open_store
from shards.lock import Lock
from shards.manifest import Manifest, commit
from shards.plan import Plan, plan_id
from shards.publish import LocalStore, Store, seal
from shards.reader import Dataset
from shards.schema import layout_of
from shards.sidecar import MAX_LONGEST, LongDocument, Sidecar, make_sidecar, read_sidecar, sidecar_name
from shards.writer import write_shard


@dataclass(frozen=True)
class StoredWindow:
    """The documents of one window, joined from the segments that were packed."""

    documents: Documents
    first_offsets: np.ndarray
    "Place of each document's first token in the document as it was tokenized; int64 (num_documents,)."
    first_targets: np.ndarray
    "1 where that token was a target before a cut; uint8 (num_documents,)."
    first_weights: np.ndarray | None
    "The weight of that target; float16 (num_documents,), None in a dataset without weights."


@dataclass(frozen=True, kw_only=True)
class _Output:
    """What output decisions need of a repacking: the same fields as of a build's job."""

    plan: Plan
    plan_id: str
    sources: tuple[()]
    out: str
    tokenizer_files: dict[str, bytes]


def repack(config: RepackConfig, progress: Progress | None = None) -> BuildResult:
    """Pack the documents of a dataset anew.

    Args:
        config: What to make of which dataset.
        progress: Where to report; silent by default.

    Returns:
        The new dataset with its manifest.

    Raises:
        PackError: The dataset cannot be read, the settings do not fit it, or the output belongs to something else.
    """
    progress, begin = progress or Progress(), time.time()
    dataset = Dataset(config.dataset)
    plan = repacked_plan(dataset.plan, config)
    files = {path.name: path.read_bytes() for path in sorted((dataset.path / "tokenizer").iterdir())}
    output = _Output(plan=plan, plan_id=plan_id(plan), sources=(), out=str(config.out), tokenizer_files=files)
    if Path(config.dataset).resolve() == Path(config.out).resolve():
        raise PackError(f"`out`: {config.out} is the dataset itself; expected another directory.")
    store = open_store(output.out)
    try:
        with Lock(store, output.plan_id, alone=config.overwrite, on_message=progress.on_message) as lock:
            manifest = _run(dataset, output, config, store, progress, lock, begin)
    except io_errors() as error:
        raise explain_failure(error, output.out) from error
    except MemoryError as error:
        raise explain_failure(error, output.out) from error
    return BuildResult(path=output.out, plan_id=output.plan_id, manifest=manifest)


def repacked_plan(plan: Plan, config: RepackConfig) -> Plan:
    """Return the plan that a build with these settings would have written.

    Raises:
        PackError: The settings do not fit what the dataset stores.
    """
    records = [RecordOptions(**source["records"]) for source in plan["sources"]]
    if config.overlong is not None:
        records = [replace(options, overlong=config.overlong) for options in records]
    packer = config.packer or plan["packer"]["name"]
    if PACKERS[packer].cut_policy is not None and config.overlong not in (None, "auto", "split"):
        raise PackError(f'`overlong`: `packer="{packer}"` cuts every document where a row is full. Omit `overlong`.')
    turn_ends = any(options.overlong_policy == "truncate-turns" for options in records)
    if turn_ends and not plan["turn_ends"]:
        raise PackError(
            f'`overlong="truncate-turns"`: {config.dataset} does not store where turns end; expected a dataset that '
            "was built with it. Build again from the corpus, or choose split, truncate or drop."
        )
    seq_len = config.seq_len or plan["seq_len"]
    if seq_len % config.align:
        raise PackError(f"`align`: {config.align} does not divide `seq_len` {seq_len:,}; expected a divisor.")
    return {
        **plan,
        "recipe": ALGORITHM_VERSION,
        "seq_len": seq_len,
        "seed": plan["seed"] if config.seed is None else config.seed,
        "align": config.align,
        # with padding, "all but the first token of a segment" would not say which tokens are targets
        "loss_mask": config.align > 1 or any(options.kind != "text" or options.weighted for options in records),
        "turn_ends": turn_ends,
        "packer": {"name": packer, "max_segments": config.max_segments or plan["packer"]["max_segments"]},
        "sources": [
            {**source, "records": options.as_plan()} for source, options in zip(plan["sources"], records, strict=True)
        ],
    }


def _run(
    dataset: Dataset,
    output: _Output,
    config: RepackConfig,
    store: Store,
    progress: Progress,
    lock: Lock,
    begin: float,
) -> Manifest:
    """Prepare the directory, repack the windows that are missing, commit."""
    num_windows = len(dataset.shards)
    request = Request(resume=config.resume, overwrite=config.overwrite)
    state = read_output(store, range(num_windows))
    decision = decide(state, request, output)
    if decision.manifest is not None:
        progress.on_message(f"{output.out}: is already there (dataset {decision.manifest['dataset_id'][:12]})")
        return decision.manifest
    prepare(store, state, decision, output)
    lock.share()
    lost = dataset.manifest["totals"]["tokens"]["lost"]
    if lost:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(lost.items()))
        progress.on_message(
            f"{config.dataset}: its build lost {counted(sum(lost.values()), 'token')} ({reasons}), which stay lost; "
            "a build from the corpus would give another dataset"
        )
    there = {
        number
        for number, window in state.windows.items()
        if decision.action == "continue"
        and window.plan_id == output.plan_id
        and state.sizes["shards"].get(window.shard) == window.shard_bytes
    }
    options = {source["name"]: RecordOptions(**source["records"]) for source in output.plan["sources"]}
    progress.begin(None)
    for number in range(num_windows):
        lock.check()
        if number not in there:
            counts = repack_window(dataset, number, output.plan, options[dataset.shards[number]["source"]], store)
            progress.on_progress(counts["documents"]["packed"], counts["tokens"]["packed"], 0)
    facts: dict[str, Any] = {
        "shardpack": metadata.version("shardpack"),
        "host": platform.node(),
        "engine": "repack",
        "workers": 1,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.time() - begin, 3),
        "repacked_from": {"dataset_id": dataset.dataset_id, "seq_len": dataset.seq_len, "packer": dataset.packer},
        **{
            name: dataset.manifest["facts"][name]
            for name in ("trained_end_ids", "spelled_controls")
            if name in dataset.manifest["facts"]
        },
    }
    return _commit(store, output, num_windows, facts)


def _commit(store: Store, output: _Output, num_windows: int, facts: dict[str, Any]) -> Manifest:
    kept = {
        name
        for sidecar in all_sidecars(store, output.plan_id, num_windows)
        for name in (sidecar["shard"]["file"], sidecar_name(sidecar["window"]))
    }
    for name in leftovers(store, kept, num_windows):
        store.remove(name)
    try:
        sidecars = all_sidecars(store, output.plan_id, num_windows)
        manifest = commit(store, output.plan, sidecars, output.tokenizer_files, facts)
        store.sweep(everything=True)
    except (PackError, FileNotFoundError):  # two that repack alike may end at the same moment
        finished = finished_dataset(store, output)
        if finished is None:
            raise
        return finished
    return manifest


def repack_window(dataset: Dataset, number: int, plan: Plan, options: RecordOptions, store: Store) -> Counts:
    """Pack the documents of one window anew, publish and commit it; return its counts."""
    stages, layout = Stages(), layout_of(plan)
    before = read_sidecar(LocalStore(dataset.path), number)
    if before is None:
        raise PackError(f"{dataset.path}: window {number} has no sidecar; expected a whole dataset. Run pack verify.")
    with stages.time("read"):
        stored = join_documents(dataset, number)
    documents = stored.documents
    with stages.time("pack"):
        packer = PACKERS[plan["packer"]["name"]]
        segments, balance = cut_documents(documents, options, layout.seq_len, packer.cut_policy)
        slots = align_up(segments.length, layout.align)
        limits = {"max_segments": plan["packer"]["max_segments"]}
        bins = packer(slots, layout.seq_len, seed=plan["seed"] + number, **limits)
        bound = lower_bound(slots, layout.seq_len, **limits)
    with stages.time("assemble"):
        rows = assemble_rows(documents, segments, bins, layout)
        document, begins = segments.document[bins.order], segments.start[bins.order] == 0
        rows = replace(
            rows,
            doc_offsets=(rows.doc_offsets + stored.first_offsets[document]).astype(np.int32),
            start_targets=np.where(begins, stored.first_targets[document], rows.start_targets).astype(np.uint8),
        )
        if rows.start_weights is not None and stored.first_weights is not None:
            weights = np.where(begins, stored.first_weights[document], rows.start_weights)
            rows = replace(rows, start_weights=weights.astype(np.float16))
    heads = int(stored.first_targets.sum())
    counts = _counts(before["counts"], balance, heads, len(segments.length), len(rows))
    with stages.time("write"):
        shard = write_shard(store, layout, plan_id(plan), number, rows)
    sidecar = make_sidecar(
        plan_id=plan_id(plan),
        window=number,
        source=before["source"],
        shard=shard,
        counts=counts,
        index=rows.index(layout),
        bound_packs=bound,
        lengths=before["lengths"],
        segment_lengths=length_histogram(segments.length),
        longest=_longest(before, documents, layout.seq_len),
        spans=before["spans"],
        input_xxh3=before["input_xxh3"],
        raw_bytes=before["raw_bytes"],
        rejected=before["rejected"],
        facts={**before["facts"], "stages_s": {name: round(seconds, 6) for name, seconds in stages.seconds.items()}},
    )
    store.put(sidecar_name(number), seal(sidecar))
    return counts


def join_documents(dataset: Dataset, number: int) -> StoredWindow:
    """Return the documents of a window as they were tokenized, in their order.

    A document of 10 tokens that was cut at 6 lies in two packs, as (offset 0, 6 tokens) and (offset 6, 4 tokens):
    sorted by document and offset, its pieces stand behind each other, and their tokens end to end are the document.
    """
    first = int(dataset.shards.columns["first_pack"][number])
    rows = [dataset[pack] for pack in range(first, first + dataset.shards[number]["rows"])]
    tokens = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    bounds = [row["cu_seqlens"].astype(np.int64) + start for row, start in zip(rows, tokens, strict=False)]
    starts = _joined([each[:-1] for each in bounds], np.int64)
    real = [row["segment_lens"] for row in rows] if dataset.layout.align > 1 else map(np.diff, bounds)
    lengths = _joined(list(real), np.int64)
    ids, parts, offsets, cut_targets = (
        _joined([row[name] for row in rows], np.int64)
        for name in ("doc_ids", "doc_parts", "doc_offsets", "start_targets")
    )
    order = np.lexsort((offsets, parts, ids))
    ids, parts, offsets, cut_targets = ids[order], parts[order], offsets[order], cut_targets[order]
    lengths = lengths[order]
    new = np.ones(len(order), bool)
    new[1:] = (ids[1:] != ids[:-1]) | (parts[1:] != parts[:-1])
    heads = np.flatnonzero(new)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    numbers = np.repeat(np.arange(len(rows)), [len(each) - 1 for each in bounds])[order]
    begins = starts[order] - tokens[numbers]
    spans = list(zip(numbers.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True))
    mask = weights = cut_weights = None
    if dataset.layout.loss_mask:
        mask = _collect([row["loss_mask"] for row in rows], spans, np.uint8)
        mask[ends[:-1]] = cut_targets
    if dataset.layout.loss_weights:
        weights = _collect([row["loss_weights"] for row in rows], spans, np.float16)
        cut_weights = _joined([row["start_weights"] for row in rows], np.float16)[order]
        weights[ends[:-1]] = cut_weights
    documents = Documents(
        input_ids=_collect([row["input_ids"] for row in rows], spans, np.int32),
        offsets=np.append(ends[heads], ends[-1]),
        doc_ids=ids[heads],
        loss_mask=mask,
        loss_weights=weights,
        doc_parts=parts[heads].astype(np.int32) if parts.any() else None,
    )
    if dataset.plan["turn_ends"]:
        turns = _joined([row["turn_ends"] + start for row, start in zip(rows, tokens, strict=False)], np.int64)
        documents = _with_turns(documents, turns, starts, order, ends)
    first_weights = None if cut_weights is None else cut_weights[heads]
    return StoredWindow(documents, offsets[heads], cut_targets[heads].astype(np.uint8), first_weights)


def _with_turns(
    documents: Documents, turns: np.ndarray, starts: np.ndarray, order: np.ndarray, ends: np.ndarray
) -> Documents:
    """Add where turns end, given as places among the tokens of all packs of the window."""
    segment = np.searchsorted(starts, turns, side="left") - 1  # a turn may end where its segment does
    place = np.empty(len(order), np.int64)
    place[order] = ends[:-1]
    joined = np.sort(place[segment] + turns - starts[segment])
    owner = np.searchsorted(documents.offsets, joined, side="left") - 1
    counts = np.bincount(owner, minlength=len(documents.doc_ids))
    return documents._replace(
        turn_ends=(joined - documents.offsets[owner]).astype(np.int32),
        turn_offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


def _collect(rows: list[np.ndarray], spans: list[tuple[int, int, int]], dtype: Any) -> np.ndarray:
    """Return slices (row, begin, end) end to end: one copy each, which beats an index for every token."""
    return _joined([rows[row][begin:end] for row, begin, end in spans], dtype)


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _counts(before: Counts, balance: Balance, heads: int, num_segments: int, num_packs: int) -> Counts:
    """Return the balance of a repacked window: what the corpus gave, what was lost then, and what is lost now.

    Targets that cuts had made first tokens are back, and lost again only where a new cut does so. But the `heads`,
    which begin documents whose beginning was truncated, stay lost.
    """
    then = {reason: number for reason, number in before["targets"]["lost"].items() if reason != "boundary"}
    if heads:
        then["boundary"] = heads
    return {
        "documents": {
            **balance.documents,
            "read": before["documents"]["read"],
            "truncated": before["documents"]["truncated"] + balance.documents["truncated"],
            "dropped": _sum(before["documents"]["dropped"], balance.documents["dropped"]),
        },
        "tokens": {
            "read": before["tokens"]["read"],
            "packed": balance.tokens["packed"],
            "lost": _sum(before["tokens"]["lost"], balance.tokens["lost"]),
        },
        "targets": {
            "read": before["targets"]["read"],
            "packed": balance.targets["packed"],
            "lost": _sum(then, balance.targets["lost"]),
        },
        "segments": num_segments,
        "packs": num_packs,
    }


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {reason: left.get(reason, 0) + right.get(reason, 0) for reason in sorted(left.keys() | right.keys())}


def _longest(before: Sidecar, documents: Documents, seq_len: int) -> list[LongDocument]:
    """Return the longest documents above `seq_len`, as they were tokenized."""
    lengths = documents.lengths
    known = {entry["doc_id"]: entry["tokens"] for entry in before["longest"]}
    found = {int(documents.doc_ids[k]): int(lengths[k]) for k in np.flatnonzero(lengths > seq_len)} | known
    chosen = sorted((item for item in found.items() if item[1] > seq_len), key=lambda item: (-item[1], item[0]))
    return [{"doc_id": number, "tokens": tokens} for number, tokens in chosen[:MAX_LONGEST]]
