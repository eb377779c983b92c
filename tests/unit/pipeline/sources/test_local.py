"""Local files are found the same way below a directory and behind a glob: links, loops, what cannot be read."""

import json
import os
from pathlib import Path

import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from shards.errors import SourceError

OPTIONS = RecordOptions()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text}) + "\n")


def names(argument: str, **options) -> list[str]:
    return [file.name for file in resolve_sources([argument], OPTIONS, **options)[0].files]


@pytest.mark.parametrize("pattern", ["", "/*", "/**/*.jsonl", "/*/*.jsonl"])
def test_linked_directories_are_followed_by_directory_and_by_glob(tmp_path, pattern):
    """Kaggle/kagglehub#246, huggingface/datasets#6764"""
    write(tmp_path / "real" / "en" / "a.jsonl", "linked")
    write(tmp_path / "corpus" / "de" / "b.jsonl", "plain")
    (tmp_path / "corpus" / "en").symlink_to("../real/en")
    assert names(f"{tmp_path}/corpus{pattern}") == ["de/b.jsonl", "en/a.jsonl"]


@pytest.mark.parametrize("pattern", ["", "/*", "/**/*.jsonl"])
def test_a_link_to_a_parent_is_no_endless_corpus(tmp_path, pattern):
    write(tmp_path / "loop" / "a.jsonl", "once")
    write(tmp_path / "loop" / "sub" / "b.jsonl", "too")
    (tmp_path / "loop" / "sub" / "up").symlink_to("..")
    (tmp_path / "loop" / "latest").symlink_to(".")
    (source,) = resolve_sources([f"{tmp_path}/loop{pattern}"], OPTIONS)
    assert len(source.files) == 2
    assert source.skipped["linked again"] >= 1


def test_a_file_with_several_names_is_read_once_and_that_is_counted(tmp_path):
    write(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    os.link(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    for argument in (str(tmp_path), f"{tmp_path}/*.jsonl"):
        (source,) = resolve_sources([argument], OPTIONS)
        assert [file.name for file in source.files] == ["a.jsonl"]
        assert source.skipped == {"linked again": 2}


def test_copies_are_read_and_named(tmp_path):
    """allenai/OLMo#870"""
    for name in ("a", "b", "other"):
        write(tmp_path / f"{name}.jsonl", "same" if name in "ab" else "else")
    first, second = resolve_sources([f"x={tmp_path}/a.jsonl", f"y={tmp_path}"], OPTIONS)
    assert first.notes == ()
    assert [file.name for file in second.files] == ["a.jsonl", "b.jsonl", "other.jsonl"]
    assert second.notes == ("files that hold the same bytes as another: b.jsonl like a.jsonl",)


@pytest.mark.parametrize("pattern", ["", "/*", "/**/*.jsonl", "/*/*.jsonl"])
def test_a_directory_that_cannot_be_listed_is_an_error_that_names_it(tmp_path, monkeypatch, pattern):
    write(tmp_path / "open" / "a.jsonl", "x")
    write(tmp_path / "closed" / "b.jsonl", "y")
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(
        SourceError, match=r"/closed: cannot be read \(Permission denied\)\. Check the path and its perm"
    ):
        names(f"{tmp_path}{pattern}")


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/b.jsonl"])
def test_a_broken_link_is_an_error_that_names_it(tmp_path, pattern):
    write(tmp_path / "a.jsonl", "x")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(SourceError, match=r"b\.jsonl: is a link to 'gone\.jsonl', which is not there"):
        names(f"{tmp_path}{pattern}")


@pytest.mark.parametrize("pattern", ["", "/*", "/**/*"])
def test_the_output_is_never_part_of_a_source(tmp_path, pattern):
    write(tmp_path / "nest" / "a.jsonl", "x")
    write(tmp_path / "nest" / "packed" / "shards" / "b.jsonl", "y")
    (source,) = resolve_sources([f"{tmp_path}/nest{pattern}"], OPTIONS, exclude=[str(tmp_path / "nest" / "packed")])
    assert [file.name for file in source.files] == ["a.jsonl"]
    with pytest.raises(SourceError, match="is the output of this build"):
        names(str(tmp_path / "nest"), exclude=[str(tmp_path / "nest")])


@pytest.mark.parametrize("pattern", ["", "/*", "/**/*"])
def test_a_packed_dataset_below_a_source_is_left_out_and_counted(tmp_path, pattern):
    write(tmp_path / "nest" / "a.jsonl", "x")
    write(tmp_path / "nest" / "packed" / "shards" / "b.jsonl", "y")
    (tmp_path / "nest" / "packed" / "plan.json").write_text('{"format": "shardpack", "version": 1}')
    (source,) = resolve_sources([f"{tmp_path}/nest{pattern}"], OPTIONS)
    assert [file.name for file in source.files] == ["a.jsonl"]
    assert source.skipped["of packed datasets"] == 1
    with pytest.raises(SourceError, match="packed: is a packed dataset; expected a corpus"):
        names(str(tmp_path / "nest" / "packed"))


def test_a_user_s_own_plan_json_does_not_make_a_dataset(tmp_path):
    write(tmp_path / "nest" / "a.jsonl", "x")
    (tmp_path / "nest" / "plan.json").write_text('{"text": "my plan"}')
    assert names(str(tmp_path / "nest")) == ["a.jsonl", "plan.json"]


def test_of_a_saved_dataset_below_a_source_only_the_data_counts(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "all" / "saved")
    write(tmp_path / "all" / "a.jsonl", "y")
    assert names(str(tmp_path / "all")) == ["a.jsonl", "saved/data-00000-of-00001.arrow"]


def test_globs_match_as_a_shell_does(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl", ".hidden.jsonl", "x/c.jsonl", "x/y/d.jsonl"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("[!a].jsonl") == ["b.jsonl"]
    assert names("?/*.jsonl") == ["x/c.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "x/c.jsonl", "x/y/d.jsonl"]
    assert names("x/**/d.jsonl") == ["y/d.jsonl"]
    assert names(f"{tmp_path}/x/*/d.jsonl") == ["y/d.jsonl"]


def test_secrets_of_urls_are_neither_stored_nor_said():
    from shards.fetching.remote import hide_secrets, reaching

    assert hide_secrets("https://b.s3.amazonaws.com/a.jsonl?X-Amz-Signature=abc&x=1") == (
        "https://b.s3.amazonaws.com/a.jsonl"
    )
    assert hide_secrets("sftp://me:secret@host/a: no") == "sftp://host/a: no"
    assert hide_secrets("s3://bucket/what?.jsonl") == "s3://bucket/what?.jsonl"
    with pytest.raises(SourceError) as caught, reaching("http://u:pw@host/a.jsonl?sig=1"):
        raise ValueError("404 for url='http://u:pw@host/a.jsonl?sig=1'")
    assert str(caught.value).startswith("http://host/a.jsonl: cannot be read (404 for url='http://host/a.jsonl')")
