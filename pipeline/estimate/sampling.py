"""A corpus sampled into packs in memory: text from random places, as tokens, nothing written.

For measurements that need a few million tokens of a corpus of any size. Chunks are small, so that a sample of a large
corpus comes from many places; documents are cut and packed as a build would do it.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import Rejected, WindowReader
from pipeline.sources.streams import stream_parts
from pipeline.sources.windows import Slice, Source, cut_windows, enumerate_streams
from shards.errors import PackError
from shards.reader import Pack

CHUNK_BYTES = 256 << 10
Place = tuple[int, tuple[Slice, ...] | int]  # number of the source, and slices or the number of a streamed file


def sample_documents(
    specs: tuple[str, ...],
    encoder: Encoder,
    options: RecordOptions,
    seq_len: int,
    seed: int,
    enough: Callable[[int, int], bool],
) -> list[Pack]:
    """Read text until there is enough.

    Args:
        specs: SOURCE arguments.
        encoder: The tokenizer.
        options: How a record becomes a document; kind text.
        seq_len: Most tokens of a segment.
        seed: Of the places.
        enough: Tells from the number of segments and of tokens so far whether to stop.

    Returns:
        Segments in random order, each a row of its own: input_ids, position_ids, loss_mask, cu_seqlens.

    Raises:
        PackError: There is no text.
    """
    segments: list[Pack] = []
    tokens, rejected = 0, list[Rejected]()
    for ids in _documents(specs, encoder, options, seed, rejected):
        pieces = cut(np.array([len(ids)], np.int64), seq_len, options.overlong_policy)
        for start, length in zip(pieces.start.tolist(), pieces.length.tolist(), strict=True):
            segments.append(alone(ids[start : start + length]))
            tokens += length
        if enough(len(segments), tokens):
            break
    if not segments:
        first = f" The first bad record: {rejected[0]}." if rejected else ""
        raise PackError(f"{', '.join(specs)}: no text to read; expected documents.{first or ' Check the files.'}")
    random.Random(seed).shuffle(segments)
    return segments


def _documents(
    specs: tuple[str, ...], encoder: Encoder, options: RecordOptions, seed: int, rejected: list[Rejected]
) -> Iterator[np.ndarray]:
    """Yield the ids of each document, and enter bad records into `rejected`."""
    sources = resolve_sources(specs, options)
    windows, _ = cut_windows(sources, CHUNK_BYTES)
    random.Random(seed).shuffle(windows)
    makers = [DocumentMaker(encoder, source.options) for source in sources]
    places: list[Place] = [*windows, *enumerate_streams(sources)]
    for number, place in places:
        for reader in chunk_readers(sources[number], place):
            for batch in reader:
                made, _ = makers[number].make(batch)
                yield from np.split(made.input_ids, made.offsets[1:-1])
            rejected += reader.rejected


def chunk_readers(source: Source, place: tuple[Slice, ...] | int) -> Iterator[WindowReader]:
    """Yield a reader of a window's slices, or, of the streamed file with that number, one for each part."""
    if isinstance(place, tuple):
        yield WindowReader(source, place, on_error="skip")
    else:
        for slice_, payload in stream_parts(source, place, CHUNK_BYTES):
            yield WindowReader(source, (slice_,), on_error="skip", payload=payload)


def alone(ids: np.ndarray) -> Pack:
    """Return a document of plain text as a row of its own: every token but the first is a target."""
    mask = np.ones(len(ids), np.uint8)
    mask[0] = 0
    return Pack(ids, np.arange(len(ids), dtype=np.int32), mask, np.array([0, len(ids)], np.int32))


def pack_rows(segments: list[Pack], seq_len: int, seed: int) -> list[Pack]:
    """Pack rows of one segment with the default packer, and shuffle the packs."""
    lengths = np.array([len(ids) for ids, *_ in segments], np.int32)
    bins = PACKERS["auto"](lengths, seq_len, seed=seed)
    packs = []
    for members in np.split(bins.order, bins.offsets[1:-1]):
        columns = list(zip(*(segments[i] for i in members), strict=True))
        ids, positions, mask = (np.concatenate(column) for column in columns[:3])
        packs.append(Pack(ids, positions, mask, np.cumsum([0, *lengths[members]], dtype=np.int32)))
    random.Random(seed).shuffle(packs)
    return packs
