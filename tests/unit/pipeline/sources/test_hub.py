"""Folders that `datasets` saved, and the hub through its cache."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from shards.errors import SourceError

TEXTS = [f"record {number}: " + "words äöü 👍 " * (number % 7) for number in range(100)]
OPTIONS = RecordOptions()


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def test_a_saved_dataset_is_read_without_importing_datasets(tmp_path, read_all):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=3)
    sources = resolve_sources([str(tmp_path / "saved")], OPTIONS)
    assert len(sources[0].files) == 3
    assert {file.format for file in sources[0].files} == {"arrow"}
    assert read_all(sources, 2000) == TEXTS


def test_a_saved_dataset_with_splits_asks_which(tmp_path, read_all):
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "my data")
    expected = r"holds the splits train, test; expected one\. Name it, such as '.*/my data/train'"
    with pytest.raises(SourceError, match=expected):
        resolve_sources([str(tmp_path / "my data")], OPTIONS)
    assert read_all(resolve_sources([str(tmp_path / "my data" / "test")], OPTIONS)) == TEXTS
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "one")
    assert read_all(resolve_sources([str(tmp_path / "one")], OPTIONS)) == TEXTS


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository in a folder, with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl(TEXTS[:60]))
    (folder / "test.jsonl").write_bytes(jsonl(TEXTS[60:]))
    return folder


def test_a_hub_dataset_comes_through_the_library(hub_folder, read_all):
    sources = resolve_sources([f"hf:{hub_folder}"], OPTIONS)
    assert read_all(sources, 500) == TEXTS[:60]
    assert read_all(resolve_sources([f"hf:{hub_folder}:test"], OPTIONS)) == TEXTS[60:]


@pytest.mark.parametrize("tail", [":validation", "/other", ":train[:10%]"])
def test_an_unknown_split_or_configuration_is_named(hub_folder, tail):
    with pytest.raises(SourceError, match="hf:") as caught:
        resolve_sources([f"hf:{hub_folder}{tail}"], OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_takes_one_line(monkeypatch, caplog):
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach 'no/where' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    expected = r"hf:no/where: no such dataset .*\(Couldn't reach 'no/where' on the Hub\).*or give files or a directory"
    with pytest.raises(SourceError, match=expected):
        resolve_sources(["hf:no/where"], OPTIONS)
    assert not caplog.records
