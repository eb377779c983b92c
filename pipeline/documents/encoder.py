"""Texts to flat arrays of ids, by the fastest engine that proves to agree with the reference.

The reference is `tokenizers` (1.4 MB/s a core on Llama-3.1); `fastokens` and `gigatoken` give the same ids at 30 to 45
MB/s. Trust is earned in every process: a fixed set of hard texts, the first documents, and pieces of at most 0.1 % of
the bytes all along the run are encoded by both. One difference, and this encoder uses the reference for good, starting
with the batch at hand; the build redoes what the fast engine made elsewhere. A new engine is an entry in `ENGINES`.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.documents.added_tokens import SpelledControls
from pipeline.documents.tokenizer import (
    JSON,
    full_json,
    parse,
    plain_json,
    read_files,
    spec_from_files,
    unknown_id,
)
from shards.errors import TokenizerError, reason_of

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Encode = Callable[[list[str]], tuple[Ids, Offsets]]

CHUNK_CHARS = 1 << 19  # the reference keeps about 100 bytes a token while it works
FIRST_BYTES = 1 << 16  # of the first documents, compared before the running sample begins
PIECE_CHARS = 4096  # longest piece of a document that is compared
SAMPLE_SHARE = 0.001  # of all bytes; the reference is 30 times slower, so this costs about 3 %


class Engine(NamedTuple):
    """A way to encode: the package that holds it, and a function from a tokenizer.json to an `Encode`."""

    package: str
    open: Callable[[bytes], Encode]


def _open_tokenizers(content: bytes) -> Encode:
    tokenizer = _reference(content)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        parts, lengths = [np.empty(0, np.int32)], list[int]()
        for chunk in _chunks(texts):
            ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False)]
            lengths += map(len, ids)
            parts.append(np.fromiter(chain.from_iterable(ids), dtype=np.int32))
        return np.concatenate(parts), running_sum(lengths)

    return encode


def _open_fastokens(content: bytes) -> Encode:
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(content.decode("utf-8"))

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = tokenizer.encode_batch_flat(texts)
        return np.frombuffer(ids, dtype=np.int32), np.frombuffer(offsets, dtype=np.int64)

    return encode


def _open_gigatoken(content: bytes) -> Encode:
    import gigatoken

    tokenizer = gigatoken.Tokenizer.from_json(content)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        layout = tokenizer.encode_batch(texts, parallel=False).layout.to_ListOffsetArray64(True)
        ids = np.asarray(layout.content.data)[: layout.offsets[-1]]
        return ids.astype(np.int32), np.asarray(layout.offsets, dtype=np.int64)

    return encode


REFERENCE = "tokenizers"
ENGINES = {
    "fastokens": Engine("fastokens", _open_fastokens),
    "gigatoken": Engine("gigatoken", _open_gigatoken),
    REFERENCE: Engine("tokenizers", _open_tokenizers),
}


class Encoder:
    """One tokenizer in one process; encodes on the calling thread, so that processes do not fight over cores.

    Args:
        tokenizer: Directory, hub name, or the files themselves (name -> content).
        engine: A key of ENGINES, or auto: the first fast one that is installed, can hold this tokenizer and agrees.
        parse_special: Read control text as control tokens; plain text otherwise.

    Raises:
        TokenizerError: The tokenizer cannot be loaded, or the engine asked for is not installed or cannot hold it.
    """

    def __init__(
        self, tokenizer: str | Path | Mapping[str, bytes], *, engine: str = "auto", parse_special: bool = False
    ) -> None:
        if engine != "auto" and engine not in ENGINES:
            raise TokenizerError(f"--tokenizer-engine: {engine!r}; expected auto or one of {', '.join(ENGINES)}.")
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        name = "tokenizer" if isinstance(tokenizer, Mapping) else str(tokenizer)
        files = tokenizer if isinstance(tokenizer, Mapping) else read_files(name)
        parsed = parse(files.get(JSON), f"{name}/{JSON}")
        self.spec = spec_from_files(files, name)
        self.parse_special = parse_special
        self.guard_failed = False
        named = self.spec.special_tokens.values()
        self.content = full_json(parsed) if parse_special else plain_json(parsed, named)
        self.spelled = SpelledControls(() if parse_special else self.spec.added)
        self._spans_tokenizer: Any = None
        self._control = np.zeros(self.spec.max_id + 1, dtype=bool)
        self._control[list(self.spec.added.values())] = not parse_special
        if (unknown := unknown_id(parsed)) is not None:  # text may hold what the vocabulary cannot spell
            self._control[unknown] = False
        self._reference = ENGINES[REFERENCE].open(self.content)
        self._check_control()
        self._engine, self._fast = self._choose(engine)
        self._checked = {"documents": 0, "bytes": 0}
        self._first_bytes, self._credit = FIRST_BYTES, 0.0
        self._random = random.Random(0)
        if self._fast is not None and not self._agree(list(hard_texts(self.spec.added))):
            self._distrust()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Encode texts, adding nothing before or after.

        Returns:
            `ids`: int32 (num_tokens,), all texts end to end; `offsets`: int64 (num_texts + 1,), where each begins.

        Raises:
            TokenizerError: A text holds a lone surrogate, which has no UTF-8 form.
        """
        self.spelled.look_at(texts)
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
        """
        if self._spans_tokenizer is None:
            self._spans_tokenizer = _reference(self.content)
        encoding = self._spans_tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def facts(self) -> dict[str, Any]:
        """Return engine, version and guard result: facts of this run that never change the bytes."""
        result = "differs" if self.guard_failed else "equal" if self._fast is not None else "not needed"
        used = REFERENCE if self._fast is None else self._engine
        return {
            "engine": used,
            "version": metadata.version(ENGINES[used].package),
            "guard": {
                "engine": self._engine,
                "result": result,
                "checked_documents": self._checked["documents"],
                "checked_bytes": self._checked["bytes"],
            },
        }

    def _choose(self, asked: str) -> tuple[str, Encode | None]:
        """Open the engine asked for, or the first fast one that can hold this tokenizer."""
        if asked == REFERENCE:
            return REFERENCE, None
        for name in ENGINES if asked == "auto" else (asked,):
            if name == REFERENCE:
                continue
            try:
                return name, ENGINES[name].open(self.content)
            except BaseException as error:
                if not _is_engine_fault(error):
                    raise
                if asked != "auto":
                    raise TokenizerError(
                        f"--tokenizer-engine {name}: cannot be used ({reason_of(error)}). "
                        f"Install it, or use auto or {REFERENCE}."
                    ) from None
        return REFERENCE, None

    def _run_fast(self, texts: list[str]) -> tuple[Ids, Offsets] | None:
        """Encode by the fast engine and compare a sample; None, and the reference from now on, where they differ."""
        assert self._fast is not None
        try:
            ids, offsets = self._fast(texts)
        except BaseException as error:
            if isinstance(error, UnicodeEncodeError | TypeError) or not _is_engine_fault(error):
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
        pieces: list[str] = []
        for text in texts if self._first_bytes > 0 else ():
            pieces.append(text[: min(PIECE_CHARS, self._first_bytes)])
            self._first_bytes -= len(pieces[-1].encode("utf-8"))
            if self._first_bytes <= 0:
                break
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
            if not _is_engine_fault(error):
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


def running_sum(lengths: npt.ArrayLike) -> Offsets:
    """Return 0 and the running sums of lengths; int64 (num_lengths + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


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


def _reference(content: bytes) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises exactly this class for whatever it cannot read
        raise TokenizerError(f"tokenizer: {error}; expected a tokenizer.json that `tokenizers` can load.") from None


def _is_engine_fault(error: BaseException) -> bool:
    """Whether a native engine failed, a Rust panic included, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    """Group texts to about CHUNK_CHARS characters."""
    start = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        if size >= CHUNK_CHARS:
            yield texts[start : index + 1]
            start, size = index + 1, 0
    if start < len(texts):
        yield texts[start:]
