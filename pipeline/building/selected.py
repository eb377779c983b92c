"""A build that keeps some of its documents: the whole corpus is built aside, then what stays is packed from it.

Duplicates are known only when all documents are, and a hold-out goes by token ids, so both need the whole corpus
tokenized first. It lies in `_tmp/whole` of the output directory meanwhile, a dataset like any other: a build that was
stopped continues there. Selecting from it is `pack repack`, so both commands select alike.
"""

from dataclasses import replace
from pathlib import Path

from pipeline.building.driver import BuildResult, build
from pipeline.building.drop_list import read_drop_list
from pipeline.building.output import Request, decide, owned_files, read_output
from pipeline.building.planning import make_job
from pipeline.building.progress import Progress
from pipeline.building.repacking.repack import repack, repacked_plan, selections
from pipeline.building.repacking.rewriting import Output
from pipeline.config import BuildConfig, RepackConfig
from shards.errors import PackError
from shards.plan import plan_id
from shards.publish import TMP, LocalStore


def build_selected(config: BuildConfig, progress: Progress) -> BuildResult:
    """Build a corpus and keep the documents that were chosen.

    Raises:
        PackError: As `build` and `repack`; or the output is no local directory.
    """
    out = str(config.out)
    if "://" in out:
        raise PackError(
            f"`out`: {out}; with `holdout`, `drop` or `dedup` expected a local directory, which holds the whole corpus "
            "meanwhile. Build there, then copy it."
        )
    whole = str(Path(out) / TMP / "whole")
    plain = replace(
        config, out=whole, overwrite=False, holdout=None, holdout_out=None, drop=None, drop_where=None, dedup=None
    )
    chosen = RepackConfig(
        dataset=whole, out=out, holdout=config.holdout, holdout_out=config.holdout_out, drop=config.drop,
        drop_where=config.drop_where, dedup=config.dedup, resume=config.resume, overwrite=config.overwrite,
    )  # fmt: skip
    finished = _finished(plain, chosen)
    if finished is not None:
        progress.on_message(f"{out}: is already built; nothing to do")
        return finished
    build(plain, progress)
    result = repack(chosen, progress)
    store = LocalStore(whole)
    for name in owned_files(read_output(store)):
        store.remove(name)
    store.made_root = True  # by the build above, in a store of its own
    store.prune()
    LocalStore(out).prune()
    return result


def _finished(plain: BuildConfig, chosen: RepackConfig) -> BuildResult | None:
    """Return the datasets where all are there; refuse what stands in their way before anything is tokenized."""
    drop = None if chosen.drop is None else read_drop_list(chosen.drop, chosen.drop_where)
    job = make_job(plain, Progress())
    if drop is not None:
        drop.check_corpus(job.plan)
    results: list[BuildResult] = []
    for out, selection in selections(chosen, drop, job.plan):
        plan = repacked_plan(job.plan, chosen, selection)
        output = Output(plan=plan, plan_id=plan_id(plan), sources=(), out=out, tokenizer_files=job.tokenizer_files)
        request = Request(resume=chosen.resume, overwrite=chosen.overwrite)
        decision = decide(read_output(LocalStore(out)), request, output)
        results.append(BuildResult(path=out, plan_id=output.plan_id, manifest=decision.manifest))
    if any(result.manifest is None for result in results):
        return None
    return replace(results[0], holdout=results[1] if len(results) > 1 else None)
