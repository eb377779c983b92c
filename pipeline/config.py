"""What a build is asked to do.

`RecordOptions` says how one source's records become documents; `BuildConfig` says everything else. Fields that change
the bytes of the result go into the plan (see `build.py`); workers, engines and paths do not.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from shards.errors import PackError

Kind = Literal["text", "chat", "instruction"]
PACKER_NAMES = ("auto", "ffd", "bfd", "next-fit", "wrapped", "bucketed", "unpacked")
OVERLONG = ("split", "truncate", "truncate-turns", "drop", "error")
CHOICES = {
    "kind": ("text", "chat", "instruction"),
    "overlong": ("auto", *OVERLONG),
    "truncate_side": ("right", "left"),
    "text_unit": ("file", "line"),
}
MIB = 1 << 20
MOST_SEQ_LEN = 1 << 24  # packing counts lengths in tables of this size


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a record of one source becomes a document."""

    kind: Kind = "text"
    "What a record holds: plain text, a conversation, or a prompt with its completion."
    text_field: str = "text"
    "Field with the text (kind text); dots reach into nested objects."
    messages_field: str = "messages"
    "Field with the conversation (kind chat): role/content or from/value."
    tools_field: str = "tools"
    "Field with the tool schemas (kind chat), where a record has one."
    prompt_field: str = "prompt"
    "Field with the prompt (kind instruction): text or messages."
    completion_field: str = "completion"
    "Field with the completion (kind instruction): text or messages."
    train_on: str = "auto"
    "Which tokens are targets: auto, all, assistant, last-assistant, completion, or role names separated by commas."
    chat_template: str | None = None
    "Chat template text that replaces the tokenizer's own."
    overlong: str = "auto"
    "What happens to a document longer than seq_len: auto (text split, others drop) or one of OVERLONG."
    truncate_side: Literal["right", "left"] = "right"
    "The side that truncation cuts off."
    keep_no_target: bool = False
    "Keep documents without any target."
    train_template_tokens: bool = False
    "Train on tokens that the template itself inserts inside an answer."
    parse_special: bool = False
    "Read control tokens that stand in the corpus as control tokens instead of plain text."
    add_eos: bool = True
    "End each document with one EOS."
    text_unit: Literal["file", "line"] = "file"
    "What is one document in a plain text file."
    format: str | None = None
    "Format of the files, where their names do not tell."

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise PackError(f"{name}: {getattr(self, name)!r}; expected one of {', '.join(choices)}.")
        if self.kind == "text" and self.overlong == "truncate-turns":
            raise PackError("--overlong truncate-turns: plain text has no turns. Use split, truncate, drop or error.")

    @property
    def overlong_policy(self) -> str:
        """The policy in force: text is split, conversations are dropped, unless the user chose."""
        if self.overlong != "auto":
            return self.overlong
        return "split" if self.kind == "text" else "drop"


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """One `pack build`."""

    sources: tuple[str, ...]
    "SOURCE arguments, each optionally NAME=SOURCE."
    out: str
    "Dataset directory, or an fsspec URL."
    tokenizer: str
    "Tokenizer directory or hub name."
    seq_len: int
    "Capacity of a pack, in tokens."
    records: RecordOptions = field(default_factory=RecordOptions)
    "Options of every source that has none of its own."
    source_records: dict[str, RecordOptions] = field(default_factory=dict)
    "Options by source name."
    packer: str = "auto"
    "A key of PACKERS."
    max_segments: int | None = None
    "Most segments in one pack; None for no limit."
    seed: int = 0
    "Seed of every random choice."
    position_ids: bool = True
    "Store position ids (2 bytes a token); the reader derives them otherwise."
    window_bytes: int | None = None
    "Raw bytes of corpus in one window; None chooses by corpus size."
    workers: int = 1
    "Processes that tokenize and pack."
    engine: str = "local"
    "Where windows run: local or ray."
    tokenizer_engine: str = "auto"
    "auto, tokenizers, fastokens or gigatoken."
    resume: bool = False
    "Continue an interrupted build of the same plan."
    overwrite: bool = False
    "Remove what the output directory holds first."
    windows: str | None = None
    "Run only windows i, i+n, i+2n … given as 'i::n'."
    finalize: bool = False
    "Run no window; commit the dataset from what is there."
    on_error: Literal["fail", "skip"] = "fail"
    "What happens at a bad record."
    max_rejected: float = 0.01
    "Share of bad records above which a build with on_error=skip stops."

    def __post_init__(self) -> None:
        if not self.out:
            raise PackError("--out: is empty; expected a directory or an fsspec URL. Check the quoted variable.")
        if not 2 <= self.seq_len <= MOST_SEQ_LEN:
            raise PackError(f"--seq-len: {self.seq_len:,}; expected 2 to {MOST_SEQ_LEN:,} tokens.")
        if self.workers < 1:
            raise PackError(f"--workers: {self.workers}; expected at least 1.")
        if self.max_segments is not None and self.max_segments < 1:
            raise PackError(f"--max-segments: {self.max_segments}; expected at least 1.")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise PackError(f"--window-bytes: {self.window_bytes}; expected a positive size, such as 64MiB.")
        if not 0 <= self.max_rejected <= 1:
            raise PackError(f"--max-rejected: {self.max_rejected:g}; expected a share from 0 to 1, such as 0.01.")
        if self.resume and self.overwrite:
            raise PackError("--resume and --overwrite: choose one.")
        if self.overwrite and (self.windows or self.finalize):
            raise PackError(
                "--overwrite: a part of a build would remove what other parts wrote; expected none with --windows or "
                "--finalize. Remove the directory before the parts start."
            )
        if self.windows is not None:
            self.window_range(0)

    def window_range(self, number: int) -> range:
        """Return the windows to run, out of `number` planned ones.

        Raises:
            PackError: `windows` is not i::n.
        """
        if self.windows is None:
            return range(number)
        match = re.fullmatch(r"(\d+)::(\d+)", self.windows)
        if match is None or not 0 <= int(match[1]) < int(match[2]):
            raise PackError(f"--windows: {self.windows!r}; expected i::n with 0 <= i < n, such as 3::16.")
        return range(int(match[1]), number, int(match[2]))
