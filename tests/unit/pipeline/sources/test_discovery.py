"""Which files a corpus is, how it is cut, and that every record of every format comes through exactly once."""

import csv
import gzip
import io
import json
import logging
import lzma
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import MIB, RecordOptions
from pipeline.sources.discovery import (
    Source,
    SourceFile,
    check_unchanged,
    cut_windows,
    default_window_bytes,
    enumerate_streams,
    resolve_specs,
)
from pipeline.sources.parsing import BadRecord, parse_object
from pipeline.sources.reader import WindowReader
from pipeline.sources.streams import stream_parts
from shards.errors import SourceError

TEXTS = [f"record {number}: " + "words äöü 👍 " * (number % 7) for number in range(100)]
OPTIONS = RecordOptions()


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def read_all(sources: list[Source], window_bytes: int | None = None, on_error: str = "fail") -> list[str]:
    """Read every window and every streamed part, in plan order."""
    windows, part_bytes = cut_windows(sources, window_bytes)
    readers = [WindowReader(sources[window.source], window.slices, on_error=on_error) for window in windows]
    for number, file in enumerate_streams(sources):
        for piece, data in stream_parts(sources[number], file, part_bytes):
            readers.append(WindowReader(sources[number], (piece,), payload=data, on_error=on_error))
    return [value for reader in readers for batch in reader for value in batch.values]


def write_parquet(path: Path, **options) -> None:
    pq.write_table(pa.table({"n": list(range(len(TEXTS))), "text": TEXTS}), path, row_group_size=13, **options)


def write_arrow(path: Path, new=pa.ipc.new_stream) -> None:
    table = pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(["n", "text"])
        writer.writerows([index, text] for index, text in enumerate(TEXTS))


FORMATS = {
    "a.jsonl": lambda path: path.write_bytes(jsonl()),
    "a.ndjson": lambda path: path.write_bytes(jsonl().rstrip(b"\n")),
    "crlf.jsonl": lambda path: path.write_bytes(jsonl().replace(b"\n", b"\r\n")),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + jsonl()),
    "blank.jsonl": lambda path: path.write_bytes(b"\n\n" + jsonl().replace(b"\n", b"\n \t\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl())),
    "members.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(jsonl(TEXTS[:50])) + gzip.compress(jsonl(TEXTS[50:]))
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(jsonl())),
    "frames.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(jsonl(TEXTS[:50])) + zstandard.compress(jsonl(TEXTS[50:]))
    ),
    "lines.json": lambda path: path.write_bytes(jsonl()),
    "lines.json.gz": lambda path: path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + jsonl())),
    "array.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS]), "utf-8"),
    "pretty.json": lambda path: path.write_text(
        json.dumps([{"text": text} for text in TEXTS], indent=2, ensure_ascii=False), "utf-8"
    ),
    "objects.json": lambda path: path.write_text(
        "\n".join(json.dumps({"text": text}, indent=1) for text in TEXTS), "utf-8"
    ),
    "a.json.zst": lambda path: path.write_bytes(
        zstandard.compress(json.dumps([{"text": text} for text in TEXTS]).encode())
    ),
    "a.parquet": write_parquet,
    "zstd.parquet": lambda path: write_parquet(path, compression="zstd"),
    "a.parquet.gz": lambda path: (write_parquet(path), path.write_bytes(gzip.compress(path.read_bytes()))),
    "stream.arrow": write_arrow,
    "a.arrow.zst": lambda path: (write_arrow(path), path.write_bytes(zstandard.compress(path.read_bytes()))),
    "file.arrow": lambda path: write_arrow(path, pa.ipc.new_file),
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.csv.gz": lambda path: (write_csv(path), path.write_bytes(gzip.compress(path.read_bytes()))),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("window_bytes", [None, 1000, 64])
def test_every_record_of_every_format_comes_once_and_in_order(tmp_path, name, window_bytes):
    FORMATS[name](tmp_path / name)
    sources = resolve_specs([str(tmp_path / name)], OPTIONS)
    assert read_all(sources, window_bytes) == TEXTS
    check_unchanged(sources)


def test_a_text_file_is_one_document_or_one_per_line(tmp_path):
    content = "first\r\n\n  second\nlast"
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    spec = [str(tmp_path)]
    assert read_all(resolve_specs(spec, OPTIONS)) == [content] * 2
    lines = RecordOptions(text_unit="line")
    assert read_all(resolve_specs(spec, lines), 4) == ["first", "  second", "last"] * 2


