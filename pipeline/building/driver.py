"""The driver of a build: plan, run the windows that are not there yet, commit.

    sources + tokenizer -> plan.json -> windows (any engine, any order) -> shards + sidecars -> index + manifest

What survives a crash is committed windows; resuming means running the windows without a valid sidecar of this plan. The
fast tokenizer engine may turn out wrong anywhere, so if a single window saw it fail, all that it wrote are built again
with the reference engine, before the commit.
"""

import errno
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from importlib import metadata
from itertools import chain
from typing import Any

import xxhash

from pipeline.building.engines import ENGINES, start_server
from pipeline.building.output import OWN, finished_dataset, prepare, reads_stdin
from pipeline.building.sidecars import Survey, Tally, all_sidecars, check_totals, take_survey
from pipeline.building.startup import SMALL_BYTES, start_compiling
from pipeline.building.stores import io_errors, open_store
from pipeline.building.window import Job, Task
from pipeline.config import BuildConfig
from pipeline.documents.encoder import REFERENCE
from pipeline.documents.make import check_options, with_trained_template
from pipeline.documents.tokenizer import load_spec, spec_from_files
from pipeline.packing.packers import PACKERS
from pipeline.sources.discovery import check_unchanged, resolve_sources
from pipeline.sources.streams import stream_windows
from pipeline.sources.windows import Slice, Source, Window, cut_windows, enumerate_streams, streamed_files
from shards.errors import FormatError, PackError, counted
from shards.manifest import commit
from shards.plan import Plan, TokenizerPlan, make_plan, make_source, plan_id
from shards.publish import Store
from shards.schema import layout_of
from shards.sidecar import Sidecar, read_sidecar

Record = dict[str, Any]
RECIPE = 2  # raise it when the same plan would give other bytes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Progress:
    """What a build tells while it runs; the command line shows it, the default is silence."""

    def begin(self, raw_bytes: int | None) -> None:
        """Take the size of the corpus, where it is known."""

    def tick(self, documents: int, tokens: int, raw_bytes: int) -> None:
        """Count what was done since the last call."""

    def say(self, message: str) -> None:
        """Show one line."""


def build(config: BuildConfig, progress: Progress | None = None) -> Record:
    """Turn a corpus into a dataset.

    Args:
        config: What to build.
        progress: Where to report; silent by default.

    Returns:
        The manifest; for a part of a build (`windows`) that is not the last, the plan's id and `unfinished`.

    Raises:
        PackError: Anything the user can mend: sources, tokenizer, options, output directory, disk.
    """
    progress = progress or Progress()
    begin = time.time()
    _refuse_idle_policy(config)
    out = str(config.out)
    sources = resolve_sources(config.source_arguments, config.records, config.source_records)
    for source in sources:
        if source.skipped:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(source.skipped.items()))
            progress.say(f"source {source.name!r}: files left out: {kinds}")
    streamed = enumerate_streams(sources)
    if (config.windows or config.finalize) and streamed:
        name = sources[streamed[0][0]].files[streamed[0][1]].name
        raise PackError(
            f"--windows, --finalize: {name} cannot be cut unread; expected plain files. "
            "Decompress it, or convert it to JSONL or Parquet first."
        )
    windows, part_bytes = cut_windows(sources, config.window_bytes)
    if config.engine == "local" and config.workers > 1 and (streamed or len(windows) > 1):
        start_server()
    spec, files = load_spec(str(config.tokenizer))
    for source in sources:
        check_options(source.options, spec)
    trained = with_trained_template(files, [source.options for source in sources])
    if trained is not files:
        spec, files = spec_from_files(trained, str(config.tokenizer)), trained
    if spec.dropout:
        progress.say(
            f"tokenizer: its BPE dropout of {spec.dropout:g} is switched off: a text always gives the same ids"
        )
    plan = plan_of(config, sources, spec.as_plan(), windows, part_bytes)
    job = Job(plan, plan_id(plan), sources, out, files, config.tokenizer_engine, config.on_error)
    try:
        return _build(job, config, open_store(out), progress, begin)
    except io_errors() as error:
        # another build of this plan that ends first clears the unpublished files of all
        if isinstance(error, FileNotFoundError) and (finished := finished_dataset(open_store(out), job)) is not None:
            return dict(finished)
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if number == errno.ENOTDIR:
            raise PackError(
                f"{config.out}: is a file, or lies in one; expected a directory. Choose another --out."
            ) from error
        what, remedy = ("no space left", "Make room") if number in FULL else ("cannot be written", "Mend the disk")
        raise PackError(
            f"{config.out}: {what} ({reason}); the windows that are done are kept. "
            f"{remedy}, then run the same command with --resume."
        ) from error
    except MemoryError as error:
        raise PackError(
            f"{config.out}: out of memory; the windows that are done are kept. "
            "Run the same command with --resume and fewer --workers."
        ) from error


