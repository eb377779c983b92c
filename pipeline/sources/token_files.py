"""Files that hold token ids and nothing else: Megatron's pairs of .bin and .idx, and streams in .npy and .bin.

Both are mapped, not read whole. A Megatron index tells where documents begin; in a stream each document ends with the
EOS id, and like a line of JSONL it belongs to the slice in which its first token lies.
"""

import os
import tokenize
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config import RecordOptions
from pipeline.sources.tokenized import Ragged
from shards.errors import SourceError, reason_of
from shards.fetching.remote import is_url, reaching

MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # Megatron's codes of integers
# numpy reads a header with Python's own parser, and lets what that says of a broken one through
BROKEN_HEADER = (ValueError, EOFError, SyntaxError, tokenize.TokenError, TypeError, OverflowError)
SEARCHED_TOKENS = 1 << 20
BATCH_TOKENS = 1 << 20


class TokenFile(NamedTuple):
    """A mapped file of ids."""

    ids: npt.NDArray[Any]
    "(num_tokens,)"
    documents: npt.NDArray[np.int64] | None
    "int64 (num_documents + 1,): where each document begins, in tokens; None for a stream."


def open_tokens(location: str, name: str, kind: str, options: RecordOptions) -> TokenFile:
    """Map a file of token ids.

    Args:
        location: A local path.
        name: The file's name in messages.
        kind: npy, bin or megatron.
        options: `token_type` is the type of a raw .bin, `eos_id` what ends its documents.

    Raises:
        SourceError: The file is remote, cut off, of a wrong type, or disagrees with its index.
    """
    if is_url(location):
        raise SourceError(f"{name}: files of token ids are mapped; expected a local path. Fetch it first.")
    with reaching(location, name):
        if kind == "megatron":
            return _open_megatron(location, name)
        if options.eos_id is None:
            raise SourceError(f"{name}: is a stream of token ids; expected the id that ends documents. Give `eos_id`.")
        if kind == "bin":
            return TokenFile(_mapped(location, name, np.dtype(options.token_type)), None)
        ids = _open_npy(location, name)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SourceError(f"{name}: holds {ids.dtype} of shape {ids.shape}; expected one row of integer ids.")
    return TokenFile(ids, None)


def _open_npy(location: str, name: str) -> npt.NDArray[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that is read as one of Python 2
            return np.lib.format.open_memmap(location, mode="r")
    except BROKEN_HEADER as error:
        raise SourceError(f"{name}: cannot be read as .npy ({reason_of(error)}). Write the file again.") from None


def is_megatron(location: str) -> bool:
    """Whether a .bin has Megatron's index beside it."""
    return not is_url(location) and os.path.isfile(f"{os.path.splitext(location)[0]}.idx")


def token_ranges(file: TokenFile, start: int, stop: int, name: str, options: RecordOptions) -> Iterator[Ragged]:
    """Yield the documents of a slice: documents [start, stop) of an index, or those that begin in tokens [start, stop).

    Raises:
        SourceError: A stream holds no EOS id.
    """
    if file.documents is None:
        yield from _stream_ranges(file.ids, start, stop, name, options)
        return
    while start < stop:
        until = int(np.searchsorted(file.documents, file.documents[start] + BATCH_TOKENS))
        until = min(max(until, start + 1), stop)
        bounds = file.documents[start : until + 1]
        yield Ragged(np.asarray(file.ids[bounds[0] : bounds[-1]]), bounds - bounds[0])
        start = until


def _stream_ranges(ids: npt.NDArray[Any], start: int, stop: int, name: str, options: RecordOptions) -> Iterator[Ragged]:
    assert options.eos_id is not None
    begin = start and _after_eos(ids, start - 1, options.eos_id)
    while begin < stop:
        end = _after_eos(ids, min(begin + BATCH_TOKENS, stop) - 1, options.eos_id)
        part = np.asarray(ids[begin:end])
        ends = np.flatnonzero(part == options.eos_id) + 1
        if len(ends) == 0 and begin == 0:
            raise SourceError(
                f"{name}: holds no id {options.eos_id}; expected it at the end of each document. Check `eos_id` and, "
                "of a raw .bin, `token_type`."
            )
        if len(ends) == 0 or ends[-1] != len(part):  # the last document of a file may lack its EOS
            ends = np.append(ends, len(part))
        yield Ragged(part, np.concatenate([np.zeros(1, np.int64), ends.astype(np.int64)]))
        begin = end


def _after_eos(ids: npt.NDArray[Any], at: int, eos_id: int) -> int:
    """Return the place behind the first EOS at or after `at`; the end of the file where there is none."""
    while at < len(ids):
        found = np.flatnonzero(ids[at : at + SEARCHED_TOKENS] == eos_id)
        if len(found):
            return at + int(found[0]) + 1
        at += SEARCHED_TOKENS
    return len(ids)


def _mapped(location: str, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    size = os.stat(location).st_size
    if size % dtype.itemsize:
        raise SourceError(
            f"{name}: has {size:,} bytes; expected a multiple of {dtype.itemsize} ({dtype}). Is it cut off?"
        )
    return np.memmap(location, dtype, "r") if size else np.zeros(0, dtype)


def _open_megatron(location: str, name: str) -> TokenFile:
    """Read the index: magic, version, type, numbers of sequences and documents, lengths, pointers, document bounds."""
    index = f"{os.path.splitext(location)[0]}.idx"
    shown = f"{os.path.splitext(name)[0]}.idx"
    with open(index, "rb") as stream:
        head = stream.read(34)
        if head[:9] != MAGIC or len(head) < 34 or int.from_bytes(head[9:17], "little") != 1:
            raise SourceError(f"{shown}: not an index of Megatron, version 1; expected one beside {name}.")
        code, sequences, bounds = head[17], *(int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        if code not in DTYPES:
            raise SourceError(f"{shown}: has the type code {code}; expected integers ({', '.join(map(str, DTYPES))}).")
        body = stream.read()
    if len(body) < 12 * sequences + 8 * bounds:
        raise SourceError(
            f"{shown}: is cut off; expected {sequences:,} sequences and {bounds:,} bounds. Fetch it again."
        )
    lengths = np.frombuffer(body, np.int32, sequences).astype(np.int64)
    pointers = np.frombuffer(body, np.int64, sequences, 4 * sequences)
    documents = np.frombuffer(body, np.int64, bounds, 12 * sequences)
    ids = _mapped(location, name, np.dtype(DTYPES[code]))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    agree = (
        (lengths >= 0).all()
        and starts[-1] == len(ids)
        and (pointers == starts[:-1] * ids.dtype.itemsize).all()
        and bounds > 0
        and documents[0] == 0
        and documents[-1] == sequences
        and (np.diff(documents) >= 0).all()
    )
    if not agree:
        raise SourceError(
            f"{name}: disagrees with {shown} ({len(ids):,} ids of {ids.dtype} there, {starts[-1]:,} in the index); "
            "expected sequences end to end. Write both again."
        )
    return TokenFile(ids, starts[documents])
