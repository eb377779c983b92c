"""What a record is, and a name and place for everything that is not one."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.files import MARKS
from pipeline.sources.reader import RecordBatch, Rejected, WindowReader
from pipeline.sources.windows import Slice, cut_windows
from shards.errors import SourceError

TEXT = RecordOptions()
CHAT = RecordOptions(kind="chat")
GOOD = [b'{"text": "one"}', b'{"text": "two"}', b'{"text": "three"}']


def read(
    content: bytes, tmp_path: Path, options: RecordOptions = TEXT, *, on_error: str = "skip", name: str = "a.jsonl"
) -> tuple[list, WindowReader]:
    """Write a file and read it as one window."""
    (tmp_path / name).write_bytes(content)
    (source,) = resolve_sources([str(tmp_path / name)], options)
    slices = [piece for window in cut_windows([source])[0] for piece in window.slices]
    reader = WindowReader(source, slices, on_error=on_error)
    return [value for batch in reader for value in batch.values], reader


LONG = "x" * (1 << 20)
ACCEPTED = {
    "control characters written as escapes": (rb'{"text": "a\u0000b\u0001\n"}', "a\0b\x01\n"),
    "escaped pairs of surrogates": (rb'{"text": "\ud83d\udc4d"}', "👍"),
    "duplicate keys: the last wins": (b'{"text": "first", "text": "last"}', "last"),
    "numbers written as text": (b'{"text": "123"}', "123"),
    "an empty text": (b'{"text": ""}', ""),
    "NaN and Infinity elsewhere": (b'{"text": "a", "score": NaN, "top": -Infinity}', "a"),
    "an integer beyond 64 bits elsewhere": (b'{"text": "a", "n": 123456789012345678901234567890}', "a"),
    "null elsewhere": (b'{"meta": null, "text": "a"}', "a"),
    "a carriage return at the end": (b'{"text": "a"}\r', "a"),
    "white space around": (b' \t{"text": "a"}  ', "a"),
    "a line of a megabyte": (json.dumps({"text": LONG}).encode(), LONG),
    "line separators of Unicode": ('{"text": "a\u2028b\u0085c"}'.encode(), "a\u2028b\u0085c"),
    "DEL and C1 characters": ('{"text": "a\x7f\x9f"}'.encode(), "a\x7f\x9f"),
}
REJECTED = {
    "a missing field": (b'{"txt": "a", "id": 3}', "no field 'text', only 'txt', 'id'; expected the text there"),
    "no fields": (b"{}", "no field 'text', and no other either"),
    "null text": (b'{"text": null}', "field 'text' is null; expected text"),
    "a number as text": (b'{"text": 3.5}', r"field 'text' is a number \(3.5\); expected text"),
    "a list as text": (b'{"text": ["a"]}', "field 'text' is a list; expected text"),
    "an object as text": (b'{"text": {"a": 1}}', "field 'text' is an object; expected text"),
    "a boolean as text": (b'{"text": true}', "field 'text' is true or false; expected text"),
    "a line cut in half": (b'{"text": "a", "b": "c', r"not JSON \(Unterminated string .*the line seems cut off\)"),
    "a line cut after a key": (b'{"text":', r"not JSON \(Expecting value at column 9, the line seems cut off\)"),
    "an extra bracket": (b'{"text": "a"}}', r"not JSON \(Extra data at column 14\)"),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}', r"not JSON \(Extra data at column 14\)"),
    "single quotes": (b"{'text': 'a'}", "not JSON"),
    "invalid UTF-8": (b'{"text": "a\xff"}', r"invalid UTF-8, byte 0xff at column 12; expected UTF-8"),
    "UTF-8 cut inside a character": (b'{"text": "\xe2\x82"}', "invalid UTF-8, byte 0xe2 at column 11"),
    "surrogates written as UTF-8": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8, byte 0xed"),
    "a lone surrogate": (rb'{"text": "a\ud83d b"}', r"lone surrogate U\+D83D; expected text that UTF-8 can hold"),
    "a lone surrogate elsewhere": (rb'{"text": "a", "b": ["\udc00"]}', r"lone surrogate U\+DC00"),
    "a raw control character": (b'{"text": "a\x01b"}', "not JSON .Invalid control character"),
    "NUL bytes": (b'{"text": "a\x00\x00"}', "NUL byte at column 12; expected JSON"),
    "only NUL bytes": (bytes(30), "NUL byte at column 1"),
    "a list": (b'["a"]', "a list; expected a JSON object"),
    "a string": (b'"a"', r"text \('a'\); expected a JSON object"),
    "a number": (b"17", r"a number \(17\); expected a JSON object"),
    "null": (b"null", "null; expected a JSON object"),
    "endless nesting": (b'{"text": ' + b"[" * 100_000, "JSON that cannot be read"),
    "a number of many digits": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}x", "not JSON|JSON that cannot be read"),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_accepted(tmp_path, what):
    line, text = ACCEPTED[what]
    values, reader = read(b"\n".join([*GOOD, line, *GOOD]) + b"\n", tmp_path, on_error="fail")
    assert values == ["one", "two", "three", text, "one", "two", "three"]
    assert reader.rejected == []
    assert reader.num_records == 7


@pytest.mark.parametrize("what", REJECTED)
def test_rejected_by_name_and_place(tmp_path, what):
    line, reason = REJECTED[what]
    content = b"\n\n".join([*GOOD, line, *GOOD]) + b"\n"
    values, reader = read(content, tmp_path)
    assert values == ["one", "two", "three"] * 2
    assert reader.num_records == 7
    (entry,) = reader.rejected
    assert (entry.index, entry.where) == (3, "a.jsonl, line 7")
    with pytest.raises(SourceError, match=f"^a.jsonl, line 7: .*{reason}.*Fix the record") as caught:
        read(content, tmp_path, on_error="fail")
    assert "\n" not in str(caught.value)
    assert line.decode("utf-8", "backslashreplace").startswith(entry.raw[:50])
    if isinstance(line, bytes) and what not in ("a missing field", "no fields") and "as text" not in what:
        _, reader = read(content, tmp_path, CHAT)
        assert (len(reader.rejected) == 1) == (what != "null text"), "what is no object is bad whatever the kind"


@pytest.mark.parametrize("what", ["a missing field", "null text", "a lone surrogate"])
def test_the_first_and_the_last_line_are_places_too(tmp_path, what):
    line, _ = REJECTED[what]
    _, reader = read(b"\xef\xbb\xbf" + line + b"\n" + GOOD[0] + b"\n" + line, tmp_path)
    assert [entry.where for entry in reader.rejected] == ["a.jsonl, line 1", "a.jsonl, line 3"]
    assert [entry.index for entry in reader.rejected] == [0, 2]


def test_places_are_exact_in_any_window_and_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.sources.reader.BATCH_BYTES", 64)
    draw = random.Random(4)
    lines = [json.dumps({"text" if draw.random() < 0.8 else "txt": "x" * draw.randrange(30)}) for _ in range(300)]
    lines = [line if draw.random() < 0.8 else "" for line in lines]
    bad = [number for number, line in enumerate(lines, 1) if "txt" in line]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")], TEXT)
    found, records = [], 0
    windows, _ = cut_windows([source], 700)
    assert len(windows) > 5
    for window in windows:
        reader = WindowReader(source, window.slices, on_error="skip")
        for batch in reader:
            for index, value in zip(batch.indices.tolist(), batch.values, strict=True):
                place = int(batch.where(index).removeprefix("a.jsonl, line "))
                assert json.loads(lines[place - 1])["text"] == value
        found += [int(entry.where.removeprefix("a.jsonl, line ")) for entry in reader.rejected]
        records += reader.num_records
    assert found == bad
    assert len(bad) > 20
    assert records == sum(bool(line) for line in lines)


def test_far_into_a_file_the_place_is_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.sources.reader.LINE_SEARCH_BYTES", 20)
    content = b"\n".join([*GOOD * 10, b"[1]", b""])
    (tmp_path / "a.jsonl").write_bytes(content)
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")], TEXT)
    reader = WindowReader(source, [Slice(0, 200, len(content))], on_error="skip")
    assert sum(len(batch.values) for batch in reader) > 5
    assert reader.rejected[0].where == f"a.jsonl, byte {content.index(b'[1]')}"


def test_a_value_can_be_refused_later_on(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b"{bad", *GOOD]))
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")], TEXT)
    reader = WindowReader(source, cut_windows([source])[0][0].slices, on_error="skip")
    (batch,) = reader
    assert batch.indices.tolist() == [1, 2, 3]
    batch.reject(2, "odd")
    assert reader.rejected[1] == Rejected(2, "a.jsonl, line 3", "odd", '{"text": "two"}')
    reader.on_error = "fail"
    with pytest.raises(SourceError, match=r"^a\.jsonl, line 4: odd\. Fix the record"):
        batch.reject(3, "odd")
    with pytest.raises(SourceError, match=r": odd\. Fix it\. Or use `on_error=.skip.`\.$"):
        batch.reject(3, "odd. Fix it.")


# Fields


@pytest.mark.parametrize(
    ("record", "field", "expected"),
    [
        ({"meta": {"body": "deep"}}, "meta.body", "deep"),
        ({"meta.body": "flat", "meta": {"body": "deep"}}, "meta.body", "flat"),
        ({"a": {"b": {"c": "deeper"}}}, "a.b.c", "deeper"),
    ],
)
def test_dots_reach_into_nested_objects(tmp_path, record, field, expected):
    options = RecordOptions(text_field=field)
    assert read(json.dumps(record).encode(), tmp_path, options, on_error="fail")[0] == [expected]
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert read(content, tmp_path, options, on_error="fail", name="a.parquet")[0] == [expected]


def test_a_missing_nested_field_is_named(tmp_path):
    content = b'{"meta": {"bdy": "a"}, "id": 1}'
    with pytest.raises(SourceError, match=r"no field 'meta\.body', only 'meta', 'id'; expected the text there"):
        read(content, tmp_path, RecordOptions(text_field="meta.body"), on_error="fail")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_records_of_another_kind_name_the_flags_that_read_them(tmp_path, form):
    content = b'{"conversations": [{"from": "human", "value": "a"}]}'
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(content)]), tmp_path / "a.parquet")
        content = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(SourceError, match=r"only 'conversations'; expected the text there.*`messages_field=.conv"):
        read(content, tmp_path, RecordOptions(), on_error="fail", name=f"a.{form}")


def test_columns_may_come_and_go_between_records(tmp_path):
    lines = [{"text": "a"}, {"text": "b", "meta": None}, {"meta": 1, "text": "c"}, {"txt": "d"}]
    content = "\n".join(map(json.dumps, lines)).encode()
    values, reader = read(content, tmp_path)
    assert values == ["a", "b", "c"]
    assert reader.rejected[0].where == "a.jsonl, line 4"


def test_chat_records_are_whole_objects(tmp_path):
    record = {"messages": [{"role": "user", "content": "hi"}], "id": 1}
    assert read(json.dumps(record).encode(), tmp_path, CHAT)[0] == [record]
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "x.parquet")
    assert read((tmp_path / "x.parquet").read_bytes(), tmp_path, CHAT, name="a.parquet")[0] == [record]


# Columns


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_type_of_text_column_is_read(tmp_path, kind):
    table = pa.table({"text": pa.array(["a", "", "äöü"]).cast(kind)})
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert read((tmp_path / "x.arrow").read_bytes(), tmp_path, name="a.arrow")[0] == ["a", "", "äöü"]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array(["a", None, "c"]), "field 'text' is null; expected text"),
        (pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"]).buffers()), "bytes, not UTF-8 text"),
    ],
)
def test_a_bad_value_of_a_column_is_one_bad_row(tmp_path, column, reason):
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    values, reader = read(content, tmp_path, name="a.parquet")
    assert values == ["a", "c"]
    assert (reader.rejected[0].index, reader.rejected[0].where) == (1, "a.parquet, row 1")
    with pytest.raises(SourceError, match=f"^a.parquet, row 1: .*{reason}"):
        read(content, tmp_path, name="a.parquet", on_error="fail")


def test_a_column_of_another_type_is_bad_row_by_row(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "x.parquet")
    values, reader = read((tmp_path / "x.parquet").read_bytes(), tmp_path, name="a.parquet")
    assert values == []
    assert [entry.reason for entry in reader.rejected] == [
        f"field 'text' is a number ({n}); expected text" for n in (1, 2)
    ]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_table_without_the_column_is_no_matter_of_records(tmp_path, on_error):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: no column 'text', only 'body', 'id'; .* `text_field`"):
        read((tmp_path / "x.parquet").read_bytes(), tmp_path, name="a.parquet", on_error=on_error)


# Text files


def test_text_files_keep_what_stands_in_them(tmp_path):
    content = "\ufeffline one\r\nline two\r\0 \x1f end"
    assert read(content.encode(), tmp_path, name="a.txt")[0] == [content[1:]]
    lines = RecordOptions(text_unit="line")
    assert read(content.encode(), tmp_path, lines, name="a.txt")[0] == ["line one", "line two\r\0 \x1f end"]


def test_invalid_utf_8_in_text_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"^a\.txt: invalid UTF-8, byte 0xe4 at column 4"):
        read(b"abc\xe4", tmp_path, name="a.txt", on_error="fail")
    values, reader = read(b"abc\n\xe4\n", tmp_path, RecordOptions(text_unit="line"), name="a.txt")
    assert values == ["abc"]
    assert reader.rejected[0].where == "a.txt, line 2"


# Batches and totals


def test_small_files_share_a_batch_and_large_ones_are_read_in_pieces(tmp_path, monkeypatch):
    for number in range(50):
        (tmp_path / f"{number:02}.jsonl").write_bytes(json.dumps({"text": str(number)}).encode())
    (source,) = resolve_sources([str(tmp_path)], TEXT)
    (window,) = cut_windows([source])[0]
    reader = WindowReader(source, window.slices)
    (batch,) = reader
    assert batch.values == [str(number) for number in range(50)]
    assert batch.where(7) == "07.jsonl, line 1"
    assert [(span.file, span.first_index, span.num_records) for span in reader.spans] == [(n, n, 1) for n in range(50)]

    monkeypatch.setattr("pipeline.sources.reader.BATCH_BYTES", 40)
    reader = WindowReader(source, window.slices)
    batches: list[RecordBatch] = list(reader)
    assert len(batches) > 10
    assert [value for batch in batches for value in batch.values] == [str(number) for number in range(50)]
    assert [index for batch in batches for index in batch.indices.tolist()] == list(range(50))
    assert sum(batch.raw_bytes for batch in batches) == reader.raw_bytes == sum(file.bytes for file in source.files)


def test_the_hash_is_that_of_the_raw_lines(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbf" + b"\n\r\n".join([*GOOD, b"broken"]) + b"\n"
    _, reader = read(content, tmp_path)
    assert reader.input_xxh3 == xxhash.xxh3_128_hexdigest(content)
    monkeypatch.setattr("pipeline.sources.reader.BATCH_BYTES", 16)
    assert read(content, tmp_path)[1].input_xxh3 == xxhash.xxh3_128_hexdigest(content)
    begin = content.index(b'{"text": "two"}')
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")], TEXT)
    reader = WindowReader(source, [Slice(0, begin - 1, begin + 1)], on_error="skip")
    assert [batch.values for batch in reader] == [["two"]]
    assert reader.input_xxh3 == xxhash.xxh3_128_hexdigest(b'{"text": "two"}\n')


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_raw_hash_is_that_of_reading_and_notices_one_digit_in_the_middle(tmp_path, suffix):
    lines = [{"text": f"{number:06}"} for number in range(20_000)]
    hashes = []
    for middle in ("010000", "010000", "01000X"):
        lines[10_000]["text"] = middle
        path = tmp_path / f"a.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(lines), path)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (source,) = resolve_sources([str(path)], TEXT)
        slices = [slice_ for window in cut_windows([source])[0] for slice_ in window.slices]
        reader = WindowReader(source, slices)
        assert sum(len(batch.values) for batch in reader) == len(lines)
        assert WindowReader(source, slices).raw_xxh3() == reader.input_xxh3
        hashes.append(reader.input_xxh3)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("options", [TEXT, CHAT])
def test_the_hash_of_columns_follows_their_values_only(tmp_path, options):
    hashes = []
    for texts, size in ((["a", "b", "c"], 1), (["a", "b", "c"], 3), (["a", "b", "d"], 3)):
        pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", compression="zstd" if size == 1 else "none")
        content = (tmp_path / "x.parquet").read_bytes()
        hashes.append(read(content, tmp_path, options, name="a.parquet")[1].input_xxh3)
    assert hashes[0] == hashes[1] != hashes[2]


@settings(max_examples=50, deadline=None)
@given(
    content=st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(GOOD)), min_size=1, max_size=12).map(b"\n".join)
)
def test_any_bytes_are_records_or_counted_rejections(tmp_path_factory, content):
    if not content or content.startswith((b"\xff\xfe", b"\xfe\xff", *(mark for mark, _, _ in MARKS))):
        return  # UTF-16, compressed, or a table: refused as a file
    values, reader = read(content, tmp_path_factory.mktemp("fuzz"))
    body = content.removeprefix(b"\xef\xbb\xbf")
    assert reader.num_records == sum(bool(line.strip()) for line in body.split(b"\n"))
    assert len(values) + len(reader.rejected) == reader.num_records
    assert len(values) >= sum(line in GOOD for line in body.split(b"\n"))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@settings(max_examples=50, deadline=None)
@given(place=st.floats(0, 1), byte=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_table_is_a_named_error_or_reads(tmp_path_factory, kind, place, byte, cut):
    path = tmp_path_factory.mktemp("fuzz") / f"x.{kind}"
    table = pa.table({"text": ["one", "two", None, "three"] * 20})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=30)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    content = bytearray(path.read_bytes())
    at = min(int(place * len(content)), len(content) - 1)
    if cut:
        del content[at:]
    else:
        content[at] ^= byte
    try:
        read(bytes(content), path.parent, name=f"a.{kind}")
    except SourceError as error:
        message = str(error)
    else:
        message = f"a.{kind}"
    assert message.startswith(f"a.{kind}")
    assert "\n" not in message


def test_an_arrow_stream_that_was_cut_between_two_batches_is_no_shorter_stream(tmp_path):
    table = pa.table({"text": ["one", "two", "three"] * 20})
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    content = (tmp_path / "x.arrow").read_bytes()
    assert len(read(content, tmp_path, name="whole.arrow")[0]) == 60
    heads = [place for place in range(0, len(content), 8) if content[place : place + 4] == b"\xff" * 4]
    assert len(heads) == 4  # schema, two batches, the end
    for number, place in enumerate(heads[1:]):
        assert sum(len(batch) for batch in pa.ipc.open_stream(content[:place])) == 30 * number  # Arrow finds no fault
        with pytest.raises(SourceError, match=r"a\.arrow: cannot be read as Arrow .*the file seems cut off"):
            read(content[:place], tmp_path, name="a.arrow")


def test_a_wrong_offset_in_an_arrow_file_does_not_kill_the_process(tmp_path):
    table = pa.table({"text": ["a" * 100] * 50})
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "x.arrow").read_bytes()
    wrong = content.replace((4900).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little"))
    assert wrong != content
    with pytest.raises(SourceError, match=r"a\.arrow: cannot be read as Arrow"):
        read(wrong, tmp_path, name="a.arrow")
