"""What a table takes in memory while it is read, whatever its file says."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.files import BATCH_BYTES
from pipeline.sources.reader import WindowReader
from pipeline.sources.windows import cut_windows

ROWS, VALUE = 1500, "x" * 100_000


@pytest.mark.parametrize("kind", ["parquet", "arrow", "view"])
@pytest.mark.parametrize("records", ["text", "chat"])
def test_a_value_that_is_stored_once_and_used_in_many_rows_is_not_held_in_all_of_them(
    tmp_path, monkeypatch, kind, records
):
    monkeypatch.setattr("pipeline.sources.tables.MAX_EXPANDED_BYTES", 4 << 20)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array([VALUE]))
    if kind == "view":  # all views point into one buffer
        view = pa.array([VALUE], pa.string_view())
        column = pa.Array.from_buffers(
            pa.string_view(), ROWS, [None, pa.py_buffer(view.buffers()[1].to_pybytes() * ROWS), view.buffers()[2]]
        )
    table = pa.table({"text": column})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    else:
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 1_000_000
    (source,) = resolve_sources([str(path)], RecordOptions(kind=records))
    rows = 0
    for window in cut_windows([source])[0]:
        for batch in WindowReader(source, window.slices):
            texts = batch.values if records == "text" else [record["text"] for record in batch.values]
            assert set(texts) == {VALUE}
            assert len(texts) * len(VALUE) <= BATCH_BYTES + (4 << 20)
            rows += len(texts)
    assert rows == ROWS
