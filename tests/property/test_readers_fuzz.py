"""Broken files of every format: a named error or a counted rejection, never another exception, never silence."""

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import WindowReader
from pipeline.sources.streams import stream_windows
from pipeline.sources.windows import cut_windows, streamed_files
from shards.errors import PackError

TEXTS = ["plain", "é 한국어 👍", 'quote " and \\ slash', "", "two\nlines", "x" * 300, "tab\t\x00nul"]
ROWS = [{"text": text, "id": k} for k, text in enumerate(TEXTS)]


def jsonl() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=k % 2 == 0) + "\n" for k, row in enumerate(ROWS)).encode()


def parquet(compression: str = "none", **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=3, compression=compression, **options)
    return sink.getvalue()


def arrow() -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return sink.getvalue()


def csv() -> bytes:
    return b"text,id\n" + b"".join(
        f'"{row["text"]}",{row["id"]}\n'.replace('quote "', "quote ").encode() for row in ROWS
    )


SAMPLES: dict[str, bytes] = {
    "c.jsonl": jsonl(),
    "c.json": json.dumps(ROWS).encode(),
    "c.jsonl.gz": gzip.compress(jsonl()),
    "c.parquet": parquet(),
    "snappy.parquet": parquet("snappy", use_dictionary=False),
    "c.arrow": arrow(),
    "c.csv": csv(),
}


def read_all(path: Path, on_error: str) -> tuple[int, int, int]:
    """Read a file as a build does; return records read, texts given, records rejected."""
    sources = resolve_sources([str(path)], RecordOptions())
    windows, _ = cut_windows(sources, 200)
    readers = [WindowReader(sources[window.source], window.slices, on_error=on_error) for window in windows]
    for source in sources:
        for slices, payloads in stream_windows(source, streamed_files(source), 200):
            readers.append(WindowReader(source, slices, on_error=on_error, payloads=payloads))
    read = given = rejected = 0
    for reader in readers:
        for batch in reader:
            assert all(isinstance(value, str) for value in batch.values)
            assert len(batch.values) == len(batch.indices)
            given += len(batch.values)
        read, rejected = read + reader.num_records, rejected + len(reader.rejected)
        assert all(path.name in entry.where and entry.reason for entry in reader.rejected)
    return read, given, rejected


def check(path: Path, content: bytes) -> None:
    """Either an error of one line that names the file, or every record is accounted for."""
    path.write_bytes(content)
    fault = ""
    try:
        read, given, rejected = read_all(path, "skip")
    except PackError as error:
        fault = str(error)
    if fault:
        assert path.name in fault
        assert "\n" not in fault
        return
    assert read == given + rejected
    if rejected:
        with pytest.raises(PackError, match=path.name.replace(".", r"\.")):
            read_all(path, "fail")
    else:
        assert read_all(path, "fail") == (read, given, 0)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_themselves_are_read_whole(tmp_path, name):
    (tmp_path / name).write_bytes(SAMPLES[name])
    assert read_all(tmp_path / name, "fail") == (len(ROWS), len(ROWS), 0)


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a flipped bit": lambda data, draw: flip(data, draw, 1),
    "many flipped bits": lambda data, draw: flip(data, draw, 20),
    "cut off": lambda data, draw: data[: draw.randrange(len(data))],
    "a hole": lambda data, draw: hole(data, draw, b""),
    "zeros inside": lambda data, draw: hole(data, draw, bytes(40)),
    "doubled": lambda data, draw: data[: draw.randrange(len(data))] + data,
    "noise": lambda data, draw: draw.randbytes(200),
}


def flip(data: bytes, draw: random.Random, times: int) -> bytes:
    changed = bytearray(data)
    for _ in range(times):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def hole(data: bytes, draw: random.Random, filling: bytes) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + filling + data[start + draw.randrange(1, 60) :]


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.sampled_from(sorted(CHANGES)), seed=st.integers(0, 1 << 20))
def test_a_broken_file_is_named_or_its_records_are_counted(tmp_path_factory, name, change, seed):
    draw = random.Random(seed)
    check(tmp_path_factory.getbasetemp() / name, CHANGES[change](SAMPLES[name], draw))


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=40).filter(lambda line: b"\n" not in line),
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.text(max_size=10),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
                max_leaves=8,
            ).map(lambda value: json.dumps({"text": value} if len(repr(value)) % 2 else value).encode()),
        ),
        max_size=12,
    )
)
@example(lines=[b'{"": ""}', b'{"": "x"}'])
def test_any_lines_at_all_are_read_or_rejected_one_by_one(tmp_path_factory, lines):
    check(tmp_path_factory.getbasetemp() / "lines.jsonl", b"\n".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_thousands_of_broken_files_are_named_or_counted(tmp_path, name):
    draw = random.Random(7)
    for number in range(3000):
        check(tmp_path / name, CHANGES[sorted(CHANGES)[number % len(CHANGES)]](SAMPLES[name], draw))
