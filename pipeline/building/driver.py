"""The driver of a build: plan, run the windows that are not there yet, commit.

    sources + tokenizer -> plan.json -> windows (any engine, any order) -> shards + sidecars -> index + manifest

What survives a crash is committed windows; resuming means running the windows without a valid sidecar of this plan. The
fast tokenizer engine may turn out wrong anywhere, so if a single window saw it fail, all that it wrote are built again
with the reference engine, before the commit.
"""

import errno
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import chain
from typing import Any

import xxhash

from pipeline.building.engines import ENGINES
from pipeline.building.inputs import changed_windows
from pipeline.building.output import (
    OutputState,
    decide,
    finished_dataset,
    leftovers,
    owned_files,
    prepare,
    read_output,
    reads_stdin,
)
from pipeline.building.planning import make_job
from pipeline.building.progress import Progress
from pipeline.building.sidecars import (
    CommittedWindow,
    NothingToTrainError,
    SidecarSummary,
    Tally,
    all_sidecars,
    check_totals,
    summarize_sidecars,
)
from pipeline.building.startup import SMALL_BYTES, EngineTrust, start_compiling
from pipeline.building.tasks import StreamTasks, all_tasks, first_tasks, planned_tasks
from pipeline.building.window import Job, Task
from pipeline.config import BuildConfig
from pipeline.documents.encoder import Encoder, EngineChoice
from pipeline.documents.engines import REFERENCE
from pipeline.documents.make import DocumentMaker
from pipeline.sources.discovery import check_unchanged
from pipeline.sources.files import changed
from pipeline.sources.reader import WindowReader
from shards.errors import PackError, counted
from shards.fetching.remote import io_errors, open_store
from shards.lock import Lock
from shards.manifest import Manifest, commit
from shards.publish import Store
from shards.schema import layout_of

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FIRST_RECORDS = 64  # of each source, tried before an older dataset is removed


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build made."""

    path: str
    "The dataset's directory or URL."
    plan_id: str
    manifest: Manifest | None
    "Of the dataset; None where windows are still to come."
    unfinished: int = 0
    "Windows that other parts of the build still have to make."
    holdout: "BuildResult | None" = None
    "The dataset of what was held out, where there is a hold-out."


def build(config: BuildConfig, progress: Progress | None = None) -> BuildResult:
    """Turn a corpus into a dataset.

    Args:
        config: What to build.
        progress: Where to report; silent by default.

    Returns:
        The dataset with its manifest; for a part of a build (`windows`) that is not the last, what is unfinished.

    Raises:
        PackError: Anything the user can fix: sources, tokenizer, options, output directory, disk.
    """
    progress = progress or Progress()
    if config.selects:
        from pipeline.building.selected import build_selected

        return build_selected(config, progress)
    begin = time.time()
    job = make_job(config, progress)
    store = open_store(job.out)
    try:
        with Lock(store, job.plan_id, alone=config.overwrite, on_message=progress.on_message) as lock:
            return _Build(job, config, store, progress, lock, begin).run()
    except io_errors() as error:
        # another build of this plan that ends first clears the unpublished files of all
        if isinstance(error, FileNotFoundError) and (finished := finished_dataset(store, job)) is not None:
            return BuildResult(path=job.out, plan_id=job.plan_id, manifest=finished)
        raise explain_failure(error, job.out) from error
    except MemoryError as error:
        raise explain_failure(error, job.out) from error


def explain_failure(error: Exception, out: str) -> PackError:
    """Say what a failing system means for what is written to `out`."""
    if isinstance(error, MemoryError):
        return PackError(
            f"{out}: out of memory; the windows that are done are kept. "
            "Run the same command with `resume=True` and fewer `workers`."
        )
    number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
    if number in (errno.ENOTDIR, errno.EEXIST):
        return PackError(f"{out}: is a file, or lies in one; expected a directory. Choose another `out`.")
    what, remedy = ("no space left", "Make room") if number in FULL else ("cannot be written", "Fix the disk")
    return PackError(
        f"{out}: {what} ({reason}); the windows that are done are kept. "
        f"{remedy}, then run the same command with `resume=True`."
    )


class _Build:
    """One run of a build: what its steps share."""

    def __init__(
        self, job: Job, config: BuildConfig, store: Store, progress: Progress, lock: Lock, begin: float
    ) -> None:
        self.job, self.config, self.store, self.progress, self.lock = job, config, store, progress, lock
        self.begin = begin
        self.stream = StreamTasks(job.plan, job.sources)
        self.num_windows = len(job.plan["windows"])
        sizes = [file.bytes for source in job.sources for file in source.files]
        self.raw_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self.tokens_read = 0
        self.wait_s = 0.0

    def run(self) -> BuildResult:
        """Prepare the directory, run what is missing, redo what is in doubt, commit."""
        job, config, progress = self.job, self.config, self.progress
        state = read_output(self.store, config.window_range(len(job.plan["windows"])))
        decision = decide(state, config, job)
        committed = self._still_valid(state)
        if decision.manifest is not None:
            self._refuse_newer_corpus(state, committed)
            identity = decision.manifest["dataset_id"][:12]
            progress.on_message(f"{job.out}: is already built (dataset {identity}); nothing to do")
            return BuildResult(path=job.out, plan_id=job.plan_id, manifest=decision.manifest)
        if decision.action == "start" and decision.remove:
            self._try_first_records()
        prepare(self.store, state, decision, job)
        self.lock.share()
        contents = [image.content for image in job.images.values()]
        encodes = not config.finalize and any(source.options.kind != "tokens" for source in job.sources)
        size = self.raw_bytes if encodes else 0
        trust = EngineTrust(contents, config.tokenizer_engine, size, config.workers, progress.on_message)
        self.job = replace(job, engines=trust.choice)
        try:
            if not config.finalize:
                self._run_windows({} if decision.action == "start" else committed)
            return self._result(trust)
        finally:
            trust.stop()

    def _result(self, trust: EngineTrust) -> BuildResult:
        """Commit, unless other parts of the build still have windows to make."""
        job, config = self.job, self.config
        there = self.store.sizes("shards")
        missing = sum(f"{number:08d}.json" not in there for number in range(self.num_windows))
        if missing and config.windows and not config.finalize:
            self.progress.on_message(
                f"{job.out}: {missing:,} of {counted(self.num_windows, 'window')} still to come; the last part commits"
            )
            return BuildResult(path=job.out, plan_id=job.plan_id, manifest=None, unfinished=missing)
        return BuildResult(path=job.out, plan_id=job.plan_id, manifest=self._finish(trust))

    def _still_valid(self, state: OutputState) -> dict[int, CommittedWindow]:
        """Return the committed windows of this plan whose shard is there and whose corpus is as it was."""
        found = {
            number: window
            for number, window in state.windows.items()
            if window.plan_id == self.job.plan_id and state.sizes["shards"].get(window.shard) == window.shard_bytes
        }
        for window in changed_windows(found.values(), self.job.sources, every=self.config.check):
            self.progress.on_message(f"{self._files_of(window)}: changed since window {window.window} was built")
            del found[window.window]
        return found

    def _files_of(self, window: CommittedWindow) -> str:
        source = next(source for source in self.job.sources if source.name == window.source)
        return ", ".join(sorted({source.files[slice_.file].name for slice_ in window.slices})[:3])

    def _refuse_newer_corpus(self, state: OutputState, valid: dict[int, CommittedWindow]) -> None:
        """Refuse a finished dataset whose corpus holds other bytes than it was built from."""
        changed = [window for number, window in state.windows.items() if number not in valid]
        if changed:
            raise PackError(
                f"{self.job.out}: holds a dataset of another version of the corpus: {self._files_of(changed[0])} "
                f"changed since (in {counted(len(changed), 'window')}); expected the same bytes. "
                "Choose another `out`, or `overwrite=True`."
            )

    def _try_first_records(self) -> None:
        """Make documents of the first records of every source: nothing is removed for a build that cannot begin.

        Raises:
            PackError: They cannot be read.
        """
        job = self.job
        for task in first_tasks(job.plan, job.sources, self.stream):
            source = job.sources[task.source]
            reader = WindowReader(source, task.slices, on_error=job.on_error, payloads=task.payloads)
            batch = next(iter(reader), None)
            if batch is None:
                continue
            special = source.options.parse_special
            encoder = Encoder(job.images[special], engine=REFERENCE, parse_special=special)
            DocumentMaker(encoder, source.options).make(batch.head(FIRST_RECORDS))
            if len(reader.rejected) == reader.num_records > 0 and self.config.max_rejected < 1:
                raise PackError(f"{reader.rejected[0]}; expected records that can be read. Nothing was removed.")

    def _run_windows(self, committed: dict[int, CommittedWindow]) -> None:
        """Run what is missing."""
        job, config = self.job, self.config
        self.progress.begin(self.raw_bytes)
        if self.raw_bytes is None or self.raw_bytes > SMALL_BYTES:
            start_compiling(layout_of(job.plan), self.progress.on_message)
        begin, busy_s, tally = time.perf_counter(), 0.0, Tally(config.max_rejected)

        def unfinished(tasks: Iterable[Task]) -> Iterator[Task]:
            for task in tasks:
                window = committed.get(task.window)
                if window is None or (task.payloads is not None and window.input_xxh3 != _digest(task.payloads)):
                    yield task
                else:
                    tally.add(window.counts)
                    self.progress.on_progress(window.counts["documents"]["read"], 0, window.raw_bytes)

        planned = planned_tasks(job.plan, config.window_range(len(job.plan["windows"])))
        workers = config.workers if self.stream.files else max(1, min(config.workers, len(planned)))
        for record in ENGINES[config.engine](job, unfinished(chain(planned, self.stream)), workers):
            self.lock.check()
            counts = record["counts"]
            tally.add(counts)
            busy_s += record["busy_s"]
            self.tokens_read += counts["tokens"]["read"]
            self.progress.on_progress(counts["documents"]["read"], counts["tokens"]["read"], record["raw_bytes"])
        self.num_windows = self.stream.next_window
        self.wait_s = max(0.0, workers * (time.perf_counter() - begin) - busy_s)

    def _finish(self, trust: EngineTrust) -> Manifest:
        """Look at all windows together, build again what is in doubt, and commit."""
        job, config = self.job, self.config
        check_unchanged(job.sources)
        summary = self._summarize()
        proofs = trust.settle(summary.unproven)
        settled = {(proof.engine, proof.version) for proof in proofs}
        differed = summary.engine_differed or any(proof.result != "equal" for proof in proofs)
        if (differed or summary.unproven - settled) and summary.fast_windows:
            self.progress.on_message(
                "the fast tokenizer engine gave other ids than the reference somewhere; "
                f"building its {counted(len(summary.fast_windows), 'window')} again with {REFERENCE}"
            )
            rebuild_with_reference(job, config, summary.fast_windows)
            summary = self._summarize()
        for window in changed_windows(summary.windows, job.sources):
            raise changed(self._files_of(window))
        try:
            check_totals(summary.totals, job.sources)
        except NothingToTrainError:
            self._discard()
            raise
        facts = {
            "shardpack": metadata.version("shardpack"),
            "host": platform.node(),
            "engine": config.engine,
            "workers": config.workers,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.time() - self.begin, 3),
            "tokens_read": self.tokens_read,  # in these seconds: fewer than all where parts were there already
            "stages_s": {"wait": round(self.wait_s, 6)},
            "trained_end_ids": sorted(summary.trained_end_ids),
            "unrolled": summary.unrolled,
            "unread_fields": summary.unread_fields,
            "spelled_controls": summary.spelled_controls,
            "tokenizer_proofs": [asdict(proof) for proof in proofs],
        }
        return self._commit(summary, facts)

    def _summarize(self) -> SidecarSummary:
        return summarize_sidecars(self.store, self.job.plan_id, self.num_windows, self.config.max_rejected)

    def _discard(self) -> None:
        """Remove windows that nobody could train on, so that they do not stand in the way of the corrected command."""
        for name in owned_files(read_output(self.store)):
            self.store.remove(name)
        self.store.sweep(everything=True)

    def _commit(self, summary: SidecarSummary, facts: dict[str, Any]) -> Manifest:
        """Write index and manifest, and clear what crashed attempts left behind."""
        store, job = self.store, self.job
        self.lock.check()
        try:
            for name in leftovers(store, summary.files, self.num_windows):
                store.remove(name)
            sidecars = all_sidecars(store, job.plan_id, self.num_windows)
            manifest = commit(store, job.plan, sidecars, job.tokenizer_files, facts)
            store.sweep(everything=True)
        except (PackError, FileNotFoundError):  # the last two parts of a job array may end at the same moment
            finished = finished_dataset(store, job)
            if finished is None:
                raise
            return finished
        return manifest


def rebuild_with_reference(job: Job, config: BuildConfig, windows: set[int]) -> None:
    """Build windows again with the reference engine."""
    if reads_stdin(job):
        raise PackError(
            "the fast tokenizer engine gave other ids than the reference, and stdin cannot be read again for what it "
            f'wrote. Run the command again with `overwrite=True` and `tokenizer_engine="{REFERENCE}"`.'
        )
    tasks = (task for task in all_tasks(job.plan, job.sources) if task.window in windows)
    workers = min(config.workers, len(windows))
    for _ in ENGINES[config.engine](replace(job, engines=EngineChoice()), tasks, workers):
        pass


def _digest(payloads: Sequence[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(payloads))
