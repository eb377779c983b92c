"""What a tokenizer is, read from its files alone.

`tokenizer.json` is parsed as JSON, not loaded: the driver of a build needs ids and a digest, not an encoder (0.2 s
against 1 s). The digest covers what changes ids: the canonical `tokenizer.json`, the special ids and the chat template;
not padding, truncation, names or limits.

Control tokens are the added tokens that are flagged special or look like marks (`<tool_call>`, `[INST]`). All others
are text: words that somebody added, white space (layout, as in Gemma), single bytes. `plain_json` derives the tokenizer
that cannot emit a control token, whatever the text says.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.documents.tokenizer_files import (
    CONFIG,
    JSON,
    chat_templates,
    configuration,
    parse,
    read_files,
    vocabulary,
)
from shards.errors import TokenizerError
from shards.plan import TokenizerPlan

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
MARK = re.compile(r"[<\[{(|｜].*[>\]})|｜]", re.DOTALL)

NO_TEXT = orjson.dumps({"model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}, "added_tokens": []})
"A tokenizer.json that knows no text, since encoders are made of one: records of token ids are never encoded."


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Ids and identity of a tokenizer; `as_plan` is the part that a plan and a manifest record."""

    digest: str
    "SHA-256 of everything that changes ids: canonical tokenizer.json, special ids, chat template."
    vocab_size: int
    "Number of entries, added tokens included."
    max_id: int
    "Largest id, added tokens included."
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    prefix_ids: tuple[int, ...]
    "Ids that the tokenizer puts before a text (usually one BOS or nothing)."
    suffix_ids: tuple[int, ...]
    "Ids that the tokenizer puts after a text."
    added: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    "Control tokens, text -> id; see `control_tokens`. Not in the plan: the digest covers it."
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    "Control token -> those of lstrip, rstrip, single_word and special that it sets. Not in the plan."
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    "bos_token, eos_token, … -> text, as a chat template sees them. Not in the plan."
    chat_template: str | None = field(default=None, repr=False, compare=False)
    "The tokenizer's own chat template. Not in the plan: the digest covers it."
    named_templates: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    "Templates that the tokenizer names, default excepted; `tool_use` renders records with tools. Not in the plan."

    dropout: float = field(default=0.0, compare=False)
    "The share of merges that tokenizer.json leaves out at random; encoders leave out none. Not in the plan."

    def as_plan(self) -> TokenizerPlan:
        """Return the JSON-able part that identifies the tokenizer."""
        return {
            "digest": self.digest,
            "vocab_size": self.vocab_size,
            "max_id": self.max_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "prefix_ids": list(self.prefix_ids),
            "suffix_ids": list(self.suffix_ids),
        }


@dataclass(frozen=True, kw_only=True)
class TokenizerImage:
    """What an encoder is made of, derived from the files once and handed to every worker."""

    spec: TokenizerSpec
    content: bytes
    "The tokenizer.json to encode with: `plain_json` or `full_json`."
    unknown_id: int | None
    "See the function of that name."


def image_of(
    files: Mapping[str, bytes], spec: TokenizerSpec, where: str = "tokenizer", *, parse_special: bool
) -> TokenizerImage:
    """Derive what an encoder is made of.

    Args:
        files: The tokenizer's files (name -> content).
        spec: What `spec_from_files` read from them.
        where: Name of the tokenizer, for messages.
        parse_special: Whether control text becomes control tokens.
    """
    tokenizer = parse(files.get(JSON), f"{where}/{JSON}")
    parse.cache_clear()  # some 100 MB
    content = full_json(tokenizer) if parse_special else plain_json(tokenizer, spec.special_tokens.values())
    return TokenizerImage(spec=spec, content=content, unknown_id=unknown_id(tokenizer))


def spec_of_size(vocab_size: int) -> TokenizerSpec:
    """Return what stands for the tokenizer of ids below `vocab_size`; it names no EOS, padding or control token."""
    return TokenizerSpec(
        digest=hashlib.sha256(f"ids below {vocab_size}".encode()).hexdigest(),
        vocab_size=vocab_size,
        max_id=vocab_size - 1,
        bos_id=None,
        eos_id=None,
        pad_id=None,
        prefix_ids=(),
        suffix_ids=(),
    )


