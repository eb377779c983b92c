"""Another dataset from the tokens of one: other `seq_len`, packer, seed, cut or alignment, and no tokenizer runs.

Window by window the segments of a document are joined again, wherever they were packed, and cut and packed anew. The
plan is the one that a build with these settings would have written, so where the first build lost nothing, the shards
and the dataset id are those of that build, byte for byte. What it did lose stays lost, and is counted as it was.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.building.driver import BuildResult
from pipeline.building.drop_list import DropList, read_drop_list
from pipeline.building.planning import ALGORITHM_VERSION
from pipeline.building.progress import Progress
from pipeline.building.repacking.joining import join_documents
from pipeline.building.repacking.rewriting import WriteWindow, facts_of, output_of, rewrite
from pipeline.building.repacking.upgrade import upgrade
from pipeline.building.repacking.window import repack_window, sidecar_of
from pipeline.building.selection import Selection
from pipeline.config import RecordOptions, RepackConfig
from pipeline.formatting import unasked
from pipeline.packing.packers import PACKERS
from shards.counts import Counts
from shards.errors import PackError, counted
from shards.plan import Plan
from shards.publish import LocalStore, Store
from shards.reader import Dataset
from shards.versions.version_1 import is_version_1


def repack(config: RepackConfig, progress: Progress | None = None) -> BuildResult:
    """Pack the documents of a dataset anew; one of format version 1 is upgraded as it is.

    Args:
        config: What to make of which dataset.
        progress: Where to report; silent by default.

    Returns:
        The new dataset with its manifest, and that of what is held out, where there is a hold-out.

    Raises:
        PackError: The dataset cannot be read, the settings do not fit it, or the output belongs to something else.
    """
    progress = progress or Progress()
    if is_version_1(config.dataset):
        return upgrade(config, progress)
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
    output = output_of(repacked_plan(dataset.plan, config, selection), out, dataset.path)
    num_windows = len(dataset.shards)

    def begin(store: Store) -> WriteWindow:
        say_what_stays_lost(dataset, progress)
        if selection.dedup:
            selection.find_duplicates((number, join_documents(dataset, number)) for number in range(num_windows))
        options = {source["name"]: RecordOptions(**source["records"]) for source in output.plan["sources"]}

        def write_window(number: int) -> Counts:
            source = dataset.shards[number]["source"]
            return repack_window(dataset, number, output.plan, options[source], selection, store)

        return write_window

    origin = {"dataset_id": dataset.dataset_id, "seq_len": dataset.seq_len, "packer": dataset.packer}
    facts = facts_of(dataset.manifest["facts"]) | {"repacked_from": origin}
    return rewrite(output, config, num_windows, begin, facts, progress)


def say_what_stays_lost(dataset: Dataset, progress: Progress) -> None:
    """Say what the first build lost: a repacking cannot bring it back."""
    lost = unasked(dataset.manifest["totals"]["tokens"]["lost"])
    if lost:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(lost.items()))
        progress.on_message(
            f"{dataset.location}: its build lost {counted(sum(lost.values()), 'token')} ({reasons}), which stay lost; "
            "a build from the corpus would give another dataset"
        )


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
