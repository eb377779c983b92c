"""`pack repack`: the dataset that a build with other settings would have made, without its corpus."""

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, DatasetExportConfig, RecordOptions, build, export_dataset
from pipeline.building.repacking import repack as repacking
from pipeline.building.repacking.repack import repack
from pipeline.cli import main
from pipeline.config import RepackConfig
from shards import Dataset, verify
from shards.errors import PackError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"text": f"document {k}: " + "some words " * int(rng.integers(0, 60))} for k in range(300)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    rows = []
    for k in range(150):
        turns = [("user", "assistant")[n % 2] for n in range(2 * int(rng.integers(1, 4)))]
        rows.append(
            {"messages": [{"role": role, "content": f"{k} says " + "so " * int(rng.integers(1, 30))} for role in turns]}
        )
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def built(out: Path, tokenizer: str, sources: Any, **changes: Any) -> Dataset:
    settings = {"tokenizer": tokenizer, "seq_len": 96, "window_bytes": 4096, "tokenizer_engine": "tokenizers"}
    build(BuildConfig(sources=sources, out=out, **settings | changes))
    return Dataset(out)


def contents(dataset: Dataset) -> dict[str, bytes]:
    """Everything but what tells of one run: sidecars and the manifest."""
    files = [path for path in dataset.path.rglob("*") if path.is_file()]
    return {
        path.relative_to(dataset.path).as_posix(): path.read_bytes()
        for path in files
        if path.name != "manifest.json" and not (path.parent.name == "shards" and path.suffix == ".json")
    }


def documents(dataset: Dataset) -> dict[int, list[int]]:
    """Tokens of each document, put together from its segments by their offsets."""
    pieces: dict[int, list[tuple[int, list[int]]]] = {}
    for row in dataset:
        real = row.get("segment_lens", np.diff(row["cu_seqlens"]))
        for (start, _), number, offset, length in zip(
            pairwise(row["cu_seqlens"]), row["doc_ids"].tolist(), row["doc_offsets"].tolist(), real, strict=True
        ):
            pieces.setdefault(number, []).append((offset, row["input_ids"][start : start + length].tolist()))
    return {number: [token for _, ids in sorted(found) for token in ids] for number, found in pieces.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 48},
        {"seq_len": 1000},
        {"seed": 7},
        {"packer": "next-fit"},
        {"packer": "bucketed", "seq_len": 256},
        {"packer": "wrapped", "seq_len": 64},
        {"max_segments": 2},
    ],
)
def test_of_a_dataset_that_lost_nothing_comes_what_a_build_would_have_made(tmp_path, tokenizer_dir, texts, changes):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    assert any(row["doc_offsets"].any() for row in first)  # documents were cut
    result = repack(RepackConfig(dataset=first.path, out=tmp_path / "again", **changes))
    expected = built(tmp_path / "expected", tokenizer_dir, texts, **changes)
    assert contents(Dataset(tmp_path / "again")) == contents(expected)
    assert result.manifest["dataset_id"] == expected.dataset_id
    assert result.manifest["totals"] == expected.manifest["totals"]
    assert result.manifest["sources"] == expected.manifest["sources"]
    assert verify(tmp_path / "again").ok


@pytest.mark.parametrize("first_len", [32, 400])
def test_targets_that_a_cut_made_first_tokens_come_back(tmp_path, tokenizer_dir, chats, texts, first_len):
    options = RecordOptions(kind="chat", chat_template=TEMPLATE, overlong="split", keep_no_target=True)
    settings = {"source_records": {"chat": options}, "records": RecordOptions(keep_no_target=True)}
    sources = (f"chat={chats}", f"web={texts}")
    first = built(tmp_path / "first", tokenizer_dir, sources, seq_len=first_len, **settings)
    repack(RepackConfig(dataset=first.path, out=tmp_path / "again", seq_len=80))
    expected = built(tmp_path / "expected", tokenizer_dir, sources, seq_len=80, **settings)
    assert contents(Dataset(tmp_path / "again")) == contents(expected)
    assert verify(tmp_path / "again").ok


def test_there_and_back_again_is_the_same_dataset(tmp_path, tokenizer_dir, texts):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    repack(RepackConfig(dataset=first.path, out=tmp_path / "there", seq_len=33, packer="wrapped"))
    repack(RepackConfig(dataset=tmp_path / "there", out=tmp_path / "back", seq_len=96, packer="auto"))
    assert Dataset(tmp_path / "back").dataset_id == first.dataset_id


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_the_first_build_cut_off_stays_off_and_is_counted(tmp_path, tokenizer_dir, texts, side):
    records = RecordOptions(overlong="truncate", truncate_side=side)
    first = built(tmp_path / "first", tokenizer_dir, texts, records=records)
    said: list[str] = []
    listener = repacking.Progress()
    listener.on_message = said.append  # type: ignore[method-assign]
    repack(RepackConfig(dataset=first.path, out=tmp_path / "again", seq_len=40, overlong="split"), listener)
    again = Dataset(tmp_path / "again")
    lost = first.manifest["totals"]["tokens"]["lost"]["truncated"]
    assert f"its build lost {lost:,} tokens (truncated {lost:,}), which stay lost" in said[0]
    assert documents(again) == documents(first)
    offsets = {number: min(row["doc_offsets"][row["doc_ids"] == number]) for row in first for number in row["doc_ids"]}
    assert (max(offsets.values()) > 0) == (side == "left")
    found = {}
    for row in again:
        for number, offset in zip(row["doc_ids"].tolist(), row["doc_offsets"].tolist(), strict=True):
            found[number] = min(offset, found.get(number, offset))
    assert found == offsets
    assert again.manifest["totals"]["tokens"]["read"] == first.manifest["totals"]["tokens"]["read"]
    assert verify(again.path).ok


