"""`pack export`: other projects' formats hold what the dataset holds, and their import gives it back."""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, DatasetExportConfig, RecordOptions, RepackConfig, build, export_dataset, repack
from pipeline.cli import main
from pipeline.export.samples import untrained_tokens
from shards import Dataset
from shards.errors import PackError

SEQ_LEN = 32
Document = tuple[list[int], list[int]]  # ids, and which of them are targets
RNG = np.random.default_rng(7)
CORPUS: dict[str, list[Document]] = {
    source: [
        (RNG.integers(3, 200, length).tolist(), [0, *RNG.integers(0, 2, length - 1).tolist()])
        for length in RNG.integers(1, 80, 50).tolist()
    ]
    for source in ("web", "code")
}


@pytest.fixture
def make(tmp_path: Path, words_dir: str) -> Callable[..., Dataset]:
    """Build `CORPUS` in several windows; its longer documents are cut."""

    def build_corpus(masks: bool = True, align: int = 1) -> Dataset:
        sources = []
        for name, documents in CORPUS.items():
            path = tmp_path / f"{name}.jsonl"
            rows = [{"input_ids": ids, "trained": mask if masks else None} for ids, mask in documents]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append(f"{name}={path}")
        records = RecordOptions(kind="tokens", overlong="split", mask_field="trained" if masks else None)
        build(
            BuildConfig(
                sources=sources, out=tmp_path / "built", tokenizer=words_dir, seq_len=SEQ_LEN, records=records,
                window_bytes=4096,
            )
        )  # fmt: skip
        if align > 1:
            repack(RepackConfig(dataset=tmp_path / "built", out=tmp_path / "aligned", align=align))
        dataset = Dataset(tmp_path / ("aligned" if align > 1 else "built"))
        assert len(dataset.shards) > 4
        return dataset

    return build_corpus


def export(dataset: Dataset, to: Any, out: Path, **options: Any) -> Path:
    export_dataset(DatasetExportConfig(dataset=dataset.path, to=to, out=out, **options))
    return out


def segments_of(dataset: Dataset) -> list[Document]:
    """Ids and targets of every segment, pack after pack, padding left out."""
    found = []
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        lengths = row["segment_lens"].tolist() if dataset.layout.align > 1 else np.diff(bounds).tolist()
        for start, length in zip(bounds, lengths, strict=False):
            part = slice(start, start + length)
            found.append((row["input_ids"][part].tolist(), row["loss_mask"][part].tolist()))
    return found


def imported(source: Path, words_dir: str, out: Path, *, joined: bool = False, **options: Any) -> list[Document]:
    """Ids and targets of the documents that a build takes from token ids, in the order of the files."""
    records = RecordOptions(kind="tokens", overlong="error", keep_no_target=True, **options)
    seq_len = 128 if joined else SEQ_LEN
    build(BuildConfig(sources=source, out=out, tokenizer=words_dir, seq_len=seq_len, records=records))
    dataset = Dataset(out)
    rows = [row for row in dataset for _ in row["doc_ids"]]
    keys = [(int(k), int(part)) for row in dataset for k, part in zip(row["doc_ids"], row["doc_parts"], strict=True)]
    assert all(not row["doc_offsets"].any() for row in rows)
    found = dict(zip(keys, segments_of(dataset), strict=True))
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("align", [1, 8])
def test_packs_as_parquet_are_what_trainers_expect(make, tmp_path, align):
    dataset = make(align=align)
    out = export(dataset, "parquet", tmp_path / "out")
    rows = [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["source"] for row in rows] == [dataset.shard_of(pack)[0]["source"] for pack in range(len(dataset))]
    segments = iter(segments_of(dataset))
    for row, pack in zip(rows, dataset, strict=True):
        ids, labels, positions = [], [], []
        for length in row["seq_lengths"]:
            tokens, mask = next(segments)
            assert len(tokens) == length
            ids += tokens
            labels += [token if trained else -100 for token, trained in zip(tokens, mask, strict=True)]
            positions += range(length)
        assert (row["input_ids"], row["labels"], row["position_ids"]) == (ids, labels, positions)
        for name in ("doc_ids", "doc_parts", "doc_offsets"):
            assert row[name] == pack[name].tolist()
    assert next(segments, None) is None