def test_one_json_object_is_one_record(tmp_path):
    (tmp_path / "one.json").write_text('{\n "text": "all of it"\n}')
    assert read_all(resolve_specs([str(tmp_path / "one.json")], OPTIONS)) == ["all of it"]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), min_size=1, max_size=20),
    window_bytes=st.integers(1, 200),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last=st.booleans(),
)
def test_no_cut_loses_or_doubles_a_line(tmp_path_factory, texts, window_bytes, end, last):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    body = end.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + (end if last else "")
    path.write_bytes(body.encode())
    sources = resolve_specs([str(path)], OPTIONS)
    windows, _ = cut_windows(sources, window_bytes)
    assert len(windows) == -(-len(body.encode()) // window_bytes)
    assert read_all(sources, window_bytes) == texts
    parts = list(
        stream_parts(Source("s", (SourceFile("a", str(path), None, "jsonl", None, ""),), OPTIONS), 0, window_bytes)
    )
    assert b"".join(data for _, data in parts) == body.encode()
    assert all(len(data) >= window_bytes for _, data in parts[:-1])
    assert [piece.start for piece, _ in parts] == [0, *(piece.stop for piece, _ in parts[:-1])]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_arrays_come_through_whatever_the_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("pipeline.sources.streams.CHUNK_BYTES", chunk)
    values = [{"text": 'q"\\ ]}[{ äöü👍\n'}, {"text": "", "n": [1, {"a": [2.5e-3, None]}]}, {"text": "end", "k": {}}]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(values, indent=indent, ensure_ascii=False), "utf-8")
        assert read_all(resolve_specs([str(tmp_path / "a.json")], OPTIONS)) == [value["text"] for value in values]


# Windows


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


# Finding files


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
        (tmp_path / name).write_bytes(jsonl([name]))
    (tmp_path / "empty.jsonl").touch()
    return tmp_path


def test_a_directory_gives_its_known_files_in_order_and_counts_the_rest(tree):
    (source,) = resolve_specs([str(tree)], OPTIONS)
    assert [file.name for file in source.files] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert source.skipped == {".md": 1, ".png": 1, "hidden": 2, "without suffix": 1, "empty": 1}


