"""What the tests of reading share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.sources.reader import WindowReader
from pipeline.sources.streams import stream_parts
from pipeline.sources.windows import Source, cut_windows, enumerate_streams

Read = Callable[..., list]


@pytest.fixture(scope="session")
def read_all() -> Read:
    """Return a function that reads every window and every streamed part, in plan order."""

    def read(sources: list[Source], window_bytes: int | None = None, on_error: str = "fail") -> list:
        windows, part_bytes = cut_windows(sources, window_bytes)
        readers = [WindowReader(sources[window.source], window.slices, on_error=on_error) for window in windows]
        for number, file in enumerate_streams(sources):
            for slice_, data in stream_parts(sources[number], file, part_bytes):
                readers.append(WindowReader(sources[number], (slice_,), payload=data, on_error=on_error))
        return [value for reader in readers for batch in reader for value in batch.values]

    return read


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.jsonl",
        "a.jsonl",
        "sub/c.jsonl",
        "README.md",
        "pic.png",
        ".hidden.jsonl",
        ".git/d.jsonl",
        "sub/none",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b'{"text": "%s"}\n' % name.encode())
    (tmp_path / "empty.jsonl").touch()
    return tmp_path