@pytest.mark.filterwarnings("ignore")  # of the library that reads
def test_datasets_opens_the_parquet_files_as_a_split(make, tmp_path):
    import datasets

    dataset = make()
    out = export(dataset, "parquet", tmp_path / "out")
    loaded = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert [row["input_ids"] for row in loaded] == [row["input_ids"].tolist() for row in dataset]


@pytest.mark.filterwarnings("ignore")  # of the library that reads
def test_trl_makes_of_the_parquet_rows_what_they_say(make, tmp_path):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    dataset = make()
    out = export(dataset, "parquet", tmp_path / "out")
    rows = pq.read_table(min(out.glob("*.parquet"))).to_pylist()[:3]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    packs = [dataset[number] for number in range(3)]
    for name, expected in {
        "input_ids": [token for pack in packs for token in pack["input_ids"].tolist()],
        "position_ids": [place for pack in packs for place in pack["position_ids"].tolist()],
        "labels": [
            token if one else -100
            for pack in packs
            for token, one in zip(pack["input_ids"].tolist(), pack["loss_mask"].tolist(), strict=True)
        ],
    }.items():
        assert batch[name][0].tolist() == expected


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize(
    ("to", "options"), [("parquet", {"labels_field": "labels"}), ("megatron-bridge", {"mask_field": "loss_mask"})]
)
def test_the_import_of_exported_packs_is_the_identity(make, words_dir, tmp_path, to, options, align):
    dataset = make(align=align)
    out = export(dataset, to, tmp_path / "out")
    assert imported(out, words_dir, tmp_path / "again", **options) == segments_of(dataset)


def test_masks_for_megatron_bridge_say_whether_the_next_token_is_trained(make, tmp_path):
    dataset = make()
    out = export(dataset, "megatron-bridge", tmp_path / "out")
    rows = [row for path in sorted(out.glob("*.idx.parquet")) for row in pq.read_table(path).to_pylist()]
    for row, pack in zip(rows, dataset, strict=True):
        assert row["input_ids"] == pack["input_ids"].tolist()
        assert [*row["seq_start_id"], len(row["input_ids"])] == pack["cu_seqlens"].tolist()
        targets = pack["loss_mask"]
        assert row["loss_mask"] == [*targets[1:].tolist(), 0]


def read_megatron(stem: Path) -> list[list[int]]:
    """Read a pair of files by the layout that Megatron documents."""
    index = stem.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert int.from_bytes(index[9:17], "little") == 1
    dtype = np.dtype({4: np.int32, 8: np.uint16}[index[17]])
    sequences, bounds = (int.from_bytes(index[at : at + 8], "little") for at in (18, 26))
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    assert np.frombuffer(index, np.int64, bounds, 34 + 12 * sequences).tolist() == list(range(sequences + 1))
    assert len(index) == 34 + 12 * sequences + 8 * bounds
    tokens = stem.with_suffix(".bin").read_bytes()
    assert pointers[-1] + lengths[-1] * dtype.itemsize == len(tokens)
    pairs = zip(lengths.tolist(), pointers.tolist(), strict=True)
    return [np.frombuffer(tokens, dtype, length, pointer).tolist() for length, pointer in pairs]


@pytest.mark.parametrize("align", [1, 8])
def test_megatron_gets_whole_documents_in_corpus_order_one_pair_a_source(make, words_dir, tmp_path, align):
    dataset = make(masks=False, align=align)
    assert dataset.manifest["totals"]["documents"]["split"] > 0
    out = export(dataset, "megatron", tmp_path / "out")
    assert sorted(path.name for path in out.glob("*.bin")) == ["code_document.bin", "web_document.bin"]
    for source, documents in CORPUS.items():
        expected = [ids for ids, _ in documents if len(ids) > 1]  # one token has no target, so the build drops it
        assert read_megatron(out / f"{source}_document") == expected
        file = out / f"{source}_document.bin"
        found = imported(file, words_dir, tmp_path / f"{source}-again", joined=True)
        assert [ids for ids, _ in found] == expected


