"""Whatever the documents and their packing, an export comes in again as it went out."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from pipeline import BuildConfig, DatasetExportConfig, RecordOptions, RepackConfig, build, export_dataset, repack
from shards import Dataset

Document = tuple[list[int], list[int]]
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=40), min_size=1, max_size=25
)


@pytest.fixture(scope="module")
def hundred_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 100 entries."""
    path = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(models.WordLevel({f"w{k}": k for k in range(100)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return path


def pack(sources: Path, out: Path, tokenizer: Path, seq_len: int, packer: Any = "auto", **options: Any) -> Dataset:
    records = RecordOptions(kind="tokens", keep_no_target=True, **options)
    build(BuildConfig(sources=sources, out=out, tokenizer=tokenizer, seq_len=seq_len, packer=packer, records=records))
    return Dataset(out)


def segments_of(dataset: Dataset) -> list[Document]:
    """Ids and targets of every segment, pack after pack, padding left out."""
    found = []
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        real = row["segment_lens"] if dataset.layout.align > 1 else [end - start for start, end in pairwise(bounds)]
        for start, length in zip(bounds, real, strict=False):
            part = slice(start, start + int(length))
            found.append((row["input_ids"][part].tolist(), row["loss_mask"][part].tolist()))
    return found


def documents_of(dataset: Dataset) -> list[Document]:
    """The same in the order of records; no document was cut."""
    keys = [(int(k), int(part)) for row in dataset for k, part in zip(row["doc_ids"], row["doc_parts"], strict=True)]
    found = dict(zip(keys, segments_of(dataset), strict=True))
    assert len(found) == len(keys)
    return [found[key] for key in sorted(found)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=DOCUMENTS,
    seq_len=st.sampled_from([8, 16, 64]),
    packer=st.sampled_from(["auto", "next-fit", "wrapped"]),
    align=st.sampled_from([1, 4]),
)
def test_the_import_of_an_export_is_the_identity(tmp_path_factory, hundred_ids, documents, seq_len, packer, align):
    root = tmp_path_factory.mktemp("round")
    lines = [{"input_ids": [token for token, _ in each], "mask": [one for _, one in each]} for each in documents]
    (root / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    overlong = {} if packer == "wrapped" else {"overlong": "split"}
    dataset = pack(root / "corpus.jsonl", root / "built", hundred_ids, seq_len, packer, mask_field="mask", **overlong)
    if align > 1 and packer != "wrapped":
        repack(RepackConfig(dataset=root / "built", out=root / "aligned", align=align))
        dataset = Dataset(root / "aligned")
    for to, options in (("parquet", {"labels_field": "labels"}), ("megatron-bridge", {"mask_field": "loss_mask"})):
        export_dataset(DatasetExportConfig(dataset=dataset.path, to=to, out=root / to))  # type: ignore[arg-type]
        again = pack(root / to, root / f"{to}-again", hundred_ids, seq_len, **options)
        assert documents_of(again) == segments_of(dataset)
    export_dataset(DatasetExportConfig(dataset=dataset.path, to="megatron", out=root / "megatron", drop_mask=True))
    (file,) = (root / "megatron").glob("*.bin")
    again = pack(file, root / "megatron-again", hundred_ids, 64)
    assert [ids for ids, _ in documents_of(again)] == [line["input_ids"] for line in lines]
