"""What the tests of reading share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.sources.reader import WindowReader
from pipeline.sources.streams import stream_windows
from pipeline.sources.windows import Source, cut_windows, streamed_files

Read = Callable[..., list]


@pytest.fixture(scope="session")
def read_all() -> Read:
    """Return a function that reads every window and every streamed part, in plan order."""

    def read(sources: list[Source], window_bytes: int | None = None, on_error: str = "fail") -> list:
        windows, part_bytes = cut_windows(sources, window_bytes)
        readers = [WindowReader(sources[window.source], window.slices, on_error=on_error) for window in windows]
        for source in sources:
            for slices, payloads in stream_windows(source, streamed_files(source), part_bytes):
                readers.append(WindowReader(source, slices, payloads=payloads, on_error=on_error))
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
