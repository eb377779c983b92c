"""Every record of every format comes through exactly once, or its fault is named."""

import csv
import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config import RecordOptions
from pipeline.sources.discovery import check_unchanged, resolve_sources
from pipeline.sources.parsing import BadRecord, parse_object
from pipeline.sources.reader import WindowReader
from pipeline.sources.streams import stream_windows
from pipeline.sources.windows import cut_windows
from shards.errors import SourceError

TEXTS = [f"record {number}: " + "words äöü 👍 " * (number % 7) for number in range(100)]
OPTIONS = RecordOptions()


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


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
def test_every_record_of_every_format_comes_once_and_in_order(tmp_path, name, window_bytes, read_all):
    FORMATS[name](tmp_path / name)
    sources = resolve_sources([str(tmp_path / name)], OPTIONS)
    assert read_all(sources, window_bytes) == TEXTS
    check_unchanged(sources)


def test_a_text_file_is_one_document_or_one_per_line(tmp_path, read_all):
    content = "first\r\n\n  second\nlast"
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    spec = [str(tmp_path)]
    assert read_all(resolve_sources(spec, OPTIONS)) == [content] * 2
    lines = RecordOptions(text_unit="line")
    assert read_all(resolve_sources(spec, lines), 4) == ["first", "  second", "last"] * 2


def test_one_json_object_is_one_record(tmp_path, read_all):
    (tmp_path / "one.json").write_text('{\n "text": "all of it"\n}')
    assert read_all(resolve_sources([str(tmp_path / "one.json")], OPTIONS)) == ["all of it"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_arrays_come_through_whatever_the_chunks(tmp_path, monkeypatch, chunk, read_all):
    for place in ("streams.CHUNK_BYTES", "json_elements.CHUNK_CHARS"):
        monkeypatch.setattr(f"pipeline.sources.{place}", chunk)
    values = [{"text": 'q"\\ ]}[{ äöü👍\n'}, {"text": "", "n": [1, {"a": [2.5e-3, None]}]}, {"text": "end", "k": {}}]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(values, indent=indent, ensure_ascii=False), "utf-8")
        assert read_all(resolve_sources([str(tmp_path / "a.json")], OPTIONS)) == [value["text"] for value in values]


COMPRESSED = {
    "gzip": gzip.compress(jsonl()),
    "zstd": zstandard.compress(jsonl()),
    "xz": lzma.compress(jsonl()),
}


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_compressed_data_without_its_suffix_is_named_with_the_way_out(tmp_path, name, kind, read_all):
    (tmp_path / name).write_bytes(COMPRESSED[kind])
    with pytest.raises(
        SourceError, match=rf"{name}: is {kind} data.*; expected text in UTF-8. Decompress it"
    ) as caught:
        read_all(resolve_sources([str(tmp_path / name)], OPTIONS))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_data_on_stdin_is_named_too(monkeypatch, kind, read_all):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COMPRESSED[kind])))
    with pytest.raises(SourceError, match=f"stdin.*: is {kind} data.*Decompress it"):
        read_all(resolve_sources(["-"], OPTIONS))


