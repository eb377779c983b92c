"""What a build is to do: all that can be checked without reading a record, and the plan."""

from pipeline.building.engines import start_server
from pipeline.building.progress import Progress
from pipeline.building.window import Job
from pipeline.config import BuildConfig
from pipeline.documents.encoder import EngineChoice
from pipeline.documents.make import check_options, with_trained_template
from pipeline.documents.tokenizer import (
    TokenizerSpec,
    image_of,
    load_spec,
    no_text_image,
    spec_from_files,
    spec_of_size,
)
from pipeline.packing.packers import PACKERS
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.windows import Source, Window, cut_windows, enumerate_streams
from shards.errors import PackError
from shards.plan import Plan, TokenizerPlan, make_plan, make_source, plan_id

ALGORITHM_VERSION = 2  # raise it when the same plan would give other bytes


def make_job(config: BuildConfig, progress: Progress) -> Job:
    """Check all that can be checked without reading a record, and make the plan."""
    _refuse_idle_policy(config)
    exclude = (str(config.out),)
    sources = resolve_sources(config.source_arguments, config.records, config.source_records, exclude=exclude)
    for source in sources:
        if source.skipped:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(source.skipped.items()))
            progress.on_message(f"source {source.name!r}: files left out: {kinds}")
        for note in source.notes:
            progress.on_message(f"source {source.name!r}: {note}")
    streamed = enumerate_streams(sources)
    if (config.windows or config.finalize) and streamed:
        name = sources[streamed[0][0]].files[streamed[0][1]].name
        raise PackError(
            f"`windows`, `finalize`: {name} cannot be cut unread; expected plain files. "
            "Decompress it, or convert it to JSONL or Parquet first."
        )
    windows, part_bytes = cut_windows(sources, config.window_bytes)
    if config.engine == "local" and config.workers > 1 and (streamed or len(windows) > 1):
        start_server()
    spec, files = _tokenizer_of(config, sources)
    for source in sources:
        check_options(source.options, spec)
    trained = with_trained_template(files, [source.options for source in sources])
    if trained is not files:
        spec, files = spec_from_files(trained, str(config.tokenizer)), trained
    if spec.dropout:
        progress.on_message(
            f"tokenizer: its BPE dropout of {spec.dropout:g} is switched off: a text always gives the same ids"
        )
    plan = plan_of(config, sources, spec.as_plan(), windows, part_bytes)
    specials = {source.options.parse_special for source in sources}
    images = {
        special: image_of(files, spec, str(config.tokenizer), parse_special=special) if files else no_text_image(spec)
        for special in specials
    }
    return Job(plan, plan_id(plan), sources, str(config.out), files, images, EngineChoice(), config.on_error)


def _tokenizer_of(config: BuildConfig, sources: list[Source]) -> tuple[TokenizerSpec, dict[str, bytes]]:
    """Return what the tokenizer is, and its files; none where the size of the vocabulary stands for it."""
    if config.vocab_size is None:
        return load_spec(str(config.tokenizer))
    for source in sources:
        if source.options.kind != "tokens":
            raise PackError(
                f"`vocab_size`: source {source.name!r} holds {source.options.kind} records, which need a tokenizer; "
                "expected token ids. Name their field with `ids_field`, or pass `tokenizer`."
            )
        if source.options.append_eos and source.options.eos_id is None:
            raise PackError("`append_eos`: without a tokenizer nothing names EOS; expected its id. Add `eos_id`.")
    return spec_of_size(config.vocab_size), {}


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
        recipe=ALGORITHM_VERSION,
        seq_len=config.seq_len,
        seed=config.seed,
        position_ids=config.position_ids,
        loss_mask=any(option.kind != "text" or option.weighted for option in options),  # of a plain text, all are
        loss_weights=any(option.weighted for option in options),
        turn_ends=any(option.overlong_policy == "truncate-turns" for option in options),
        packer=config.packer,
        max_segments=config.max_segments,
        tokenizer=tokenizer,
        sources=[
            make_source(source.name, source.options.as_plan(), [file.as_plan() for file in source.files])
            for source in sources
        ],
        windows=[[window.source, [list(slice_) for slice_ in window.slices]] for window in windows],
        part_bytes=part_bytes,
    )