def test_text_files_count_where_a_directory_has_no_others(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    assert read_all(resolve_specs([str(tmp_path)], OPTIONS)) == ["one", "two"]


def test_globs_and_several_arguments_make_one_source(tree):
    (source,) = resolve_specs([str(tree / "[ab].jsonl"), str(tree / "sub")], OPTIONS)
    assert [file.name for file in source.files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    (source,) = resolve_specs([str(tree / "**/c*.jsonl")], OPTIONS)
    assert [file.name for file in source.files] == ["sub/c.jsonl"]


def test_files_of_one_name_are_told_apart(tmp_path):
    for part in ("x", "y"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "train.jsonl").write_bytes(jsonl([part]))
    (source,) = resolve_specs([str(tmp_path / part / "train.jsonl") for part in "yx"], OPTIONS)
    assert [file.name for file in source.files] == ["x/train.jsonl", "y/train.jsonl"]


def test_names_make_sources_with_their_own_options(tree):
    chat = RecordOptions(kind="chat")
    specs = [f"web={tree}/a.jsonl", f"chat={tree}/b.jsonl", f"web={tree}/sub/c.jsonl"]
    web, talk = resolve_specs(specs, OPTIONS, {"chat": chat})
    assert (web.name, len(web.files), web.options.kind) == ("web", 2, "text")
    assert (talk.name, len(talk.files), talk.options) == ("chat", 1, chat)
    with pytest.raises(SourceError, match="source 'code' has options, but no SOURCE has that name"):
        resolve_specs(specs, OPTIONS, {"code": chat})


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.jsonl").write_bytes(jsonl())
    monkeypatch.chdir(tmp_path)
    (source,) = resolve_specs(["year=2024"], OPTIONS)
    assert source.name == "corpus"
    assert [source.name for source in resolve_specs(["x=year=2024/*.jsonl"], OPTIONS)] == ["x"]


def test_the_order_and_the_plan_do_not_depend_on_where_the_corpus_lies(tree, tmp_path_factory):
    import shutil

    moved = shutil.copytree(tree, tmp_path_factory.mktemp("moved") / "x")
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    plans = [[file.as_plan() for file in resolve_specs([str(root)], OPTIONS)[0].files] for root in (tree, moved)]
    assert plans[0] == plans[1]
    assert str(tree) not in json.dumps(plans[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: [f"{root}/nowhere.jsonl"], "nowhere.jsonl: no such file or directory"),
        (lambda root: [f"{root}/*.parquet"], "no files to read"),
        (lambda root: [f"{root}/empty.jsonl"], "empty.jsonl: empty file; expected at least one record"),
        (lambda root: [f"{root}/pic.png"], "pic.png: cannot tell the format"),
        (lambda root: ["hf:"], "hf: names no dataset"),
        (lambda root: ["my data=a.jsonl"], r"A name before = takes letters, digits"),
        (lambda root: [f"{root}/a.jsonl", f"{root}/a.jsonl"], "a.jsonl is given twice"),
        (lambda root: [f"{root}/*.jsonl", f"{root}"], "is given twice"),
        (lambda root: [], "no SOURCE given"),
    ],
)
def test_what_cannot_be_found_is_named(tree, make, message):
    with pytest.raises(SourceError, match=message) as caught:
        resolve_specs(make(tree), OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_directory_without_anything_to_read_says_what_it_left_out(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(SourceError, match=r"no files to read \(1 \.png left out\)"):
        resolve_specs([str(tmp_path)], OPTIONS)


def test_the_format_can_be_said_where_names_do_not_tell(tmp_path):
    (tmp_path / "data.log").write_bytes(jsonl(["x"]))
    assert read_all(resolve_specs([str(tmp_path / "data.log")], RecordOptions(format="jsonl"))) == ["x"]
    with pytest.raises(SourceError, match="--format: 'xml'; expected one of jsonl"):
        resolve_specs([str(tmp_path / "data.log")], RecordOptions(format="xml"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named_with_the_way_out(tmp_path, encoding):
    content = jsonl().decode().encode(encoding)
    (tmp_path / "a.jsonl").write_bytes(content if content[:1] == b"\xff" else b"\xfe\xff" + content)
    with pytest.raises(SourceError, match=r"a\.jsonl: is UTF-16; expected UTF-8. Convert it: iconv"):
        resolve_specs([str(tmp_path / "a.jsonl")], OPTIONS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz: is UTF-16"):
        read_all(resolve_specs([str(tmp_path / "a.jsonl.gz")], OPTIONS))


COMPRESSED = {
    "gzip": gzip.compress(jsonl()),
    "zstd": zstandard.compress(jsonl()),
    "xz": lzma.compress(jsonl()),
}


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_compressed_data_without_its_suffix_is_named_with_the_way_out(tmp_path, name, kind):
    (tmp_path / name).write_bytes(COMPRESSED[kind])
    with pytest.raises(
        SourceError, match=rf"{name}: is {kind} data.*; expected text in UTF-8. Decompress it"
    ) as caught:
        resolve_specs([str(tmp_path / name)], OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_data_on_stdin_is_named_too(monkeypatch, kind):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COMPRESSED[kind])))
    with pytest.raises(SourceError, match=f"stdin.*: is {kind} data.*Decompress it"):
        read_all(resolve_specs(["-"], OPTIONS))


# Identity


@pytest.mark.parametrize("size", [1, 1000, 200_000, 3 << 20])
def test_the_fingerprint_follows_content_and_size_only(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(size))
    (file,) = resolve_specs([str(path)], OPTIONS)[0].files
    os.utime(path, (5, 5))
    assert resolve_specs([str(path)], OPTIONS)[0].files == (file,)
    for at in {0, size - 1, size // 15 if size > 1000 else size // 2}:  # ends, and the first sample
        content = bytearray(size)
        content[at] = 1
        path.write_bytes(content)
        assert resolve_specs([str(path)], OPTIONS)[0].files[0].fingerprint != file.fingerprint
    path.write_bytes(bytes(size + 1))
    assert resolve_specs([str(path)], OPTIONS)[0].files[0].fingerprint != file.fingerprint


def test_a_corpus_that_changes_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    sources = resolve_specs([str(path)], OPTIONS)
    windows, _ = cut_windows(sources)
    path.write_bytes(jsonl().replace(b"record 3", b"record X"))
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        check_unchanged(sources)
    path.write_bytes(jsonl()[:-20])
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        list(WindowReader(sources[0], windows[0].slices))
    path.write_bytes(jsonl())
    monkeypatch.setattr("pipeline.sources.reader.BATCH_BYTES", 100)
    reader = iter(WindowReader(sources[0], windows[0].slices))
    next(reader)
    os.utime(path, (1, 1))  # while a window is read, the time may tell what an unchanged size does not
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        list(reader)
    check_unchanged(sources)
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        check_unchanged(sources)


# Broken streams


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 50))[:-200], "cannot be read as gzip"),
        ("a.jsonl.zst", zstandard.compress(jsonl(TEXTS * 50))[:-50], "cannot be read as zstd"),
        ("a.jsonl.gz", b"plain text", "cannot be read as gzip"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "record 1: broken or cut off"),
        ("a.json", b'[{"text": "a"}, {"text" "b"}]', "record 1: broken or cut off"),
        ("a.json", b'[{"text": "a"}', "the array does not end"),
        ("a.json", b'[{"text": "a"}] [1]', "text follows the end of the array"),
        ("a.csv", b'text,n\n"a,1\n', "line 2: not CSV"),
        ("a.parquet", b"PAR1 not really", "cannot be read as Parquet"),
        ("a.arrow", b"ARROW1 not really", "cannot be read as Arrow"),
        ("a.arrow", b"neither", "cannot be read as Arrow"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_all(resolve_specs([str(tmp_path / name)], OPTIONS))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_rows_that_do_not_fit_their_header_are_bad_records(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'n,text\n1,"a, b"\n2,x,y\n3\n\n4,"two\nlines"\n5,\xff\n')
    sources = resolve_specs([str(tmp_path / "a.csv")], OPTIONS)
    assert read_all(sources, on_error="skip") == ["a, b", "two\nlines"]
    with pytest.raises(SourceError, match=r"a\.csv, record 2: 3 fields where the header has 2"):
        read_all(sources)


def test_a_csv_row_that_does_not_fit_is_kept_with_its_reason(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"n,text\n1,2,y\n")
    [source] = resolve_specs([str(tmp_path / "a.csv")], OPTIONS)
    [(_, payload)] = stream_parts(source, 0, 100)
    with pytest.raises(BadRecord, match=r"^3 fields where the header has 2$"):
        parse_object(payload)
    [(_, row)] = json.loads(payload).values()
    assert row == ["1", "2", "y"]


def test_a_record_whose_only_field_has_no_name_is_read_as_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"": "x"}\n')
    with pytest.raises(SourceError, match="no field 'text', only ''; expected the text there"):
        read_all(resolve_specs([str(tmp_path / "a.jsonl")], OPTIONS))


def test_two_csv_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text,,text,\nx,,y,\n")
    with pytest.raises(SourceError, match=r"a\.csv: has two columns 'text'"):
        read_all(resolve_specs([str(tmp_path / "a.csv")], OPTIONS))


def test_stdin_is_read_once_and_cut_like_any_stream(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jsonl())))
    sources = resolve_specs(["-"], OPTIONS)
    assert sources[0].files[0].as_plan()["name"] == "stdin"
    assert cut_windows(sources)[0] == []
    assert read_all(sources, 500) == TEXTS


