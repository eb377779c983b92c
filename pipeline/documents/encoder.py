"""Texts to flat arrays of ids, by the fastest engine that proves to agree with the reference.

Every process checks the fast engine: a fixed set of hard texts, the first documents, and pieces of at most 0.1 % of the
bytes all along the run are encoded by both. One difference, and this encoder uses the reference for good, starting with
the batch at hand; the build redoes what the fast engine made elsewhere. Every character there is is compared once for a
tokenizer, beside a build (`proof.py`).
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.documents.added_tokens import SpelledControls
from pipeline.documents.engines import (
    ENGINES,
    REFERENCE,
    Encode,
    Ids,
    Offsets,
    Reference,
    is_engine_fault,
    reference_is_fast,
    single_threaded,
)
from pipeline.documents.tokenizer import TokenizerImage, image_of, spec_from_files
from pipeline.documents.tokenizer_files import read_files
from shards.errors import TokenizerError, reason_of

FIRST_BYTES = 1 << 16  # of the first documents, compared before the running sample begins
PIECE_CHARS = 4096  # longest piece of a document that is compared
SAMPLE_SHARE = 0.001  # of all bytes; the reference is 30 times slower, so this costs about 3 %


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engines an encoder may use beside the reference, and from when on."""

    engines: tuple[str, ...] = ()
    "Fast engines to try, in order: keys of ENGINES; empty for the reference alone."
    required: bool = False
    "Whether it is an error that none of them can be used."
    patience_chars: int = 0
    "Characters that the reference encodes first: a small corpus is done before a fast engine is loaded."
    compare_all: bool = False
    "Compare every text with the reference, not a sample: for an engine that nobody has compared on every character."

    @classmethod
    def named(cls, name: str) -> "EngineChoice":
        """Return the choice that a name stands for: auto, or a key of ENGINES.

        Raises:
            TokenizerError: There is no such engine.
        """
        if name == "auto":
            fast = () if reference_is_fast() else tuple(engine for engine in ENGINES if engine != REFERENCE)
            return cls(engines=fast)
        if name not in ENGINES:
            raise TokenizerError(f"tokenizer_engine: {name!r}; expected auto or one of {', '.join(ENGINES)}.")
        return cls() if name == REFERENCE else cls(engines=(name,), required=True)


