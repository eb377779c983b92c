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

from pipeline.building.driver import BuildResult, explain_failure
from pipeline.building.drop_list import DropList, read_drop_list
from pipeline.building.joining import join_documents
from pipeline.building.output import Request, decide, finished_dataset, leftovers, owned_files, prepare, read_output
from pipeline.building.planning import ALGORITHM_VERSION
from pipeline.building.progress import Progress
from pipeline.building.repacked_window import repack_window, sidecar_of
from pipeline.building.selection import Selection
from pipeline.building.sidecars import all_sidecars
from pipeline.config import RecordOptions, RepackConfig
from pipeline.formatting import unasked
from pipeline.packing.packers import PACKERS
from shards.errors import PackError, counted
from shards.fetching.remote import io_errors, open_store
from shards.lock import Lock
from shards.manifest import Manifest, commit
from shards.plan import Plan, plan_id
from shards.publish import LocalStore, Store
from shards.reader import Dataset
from shards.sidecar import sidecar_name


@dataclass(frozen=True, kw_only=True)
class Output:
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
        The new dataset with its manifest, and that of what is held out, where there is a hold-out.

    Raises:
        PackError: The dataset cannot be read, the settings do not fit it, or the output belongs to something else.
    """
    progress = progress or Progress()
    dataset = Dataset(config.dataset)
    drop = None if config.drop is None else read_drop_list(config.drop, config.drop_where)
    if drop is not None:
        check_drop_list(drop, dataset)
    sides = selections(config, drop, dataset.plan)
    for out, _ in sides:
        if Path(config.dataset).resolve() == Path(out).resolve():
            raise PackError(f"`out`: {out} is the dataset itself; expected another directory.")
    results = [  # the hold-out first: where `out` is finished, it is there
        _repack_side(dataset, config, out, selection, progress) for out, selection in reversed(sides)
    ]
    return replace(results[-1], holdout=results[0] if len(results) > 1 else None)


def selections(config: RepackConfig, drop: DropList | None, plan: Plan) -> list[tuple[str, Selection]]:
    """Return the datasets that a repacking gives: where each goes, and which documents it keeps."""
    sides = [(str(config.out), False)] + ([] if config.holdout is None else [(config.holdout_path, True)])
    same: dict[str, Any] = {"drop": drop, "dedup": config.dedup is not None, "holdout": config.holdout}
    return [(out, Selection(**same, held_out=held_out, before=plan.get("select", ()))) for out, held_out in sides]


def check_drop_list(drop: DropList, dataset: Dataset) -> None:
    """Refuse a list of another corpus, or that names records which the dataset's corpus does not have.

    Raises:
        PackError: Names the file, the row and the document.
    """
    drop.check_corpus(dataset.plan)
    drop.check_windows(len(dataset.shards))
    store = LocalStore(dataset.path)
    for window in np.unique(drop.doc_ids >> 32).tolist():
        drop.check(window, sum(count for *_, count in sidecar_of(store, window)["spans"]))


def _repack_side(
    dataset: Dataset, config: RepackConfig, out: str, selection: Selection, progress: Progress
) -> BuildResult:
    """Write one dataset of those that a repacking gives."""
    begin, plan = time.time(), repacked_plan(dataset.plan, config, selection)
    files = {path.name: path.read_bytes() for path in sorted((dataset.path / "tokenizer").iterdir())}
    output = Output(plan=plan, plan_id=plan_id(plan), sources=(), out=out, tokenizer_files=files)
    store = open_store(out)
    try:
        with Lock(store, output.plan_id, alone=config.overwrite, on_message=progress.on_message) as lock:
            manifest = _run(dataset, output, config, selection, store, progress, lock, begin)
    except io_errors() as error:
        raise explain_failure(error, out) from error
    except MemoryError as error:
        raise explain_failure(error, out) from error
    return BuildResult(path=out, plan_id=output.plan_id, manifest=manifest)


def repacked_plan(plan: Plan, config: RepackConfig, selection: Selection) -> Plan:
    """Return the plan that a build with these settings would have written.

    What is selected is added to what was selected before.

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
    selected = [*plan.get("select", ()), *filter(None, [selection.plan_entry()])]
    new: Plan = {
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
    if selected:
        new["select"] = selected
    return new


def _run(
    dataset: Dataset,
    output: Output,
    config: RepackConfig,
    selection: Selection,
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
    lost = unasked(dataset.manifest["totals"]["tokens"]["lost"])
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
    if selection.dedup:
        selection.find_duplicates((number, join_documents(dataset, number)) for number in range(num_windows))
    options = {source["name"]: RecordOptions(**source["records"]) for source in output.plan["sources"]}
    progress.begin(None)
    for number in range(num_windows):
        lock.check()
        if number not in there:
            source = dataset.shards[number]["source"]
            counts = repack_window(dataset, number, output.plan, options[source], selection, store)
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
            for name in ("trained_end_ids", "spelled_controls", "unread_fields", "unrolled", "tokenizer_proofs")
            if name in dataset.manifest["facts"]
        },
    }
    return _commit(store, output, num_windows, facts)


def _commit(store: Store, output: Output, num_windows: int, facts: dict[str, Any]) -> Manifest:
    kept, packed = set[str](), 0
    for sidecar in all_sidecars(store, output.plan_id, num_windows):
        kept |= {sidecar["shard"]["file"], sidecar_name(sidecar["window"])}
        packed += sidecar["counts"]["documents"]["packed"]
    if not packed:
        for name in owned_files(read_output(store)):
            store.remove(name)
        store.sweep(everything=True)
        raise PackError(
            f"{output.out}: no document is left for it; expected at least one. Choose a larger `holdout`, a shorter "
            "`drop` list, or another `seq_len` or `overlong`."
        )
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
