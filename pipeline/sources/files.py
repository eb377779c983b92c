"""Corpus files as bytes: local paths and fsspec URLs, opened, measured, fingerprinted and sniffed the same way."""

import os
from typing import IO

import orjson
import xxhash

from shards.errors import SourceError
from shards.fetching.remote import filesystem_of, is_url, reaching

BATCH_BYTES = 4 << 20  # read and parsed at once
MAX_RECORD_BYTES = 256 << 20  # what is larger has no end, or was packed to fill the memory
END_BYTES, SAMPLE_BYTES, NUM_SAMPLES = 64 << 10, 4 << 10, 14
MARKS = (  # first bytes, name, way out
    (b"\x1f\x8b\x08", "gzip", "Decompress it (gzip -dc), or give a file whose name ends in .gz."),
    (b"\x28\xb5\x2f\xfd", "zstd", "Decompress it (zstd -dc), or give a file whose name ends in .zst."),
    (b"\xfd7zXZ\0", "xz", "Decompress it (xz -dc)."),
    (b"BZh91AY&SY", "bzip2", "Decompress it (bzip2 -dc)."),
    (b"PK\x03\x04", "zip", "Unpack it."),
    (b"PAR1\x15", "Parquet", 'Say `format="parquet"`, or name it so.'),
    (b"ARROW1\0\0", "Arrow", 'Say `format="arrow"`, or name it so.'),
    (b"\xff\xff\xff\xff", "Arrow", 'Say `format="arrow"`, or name it so.'),
    (b"\x93NUMPY", "numpy", "Name it .npy, and see --help for token ids."),
)
ETAGS = ("ETag", "etag", "md5Hash", "content_md5", "checksum")


def open_source(location: str) -> IO[bytes]:
    """Open a local path or a URL for reading, with seek.

    Raises:
        SourceError: It cannot be opened.
    """
    with reaching(location):
        if not is_url(location):
            return open(location, "rb")
        filesystem, path = filesystem_of(location)
        stream: IO[bytes] = filesystem.open(path, "rb")
        return stream


def size_of(location: str) -> int:
    """Return the size in bytes.

    Raises:
        SourceError: There is no such file.
    """
    with reaching(location):
        if not is_url(location):
            return os.stat(location).st_size
        filesystem, path = filesystem_of(location)
        return int(filesystem.info(path)["size"])


def fingerprint(location: str) -> str:
    """Return the etag of an object store, or size + xxh3 of both ends and fixed samples.

    Raises:
        SourceError: The file cannot be read.
    """
    if is_url(location):
        filesystem, path = filesystem_of(location)
        filesystem.invalidate_cache()
        with reaching(location):
            info = filesystem.info(path)
        if etag := next((info[key] for key in ETAGS if info.get(key)), None):
            return "etag:" + str(etag).strip('"')
    digest, size = xxhash.xxh3_128(), size_of(location)
    with open_source(location) as stream:
        if size <= 2 * END_BYTES + NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(stream.read())
        else:
            digest.update(stream.read(END_BYTES))
            for sample in range(1, NUM_SAMPLES + 1):
                stream.seek(size * sample // (NUM_SAMPLES + 1))
                digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(size - END_BYTES)
            digest.update(stream.read())
    return f"{size}-{digest.hexdigest()}"


def changed(name: str) -> SourceError:
    """Return the error for a file that changed while it was read."""
    return SourceError(
        f"{name}: changed while it was read; expected the same bytes throughout. Build again with `overwrite=True`."
    )


def foreign_kind(head: bytes) -> str | None:
    """Return what a file is that should be text in UTF-8 and begins with the mark of something else, and what to do."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8."
    for mark, kind, remedy in MARKS:
        if head.startswith(mark):
            return f"is {kind} data, which its name does not say; expected text in UTF-8. {remedy}"
    return None


def refuse_foreign(head: bytes, name: str) -> None:
    """Raise SourceError for a file that should be text and begins with the mark of something else."""
    if foreign := foreign_kind(head):
        raise SourceError(f"{name}: {foreign}")


def is_lines(head: bytes) -> bool:
    """Whether a file that begins so holds one JSON object per line, whatever its name says."""
    line, newline, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not newline or not line.startswith(b"{"):
        return False
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def too_long(name: str) -> SourceError:
    """Return the error for a record that would fill the memory."""
    return SourceError(
        f"{name}: holds a record longer than {MAX_RECORD_BYTES >> 20:,} MiB; expected one record per line. "
        "Check the file, and split what is too large."
    )