def test_tokens_that_are_not_trained_are_no_secret_to_megatron(make, tmp_path):
    dataset = make()
    with pytest.raises(PackError, match=r"tokens that are read but not trained, which `to=\"megatron\"` cannot say"):
        export(dataset, "megatron", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = export(dataset, "megatron", tmp_path / "out", drop_mask=True)
    for source, documents in CORPUS.items():
        kept = [ids for ids, mask in documents if sum(mask)]  # without a target a document is dropped by the build
        assert read_megatron(out / f"{source}_document") == kept


def test_a_mask_that_a_cut_hides_is_found_too(build_words, tmp_path):
    """All tokens inside segments are targets, but the token that begins the second segment was none."""
    dataset = build_words([([5], [6, 7, 8])], seq_len=8)
    assert untrained_tokens(dataset) == 0
    ids, mask = list(range(10, 26)), [1] * 8 + [0] + [1] * 7
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"input_ids": ids, "mask": mask}) + "\n")
    records = RecordOptions(kind="tokens", mask_field="mask", overlong="split")
    build(
        BuildConfig(
            sources=path, out=tmp_path / "cut", tokenizer=dataset.path / "tokenizer", seq_len=8, records=records
        )
    )
    assert untrained_tokens(Dataset(tmp_path / "cut")) == 1


def test_documents_as_jsonl_are_text_with_the_places_of_targets(make, tmp_path):
    out = export(make(), "jsonl", tmp_path / "out")
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["code.jsonl", "web.jsonl"]
    for source, documents in CORPUS.items():
        lines = [json.loads(line) for line in (out / f"{source}.jsonl").read_text("utf-8").splitlines()]
        kept = [(ids, mask) for ids, mask in documents if sum(mask)]  # without a target a document is dropped
        assert len(lines) == len(kept) > 30
        for line, (ids, mask) in zip(lines, kept, strict=True):
            assert line["text"] == " ".join(f"w{token}" for token in ids)
            assert line["source"] == source
            trained = [word for begin, end in line["targets"] for word in line["text"][begin:end].split()]
            assert trained == [f"w{token}" for token, one in zip(ids, mask, strict=True) if one]