def _arrow(new_writer):
    sink = pa.BufferOutputStream()
    with new_writer(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": TEXTS}))
    return sink.getvalue().to_pybytes()


def _parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": TEXTS}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("kind", "content"),
    [("Parquet", _parquet()), ("Arrow", _arrow(pa.ipc.new_file)), ("Arrow", _arrow(pa.ipc.new_stream))],
)
def test_a_table_without_its_suffix_is_named_with_the_way_out(tmp_path, monkeypatch, kind, content, read_all):
    (tmp_path / "a.jsonl").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    for given, name in ((str(tmp_path / "a.jsonl"), "a.jsonl"), ("-", "stdin")):
        with pytest.raises(SourceError, match=f'{name}.*: is {kind} data.*Say `format="{kind.lower()}"`'):
            read_all(resolve_sources([given], OPTIONS))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 50))[:-200], "cannot be read as gzip"),
        ("a.jsonl.zst", zstandard.compress(jsonl(TEXTS * 50))[:-50], "cannot be read as zstd"),
        ("a.jsonl.gz", b"plain text", "cannot be read as gzip"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "record 2: broken or cut off"),
        ("a.json", b'[{"text": "a"}, {"text" "b"}]', "record 2: broken or cut off"),
        ("a.json", b'[{"text": "a"}', "the array does not end"),
        ("a.json", b'[{"text": "a"}] [1]', "text follows the end of the array"),
        ("a.csv", b'text,n\n"a,1\n', "line 2: not CSV"),
        ("a.parquet", b"PAR1 not really", "cannot be read as Parquet"),
        ("a.arrow", b"ARROW1 not really", "cannot be read as Arrow"),
        ("a.arrow", b"neither", "cannot be read as Arrow"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message, read_all):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_all(resolve_sources([str(tmp_path / name)], OPTIONS))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_rows_that_do_not_fit_their_header_are_bad_records(tmp_path, read_all):
    (tmp_path / "a.csv").write_bytes(b'n,text\n1,"a, b"\n2,x,y\n3\n\n4,"two\nlines"\n5,\xff\n')
    sources = resolve_sources([str(tmp_path / "a.csv")], OPTIONS)
    assert read_all(sources, on_error="skip") == ["a, b", "two\nlines"]
    with pytest.raises(SourceError, match=r"a\.csv, record 2: 3 fields where the header has 2"):
        read_all(sources)


def test_a_csv_row_that_does_not_fit_is_kept_with_its_reason(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"n,text\n1,2,y\n")
    [source] = resolve_sources([str(tmp_path / "a.csv")], OPTIONS)
    [(_, (payload,))] = stream_windows(source, [0], 100)
    with pytest.raises(BadRecord, match=r"^3 fields where the header has 2$"):
        parse_object(payload)
    [(_, row)] = json.loads(payload).values()
    assert row == ["1", "2", "y"]


def test_a_record_whose_only_field_has_no_name_is_read_as_one(tmp_path, read_all):
    (tmp_path / "a.jsonl").write_text('{"": "x"}\n')
    with pytest.raises(SourceError, match="no field 'text', only ''; expected the text there"):
        read_all(resolve_sources([str(tmp_path / "a.jsonl")], OPTIONS))


def test_two_csv_columns_of_one_name_are_refused(tmp_path, read_all):
    (tmp_path / "a.csv").write_bytes(b"text,,text,\nx,,y,\n")
    with pytest.raises(SourceError, match=r"a\.csv: has two columns 'text'"):
        read_all(resolve_sources([str(tmp_path / "a.csv")], OPTIONS))


def test_stdin_is_read_once_and_cut_like_any_stream(monkeypatch, read_all):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jsonl())))
    sources = resolve_sources(["-"], OPTIONS)
    assert sources[0].files[0].as_plan()["name"] == "stdin"
    assert cut_windows(sources)[0] == []
    assert read_all(sources, 500) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "stream.arrow", "a.csv"])
def test_urls_are_read_through_fsspec(tmp_path, name, read_all):
    FORMATS[name](tmp_path / name)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file(f"/bucket/{name}", (tmp_path / name).read_bytes())
    try:
        for spec in (f"memory://bucket/{name}", "memory://bucket", f"memory://bucket/*{name[-4:]}"):
            sources = resolve_sources([spec], OPTIONS)
            assert [file.name for file in sources[0].files] == [name]
            assert read_all(sources, 2000) == TEXTS
            check_unchanged(sources)
        with pytest.raises(SourceError, match="memory://bucket/none: nothing there"):
            resolve_sources(["memory://bucket/none"], OPTIONS)
    finally:
        filesystem.rm("/bucket", recursive=True)


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_text_file_in_another_encoding_is_a_bad_record_like_any_other(tmp_path, suffix, read_all):
    for name, content in (("a", b"first"), ("b", "zweite".encode("utf-16")), ("c", b"\xfcber")):
        data = gzip.compress(content) if suffix.endswith("gz") else content
        (tmp_path / f"{name}.{suffix}").write_bytes(data)
    sources = resolve_sources([str(tmp_path)], OPTIONS)
    assert read_all(sources, on_error="skip") == ["first"]
    with pytest.raises(SourceError, match=rf"b\.{suffix}.*: is UTF-16; expected UTF-8. Convert it: iconv"):
        read_all(sources)


