"""A dataset as a Python user meets it: sequence, slices, what a notebook shows."""

import numpy as np
import pytest

import shards
from shards import Dataset, FormatError, Pack

PACKS = {"web": [[3, 2], [4], [1, 1, 2]], "code": [[5], [2, 2]]}


def test_a_dataset_is_a_sequence_of_packs(write_dataset):
    dataset = Dataset(str(write_dataset(PACKS)))
    assert len(dataset) == len(list(dataset)) == 5
    lengths = [np.diff(row["cu_seqlens"]).tolist() for row in dataset]
    assert lengths == [[3, 2], [4], [1, 1, 2], [5], [2, 2]]
    assert [np.diff(row["cu_seqlens"]).tolist() for row in dataset[1:4]] == lengths[1:4]
    assert [np.diff(row["cu_seqlens"]).tolist() for row in dataset[::-2]] == lengths[::-2]
    assert np.array_equal(dataset[-1]["input_ids"], dataset[4]["input_ids"])
    with pytest.raises(IndexError, match="has 5 packs; there is no pack 5"):
        dataset[5]
    pack = dataset.pack(2)
    assert isinstance(pack, Pack)
    assert pack.cu_seqlens.tolist() == [0, 1, 2, 4]


def test_a_dataset_says_what_it_is_in_a_notebook(write_dataset):
    dataset = Dataset(write_dataset(PACKS, name="a<b", seq_len=8))
    assert repr(dataset).startswith(f"Dataset('{dataset.path}', packs 5, seq_len 8, tokens 22, ")
    assert "fill_rate 55.00%" in repr(dataset)
    page = dataset._repr_html_()
    assert "a&lt;b</caption>" in page
    assert "<tr><th>tokens</th><td>22</td></tr>" in page


def test_the_public_names_are_listed():
    assert dir(shards) == ["Cache", "Dataset", "FormatError", "OptionError", "Pack", "PackError", "StepOrder", "verify"]


def test_a_shard_of_another_size_is_found_at_opening_among_many(write_dataset):
    path = write_dataset({f"part-{k}": [[3, 2]] for k in range(12)})
    file = path / Dataset(path).shards.files()[7]
    assert [shard["file"] for shard in Dataset(path).shards] == Dataset(path).shards.files()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(FormatError, match=rf"{file.name}: has [\d,]+ bytes, the manifest says [\d,]+ \(rule F3\)"):
        Dataset(path)
    file.unlink()
    with pytest.raises(FormatError, match=rf"{file.name}: is missing"):
        Dataset(path)
