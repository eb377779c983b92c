"""Small files fill packs like one file with the same records, whatever their kind."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from pipeline import BuildConfig, build
from shards import Dataset, verify

TEXTS = [" ".join(f"w{(7 * number + place) % 90}" for place in range(3 + number % 11)) for number in range(240)]
LINES = [json.dumps({"text": text}) + "\n" for text in TEXTS]
KINDS: dict[str, Callable[[str], bytes]] = {
    "jsonl": lambda text: json.dumps({"text": text}).encode(),
    "json": lambda text: json.dumps([{"text": text}], indent=1).encode(),
    "csv": lambda text: f"text\n{text}\n".encode(),
    "jsonl.gz": lambda text: gzip.compress(json.dumps({"text": text}).encode(), mtime=0),
    "jsonl.zst": lambda text: zstandard.compress(json.dumps({"text": text}).encode()),
}


@pytest.fixture(params=[*KINDS, "mixed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of one file per record."""
    (tmp_path / "many").mkdir()
    for number, text in enumerate(TEXTS):
        kind = [*KINDS][number % len(KINDS)] if request.param == "mixed" else request.param
        (tmp_path / "many" / f"{number:04}.{kind}").write_bytes(KINDS[kind](text))
    return tmp_path / "many"


def test_a_folder_of_small_files_is_packed_like_one_file(folder, tmp_path, words_dir):
    (tmp_path / "one.jsonl").write_text("".join(LINES))
    options = {"tokenizer": words_dir, "seq_len": 64}
    build(BuildConfig(sources=(str(tmp_path / "one.jsonl"),), out=str(tmp_path / "a"), **options))
    build(BuildConfig(sources=(str(folder),), out=str(tmp_path / "b"), **options))
    build(BuildConfig(sources=(str(folder),), out=str(tmp_path / "c"), workers=2, **options))
    one, many, again = (Dataset(tmp_path / name) for name in "abc")
    assert len(many.shards) <= 2, "one for files that can be cut unread, one for the others"
    assert len(many) <= 1.01 * len(one) + len(many.shards) - 1
    assert many.manifest["totals"]["tokens"] == one.manifest["totals"]["tokens"]
    hashes = [[entry["xxh3_128"] for entry in dataset.shards] for dataset in (many, again)]
    assert hashes[0] == hashes[1]
    assert verify(str(tmp_path / "b")).problems == []


def test_streamed_windows_are_as_many_as_their_bytes_ask_for(tmp_path, words_dir):
    (tmp_path / "many").mkdir()
    for number, line in enumerate(LINES):
        (tmp_path / "many" / f"{number:04}.json").write_text(f"[{line}]")
    size = sum(len(line) for line in LINES)
    config = BuildConfig(
        sources=(str(tmp_path / "many"),),
        out=str(tmp_path / "out"),
        tokenizer=words_dir,
        seq_len=64,
        window_bytes=size // 4,
    )
    build(config)
    assert len(Dataset(tmp_path / "out").shards) in (4, 5)
