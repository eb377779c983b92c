"""Whether the corpus still is what committed windows were made of.

A plan knows a large file by its size and samples of its bytes, so a small change in its middle escapes it. Each sidecar
has the hash of all that its window read, and when and as which file it was read; where the file was touched since, it
is read and hashed again. So a dataset is never a mix of two versions of a file.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.building.sidecars import CommittedWindow
from pipeline.sources.reader import WindowReader
from pipeline.sources.windows import Slice, Source, is_streamed
from shards.fetching.remote import is_url, reaching

Marks = list[list[int]]


def file_marks(source: Source, slices: Iterable[Slice]) -> Marks:
    """Return [file, time of change in ns, inode] of each local file that a window reads.

    A URL has none: its plan has the tag that the store gives to its content.
    """
    marks = []
    for file in sorted({slice_.file for slice_ in slices}):
        location = source.files[file].location
        if location != "-" and not is_url(location):
            with reaching(location, source.files[file].name):
                status = Path(location).stat()
            marks.append([file, status.st_mtime_ns, status.st_ino])
    return marks


def changed_windows(
    windows: Iterable[CommittedWindow], sources: Collection[Source], *, every: bool = False
) -> list[CommittedWindow]:
    """Return the windows whose part of the corpus holds other bytes now.

    Windows of streamed files are left out: the driver reads those again in any case, and compares.

    Args:
        windows: What was committed.
        sources: The corpus as it is.
        every: Hash every window, not only those whose files were touched.

    Raises:
        SourceError: A file cannot be read.
    """
    by_name = {source.name: source for source in sources}
    changed = []
    for window in windows:
        source = by_name.get(window.source)
        if source is None or any(is_streamed(source.files[slice_.file]) for slice_ in window.slices):
            continue
        if every or file_marks(source, window.slices) != window.marks:
            reader = WindowReader(source, window.slices, on_error="skip")
            for _ in reader:
                pass
            if reader.input_xxh3 != window.input_xxh3:
                changed.append(window)
    return changed