def test_weights_go_where_the_format_has_them(tokenizer_dir, tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there", "weight": 0.5}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    records = RecordOptions(kind="chat", message_weights=True)
    build(
        BuildConfig(
            sources=f"chats={path}", out=tmp_path / "built", tokenizer=tokenizer_dir, seq_len=64, records=records
        )
    )
    dataset = Dataset(tmp_path / "built")
    out = export(dataset, "parquet", tmp_path / "parquet")
    (row,) = pq.read_table(next(out.glob("*.parquet"))).to_pylist()
    assert row["loss_weights"] == dataset[0]["loss_weights"].tolist()
    (line,) = (export(dataset, "jsonl", tmp_path / "jsonl") / "chats.jsonl").read_text("utf-8").splitlines()
    record = json.loads(line)
    ((begin, end),) = record["targets"]
    assert record["text"][begin:end] == "Hello there<|im_end|>"
    assert record["weights"] == [0.5]
    records = RecordOptions(kind="tokens", labels_field="labels", weights_field="loss_weights")
    build(BuildConfig(sources=out, out=tmp_path / "again", tokenizer=tokenizer_dir, seq_len=64, records=records))
    assert Dataset(tmp_path / "again")[0]["loss_weights"].tolist() == dataset[0]["loss_weights"].tolist()
    with pytest.raises(PackError, match=r"has loss weights, which `to=\"megatron-bridge\"` cannot say"):
        export(dataset, "megatron-bridge", tmp_path / "bridge")
    assert export(dataset, "megatron-bridge", tmp_path / "bridge", drop_weights=True).is_dir()


class Writer:
    """Takes what a library's writer is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options, self.samples = args, options, []
        WRITERS.append(self)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.finished = True

    def write(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)

    def __setitem__(self, number: int, sample: dict[str, Any]) -> None:
        assert number == len(self.samples)
        self.samples.append(sample)

    def done(self) -> None:
        self.finished = True

    def merge(self) -> None:
        assert self.finished


WRITERS: list[Writer] = []


@pytest.mark.parametrize("to", ["mds", "litdata"])
def test_libraries_get_one_sample_a_pack(make, tmp_path, monkeypatch, to):
    """What their own readers make of it is checked in environments of theirs: benchmarks/check_exports.py."""
    dataset = make(align=8)
    for name in ("streaming", "litdata", "litdata.streaming", "litdata.streaming.writer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["streaming"], "MDSWriter", Writer, raising=False)
    monkeypatch.setattr(sys.modules["litdata.streaming.writer"], "BinaryWriter", Writer, raising=False)
    WRITERS.clear()
    export(dataset, to, tmp_path / "out")
    (writer,) = WRITERS
    assert writer.finished
    assert len(writer.samples) == len(dataset)
    kinds = {name: f"ndarray:{values.dtype}" for name, values in writer.samples[0].items() if name != "source"}
    if to == "mds":
        assert writer.options["columns"] == kinds | {"source": "str"}
    segments = iter(segments_of(dataset))
    for sample in writer.samples:
        bounds = np.concatenate([[0], np.cumsum(sample["seq_lengths"])])
        for begin, end in pairwise(bounds.tolist()):
            ids, mask = next(segments)
            assert sample["input_ids"][begin:end].tolist() == ids
            assert (sample["labels"][begin:end] != -100).astype(int).tolist() == mask
    assert {sample["source"] for sample in writer.samples} == {"web", "code"}


@pytest.mark.parametrize(("to", "package"), [("mds", "mosaicml-streaming"), ("litdata", "litdata")])
def test_a_library_that_is_missing_is_named_and_nothing_is_left(make, tmp_path, monkeypatch, to, package):
    monkeypatch.setitem(sys.modules, "streaming", None)
    monkeypatch.setitem(sys.modules, "litdata", None)
    dataset = make()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PackError, match=f"{package} cannot be imported .* Install it as docs/export.md says"):
        export(dataset, to, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing_and_an_older_export_as_it_was(make, tmp_path, monkeypatch):
    dataset = make()
    out = export(dataset, "parquet", tmp_path / "out")
    files = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(dataset: Dataset, out: Path, progress: Any) -> None:
        (out / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.export.tables.write_parquet", full)
    with pytest.raises(PackError, match=r"cannot be written .*No space left on device.* The export is not there"):
        export(dataset, "parquet", out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    assert not (tmp_path / "out.partial").exists()


def test_a_place_that_is_taken_is_refused(make, tmp_path):
    dataset = make()
    out = export(dataset, "parquet", tmp_path / "out")
    with pytest.raises(PackError, match=r"out holds an export.*`overwrite=True`"):
        export(dataset, "parquet", out)
    export(dataset, "jsonl", out, overwrite=True)
    assert not list(out.glob("*.parquet"))
    with pytest.raises(PackError, match="built is there and no export"):
        export(dataset, "parquet", dataset.path, overwrite=True)
    (tmp_path / "new.partial").mkdir()
    with pytest.raises(PackError, match=r"new\.partial: is there, from an export that was killed or still runs"):
        export(dataset, "parquet", tmp_path / "new")
    assert export(dataset, "parquet", tmp_path / "new", overwrite=True).is_dir()


@pytest.mark.parametrize("out", [".", "~/export", "nested/deep/export"])
def test_a_place_is_named_as_people_do(make, tmp_path, monkeypatch, out):
    dataset, here = make(), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shown = CliRunner().invoke(main, ["export", str(dataset.path), "--to", "jsonl", f"--out={out}"])
    assert shown.exit_code == 0, shown.output
    expected = {".": here, "~/export": tmp_path / "home" / "export"}.get(out, here / "nested" / "deep" / "export")
    assert (expected / "web.jsonl").is_file()


def test_a_url_is_no_place_to_write(make):
    with pytest.raises(PackError, match="s3://bucket/x is a URL; expected a directory on this machine"):
        export(make(), "jsonl", "s3://bucket/x")


def test_the_command_says_what_it_wrote(make, tmp_path):
    dataset = make()
    arguments = ["export", str(dataset.path), "--to", "jsonl", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(main, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    tokens = dataset.manifest["totals"]["tokens"]["packed"]
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.jsonl"))
    expected = {"path": str(tmp_path / "out"), "files": 2, "bytes": size, "packs": len(dataset), "tokens": tokens}
    assert json.loads(shown.stdout) == expected
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "--out: " in again.output
    assert "--overwrite" in again.output
