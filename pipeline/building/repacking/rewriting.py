"""A dataset written from another one: its directory prepared, the windows that are missing written, its commit."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.building.driver import BuildResult, explain_failure
from pipeline.building.output import Request, decide, finished_dataset, leftovers, owned_files, prepare, read_output
from pipeline.building.progress import Progress
from pipeline.building.sidecars import all_sidecars
from pipeline.config import RepackConfig
from shards.counts import Counts
from shards.errors import PackError
from shards.fetching.remote import io_errors, open_store
from shards.lock import Lock
from shards.manifest import Facts, Manifest, commit
from shards.plan import Plan, plan_id
from shards.publish import Store
from shards.sidecar import sidecar_name

WriteWindow = Callable[[int], Counts]
"Writes a window's shard and sidecar and returns its balance sheet."


@dataclass(frozen=True, kw_only=True)
class Output:
    """What output decisions need of a dataset that is not built from a corpus: the same fields as of a build's job."""

    plan: Plan
    plan_id: str
    sources: tuple[()]
    out: str
    tokenizer_files: dict[str, bytes]


def output_of(plan: Plan, out: str, dataset: Path) -> Output:
    """Return what a dataset with this plan is, with the tokenizer of the one that it comes from."""
    directory = dataset / "tokenizer"
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())} if directory.is_dir() else {}
    return Output(plan=plan, plan_id=plan_id(plan), sources=(), out=out, tokenizer_files=files)


def facts_of(facts: Facts) -> dict[str, Any]:
    """Return the facts about documents, which stay true however they are packed."""
    names = ("trained_end_ids", "spelled_controls", "unread_fields", "unrolled", "tokenizer_proofs")
    return {name: value for name, value in facts.items() if name in names}


def rewrite(
    output: Output,
    config: RepackConfig,
    num_windows: int,
    begin: Callable[[Store], WriteWindow],
    facts: dict[str, Any],
    progress: Progress,
) -> BuildResult:
    """Write one dataset, or go on with it, or find it finished.

    Args:
        output: What it is to be.
        config: Whether an older one is continued or removed.
        num_windows: Windows of the dataset that it comes from.
        begin: Called once, when there is something to do; what it returns is called for each window that is missing.
        facts: Facts of the manifest, beside the usual ones.
        progress: Where to report.

    Raises:
        PackError: The place belongs to something else, cannot be written, or nothing would be in the dataset.
    """
    store = open_store(output.out)
    try:
        with Lock(store, output.plan_id, alone=config.overwrite, on_message=progress.on_message) as lock:
            manifest = _run(output, config, num_windows, begin, facts, progress, store, lock)
    except io_errors() as error:
        raise explain_failure(error, output.out) from error
    except MemoryError as error:
        raise explain_failure(error, output.out) from error
    return BuildResult(path=output.out, plan_id=output.plan_id, manifest=manifest)


def _run(
    output: Output,
    config: RepackConfig,
    num_windows: int,
    begin: Callable[[Store], WriteWindow],
    facts: dict[str, Any],
    progress: Progress,
    store: Store,
    lock: Lock,
) -> Manifest:
    started = time.time()
    state = read_output(store, range(num_windows))
    decision = decide(state, Request(resume=config.resume, overwrite=config.overwrite), output)
    if decision.manifest is not None:
        progress.on_message(f"{output.out}: is already there (dataset {decision.manifest['dataset_id'][:12]})")
        return decision.manifest
    prepare(store, state, decision, output)
    lock.share()
    there = {
        number
        for number, window in state.windows.items()
        if decision.action == "continue"
        and window.plan_id == output.plan_id
        and state.sizes["shards"].get(window.shard) == window.shard_bytes
    }
    write_window = begin(store)
    progress.begin(None)
    for number in range(num_windows):
        lock.check()
        if number not in there:
            counts = write_window(number)
            progress.on_progress(counts["documents"]["packed"], counts["tokens"]["packed"], 0)
    usual: dict[str, Any] = {
        "shardpack": metadata.version("shardpack"),
        "host": platform.node(),
        "engine": "repack",
        "workers": 1,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.time() - started, 3),
    }
    return _commit(store, output, num_windows, usual | facts)


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