def test_a_row_in_another_encoding_is_kept_with_its_bytes(tmp_path):
    (tmp_path / "a.csv").write_bytes("n,text\n1,größe\n2,fine\n".encode("latin-1"))
    [source] = resolve_sources([str(tmp_path / "a.csv")], OPTIONS)
    [(slices, payloads)] = stream_windows(source, [0], 1000)
    reader = WindowReader(source, slices, payloads=payloads, on_error="skip")
    assert [batch.values for batch in reader] == [["fine"]]
    [entry] = reader.rejected
    assert (entry.where, entry.reason) == ("a.csv, record 1", "invalid UTF-8 in 'text', byte 0xf6; expected UTF-8")
    assert json.loads(entry.raw) == ["1", r"gr\xf6\xdfe"]


def test_an_element_that_is_nested_too_deeply_is_a_bad_record(tmp_path, read_all):
    deep = '{"text": "b", "x": ' + "[" * 5000 + '"]"' + "]" * 5000 + "}"
    (tmp_path / "a.json").write_text(f'[{{"text": "a"}}, {deep}, {{"text": "c"}}]')
    sources = resolve_sources([str(tmp_path / "a.json")], OPTIONS)
    assert read_all(sources, on_error="skip") == ["a", "c"]
    with pytest.raises(SourceError, match=r"a\.json, record 2: JSON that cannot be read"):
        read_all(sources)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_tables_are_read_from_stdin(tmp_path, monkeypatch, kind, read_all):
    FORMATS[{"arrow": "stream.arrow", "parquet": "a.parquet"}[kind]](tmp_path / "x")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "x").read_bytes())))
    assert read_all(resolve_sources(["-"], RecordOptions(format=kind))) == TEXTS


def test_a_window_of_zstd_that_is_too_large_has_a_way_out(tmp_path, read_all):
    """indygreg/python-zstandard#157"""
    parameters = zstandard.ZstdCompressionParameters(window_log=29)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(jsonl()) + compressor.flush())
    with pytest.raises(SourceError, match=r"a\.jsonl\.zst: .*window.*zstd -dc --long=31 FILE \| pack build -"):
        read_all(resolve_sources([str(tmp_path / "a.jsonl.zst")], OPTIONS))


def test_a_field_below_something_that_is_no_object_is_named_in_full(tmp_path, read_all):
    (tmp_path / "a.jsonl").write_text('{"meta": null}\n')
    pq.write_table(pa.Table.from_pylist([{"meta": {"text": "a"}}, {"meta": None}]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(SourceError, match=r"field 'meta\.text': 'meta' is null; expected an object with 'text'"):
            read_all(resolve_sources([str(tmp_path / name)], RecordOptions(text_field="meta.text")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.csv", "a.txt", "a.txt.gz", "a.json.gz", "a.parquet.gz"])
def test_a_record_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name, read_all):
    for module in ("streams", "reader", "json_elements"):
        monkeypatch.setattr(f"pipeline.sources.{module}.MAX_RECORD_BYTES", 1 << 20)
    monkeypatch.setattr("pipeline.sources.streams.MAX_TABLE_BYTES", 1 << 20)
    endless = {"json": b'[{"text": "', "csv": b'text\n"'}.get(name.split(".")[1], b"") + b"x" * (5 << 20)
    packed = {"zst": zstandard.compress, "gz": gzip.compress}.get(name.rpartition(".")[2], bytes)(endless)
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(SourceError, match=rf"{name}.*(longer than|larger than|broken or cut off)"):
        read_all(resolve_sources([str(tmp_path / name)], OPTIONS))
