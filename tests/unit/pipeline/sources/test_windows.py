"""How files are cut into windows, by size alone."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import MIB, RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.streams import stream_windows
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
    streamed = Source("s", (SourceFile("a", str(path), None, "jsonl", None, ""),), OPTIONS)
    parts = [(*slices, *payloads) for slices, payloads in stream_windows(streamed, [0], window_bytes)]
    assert b"".join(data for _, data in parts) == body.encode()
    assert all(len(data) >= window_bytes for _, data in parts[:-1])
    assert [slice_.start for slice_, _ in parts] == [0, *(slice_.stop for slice_, _ in parts[:-1])]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=8),
    window_bytes=st.integers(1, 120),
    ends=st.booleans(),
)
def test_streamed_files_are_cut_as_if_they_were_one(tmp_path_factory, sizes, window_bytes, ends):
    root = tmp_path_factory.mktemp("streams")
    contents = [b"\n".join(b"x" * size for size in lines) + (b"\n" if ends else b"") for lines in sizes]
    for number, content in enumerate(contents):
        (root / f"{number}.jsonl").write_bytes(content)
    files = tuple(
        SourceFile(str(number), str(root / f"{number}.jsonl"), None, "jsonl", None, "") for number in range(len(sizes))
    )
    windows = list(stream_windows(Source("s", files, OPTIONS), range(len(files)), window_bytes))
    assert b"".join(part for window in windows for part in window.payloads) == b"".join(contents)
    lengths = [sum(map(len, window.payloads)) for window in windows]
    assert all(length >= window_bytes for length in lengths[:-1])
    for window, length in zip(windows, lengths, strict=True):
        last_line = window.payloads[-1].removesuffix(b"\n").rpartition(b"\n")[2]
        assert length - len(last_line) - 1 < window_bytes, "a window ends with the line that fills it"
    lines = [(slice_.file, line) for window in windows for slice_ in window.slices for line in range(*slice_[1:])]
    assert lines == [(file, line) for file, of_file in enumerate(sizes) for line in range(len(of_file))]


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


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("field", ["text", "meta.body"])
def test_windows_of_tables_count_the_bytes_of_the_columns_that_are_read(tmp_path, suffix, field, read_all):
    texts = [f"{number:04}" * 250 for number in range(64)]
    images = pa.array([os.urandom(50_000) for _ in texts])
    column = pa.array(texts) if field == "text" else pa.array([{"body": text} for text in texts])
    table = pa.table({"image": images, field.partition(".")[0]: column})
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=4, use_dictionary=False)
    else:
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    sources = resolve_sources([str(tmp_path / f"a.{suffix}")], RecordOptions(text_field=field))
    windows, _ = cut_windows(sources, 16_000)
    assert 4 <= len(windows) <= 8, "64 texts of 1,000 bytes (and Parquet's statistics of them), not 3 MB of images"
    assert read_all(sources, 16_000) == texts
