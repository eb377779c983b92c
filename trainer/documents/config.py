"""What `pack score` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shards.errors import PackError
from shards.settings import check_choices, set_path


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """One `pack score`; what is said of a field is the help of its flag."""

    dataset: Annotated[str | Path, "Dataset directory."]
    model: Annotated[str | Path, "Model name or directory."]
    out: Annotated[str | Path, "Parquet file with a row for each document."]
    tokens_per_batch: Annotated[int | None, "Tokens in a batch on one device. [default: one pack]"] = None
    dtype: Annotated[Literal["bf16", "fp32"], "Arithmetic."] = "bf16"
    attention: Annotated[str, "Attention backend, as in pack train."] = "auto"
    device: Annotated[str | None, "cuda or cpu. [default: cuda where there is one]"] = None
    overwrite: Annotated[bool, "Replace the file where it is there."] = False
    force: Annotated[bool, "Go on with an unpacked dataset or a foreign tokenizer."] = False

    def __post_init__(self) -> None:
        set_path(self, "dataset", "model", "out")
        check_choices(self)
        if self.tokens_per_batch is not None and self.tokens_per_batch < 1:
            raise PackError(f"`tokens_per_batch`: {self.tokens_per_batch}; expected at least 1.")
        out = Path(self.out)
        if out.exists() and not self.overwrite:
            raise PackError(f"`out`: {out} is there already; expected no file. Choose another, or add `overwrite`.")
        if not out.resolve().parent.is_dir():
            raise PackError(f"`out`: {out}; expected a file in a directory that is there. Create it first.")
