"""Ways to turn texts into ids: the reference, `tokenizers`, and engines that give the same ids faster.

The reference runs on tokenizers 0.22 and 0.23 (2.6 MB/s a core on Llama 3.1) and on 1.x (72 MB/s), whose API is another
one: tokenizers come from files, ids as arrays, and offsets are gone. `fastokens` and `gigatoken` give 30 to 45 MB/s
beside the old reference and are not needed beside the new one. A new engine is an entry in `ENGINES`.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shards.errors import TokenizerError

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Encode = Callable[[list[str]], tuple[Ids, Offsets]]

CHUNK_CHARS = 1 << 17  # the reference keeps some hundred bytes a token while it works


class Engine(NamedTuple):
    """A way to encode: the package that holds it, and a function from a tokenizer.json to an `Encode`."""

    package: str
    open: Callable[[bytes], Encode]

    @property
    def version(self) -> str:
        """The version of its package that is installed; empty where none is."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return ""


class Reference:
    """The reference engine on one tokenizer.

    Args:
        content: A tokenizer.json.

    Raises:
        TokenizerError: `tokenizers` cannot load it.
    """

    def __init__(self, content: bytes) -> None:
        import tokenizers

        try:
            if hasattr(tokenizers.Tokenizer, "from_buffer"):
                self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
            else:
                self._tokenizer = _from_file(tokenizers.Tokenizer, content)
        except Exception as error:  # the library raises exactly this class for whatever it cannot read
            raise TokenizerError(f"tokenizer: {error}; expected a tokenizer.json that `tokenizers` can load.") from None
        self._encode_batch = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Encode texts; see `Encoder.encode`."""
        parts, lengths = [np.empty(0, np.int32)], list[int]()
        for chunk in _chunks(texts):
            encodings = self._encode_batch(chunk, add_special_tokens=False)
            lengths += map(len, encodings)
            if encodings and hasattr(encodings[0], "ids_array"):
                parts += [encoding.ids_array.astype(np.int32) for encoding in encodings]
            else:
                ids = chain.from_iterable(encoding.ids for encoding in encodings)
                parts.append(np.fromiter(ids, dtype=np.int32))
        return np.concatenate(parts), running_sum(lengths)

    def encode_with_spans(self, text: str) -> tuple[Ids, Ids]:
        """Encode one text and say which characters each token covers; see `Encoder.encode_with_spans`."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if not hasattr(encoding, "offsets"):
            raise TokenizerError(
                f"tokenizers {metadata.version('tokenizers')}: gives no offsets, which this tokenizer needs where a "
                "target begins inside a text. Install 'tokenizers<1'."
            )
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)


def _from_file(tokenizer_class: Any, content: bytes) -> Any:
    """Load a tokenizer that tokenizers 1.x takes from files only."""
    handle, path = tempfile.mkstemp(suffix=".json")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return tokenizer_class.from_file(path)
    finally:
        Path(path).unlink()


def _open_reference(content: bytes) -> Encode:
    return Reference(content).encode


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
    REFERENCE: Engine("tokenizers", _open_reference),
}


def reference_is_fast() -> bool:
    """Whether the reference needs no faster engine beside it: tokenizers from 1.0 on."""
    return int(ENGINES[REFERENCE].version.partition(".")[0]) >= 1


def single_threaded() -> None:
    """Keep engines on the calling thread, so that processes do not fight over cores; before the first one is opened."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def is_engine_fault(error: BaseException) -> bool:
    """Whether a native engine failed, a Rust panic included, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def running_sum(lengths: npt.ArrayLike) -> Offsets:
    """Return 0 and the running sums of lengths; int64 (num_lengths + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


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