def test_aligned_segments_have_the_same_documents_and_go_back(tmp_path, tokenizer_dir, texts):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    repack(RepackConfig(dataset=first.path, out=tmp_path / "aligned", align=16))
    aligned = Dataset(tmp_path / "aligned")
    assert all((np.diff(row["cu_seqlens"]) % 16 == 0).all() for row in aligned)
    assert any((np.diff(row["cu_seqlens"]) > row["segment_lens"]).any() for row in aligned)
    assert documents(aligned) == documents(first)
    assert aligned.manifest["totals"]["tokens"] == first.manifest["totals"]["tokens"]
    assert verify(aligned.path).ok
    repack(RepackConfig(dataset=aligned.path, out=tmp_path / "back"))
    assert Dataset(tmp_path / "back").dataset_id == first.dataset_id


def test_turn_ends_come_along(tmp_path, tokenizer_dir, chats):
    options = RecordOptions(kind="chat", chat_template=TEMPLATE, overlong="truncate-turns")
    first = built(tmp_path / "first", tokenizer_dir, chats, seq_len=2000, records=options)
    assert not first.manifest["totals"]["tokens"]["lost"]
    repack(RepackConfig(dataset=first.path, out=tmp_path / "again", seq_len=100))
    expected = built(tmp_path / "expected", tokenizer_dir, chats, seq_len=100, records=options)
    assert expected.manifest["totals"]["documents"]["truncated"] > 0
    assert contents(Dataset(tmp_path / "again")) == contents(expected)


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, tokenizer_dir, texts, monkeypatch):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    config = {"dataset": first.path, "out": tmp_path / "again", "seq_len": 64}
    real, ran = repacking.repack_window, []

    def stopping(dataset: Any, number: int, *rest: Any) -> Any:
        if number == 2 and len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(number)
        return real(dataset, number, *rest)

    monkeypatch.setattr(repacking, "repack_window", stopping)
    with pytest.raises(KeyboardInterrupt):
        repack(RepackConfig(**config))
    with pytest.raises(PackError, match="Add `resume=True`"):
        repack(RepackConfig(**config))
    ran.append(-1)
    repack(RepackConfig(**config, resume=True))
    assert ran == [0, 1, -1, *range(2, len(first.shards))]
    whole = repack(RepackConfig(**config | {"out": tmp_path / "whole"}))
    assert Dataset(tmp_path / "again").dataset_id == whole.manifest["dataset_id"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"align": 7}, "--align: 7 does not divide --seq-len 96; expected a divisor."),
        ({"overlong": "truncate-turns"}, "--overlong truncate-turns: plain text has no turns."),
        ({"packer": "wrapped", "overlong": "drop"}, "--packer wrapped cuts every document where a row is full"),
        ({"seq_len": 1}, "--seq-len: 1; expected 2 to"),
        ({"out": "first"}, "first is the dataset itself; expected another directory."),
    ],
)
def test_settings_that_do_not_fit_are_one_line(tmp_path, tokenizer_dir, texts, changes, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built(tmp_path / "first", tokenizer_dir, texts)
    flags = [part for name, value in changes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(main, ["repack", "first", *(() if "out" in changes else ("--out", "new")), *flags])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_command_prints_what_it_made(tmp_path, tokenizer_dir, texts):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    result = CliRunner().invoke(
        main, ["repack", str(first.path), "--seq-len", "64", "--out", str(tmp_path / "new"), "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["dataset_id"] == Dataset(tmp_path / "new").dataset_id


def test_a_flipped_token_is_not_written_on(tmp_path, tokenizer_dir, texts):
    first = built(tmp_path / "first", tokenizer_dir, texts)
    row = next(row for row in first if len(row["input_ids"]) > 20)
    ids = row["input_ids"][:16].tobytes()
    places = []
    for path in (first.path / "shards").glob("*.arrow"):
        content = bytearray(path.read_bytes())
        if (at := content.find(ids)) >= 0:
            content[at] ^= 1  # another id of the vocabulary
            path.write_bytes(bytes(content))
            places.append(at)
    assert places
    with pytest.raises(PackError, match="does not match its checksum"):
        repack(RepackConfig(dataset=first.path, out=tmp_path / "out", seq_len=48))
    for form in ("parquet", "jsonl", "megatron"):
        with pytest.raises(PackError, match="does not match its checksum"):
            export_dataset(DatasetExportConfig(dataset=first.path, to=form, out=tmp_path / form))


def test_memory_does_not_grow_with_the_number_of_windows(tmp_path, tokenizer_dir):
    """Peaks of what numpy and Python hold, mapped shards not counted: of three windows and of twelve."""
    peaks = []
    for windows in (3, 12):
        lines = (json.dumps({"text": f"{k} " + "some words of a text " * 40}) for k in range(120 * windows))
        source = tmp_path / f"{windows}.jsonl"
        source.write_text("\n".join(lines) + "\n")
        first = built(
            tmp_path / f"first-{windows}", tokenizer_dir, source, seq_len=512,
            window_bytes=source.stat().st_size // windows + 1,
        )  # fmt: skip
        assert len(first.shards) == windows
        repack(RepackConfig(dataset=first.path, out=tmp_path / f"warm-{windows}", seq_len=256))
        tracemalloc.start()
        repack(RepackConfig(dataset=first.path, out=tmp_path / f"again-{windows}", seq_len=256))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], peaks
