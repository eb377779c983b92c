"""What an export is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shards.errors import PackError
from shards.settings import check_choices, set_path

ExportFormat = Literal["megatron", "megatron-bridge", "mds", "litdata", "parquet", "jsonl"]


@dataclass(frozen=True, kw_only=True)
class DatasetExportConfig:
    """One `pack export`."""

    dataset: Annotated[str | Path, "Dataset directory."]
    to: Annotated[ExportFormat, "What to write."]
    out: Annotated[str | Path, "Directory to write, new or empty."]
    drop_mask: Annotated[bool, "Let a format that cannot say which tokens are trained train all of them."] = False
    drop_weights: Annotated[bool, "Let a format that has no loss weights give each target the weight 1."] = False
    overwrite: Annotated[bool, "Replace an earlier export there, finished or not."] = False

    def __post_init__(self) -> None:
        set_path(self, "dataset", "out")
        check_choices(self)
        check_directory(str(self.out))


def check_directory(out: str) -> None:
    """Refuse a place that is no directory of this machine.

    Raises:
        PackError: It is empty, or a URL.
    """
    if not out:
        raise PackError("`out`: is an empty string; expected a directory. Is a shell variable unset?")
    if "://" in out:
        raise PackError(f"`out`: {out} is a URL; expected a directory on this machine. Copy from there.")
