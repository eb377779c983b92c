"""Token ids that come with the corpus are packed as they are, from every form in which people keep them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, RecordOptions, build
from pipeline.cli import main
from shards import Dataset, verify
from shards.errors import PackError

EOS = 2
DOCUMENTS = [[*range(10 + number, 13 + number + 3 * (number % 4)), EOS] for number in range(40)]
PAIRS = [(number, number + 1) for number in range(0, 40, 2)]
Documents = dict[tuple[int, int], tuple[list[int], list[int]]]


def imported(dataset: Dataset) -> Documents:
    """Return ids and loss mask of every document, by record and part."""
    found: dict[tuple[int, int], list[Any]] = {}
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        parts = row["doc_parts"].tolist()
        for segment, document in enumerate(row["doc_ids"].tolist()):
            begin, end = bounds[segment : segment + 2]
            piece = (int(row["doc_offsets"][segment]), row["input_ids"][begin:end], row["loss_mask"][begin:end])
            found.setdefault((document & 0xFFFFFFFF, parts[segment]), []).append(piece)
    joined = {}
    for key, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        joined[key] = tuple(np.concatenate([piece[at] for piece in pieces]).tolist() for at in (1, 2))
    return joined


@pytest.fixture
def pack(tmp_path: Path, words_dir: str) -> Callable[..., Dataset]:
    """Build a dataset of ids and check it against the format's rules."""

    def make(source: Path, seq_len: int = 64, on_error: str = "fail", **options: Any) -> Dataset:
        config = {"tokenizer": words_dir, "seq_len": seq_len, "on_error": on_error, "max_rejected": 1.0}
        records = RecordOptions(kind="tokens", **options)
        build(BuildConfig(sources=(str(source),), out=str(tmp_path / "out"), overwrite=True, records=records, **config))
        assert verify(str(tmp_path / "out")).problems == []
        return Dataset(tmp_path / "out")

    return make


def table(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows as the path's suffix says."""
    columns = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(columns, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), columns.schema) as writer:
            writer.write_table(columns, max_chunksize=7)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


TABLES = ["a.jsonl", "a.json", "a.parquet", "a.arrow", "saved"]


@pytest.mark.parametrize("name", TABLES)
def test_columns_of_ids_come_through_as_they_are(tmp_path, pack, name):
    dataset = pack(table([{"input_ids": ids, "other": "x"} for ids in DOCUMENTS], tmp_path / name))
    assert imported(dataset) == {(number, 0): (ids, [0] + [1] * (len(ids) - 1)) for number, ids in enumerate(DOCUMENTS)}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("field", ["labels", "mask"])
def test_labels_and_masks_say_which_ids_are_targets(tmp_path, pack, name, field):
    rows, expected = [], {}
    for number, ids in enumerate(DOCUMENTS):
        trained = [0] + [int((place + number) % 3 > 0) for place in range(1, len(ids))]
        labels = [token if one else -100 for token, one in zip(ids, trained, strict=True)]
        rows.append({"ids": ids, "labels": labels, "mask": trained})
        expected[number, 0] = (ids, trained)
    dataset = pack(table(rows, tmp_path / name), ids_field="ids", **{f"{field}_field": field})
    assert imported(dataset) == expected


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("told", ["seq_lengths", "position_ids", "cu_seqlens", "seq_start_id"])
def test_packed_rows_are_taken_apart_into_their_documents(tmp_path, pack, name, told):
    rows = []
    for first, second in PAIRS:
        both = [DOCUMENTS[first], DOCUMENTS[second]]
        lengths = [len(ids) for ids in both]
        rows.append(
            {
                "input_ids": [*both[0], *both[1]],
                told: {
                    "seq_lengths": lengths,
                    "position_ids": [place for length in lengths for place in range(length)],
                    "cu_seqlens": [0, lengths[0], sum(lengths)],
                    "seq_start_id": [0, lengths[0]],
                }[told],
            }
        )
    found = imported(pack(table(rows, tmp_path / name)))
    assert {key: ids for key, (ids, _) in found.items()} == {
        (row, part): DOCUMENTS[number] for row, pair in enumerate(PAIRS) for part, number in enumerate(pair)
    }