def _build(job: Job, config: BuildConfig, store: Store, progress: Progress, begin: float) -> Record:
    """Prepare the directory, run what is missing, redo what is in doubt, commit."""
    done = prepare(store, config, job, progress.say)
    if done is not None:
        return dict(done)
    sizes = [file.bytes for source in job.sources for file in source.files]
    raw_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    progress.begin(raw_bytes)
    if not config.finalize and (raw_bytes is None or raw_bytes > SMALL_BYTES):
        start_compiling(layout_of(job.plan), progress.say)
    nothing = (len(job.plan["windows"]), 0.0, 0)
    num_windows, wait_s, tokens = nothing if config.finalize else _run(job, config, store, progress)
    there = store.sizes("shards")
    missing = sum(f"{number:08d}.json" not in there for number in range(num_windows))
    if missing and config.windows and not config.finalize:
        progress.say(
            f"{config.out}: {missing:,} of {counted(num_windows, 'window')} still to come; the last part commits"
        )
        return {"plan_id": job.plan_id, "unfinished": missing}
    check_unchanged(job.sources)
    survey = take_survey(store, num_windows, config.max_rejected)
    if survey.lied and survey.suspects:
        progress.say(
            "the fast tokenizer engine gave other ids than the reference somewhere; "
            f"building its {counted(len(survey.suspects), 'window')} again with {REFERENCE}"
        )
        _redo(job, config, survey.suspects, progress)
        survey = take_survey(store, num_windows, config.max_rejected)
    facts = {
        "shardpack": metadata.version("shardpack"),
        "host": platform.node(),
        "engine": config.engine,
        "workers": config.workers,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.time() - begin, 3),
        "tokens_read": tokens,  # in these seconds: fewer than all where parts were there already
        "stages_s": {"wait": round(wait_s, 6)},
        "trained_end_ids": sorted(survey.trained_end_ids),
        "spelled_controls": survey.spelled_controls,
    }
    return _commit(store, job, survey, num_windows, facts)


def _refuse_idle_policy(config: BuildConfig) -> None:
    """Refuse a policy for over-long documents beside a packer that has its own."""
    if PACKERS[config.packer].cut_policy is None:
        return
    for options in (config.records, *config.source_records.values()):
        if options.overlong not in ("auto", "split"):
            raise PackError(
                f'`overlong="{options.overlong}"`: `packer="{config.packer}"` cuts every document where a row is full; '
                "expected auto or split. Omit `overlong`, or choose another `packer`."
            )


def plan_of(
    config: BuildConfig, sources: list[Source], tokenizer: TokenizerPlan, windows: list[Window], part_bytes: int
) -> Plan:
    """Return all that determines the bytes of the dataset, and nothing else."""
    options = [source.options for source in sources]
    return make_plan(
        recipe=RECIPE,
        seq_len=config.seq_len,
        seed=config.seed,
        position_ids=config.position_ids,
        loss_mask=any(option.kind != "text" for option in options),  # of a text, every token but the first is a target
        turn_ends=any(option.overlong_policy == "truncate-turns" for option in options),
        packer=config.packer,
        max_segments=config.max_segments,
        tokenizer=tokenizer,
        sources=[
            make_source(source.name, asdict(source.options), [file.as_plan() for file in source.files])
            for source in sources
        ],
        windows=[[window.source, [list(slice_) for slice_ in window.slices]] for window in windows],
        part_bytes=part_bytes,
    )