# Datasets and URLs


def test_a_saved_dataset_is_read_without_importing_datasets(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=3)
    sources = resolve_specs([str(tmp_path / "saved")], OPTIONS)
    assert len(sources[0].files) == 3
    assert {file.format for file in sources[0].files} == {"arrow"}
    assert read_all(sources, 2000) == TEXTS


def test_a_saved_dataset_with_splits_asks_which(tmp_path):
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "my data")
    expected = r"holds the splits train, test; expected one\. Name it, such as '.*/my data/train'"
    with pytest.raises(SourceError, match=expected):
        resolve_specs([str(tmp_path / "my data")], OPTIONS)
    assert read_all(resolve_specs([str(tmp_path / "my data" / "test")], OPTIONS)) == TEXTS
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "one")
    assert read_all(resolve_specs([str(tmp_path / "one")], OPTIONS)) == TEXTS


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository in a folder, with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl(TEXTS[:60]))
    (folder / "test.jsonl").write_bytes(jsonl(TEXTS[60:]))
    return folder


def test_a_hub_dataset_comes_through_the_library(hub_folder):
    sources = resolve_specs([f"hf:{hub_folder}"], OPTIONS)
    assert read_all(sources, 500) == TEXTS[:60]
    assert read_all(resolve_specs([f"hf:{hub_folder}:test"], OPTIONS)) == TEXTS[60:]


