"""How files are cut into windows, by size alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import MIB, RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.streams import stream_parts
from pipeline.sources.windows import Source, SourceFile, cut_windows, default_window_bytes

OPTIONS = RecordOptions()


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), min_size=1, max_size=20),
    window_bytes=st.integers(1, 200),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last=st.booleans(),
)
def test_no_cut_loses_or_doubles_a_line(tmp_path_factory, texts, window_bytes, end, last, read_all):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    body = end.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + (end if last else "")
    path.write_bytes(body.encode())
    sources = resolve_sources([str(path)], OPTIONS)
    windows, _ = cut_windows(sources, window_bytes)
    assert len(windows) == -(-len(body.encode()) // window_bytes)
    assert read_all(sources, window_bytes) == texts
    parts = list(
        stream_parts(Source("s", (SourceFile("a", str(path), None, "jsonl", None, ""),), OPTIONS), 0, window_bytes)
    )
    assert b"".join(data for _, data in parts) == body.encode()
    assert all(len(data) >= window_bytes for _, data in parts[:-1])
    assert [piece.start for piece, _ in parts] == [0, *(piece.stop for piece, _ in parts[:-1])]


def file_of(size: int, name: str = "f") -> SourceFile:
    return SourceFile(name, f"/{name}", size, "jsonl", None, "")


def test_windows_are_cut_evenly_and_small_files_share_one():
    source = Source("a", (file_of(10, "a"), file_of(25, "b"), file_of(5, "c")), OPTIONS)
    windows, _ = cut_windows([source], 20)
    assert windows == [(0, ((0, 0, 10), (1, 0, 10))), (0, ((1, 10, 25), (2, 0, 5)))]


def test_a_window_never_spans_two_sources():
    sources = [Source("a", (file_of(10),), OPTIONS), Source("b", (file_of(10),), OPTIONS)]
    assert cut_windows(sources, 1000)[0] == [(0, ((0, 0, 10),)), (1, ((0, 0, 10),))]


def test_units_that_cannot_be_cut_go_where_they_begin():
    groups = SourceFile("p", "/p", 999, "parquet", None, "", (30, 30, 30, 10))
    assert cut_windows([Source("p", (groups,), OPTIONS)], 50)[0] == [(0, ((0, 0, 2),)), (0, ((0, 2, 4),))]
    whole = tuple(SourceFile(f"{n}.txt", f"/{n}", 30, "text", None, "") for n in range(4))
    assert cut_windows([Source("t", whole, OPTIONS)], 60)[0] == [
        (0, ((0, 0, 30), (1, 0, 30))),
        (0, ((2, 0, 30), (3, 0, 30))),
    ]


def test_rows_are_cut_by_their_share_of_the_bytes():
    rows = SourceFile("r", "/r", 1000, "arrow", None, "", (60, 40))
    windows, _ = cut_windows([Source("r", (rows,), OPTIONS)], 300)
    assert [piece for window in windows for piece in window.slices] == [
        (0, 0, 25),
        (0, 25, 50),
        (0, 50, 75),
        (0, 75, 100),
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], 16 * MIB),
        ([512 * MIB], 32 * MIB),
        ([256 * MIB, 256 * MIB], 32 * MIB),
        ([20 << 30], 256 * MIB),
        ([512 * MIB, None], 64 * MIB),
    ],
)
def test_the_default_window_is_a_sixteenth_within_bounds(sizes, expected):
    sources = [Source("s", tuple(file_of(size) for size in sizes), OPTIONS)]
    assert default_window_bytes(sources) == expected
    assert cut_windows(sources)[1] == expected


def test_offsets_beyond_32_bits_stay_exact():
    source = Source("s", tuple(file_of(3 << 31, str(n)) for n in range(3)), OPTIONS)
    windows, _ = cut_windows([source], 256 * MIB)
    assert sum(piece.stop - piece.start for window in windows for piece in window.slices) == 9 << 31
    assert windows[-1].slices[-1] == (2, (3 << 31) - 256 * MIB, 3 << 31)