def _run(job: Job, config: BuildConfig, store: Store, progress: Progress) -> tuple[int, float, int]:
    """Run what is missing; return the number of windows of the dataset, the workers' idle seconds, and tokens read."""
    begin, busy_s, tokens = time.perf_counter(), 0.0, 0
    tally = Tally(config.max_rejected)
    stream = _Stream(job.plan, job.sources)

    def unfinished(tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            sidecar = _committed(store, job, task)
            if sidecar is None:
                yield task
            else:
                tally.add(sidecar["counts"])
                progress.tick(sidecar["counts"]["documents"]["read"], 0, sidecar["raw_bytes"])

    planned = _planned(job.plan, config.window_range(len(job.plan["windows"])))
    workers = config.workers if stream.files else max(1, min(config.workers, len(planned)))
    for record in ENGINES[config.engine](job, unfinished(chain(planned, stream)), workers, progress.tick):
        tally.add(record["counts"])
        busy_s += record["busy_s"]
        tokens += record["counts"]["tokens"]["read"]
    return stream.next_window, max(0.0, workers * (time.perf_counter() - begin) - busy_s), tokens


def _redo(job: Job, config: BuildConfig, suspects: set[int], progress: Progress) -> None:
    """Build windows again with the reference engine."""
    if reads_stdin(job):
        raise PackError(
            "the fast tokenizer engine gave other ids than the reference, and stdin cannot be read again for what it "
            f"wrote. Run the command again with --overwrite --tokenizer-engine {REFERENCE}."
        )
    tasks = (task for task in all_tasks(job.plan, job.sources) if task.window in suspects)
    workers = min(config.workers, len(suspects))
    for _ in ENGINES[config.engine](replace(job, tokenizer_engine=REFERENCE), tasks, workers, progress.tick):
        pass


def _planned(plan: Plan, chosen: Iterable[int]) -> list[Task]:
    windows = plan["windows"]
    return [
        Task(number, windows[number][0], tuple(Slice(*slice_) for slice_ in windows[number][1])) for number in chosen
    ]


def all_tasks(plan: Plan, sources: list[Source]) -> Iterator[Task]:
    """Yield every window of a plan in order; streamed sources are read again for theirs."""
    yield from _planned(plan, range(len(plan["windows"])))
    yield from _Stream(plan, sources)


class _Stream:
    """The windows that the driver cuts while reading, numbered on from the planned ones."""

    def __init__(self, plan: Plan, sources: list[Source]) -> None:
        self.sources = sources
        self.part_bytes: int = plan["part_bytes"]
        self.next_window = len(plan["windows"])
        self.files = enumerate_streams(sources)

    def __iter__(self) -> Iterator[Task]:
        for number, source in enumerate(self.sources):
            for slices, payloads in stream_windows(source, streamed_files(source), self.part_bytes):
                self.next_window += 1
                yield Task(self.next_window - 1, number, slices, payloads)


def _committed(store: Store, job: Job, task: Task) -> Sidecar | None:
    """Return the sidecar of a finished window; None where the window must be built (again)."""
    try:
        sidecar = read_sidecar(store, task.window)
    except FormatError:
        return None  # damaged: build it again
    if sidecar is None or sidecar["plan_id"] != job.plan_id:
        return None
    if task.payloads is not None and sidecar["input_xxh3"] != xxhash.xxh3_128_hexdigest(b"".join(task.payloads)):
        return None
    return sidecar if store.size(sidecar["shard"]["file"]) == sidecar["shard"]["bytes"] else None


def _commit(store: Store, job: Job, survey: Survey, num_windows: int, facts: Record) -> Record:
    """Write index and manifest, and clear what crashed attempts left behind."""
    check_totals(survey.totals, job.sources)
    try:
        for name in store.sizes("shards"):
            if f"shards/{name}" not in survey.kept and OWN.fullmatch(name):
                store.remove(f"shards/{name}")
        manifest = commit(store, job.plan, all_sidecars(store, num_windows), job.tokenizer_files, facts)
        store.sweep(everything=True)
    except (PackError, FileNotFoundError):  # the last two parts of a job array may end at the same moment
        finished = finished_dataset(store, job)
        if finished is None:
            raise
        return dict(finished)
    return dict(manifest)