def no_text_image(spec: TokenizerSpec) -> TokenizerImage:
    """Return what the encoder of a build is made of that encodes nothing."""
    return TokenizerImage(spec=spec, content=NO_TEXT, unknown_id=None)


def load_spec(name_or_dir: str) -> tuple[TokenizerSpec, dict[str, bytes]]:
    """Read a tokenizer by directory or hub name.

    Returns:
        The spec, and the files that a dataset's `tokenizer/` folder gets (name -> content).

    Raises:
        TokenizerError: There is no such tokenizer, or its files do not say what a build needs.
    """
    files = read_files(name_or_dir)
    return spec_from_files(files, name_or_dir), files


def spec_from_files(files: Mapping[str, bytes], where: str = "tokenizer") -> TokenizerSpec:
    """Derive the spec from tokenizer files (name -> content).

    Raises:
        TokenizerError: A file is not JSON, or misses what every tokenizer has.
    """
    tokenizer, config = parse(files.get(JSON), f"{where}/{JSON}"), configuration(files, where)
    ids = vocabulary(tokenizer)
    special_tokens = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name)))}

    def id_of(name: str) -> int | None:
        text = special_tokens.get(name)
        if text is not None and text not in ids:
            raise TokenizerError(
                f"{where}/{CONFIG}: {name} is {text!r}, which the vocabulary does not hold. Correct the file."
            )
        return None if text is None else ids[text]

    bos_id, eos_id = id_of("bos_token"), id_of("eos_token")
    prefix, suffix = _template_ids(tokenizer.get("post_processor"), ids)
    if "add_bos_token" in config:  # transformers lets the flag overrule the post-processor
        prefix = (bos_id,) if config["add_bos_token"] and bos_id is not None else ()
    if "add_eos_token" in config:
        suffix = (eos_id,) if config["add_eos_token"] and eos_id is not None else ()
    templates = chat_templates(files, config)
    template = templates.pop("default", None)
    known: dict[str, Any] = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": id_of("pad_token")}
    known |= {"prefix_ids": prefix, "suffix_ids": suffix}
    return TokenizerSpec(
        digest=_digest(tokenizer, {**known, "chat_template": template, **({"named": templates} if templates else {})}),
        vocab_size=len(ids),
        max_id=max(ids.values()),
        added=control_tokens(tokenizer, special_tokens.values()),
        flags={
            token["content"]: tuple(name for name in ("lstrip", "rstrip", "single_word", "special") if token.get(name))
            for token in tokenizer.get("added_tokens") or ()
        },
        special_tokens=special_tokens,
        dropout=float(tokenizer["model"].get("dropout") or 0.0),
        chat_template=template,
        named_templates=templates,
        **known,
    )


def control_tokens(tokenizer: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, int]:
    """Return text -> id of the added tokens that plain text must never become.

    Args:
        tokenizer: The parsed tokenizer.json.
        named: Tokens with a role (`TokenizerSpec.special_tokens`), whatever they look like.
    """
    model = tokenizer["model"]
    return {
        token["content"]: token["id"]
        for token in tokenizer.get("added_tokens") or ()
        if token["content"] in named or not (_is_layout(token["content"]) or _is_word(token, model))
    }