@pytest.mark.parametrize("labels", [False, True])
def test_eos_is_added_where_it_is_asked_for_and_missing(tmp_path, pack, labels):
    documents = [ids if number % 3 else ids[:-1] for number, ids in enumerate(DOCUMENTS)]
    rows = [{"input_ids": ids} | ({"labels": [-100, *ids[1:]]} if labels else {}) for ids in documents]
    source = table(rows, tmp_path / "a.parquet")
    found = imported(pack(source, append_eos=True, **({"labels_field": "labels"} if labels else {})))
    assert found == {(number, 0): (ids, [0] + [1] * (len(ids) - 1)) for number, ids in enumerate(DOCUMENTS)}


def megatron(path: Path, dtype: type = np.uint16, code: int = 8) -> Path:
    """Write documents as Megatron's IndexedDatasetBuilder does, every second document in two sequences."""
    sequences, bounds = [], [0]
    for number, ids in enumerate(DOCUMENTS):
        sequences += [ids[:2], ids[2:]] if number % 2 else [ids]
        bounds.append(len(sequences))
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    path.write_bytes(np.concatenate([np.array(ids, dtype) for ids in sequences]).tobytes())
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    counts = len(sequences).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    index = header + counts + lengths.tobytes() + pointers.tobytes() + np.array(bounds, np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
def test_megatron_s_pairs_give_the_documents_of_their_index(tmp_path, pack, dtype, code):
    dataset = pack(megatron(tmp_path / "a.bin", dtype, code))
    assert [ids for _, (ids, _) in sorted(imported(dataset).items())] == DOCUMENTS
    shown = CliRunner().invoke(main, ["show", str(dataset.path), "0"], catch_exceptions=False).stdout
    assert "a.bin, record" in shown
    assert "of documents 0:40" in shown


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
@pytest.mark.parametrize("window_bytes", [None, 100, 2])
@pytest.mark.parametrize("end", [True, False])
def test_streams_are_cut_behind_the_eos_id(tmp_path, words_dir, name, window_bytes, end):
    stream = np.array([token for ids in DOCUMENTS for token in ids], np.uint16)[: None if end else -1]
    if name == "a.npy":
        np.save(tmp_path / name, stream)
    else:
        stream.tofile(tmp_path / name)
    config = BuildConfig(
        sources=(str(tmp_path / name),),
        out=str(tmp_path / "out"),
        tokenizer=words_dir,
        seq_len=64,
        packer="next-fit",
        window_bytes=window_bytes,
        records=RecordOptions(kind="tokens", eos_id=EOS),
    )
    build(config)
    dataset = Dataset(tmp_path / "out")
    segments = [
        row["input_ids"][a:b].tolist()
        for row in dataset
        for a, b in zip(row["cu_seqlens"][:-1], row["cu_seqlens"][1:], strict=True)
    ]
    assert segments == [*DOCUMENTS[:-1], DOCUMENTS[-1] if end else DOCUMENTS[-1][:-1]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an id outside the vocabulary": ({"input_ids": [5, 999, 7]}, r"id 999 at place 1; expected 0 to 199"),
    "a negative id": ({"input_ids": [-1, 6, 7]}, r"id -1 at place 0"),
    "labels that disagree": ({"labels": [-100, 6, 9]}, r"'labels' holds 9 at place 2, 'input_ids' 7"),
    "labels that are shifted": ({"labels": [6, 7, -100]}, r"'labels' looks shifted by one"),
    "too few labels": ({"labels": [-100, 6]}, r"'labels' holds 2 values, 'input_ids' 3"),
    "lengths that do not sum": ({"seq_lengths": [2, 2]}, r"'seq_lengths' sums to 4, the row holds 3"),
    "offsets that end elsewhere": ({"cu_seqlens": [0, 2]}, r"'cu_seqlens' is no rise from 0 to 3"),
    "positions that jump": ({"position_ids": [0, 1, 5]}, r"'position_ids' neither goes on nor restarts"),
    "a padded row": ({"attention_mask": [1, 1, 0]}, r"'attention_mask' holds 0: the row is padded"),
    "a mask of another kind": ({"mask": [0, 1, 2]}, r"'mask' holds 2; expected 0 or 1"),
    "no ids": ({"input_ids": None}, r"'input_ids' is null"),
}
GOOD: dict[str, list[int]] = {
    "input_ids": [5, 6, 7], "labels": [-100, 6, 7], "mask": [0, 1, 1], "seq_lengths": [3], "cu_seqlens": [0, 3],
    "position_ids": [0, 1, 2], "attention_mask": [1, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_with_its_place_or_counted(tmp_path, pack, name, what):
    change, reason = BAD[what]
    fields = {"input_ids", *change}
    good = {field: GOOD[field] for field in fields}
    source = table([good, good, good | change, good], tmp_path / name)
    options = {f"{field}_field": field for field in ("labels", "mask") if field in fields}
    place = "line 3" if name == "a.jsonl" else "row 2"
    with pytest.raises(PackError, match=rf"^{name}, {place}: .*{reason}.*on.error"):
        pack(source, **options)
    dataset = pack(source, on_error="skip", **options)
    assert dataset.manifest["totals"]["documents"]["dropped"] == {"rejected": 1}
    assert {record for record, _ in imported(dataset)} == {0, 1, 3}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_floats_are_no_ids(tmp_path, pack, name):
    source = table([{"input_ids": [5.0, 6.5]}], tmp_path / name)
    with pytest.raises(PackError, match=rf"^{name}, .*'input_ids' holds .*; expected"):
        pack(source)


def test_broken_files_of_ids_are_named(tmp_path, pack):
    path = megatron(tmp_path / "a.bin")
    whole, index = path.read_bytes(), path.with_suffix(".idx").read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(PackError, match=r"a\.bin: disagrees with a\.idx"):
        pack(path)
    path.write_bytes(whole)
    path.with_suffix(".idx").write_bytes(index[:17] + bytes([7]) + index[18:])
    with pytest.raises(PackError, match=r"a\.idx: has the type code 7; expected integers"):
        pack(path)
    path.with_suffix(".idx").write_bytes(index[:-3])
    with pytest.raises(PackError, match=r"a\.idx: is cut off"):
        pack(path)
    path.with_suffix(".idx").write_bytes(b"something else")
    with pytest.raises(PackError, match=r"a\.idx: not an index of Megatron"):
        pack(path)
    np.save(tmp_path / "b.npy", np.arange(100, dtype=np.uint16))
    with pytest.raises(PackError, match=r"b\.npy: is a stream of token ids; expected the id that ends documents"):
        pack(tmp_path / "b.npy")
    with pytest.raises(PackError, match=r"b\.npy: holds no id 150; expected it at the end of each document"):
        pack(tmp_path / "b.npy", eos_id=150)
    (tmp_path / "b.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-20])
    with pytest.raises(PackError, match=r"b\.npy: cannot be read as \.npy"):
        pack(tmp_path / "b.npy", eos_id=5)
    np.savez(tmp_path / "z", np.arange(5))
    (tmp_path / "z.npz").rename(tmp_path / "z.npy")
    with pytest.raises(PackError, match=r"z\.npy: cannot be read as \.npy"):
        pack(tmp_path / "z.npy", eos_id=5)
    np.save(tmp_path / "c.npy", np.zeros(9))
    with pytest.raises(PackError, match=r"c\.npy: holds float64"):
        pack(tmp_path / "c.npy", eos_id=5)
    (tmp_path / "d.bin").write_bytes(b"abc")
    with pytest.raises(PackError, match=r"d\.bin: has 3 bytes; expected a multiple of 2"):
        pack(tmp_path / "d.bin", eos_id=5)


def test_a_table_without_the_column_names_what_it_has(tmp_path, pack):
    with pytest.raises(PackError, match=r"a\.parquet: no column 'tokens', only 'input_ids'"):
        pack(table([{"input_ids": [1]}], tmp_path / "a.parquet"), ids_field="tokens")


def test_the_command_line_knows_ids_by_their_fields(tmp_path, words_dir):
    source = table([{"ids": ids} for ids in DOCUMENTS], tmp_path / "a.parquet")
    arguments = ["build", str(source), "--out", str(tmp_path / "out"), "--tokenizer", words_dir, "--seq-len", "64"]
    result = CliRunner().invoke(main, [*arguments, "--ids-field", "ids"])
    assert result.exit_code == 0, result.output
    assert sum(len(row["input_ids"]) for row in Dataset(tmp_path / "out")) == sum(map(len, DOCUMENTS))


@pytest.mark.parametrize("streamed", [False, True])
def test_columns_of_a_dataset_of_the_hub_come_through_the_library(tmp_path, pack, monkeypatch, streamed):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repo").mkdir()
    rows = [{"input_ids": ids, "labels": [-100, *ids[1:-1], -100]} for ids in DOCUMENTS]
    table(rows, tmp_path / "repo" / "train.jsonl")
    source = f"hf:{tmp_path / 'repo'}" + (":train" if streamed else "")
    found = imported(pack(source, labels_field="labels"))
    assert found == {(number, 0): (ids, [0] + [1] * (len(ids) - 2) + [0]) for number, ids in enumerate(DOCUMENTS)}


VOCAB_SIZE = 200


@pytest.fixture
def without(tmp_path: Path) -> Dataset:
    """A dataset of ids whose tokenizer nobody brought."""
    source = table([{"input_ids": ids} for ids in DOCUMENTS], tmp_path / "ids.parquet")
    flags = ["--vocab-size", str(VOCAB_SIZE), "--ids-field", "input_ids", "--seq-len", "64"]
    done = CliRunner().invoke(main, ["build", str(source), *flags, "--out", str(tmp_path / "bare")])
    assert done.exit_code == 0, done.output
    return Dataset(tmp_path / "bare")


def test_ids_are_packed_without_a_tokenizer(without, tmp_path):
    assert imported(without) == {(number, 0): (ids, [0] + [1] * (len(ids) - 1)) for number, ids in enumerate(DOCUMENTS)}
    assert (without.max_token_id, without.plan["tokenizer"]["vocab_size"]) == (VOCAB_SIZE - 1, VOCAB_SIZE)
    assert without.manifest["tokenizer_files"] == {}
    for command in (["verify"], ["verify", "--against", str(tmp_path / "ids.parquet")], ["inspect"]):
        done = CliRunner().invoke(main, [command[0], str(without.path), *command[1:]])
        assert done.exit_code == 0, done.output


def test_ids_without_a_tokenizer_are_shown_as_numbers(without, tmp_path):
    done = CliRunner().invoke(main, ["show", str(without.path), "--doc", "0:3", "--json"])
    (pack,) = map(json.loads, done.stdout.splitlines())
    (segment,) = [segment for segment in pack["segments"] if segment["document"] == 3]
    text = "".join(run["text"] for run in segment["runs"])
    assert text == "".join(f" {token}" for token in DOCUMENTS[3])
    done = CliRunner().invoke(main, ["inspect", str(without.path), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output


def test_what_needs_a_tokenizer_says_so(without, tmp_path):
    done = CliRunner().invoke(main, ["export", str(without.path), "--to", "jsonl", "--out", str(tmp_path / "out")])
    assert (done.exit_code, "expected a dataset that was built with a tokenizer" in done.stderr) == (1, True)
    again = CliRunner().invoke(main, ["repack", str(without.path), "--seq-len", "32", "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert imported(Dataset(tmp_path / "again")) == imported(without)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--tokenizer, --vocab-size: are not given; expected one"),
        (["--vocab-size", "200", "--tokenizer", "x"], "are both given; expected one"),
        (["--vocab-size", "200"], "source 'corpus' holds text records, which need a tokenizer; expected token ids"),
        (["--vocab-size", "200", "--ids-field", "input_ids", "--append-eos"], "expected its id. Add --eos-id"),
        (["--vocab-size", "12", "--ids-field", "input_ids"], "id 12 at place 2; expected 0 to 11"),
        (["--vocab-size", "0", "--ids-field", "input_ids"], "--vocab-size: 0; expected at least 1"),
    ],
)
def test_a_size_that_cannot_stand_for_a_tokenizer_is_refused(tmp_path, flags, message):
    source = table([{"input_ids": ids} for ids in DOCUMENTS], tmp_path / "ids.jsonl")
    arguments = ["build", str(source), "--seq-len", "64", "--out", str(tmp_path / "out"), *flags]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (1, 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 or done.exit_code == 2


@pytest.mark.parametrize("name", TABLES)
def test_columns_that_nobody_reads_and_that_look_like_targets_are_named(tmp_path, pack, name):
    rows = [
        {"input_ids": ids, "labels": [-100, *ids[1:]] if number % 4 else None, "url": "x", "special_tokens_mask": [0]}
        for number, ids in enumerate(DOCUMENTS)
    ]
    dataset = pack(table(rows, tmp_path / name))
    having = sum(row["labels"] is not None for row in rows) if name.startswith("a.json") else len(rows)
    expected = {"labels": having, "special_tokens_mask": len(rows)}
    assert list(dataset.manifest["facts"]["unread_fields"].values()) == [expected]
    with pytest.raises(
        PackError, match=r"holds '(labels|special_tokens_mask)', which no option reads; expected no such"
    ):
        pack(table(rows, tmp_path / name), strict_fields=True)
    read = pack(table(rows[1:4], tmp_path / f"read-{name}"), labels_field="labels")
    assert list(read.manifest["facts"]["unread_fields"].values()) == [{"special_tokens_mask": 3}]
