"""Views of Arrow arrays as numpy arrays: values, types, slices, and what is not imported."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.shard import numbers_of


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.float16, np.float64])
@pytest.mark.parametrize("span", [(0, 5), (2, 3), (5, 0)])
def test_a_view_holds_the_values_of_a_slice_in_their_type(dtype, span):
    begin, count = span
    view = numbers_of(pa.array(np.arange(5, dtype=dtype)).slice(begin, count))
    assert view.dtype == dtype
    assert view.tolist() == list(range(begin, begin + count))


IMPORT_AND_REPACK = """
import sys
from pipeline import BuildConfig, RecordOptions, RepackConfig, build, repack
from shards import Dataset
root, tokens = sys.argv[1], RecordOptions(kind="tokens")
build(BuildConfig(sources=f"{root}/ids.parquet", out=f"{root}/d", tokenizer=root, seq_len=4, records=tokens))
repack(RepackConfig(dataset=f"{root}/d", out=f"{root}/e", seq_len=8))
assert sorted(Dataset(f"{root}/e")[0]["input_ids"].tolist()) == [1, 1, 2, 2, 2]
print("pandas" in sys.modules)
"""


def test_importing_ids_and_repacking_them_imports_no_pandas(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    pq.write_table(pa.table({"input_ids": [[1, 2, 1], [2, 2]]}), tmp_path / "ids.parquet")
    command = [sys.executable, "-c", IMPORT_AND_REPACK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
