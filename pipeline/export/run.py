"""`pack export`: a dataset written as others read it, whole or not at all.

Everything is written in a directory beside `out`, named `<out>.partial`, which takes its place once all is on disk. To
add a format, write a function and enter it in `FORMATS`.
"""

import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pipeline.building.progress import Progress
from pipeline.export.config import DatasetExportConfig, ExportFormat
from pipeline.export.samples import origin_of, untrained_tokens
from shards.errors import PackError, counted, reason_of
from shards.publish import canonical, fsync, rename, sync_directory
from shards.reader import Dataset

PARTIAL = ".partial"
MARK = ".shardpack-export.json"  # hidden, so that readers of whole directories pass over it


class Format(NamedTuple):
    """What writes a format, and what it can say."""

    writer: str
    "module:function, imported when asked for, since what one format needs another does not."
    masks: bool = True
    "Whether it says which tokens are trained."
    weights: bool = True
    "Whether it says with which weight."

    def write(self, dataset: Dataset, out: Path, progress: Progress) -> None:
        """Write a dataset into a directory."""
        module, name = self.writer.split(":")
        getattr(import_module(module), name)(dataset, out, progress)


FORMATS: dict[ExportFormat, Format] = {
    "megatron": Format("pipeline.export.megatron:write_megatron", masks=False, weights=False),
    "megatron-bridge": Format("pipeline.export.tables:write_bridge", weights=False),
    "mds": Format("pipeline.export.streams:write_mds"),
    "litdata": Format("pipeline.export.streams:write_litdata"),
    "parquet": Format("pipeline.export.tables:write_parquet"),
    "jsonl": Format("pipeline.export.texts:write_jsonl"),
}


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote."""

    path: str
    files: int
    bytes: int
    packs: int
    tokens: int


def export_dataset(config: DatasetExportConfig, progress: Progress | None = None) -> ExportResult:
    """Write a dataset in another format.

    Args:
        config: Which dataset, in which format, where to.
        progress: Where to report; silent by default.

    Returns:
        What was written.

    Raises:
        PackError: The format cannot say what the dataset holds, its library is missing, or `out` is taken.
    """
    dataset, out = Dataset(config.dataset), Path(os.path.abspath(config.out))  # noqa: PTH100  # "." has no name
    _check_fit(dataset, config)
    try:
        return _write_beside(dataset, out, config, progress or Progress())
    except OSError as error:
        raise PackError(
            f"{out}: cannot be written ({reason_of(error)}); expected a writable place with room. The export is not "
            "there. Make room or choose another `out`, then export again."
        ) from error


def _check_fit(dataset: Dataset, config: DatasetExportConfig) -> None:
    """Refuse what the format cannot say.

    Raises:
        PackError: Masks or weights would be lost, or there is nothing to export.
    """
    chosen = FORMATS[config.to]
    if not len(dataset):
        raise PackError(f"{dataset.path}: holds no packs; expected at least one. There is nothing to export.")
    if dataset.layout.loss_weights and not (chosen.weights or config.drop_weights):
        able = ", ".join(name for name, other in FORMATS.items() if other.weights)
        raise PackError(
            f'{dataset.path}: has loss weights, which `to="{config.to}"` cannot say; expected a format that can '
            f"({able}). Choose one, or set `drop_weights=True`."
        )
    untrained = 0 if chosen.masks or config.drop_mask else untrained_tokens(dataset)
    if untrained:
        raise PackError(
            f"{dataset.path}: has {counted(untrained, 'token')} that are read but not trained, which "
            f'`to="{config.to}"` cannot say; expected a dataset whose tokens are all targets. Choose another format, '
            "or set `drop_mask=True` to have them trained too."
        )


def _write_beside(dataset: Dataset, out: Path, config: DatasetExportConfig, progress: Progress) -> ExportResult:
    """Write into `<out>.partial` and move it to its place."""
    beside = out.with_name(out.name + PARTIAL)
    _make_room(out, beside, overwrite=config.overwrite)
    beside.mkdir(parents=True)
    progress.begin(None)
    try:
        FORMATS[config.to].write(dataset, beside, progress)
        files = [path for path in sorted(beside.rglob("*")) if path.is_file()]
        (beside / MARK).write_bytes(canonical({"format": config.to, **origin_of(dataset)}))
        for path in (*files, beside / MARK):
            with path.open("rb+") as file:
                fsync(file)
        sync_directory(beside)
        size = sum(path.stat().st_size for path in files)
        if out.exists():
            shutil.rmtree(out)
        rename(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    tokens = dataset.manifest["totals"]["tokens"]["packed"]
    return ExportResult(path=str(out), files=len(files), bytes=size, packs=len(dataset), tokens=tokens)


def _make_room(out: Path, beside: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken; clear one that an earlier export left, where that is asked for.

    Raises:
        PackError: Something is there that was not to be overwritten, or that no export wrote.
    """
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not empty and not (out / MARK).is_file():
        raise PackError(f"`out`: {out} is there and no export; expected a new or empty directory. Choose another.")
    if not empty and not overwrite:
        raise PackError(f"`out`: {out} holds an export; expected a new directory. Choose another, or `overwrite=True`.")
    if beside.exists():
        if not overwrite:
            raise PackError(
                f"{beside}: is there, from an export that was killed or still runs; expected none. Wait for it, or set "
                "`overwrite=True` to replace it."
            )
        shutil.rmtree(beside)
