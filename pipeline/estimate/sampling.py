"""A corpus sampled: documents of small chunks from random places, as tokens, nothing written.

For estimates and for measurements that need a few million tokens of a corpus of any size. Chunks are small, so that a
sample of a large corpus comes from many places; `pack_rows` packs segments in memory as a build would.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import Rejected, WindowReader
from pipeline.sources.streams import Meter, stream_windows
from pipeline.sources.windows import Slice, Source, cut_windows, enumerate_streams
from pipeline.tokens import Documents
from shards.errors import PackError
from shards.reader import Pack

CHUNK_BYTES = 256 << 10
Place = tuple[int, tuple[Slice, ...] | int]  # index of the source, and slices or the index of a streamed file


class Chunk(NamedTuple):
    """What one small piece of a corpus holds."""

    source: int
    "Index of its source."
    order: int
    "Its place among all chunks of the corpus, in plan order; parts of one streamed file share it."
    documents: list[Documents]
    raw_bytes: int
    "Bytes read, as they are parsed."
    stored_bytes: int
    "The same in the bytes by which the file counts in its source: compressed where it is."
    empty: int
    "Records without a token."
    rejected: list[Rejected]
    whole: bool
    "Whether it was read to its end."
    unread_fields: dict[str, int]
    "How many records have a field that looks as if it mattered and that no option reads."


def draw_places(sources: list[Source], chunk_bytes: int, seed: int) -> list[tuple[int, Place]]:
    """Return (order, place) of every chunk and streamed file in random order, one of every source first."""
    windows, _ = cut_windows(sources, chunk_bytes)
    places: list[tuple[int, Place]] = list(enumerate([*windows, *enumerate_streams(sources)]))
    random.Random(seed).shuffle(places)
    first: dict[int, int] = {}
    for order, (source, _) in places:
        first.setdefault(source, order)
    return sorted(places, key=lambda place: first[place[1][0]] != place[0])


def read_chunks(
    sources: list[Source], places: list[tuple[int, Place]], encoder: Encoder, expired: Callable[[], bool]
) -> Iterator[Chunk]:
    """Read and tokenize chunks until there is no more time; something of every source even then.

    Args:
        sources: All sources.
        places: From `draw_places`; their first entries hold one of every source.
        encoder: The tokenizer.
        expired: Tells whether to stop; asked after each batch of records.
    """
    makers = [DocumentMaker(encoder, source.options) for source in sources]
    for position, (order, (index, place)) in enumerate(places):
        if position >= len(sources) and expired():
            return
        counted, meter = 0, Meter()
        for reader in _readers(sources[index], place, meter):
            documents, empty, late = [], 0, False
            for batch in reader:
                made, drops = makers[index].make(batch)
                documents.append(made)
                empty += sum(drops.values())
                late = expired()
                if late:
                    break
            unread = makers[index].unread_fields.take()
            raw_bytes = reader.raw_bytes
            stored_bytes = meter.bytes - counted if isinstance(place, int) else raw_bytes
            counted = meter.bytes
            yield Chunk(index, order, documents, raw_bytes, stored_bytes, empty, reader.rejected, not late, unread)
            if late:
                break


def _readers(source: Source, place: tuple[Slice, ...] | int, meter: Meter) -> Iterator[WindowReader]:
    """Yield a reader of a window's slices, or, of the streamed file with that index, one for each part."""
    if isinstance(place, tuple):
        yield WindowReader(source, place, on_error="skip")
    else:
        for slices, payloads in stream_windows(source, (place,), CHUNK_BYTES, meter):
            yield WindowReader(source, slices, on_error="skip", payloads=payloads)


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
        seq_len: Maximum number of tokens of a segment.
        seed: Of the places.
        enough: Tells from the number of segments and of tokens so far whether to stop.

    Returns:
        Segments in random order, each a row of its own: input_ids, position_ids, loss_mask, cu_seqlens.

    Raises:
        PackError: There is no text.
    """
    sources = resolve_sources(specs, options)
    segments: list[Pack] = []
    tokens, rejected = 0, list[Rejected]()
    for chunk in read_chunks(sources, draw_places(sources, CHUNK_BYTES, seed), encoder, lambda: False):
        rejected += chunk.rejected
        for ids in _texts(chunk):
            pieces = cut(np.array([len(ids)], np.int64), seq_len, options.overlong_policy)
            for start, length in zip(pieces.start.tolist(), pieces.length.tolist(), strict=True):
                segments.append(single_document_pack(ids[start : start + length]))
                tokens += length
        if segments and enough(len(segments), tokens):
            break
    if not segments:
        first = f" The first bad record: {rejected[0]}." if rejected else ""
        raise PackError(f"{', '.join(specs)}: no text to read; expected documents.{first or ' Check the files.'}")
    random.Random(seed).shuffle(segments)
    return segments


def _texts(chunk: Chunk) -> Iterator[np.ndarray]:
    for documents in chunk.documents:
        yield from np.split(documents.input_ids, documents.offsets[1:-1])


def single_document_pack(ids: np.ndarray) -> Pack:
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
