"""What a build is asked to do.

`RecordOptions` says how one source's records become documents; `BuildConfig` says everything else. Fields that change
the bytes of the result go into the plan (see `building/planning.py`); workers, engines and paths do not. The text
beside a type is the help of the field's flag.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from shards.errors import PackError
from shards.settings import check_choices, set_path

Kind = Literal["text", "chat", "instruction", "tokens"]
Packer = Literal["auto", "ffd", "bfd", "next-fit", "wrapped", "bucketed", "unpacked"]
PACKER_NAMES: tuple[str, ...] = get_args(Packer)
YOUNG = frozenset(
    ("unroll", "system_field", "strict_fields", "message_weights", "weights_field")
)  # options that came after the format's version 2
MIB = 1 << 20
MAX_VOCAB = 1 << 31
MAX_SEQ_LEN = 1 << 24  # packing counts lengths in tables of this size


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a record of one source becomes a document."""

    kind: Kind = "text"
    "What a record holds: plain text, a conversation, a prompt with its completion, or token ids."
    text_field: Annotated[str, "Field with the text; dots reach into nested objects."] = "text"
    messages_field: Annotated[str, "Field with a conversation (role/content or from/value)."] = "messages"
    tools_field: Annotated[str, "Field with the tool schemas of a chat."] = "tools"
    system_field: Annotated[str, "Field with a system prompt beside the messages, if any."] = "system"
    prompt_field: Annotated[
        str, "Field with the prompt of an instruction: text or messages; several texts with commas."
    ] = "prompt"
    completion_field: Annotated[str, "Field with its completion: text or messages."] = "completion"
    ids_field: Annotated[str, "Field with token ids: documents are imported as they are."] = "input_ids"
    labels_field: Annotated[str | None, "Field with labels beside the ids: unshifted, -100 is no target."] = None
    mask_field: Annotated[str | None, "Field with 1 for each id that is a target, 0 for others."] = None
    eos_id: Annotated[int | None, "Id that ends each document of a .npy or .bin stream of ids."] = None
    append_eos: Annotated[bool, "EOS behind each imported document that has none."] = False
    token_type: Annotated[
        Literal["uint16", "int32", "uint32", "int64"], "Type of the ids in a .bin without Megatron's .idx."
    ] = "uint16"
    train_on: Annotated[
        str,
        "Targets: auto, all, assistant, last-assistant, completion, or roles (assistant,user:0.1).",
    ] = "auto"
    message_weights: Annotated[bool, "Weigh each message by its own weight field."] = False
    weights_field: Annotated[
        str | None, "Field with a weight of the record, or a list of one for each message or token."
    ] = None
    unroll: Annotated[
        Literal["auto", "always", "never"],
        "One document for each answer; auto does so where the template rewrites earlier turns.",
    ] = "auto"
    chat_template: Annotated[str | None, "Jinja file instead of the tokenizer's template."] = None
    "Text of the template; the command line reads it from a file."
    overlong: Annotated[
        Literal["auto", "split", "truncate", "truncate-turns", "drop", "error"],
        "Documents longer than seq-len; auto splits text and drops the rest. Not for --packer wrapped.",
    ] = "auto"
    truncate_side: Annotated[Literal["right", "left"], "Side that truncation cuts off."] = "right"
    keep_no_target: Annotated[bool, "Keep documents without any target."] = False
    train_template_tokens: Annotated[bool, "Train on what a template inserts inside answers."] = False
    strict_fields: Annotated[bool, "Refuse records with fields that change meaning and that no option reads."] = False
    parse_special: Annotated[bool, "Read control tokens in the corpus as such, not as text."] = False
    add_eos: Annotated[bool, "One EOS after each document."] = True
    text_unit: Annotated[Literal["file", "line"], "One document in a plain text file."] = "file"
    format: Annotated[str | None, "Format of the files where their names do not tell, such as jsonl."] = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PackError(f"`kind`: {self.kind!r}; expected one of {', '.join(get_args(Kind))}.")
        check_choices(self)
        if self.unroll == "always" and self.train_on == "all":
            raise PackError(
                '`unroll="always"`: trains each answer alone, not all tokens. Omit it, or `train_on="all"`.'
            )
        if self.kind in ("text", "tokens") and self.message_weights:
            what = "plain text has" if self.kind == "text" else "token ids have"
            raise PackError(f"`message_weights`: {what} no messages. Use `weights_field`, or leave it out.")
        if self.kind in ("text", "tokens") and self.overlong == "truncate-turns":
            what = "plain text has" if self.kind == "text" else "token ids have"
            raise PackError(f'`overlong="truncate-turns"`: {what} no turns. Use split, truncate, drop or error.')

    @property
    def weighted(self) -> bool:
        """Whether tokens have weights of their own, which shards then store."""
        return self.message_weights or self.weights_field is not None or ":" in self.train_on

    def as_plan(self) -> dict[str, Any]:
        """Return the options as a plan records them.

        Options that are younger than the format are there only where they are not the default: a build that does not
        use them has the identity that it always had.
        """
        values = asdict(self)
        young = {entry.name: entry.default for entry in fields(self) if entry.name in YOUNG}
        return {name: value for name, value in values.items() if name not in young or value != young[name]}

    @property
    def overlong_policy(self) -> str:
        """The policy in force: what is all targets is split, conversations are dropped, unless the user chose."""
        if self.overlong != "auto":
            return self.overlong
        plain = self.kind == "tokens" and self.labels_field is None and self.mask_field is None
        return "split" if self.kind == "text" or plain else "drop"


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which documents a dataset keeps; part of what `pack build` and `pack repack` are asked to do."""

    holdout: Annotated[float | None, "Share of documents to hold out, such as 1%, as a dataset of its own."] = None
    holdout_out: Annotated[str | Path | None, "Its directory. [default: OUT-holdout]"] = None
    drop: Annotated[str | Path | None, "File of documents to leave out: text, JSONL or Parquet with doc_id."] = None
    drop_where: Annotated[str | None, "Rows of a --drop table that count, such as 'loss > 6'."] = None
    dedup: Annotated[Literal["exact"] | None, "Of documents with the same tokens, keep the first."] = None

    @property
    def selects(self) -> bool:
        """Whether any document may be set aside."""
        return self.holdout is not None or self.drop is not None or self.dedup is not None

    def check_selection(self, out: str | Path) -> None:
        """Refuse settings that do not fit each other.

        Raises:
            PackError: Names the setting.
        """
        set_path(self, "holdout_out", "drop")
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise PackError(f"`holdout`: {self.holdout:g}; expected a share between 0 and 1, such as 1%.")
        if self.holdout_out is not None and self.holdout is None:
            raise PackError("`holdout_out`: there is no hold-out; expected a share. Add `holdout`.")
        if self.drop_where is not None and self.drop is None:
            raise PackError("`drop_where`: there is no list; expected one. Add `drop`.")
        if self.holdout_out is not None and str(self.holdout_out) == str(out):
            raise PackError(f"`holdout_out`: {out} is `out` too; expected another directory.")


@dataclass(frozen=True, kw_only=True)
class BuildConfig(SelectionConfig):
    """One `pack build`."""

    sources: str | Path | Sequence[str | Path]
    "SOURCE arguments, each optionally NAME=SOURCE; one may stand alone."
    out: Annotated[str | Path, "Dataset directory, or an fsspec URL."]
    tokenizer: Annotated[str | Path | None, "Tokenizer directory or hub name."] = None
    vocab_size: Annotated[int | None, "Instead of --tokenizer, for records of token ids: how many ids there are."] = (
        None
    )
    seq_len: Annotated[int, "Capacity of a pack, in tokens."]
    records: RecordOptions = field(default_factory=RecordOptions)
    "Options of every source that has none of its own."
    source_records: Mapping[str, RecordOptions] = field(default_factory=dict)
    "Options by source name."
    packer: Annotated[
        Packer, "How segments share packs; wrapped cuts documents where a row is full, conversations too, inside turns."
    ] = "auto"
    max_segments: Annotated[int | None, "Maximum number of segments in one pack. [default: no limit]"] = None
    seed: Annotated[int, "Seed of every random choice."] = 0
    position_ids: Annotated[bool, "Store position ids (2 bytes a token); the reader derives them otherwise."] = True
    window_bytes: Annotated[int | None, "Corpus bytes in one window, such as 64MiB. [default: by corpus size]"] = None
    workers: Annotated[int, "Processes that tokenize and pack."] = 1
    engine: Annotated[Literal["local", "ray"], "Where windows run."] = "local"
    tokenizer_engine: Annotated[
        Literal["auto", "tokenizers", "fastokens", "gigatoken"],
        "Engine; a fast one is checked against tokenizers all along.",
    ] = "auto"
    resume: Annotated[bool, "Continue an interrupted build."] = False
    overwrite: Annotated[bool, "Remove an older dataset there first."] = False
    check: Annotated[bool, "Hash what is built already against the corpus, also where no file was touched."] = False
    windows: Annotated[str | None, "Only windows i, i+n, i+2n …, as i::n, for job arrays."] = None
    finalize: Annotated[bool, "Run no window; commit what is there."] = False
    on_error: Annotated[Literal["fail", "skip"], "At a bad record."] = "fail"
    max_rejected: Annotated[float, "Share of bad records that stops a build with on-error skip."] = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", self.source_arguments)
        set_path(self, "out", "tokenizer")
        check_choices(self)
        if not self.sources:
            raise PackError("`sources`: is empty; expected at least one SOURCE.")
        if not self.out:
            raise PackError(
                "`out`: is an empty string; expected a directory or an fsspec URL. Is a shell variable unset?"
            )
        if not 2 <= self.seq_len <= MAX_SEQ_LEN:
            raise PackError(f"`seq_len`: {self.seq_len:,}; expected 2 to {MAX_SEQ_LEN:,} tokens.")
        if (self.tokenizer is None) == (self.vocab_size is None):
            given = "are not given" if self.tokenizer is None else "are both given"
            raise PackError(f"`tokenizer`, `vocab_size`: {given}; expected one: the second for token ids alone.")
        for name in ("workers", "max_segments", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"`{name}`: {value}; expected at least 1.")
        if self.vocab_size is not None and self.vocab_size > MAX_VOCAB:
            raise PackError(f"`vocab_size`: {self.vocab_size:,}; expected at most {MAX_VOCAB:,}.")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise PackError(f"`window_bytes`: {self.window_bytes}; expected a positive size, such as 64MiB.")
        if not 0 <= self.max_rejected <= 1:
            raise PackError(f"`max_rejected`: {self.max_rejected:g}; expected a share from 0 to 1, such as 0.01.")
        if self.resume and self.overwrite:
            raise PackError("`resume=True` and `overwrite=True`: choose one.")
        if self.overwrite and (self.windows or self.finalize):
            raise PackError(
                "`overwrite=True`: a part of a build would remove what other parts wrote; expected none with `windows` "
                "or `finalize=True`. Remove the directory before the parts start."
            )
        if self.windows is not None:
            self.window_range(0)
        self.check_selection(self.out)
        if self.selects and (self.windows or self.finalize):
            raise PackError(
                "`holdout`, `drop`, `dedup`: need all windows at once; expected none of them with `windows` or "
                "`finalize=True`. Build the whole, then select with pack repack."
            )

    @property
    def source_arguments(self) -> tuple[str, ...]:
        """The SOURCE arguments, as text."""
        sources = [self.sources] if isinstance(self.sources, (str, Path)) else self.sources
        return tuple(map(str, sources))

    def window_range(self, number: int) -> range:
        """Return the windows to run, out of `number` planned ones.

        Raises:
            PackError: `windows` is not i::n.
        """
        if self.windows is None:
            return range(number)
        match = re.fullmatch(r"(\d+)::(\d+)", self.windows)
        if match is None or not 0 <= int(match[1]) < int(match[2]):
            raise PackError(f"`windows`: {self.windows!r}; expected i::n with 0 <= i < n, such as 3::16.")
        return range(int(match[1]), number, int(match[2]))


@dataclass(frozen=True, kw_only=True)
class RepackConfig(SelectionConfig):
    """One `pack repack`; what is not given is as in the dataset."""

    dataset: Annotated[str | Path, "Dataset directory."]
    out: Annotated[str | Path, "Directory of the new dataset, or an fsspec URL."]
    seq_len: Annotated[int | None, "Capacity of a pack, in tokens."] = None
    packer: Annotated[Packer | None, "How segments share packs."] = None
    max_segments: Annotated[int | None, "Maximum number of segments in one pack."] = None
    seed: Annotated[int | None, "Seed of every random choice."] = None
    overlong: Annotated[
        Literal["auto", "split", "truncate", "truncate-turns", "drop", "error"] | None,
        "Documents longer than seq-len.",
    ] = None
    align: Annotated[int, "Pad each segment to a multiple of so many tokens, for context or tensor parallelism."] = 1
    resume: Annotated[bool, "Continue an interrupted run."] = False
    overwrite: Annotated[bool, "Remove an older dataset there first."] = False

    def __post_init__(self) -> None:
        set_path(self, "dataset", "out")
        check_choices(self)
        if self.seq_len is not None and not 2 <= self.seq_len <= MAX_SEQ_LEN:
            raise PackError(f"`seq_len`: {self.seq_len:,}; expected 2 to {MAX_SEQ_LEN:,} tokens.")
        for name in ("max_segments", "align"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"`{name}`: {value}; expected at least 1.")
        if self.resume and self.overwrite:
            raise PackError("`resume=True` and `overwrite=True`: choose one.")
        self.check_selection(self.out)

    @property
    def holdout_path(self) -> str:
        """Directory of what is held out."""
        return str(self.holdout_out or f"{str(self.out).rstrip('/')}-holdout")