@pytest.mark.parametrize("tail", [":validation", "/other", ":train[:10%]"])
def test_an_unknown_split_or_configuration_is_named(hub_folder, tail):
    with pytest.raises(SourceError, match="hf:") as caught:
        resolve_specs([f"hf:{hub_folder}{tail}"], OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_takes_one_line(monkeypatch, caplog):
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach 'no/where' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    expected = r"hf:no/where: no such dataset .*\(Couldn't reach 'no/where' on the Hub\).*or give files or a directory"
    with pytest.raises(SourceError, match=expected):
        resolve_specs(["hf:no/where"], OPTIONS)
    assert not caplog.records


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "stream.arrow", "a.csv"])
def test_urls_are_read_through_fsspec(tmp_path, name):
    FORMATS[name](tmp_path / name)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file(f"/bucket/{name}", (tmp_path / name).read_bytes())
    try:
        for spec in (f"memory://bucket/{name}", "memory://bucket", f"memory://bucket/*{name[-4:]}"):
            sources = resolve_specs([spec], OPTIONS)
            assert [file.name for file in sources[0].files] == [name]
            assert read_all(sources, 2000) == TEXTS
            check_unchanged(sources)
        with pytest.raises(SourceError, match="memory://bucket/none: nothing there"):
            resolve_specs(["memory://bucket/none"], OPTIONS)
    finally:
        filesystem.rm("/bucket", recursive=True)


def test_a_remote_folder_is_chosen_from_as_one_here(tree):
    filesystem = fsspec.filesystem("memory")
    for file in tree.rglob("*"):
        if file.is_file():
            filesystem.pipe_file(f"/bucket/{file.relative_to(tree)}", file.read_bytes())
    try:
        (remote,), (here,) = (resolve_specs([spec], OPTIONS) for spec in ("memory://bucket", str(tree)))
        assert [file.name for file in remote.files] == [file.name for file in here.files]
        assert remote.skipped == here.skipped
    finally:
        filesystem.rm("/bucket", recursive=True)


def test_a_file_is_read_from_a_web_server(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["<a href='b.jsonl'>a link</a>"]))
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        sources = resolve_specs([f"http://127.0.0.1:{server.server_port}/a.jsonl"], OPTIONS)
        assert [file.name for file in sources[0].files] == ["a.jsonl"]
        assert read_all(sources) == ["<a href='b.jsonl'>a link</a>"]
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(SourceError, match="nothing://x/y: Protocol not known"):
        resolve_specs(["nothing://x/y"], OPTIONS)


def test_an_object_store_is_read_by_range_and_identified_by_etag(monkeypatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    try:
        filesystem.mkdir("corpus")
        filesystem.pipe_file("corpus/a/x.jsonl", jsonl())
        filesystem.pipe_file("corpus/a/y.jsonl.gz", gzip.compress(jsonl()))
        sources = resolve_specs(["s3://corpus/a"], OPTIONS)
        assert [file.name for file in sources[0].files] == ["x.jsonl", "y.jsonl.gz"]
        assert all(file.fingerprint.startswith("etag:") for file in sources[0].files)
        assert read_all(sources, 2000) == TEXTS * 2
        check_unchanged(sources)
        filesystem.pipe_file("corpus/a/x.jsonl", jsonl().replace(b"record 3", b"record X"))
        with pytest.raises(SourceError, match=r"x\.jsonl: changed while it was read"):
            check_unchanged(sources)
        with pytest.raises(SourceError, match="s3://corpus/none: nothing there"):
            resolve_specs(["s3://corpus/none"], OPTIONS)
    finally:
        server.stop()


def test_an_error_of_a_store_s_own_class_is_one_line():
    from pipeline.sources.files import reaching

    class NoCredentialsError(Exception):
        """As an object store's client defines its own."""

    with (
        pytest.raises(SourceError, match=r"^s3://b/x: cannot be read \(no keys\)\. Check the URL"),
        reaching("s3://b/x"),
    ):
        raise NoCredentialsError("no keys\nmore")
    with pytest.raises(SourceError, match=r"^http://h/x: cannot be read \(no range"), reaching("http://h/x"):
        raise ValueError("no range requests. Only reading from the beginning")
    with pytest.raises(TypeError), reaching("s3://b/x"):
        raise TypeError("a bug stays a bug")


@pytest.mark.parametrize("spec", ["p.jsonl", "*.jsonl", "."])
def test_a_pipe_is_refused_beside_whatever_else_and_never_taken_for_an_empty_file(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    os.mkfifo("p.jsonl")
    with pytest.raises(SourceError, match=r"p\.jsonl: is a pipe; expected a file .* Use - and redirect it to stdin"):
        resolve_specs(["other=a.jsonl", spec], OPTIONS)


def test_process_substitution_is_refused_as_a_pipe_before_its_missing_suffix():
    read, write = os.pipe()
    try:
        with pytest.raises(SourceError, match=rf"^/dev/fd/{read}: is a pipe"):
            resolve_specs([f"/dev/fd/{read}"], OPTIONS)
    finally:
        os.close(read)
        os.close(write)