class Encoder:
    """One tokenizer in one process; encodes on the calling thread, so that processes do not fight over cores.

    Args:
        tokenizer: Directory, hub name, the files themselves (name -> content), or an image made for `parse_special`.
        engine: A key of ENGINES, or auto: the first fast one that is installed, can hold this tokenizer and agrees; or
            an `EngineChoice`.
        parse_special: Read control text as control tokens; plain text otherwise.

    Raises:
        TokenizerError: The tokenizer cannot be loaded, or the engine asked for is not installed or cannot hold it.
    """

    def __init__(
        self,
        tokenizer: str | Path | Mapping[str, bytes] | TokenizerImage,
        *,
        engine: str | EngineChoice = "auto",
        parse_special: bool = False,
    ) -> None:
        self.choice = EngineChoice.named(engine) if isinstance(engine, str) else engine
        single_threaded()
        if not isinstance(tokenizer, TokenizerImage):
            name = "tokenizer" if isinstance(tokenizer, Mapping) else str(tokenizer)
            files = tokenizer if isinstance(tokenizer, Mapping) else read_files(name)
            tokenizer = image_of(files, spec_from_files(files, name), name, parse_special=parse_special)
        self.spec, self.content, self.parse_special = tokenizer.spec, tokenizer.content, parse_special
        self.guard_failed = False
        self.spelled = SpelledControls(() if parse_special else self.spec.added)
        self._control = np.zeros(self.spec.max_id + 1, dtype=bool)
        self._control[list(self.spec.added.values())] = not parse_special
        if tokenizer.unknown_id is not None:  # text may hold what the vocabulary cannot spell
            self._control[tokenizer.unknown_id] = False
        self._spans = Reference(self.content)
        self._reference = self._spans.encode
        self._check_control()
        self._checked = {"documents": 0, "bytes": 0}
        self._first_bytes, self._credit = FIRST_BYTES, 0.0
        self._random = random.Random(0)
        self._engine: str = REFERENCE
        self._fast: Encode | None = None
        self._patience = self.choice.patience_chars
        if self._patience == 0:
            self._open_fast()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Encode texts, adding nothing before or after.

        Returns:
            `ids`: int32 (num_tokens,), all texts end to end; `offsets`: int64 (num_texts + 1,), where each begins.

        Raises:
            TokenizerError: A text holds a lone surrogate, which has no UTF-8 form.
        """
        self.spelled.look_at(texts)
        if self._patience > 0:
            self._patience -= sum(map(len, texts))
            if self._patience <= 0:
                self._open_fast()
        try:
            fast = self._run_fast(texts) if self._fast is not None else None
            return self._reference(texts) if fast is None else fast
        except (UnicodeEncodeError, TypeError):
            raise _surrogate_error(texts) from None

    def encode_with_spans(self, text: str) -> tuple[Ids, Ids]:
        """Encode one text with the reference engine, and say which characters each token covers.

        Returns:
            `ids`: int32 (num_tokens,); `spans`: int32 (num_tokens, 2), first and one-past-last character of each token,
            as Python indexes a `str`. Tokens of one multi-byte character share its span.

        Raises:
            TokenizerError: The version of `tokenizers` that is installed gives no offsets.
        """
        return self._spans.encode_with_spans(text)

    def facts(self) -> dict[str, Any]:
        """Return engine, version and guard result: facts of this run that never change the bytes."""
        result = "differs" if self.guard_failed else "equal" if self._fast is not None else "not needed"
        used = REFERENCE if self._fast is None else self._engine
        return {
            "engine": used,
            "version": ENGINES[used].version,
            "guard": {
                "engine": self._engine,
                "result": result,
                "compares_all": self.choice.compare_all,
                "checked_documents": self._checked["documents"],
                "checked_bytes": self._checked["bytes"],
            },
        }

    def _open_fast(self) -> None:
        """Open the first fast engine of the choice that can hold this tokenizer, and compare it on the fixed texts."""
        for name in self.choice.engines:
            try:
                self._fast, self._engine = ENGINES[name].open(self.content), name
                break
            except BaseException as error:
                if not is_engine_fault(error):
                    raise
                if self.choice.required:
                    raise TokenizerError(
                        f"tokenizer_engine {name}: cannot be used ({reason_of(error)}). "
                        f"Install it, or use auto or {REFERENCE}."
                    ) from None
        texts = list(hard_texts([*self.spec.added, *(text for text in self.spec.flags if text not in self.spec.added)]))
        if self._fast is not None and not self._agree(texts):
            self._distrust()

    def _run_fast(self, texts: list[str]) -> tuple[Ids, Offsets] | None:
        """Encode by the fast engine and compare a sample; None, and the reference from now on, where they differ."""
        assert self._fast is not None
        try:
            ids, offsets = self._fast(texts)
        except BaseException as error:
            if isinstance(error, UnicodeEncodeError | TypeError) or not is_engine_fault(error):
                raise
            self._distrust()
            return None
        if ids.size and (ids.min() < 0 or ids.max() > self.spec.max_id or self._control[ids].any()):
            self._distrust()
            return None
        if not self._agree(self._sample(texts)):
            self._distrust()
            return None
        return ids, offsets

    def _distrust(self) -> None:
        self._fast, self.guard_failed = None, True

    def _sample(self, texts: list[str]) -> list[str]:
        """Pick pieces: the heads of the first documents, then places at random within the share allowed."""
        if self.choice.compare_all:
            return texts
        pieces: list[str] = []
        for text in texts:
            if self._first_bytes <= 0:
                break
            pieces.append(text[: min(PIECE_CHARS, self._first_bytes)])
            self._first_bytes -= len(pieces[-1].encode("utf-8"))
        self._credit += SAMPLE_SHARE * sum(map(len, texts))  # characters: never more than the bytes
        while texts and self._credit >= PIECE_CHARS:
            text = texts[self._random.randrange(len(texts))]
            start = self._random.randrange(max(1, len(text) - PIECE_CHARS + 1))
            pieces.append(text[start : start + PIECE_CHARS])
            self._credit -= max(len(pieces[-1].encode("utf-8")), 1)
        return pieces

    def _agree(self, texts: list[str]) -> bool:
        """Whether the fast engine gives the same ids as the reference."""
        assert self._fast is not None
        if not texts:
            return True
        self._checked["documents"] += len(texts)
        self._checked["bytes"] += sum(len(text.encode("utf-8")) for text in texts)
        try:
            ids, offsets = self._fast(texts)
        except BaseException as error:
            if not is_engine_fault(error):
                raise
            return False
        expected_ids, expected_offsets = self._reference(texts)
        return np.array_equal(ids, expected_ids) and np.array_equal(offsets, expected_offsets)

    def _check_control(self) -> None:
        """Prove on every control text that plain encoding cannot give a control token."""
        if self.parse_special or not self.spec.added:
            return
        texts = [form for text in self.spec.added for form in (text, f"a {text} b", f"a{text}b")]
        ids, _ = self._reference(texts)
        forged = ids[self._control[ids]]
        if len(forged):
            raise TokenizerError(
                f"tokenizer: plain text still becomes the control token with id {forged[0]}; expected plain tokens. "
                "Use --parse-special, or report this tokenizer."
            )


def hard_texts(added: Iterable[str] = ()) -> Iterator[str]:
    """Yield the fixed texts that an engine must encode as the reference does: known traps, then a seeded fuzz."""
    traps = [
        *("", " ", "\n", "  \n\n\t \r\n", "a  b   c    d", "trailing  ", "\tTabs\t\tand\n\n\n\nlines\r\rold\r\n"),
        *("I'm you'LL WE'VE they'd it's 'S 'tis", "don’t “quote” —dash…", "1 12 123 1234 12345 1,234,567.89 3٣३"),
        *("é e\u0301 Å A\u030a ﬁ ½ ① Ⅷ", "한국어 한국어 日本語テキスト 中文,。!", "שלום مرحبا हिन्दी ไทย ქართული"),
        *("👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 👍🏽", "\ufeffbom \u2028 \u2029 \u0085 \u00a0 \u3000 \u200b \u00ad"),
        *("\x00\x01\x1f\x7f", "a\x00b", "\U0010ffff\ue000\ufffd", "▁▁ ▁a", "<0x0A> <0xFF>", "Ġ Ċ ĉ"),
        *("x" * 300, "ab" * 500, "=" * 200, "_" * 70 + " " * 70 + "\n" * 70, "https://ex.org/a?b=c&d=%20#e"),
        *("def f(x):\n\treturn {'a': [x]}\n", "\u1100\u1161\u11a8", "a\u0301\u0302\u0303\u0304"),
        *("CamelCaseHTTPServer2 snake_case kebab-case", "İSTANBUL ǅ ß ẞ ſ K"),
    ]
    yield from traps
    for text in list(added)[:100]:
        yield from (text, f"a {text} b", f"{text}{text}", text[:-1], text.upper())
    draw = random.Random(20)
    alphabet = "aAeE zZ09  \n\t\r.,'’\"-_/<>|[]{}()#@éßñ你好한ـسд👍\u0301\u200d\u00a0\ufeff\u2028▁"
    for length in range(1, 200):
        yield "".join(draw.choices(alphabet, k=length))
    for length in range(1, 100):
        yield "".join(chr(draw.randrange(1, 0xD800)) for _ in range(length))


def _surrogate_error(texts: list[str]) -> TokenizerError:
    """Name the first text that UTF-8 cannot hold; engines differ in what they raise for it, this does not."""
    for index, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return TokenizerError(
                f"text {index}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
                "expected text that UTF-8 can hold. Repair the record, or use --on-error skip."
            )
    raise AssertionError("an engine refused texts that are all valid")