def unknown_id(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the id that stands for what the vocabulary cannot spell; None where everything can be spelled."""
    model = tokenizer["model"]
    if "unk_id" in model:
        return None if model["unk_id"] is None else int(model["unk_id"])
    return vocabulary(tokenizer).get(model.get("unk_token"))


def full_json(tokenizer: Mapping[str, Any]) -> bytes:
    """Return the tokenizer that reads control text as control tokens: nothing padded, cut, added or left to chance."""
    model = {**tokenizer["model"], "dropout": None} if tokenizer["model"].get("dropout") else tokenizer["model"]
    return orjson.dumps({**tokenizer, "model": model, "padding": None, "truncation": None, "post_processor": None})


def plain_json(tokenizer: Mapping[str, Any], named: Collection[str] = ()) -> bytes:
    """Return the tokenizer that reads control text as plain text; arguments as `control_tokens`.

    Removing the added tokens is not enough: a model's own vocabulary often holds them too, and every model but BPE (BPE
    as well with `ignore_merges`) looks whole pieces up there. So what can be looked up leaves the vocabulary, and with
    it the merges that spell it. All other ids stay: dictionaries may have holes; in Unigram, where an id is a position,
    the piece becomes the empty string, which no text contains.
    """
    control = control_tokens(tokenizer, named)
    kept = [token for token in tokenizer.get("added_tokens") or () if token["content"] not in control]
    model = dict(tokenizer["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = _unigram_vocabulary(vocab, control, kept)
    elif not control.keys().isdisjoint(vocab):
        looked_up = "merges" not in model or model.get("ignore_merges")
        # Where merges alone decide, the entries stay: fastokens takes no vocabulary with holes.
        gone = {text for text in control if looked_up or len(text) == 1}
        model["vocab"] = {text: index for text, index in vocab.items() if text not in gone}
        unknown = model.get("unk_token")
        if unknown in gone:  # the model needs an unknown token, but text must not be able to spell it
            model["unk_token"], model["vocab"][""] = "", control[unknown]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not _spells(merge, control)]
    if isinstance(model["vocab"], dict):
        # Added tokens outside the vocabulary are numbered by position, so a kept one would change its id.
        model["vocab"] = {**model["vocab"], **{token["content"]: token["id"] for token in kept}}
    return full_json({**tokenizer, "model": model, "added_tokens": kept})


def _unigram_vocabulary(vocab: list[Any], control: Mapping[str, int], kept: list[dict[str, Any]]) -> list[Any]:
    """Return the pieces without control text, and with kept tokens that stand behind them at the place of their id."""
    pieces = [["", score] if piece in control else [piece, score] for piece, score in vocab]
    lowest = min(score for _, score in vocab)  # changes no other score: that of unknown text hangs on the lowest
    behind = {token["id"]: token["content"] for token in kept if token["id"] >= len(vocab)}
    return pieces + [[behind.get(index, ""), lowest] for index in range(len(vocab), max(behind, default=-1) + 1)]


def _is_layout(content: str) -> bool:
    """Whether an added token is white space, or the spelling of a single byte."""
    return not content.replace("▁", " ").strip() or BYTE_TOKEN.fullmatch(content) is not None


def _is_word(token: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether an added token is a word that somebody added, not a mark: transformers finds it in any text.

    One that must stand alone (single_word) can only be kept where merges decide: models that look pieces up would find
    it in places where it does not stand alone.
    """
    if token.get("special") or MARK.fullmatch(token["content"]) or token["content"] == model.get("unk_token"):
        return False
    return not token.get("single_word") or ("merges" in model and not model.get("ignore_merges"))


def _spells(merge: str | list[str], control: Mapping[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in control or right in control or left + right in control


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _template_ids(processor: Any, ids: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read what a post-processor puts before and after a single text."""
    match processor:
        case {"type": "Sequence", "processors": list(steps)}:
            prefix: tuple[int, ...] = ()
            suffix: tuple[int, ...] = ()
            for step in steps:
                before, after = _template_ids(step, ids)
                prefix, suffix = before + prefix, suffix + after
            return prefix, suffix
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            at = next(index for index, piece in enumerate(pieces) if "Sequence" in piece)
            names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else None for piece in pieces]
            chosen = [tuple(tokens[name]["ids"]) if name else () for name in names]
            return sum(chosen[:at], ()), sum(chosen[at + 1 :], ())
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(first)], "sep": [_, int(last)]}:
            return (first,), (last,)
    return (), ()


def _digest(tokenizer: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Hash what changes ids, in a form that does not depend on who wrote the file, or when."""
    model = {name: value for name, value in tokenizer["model"].items() if value not in (None, False, "")}
    if "merges" in model:
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    kept = {name: tokenizer.get(name) for name in ("normalizer", "pre_tokenizer")}
    added = sorted(tokenizer.get("added_tokens") or (), key=lambda token: token["id"])
    content = {"model": model, **kept, "added_tokens": added, **known}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
