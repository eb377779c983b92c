"""Which files a corpus is, in which order, and what identifies them."""

import gzip
import json
import os

import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import check_unchanged, resolve_sources
from pipeline.sources.reader import WindowReader
from pipeline.sources.windows import cut_windows
from shards.errors import SourceError

TEXTS = [f"record {number}: " + "words äöü 👍 " * (number % 7) for number in range(100)]
OPTIONS = RecordOptions()


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def test_a_directory_gives_its_known_files_in_order_and_counts_the_rest(tree):
    (source,) = resolve_sources([str(tree)], OPTIONS)
    assert [file.name for file in source.files] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert source.skipped == {".md": 1, ".png": 1, "hidden": 2, "without suffix": 1, "empty": 1}


def test_text_files_count_where_a_directory_has_no_others(tmp_path, read_all):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    assert read_all(resolve_sources([str(tmp_path)], OPTIONS)) == ["one", "two"]


def test_globs_and_several_arguments_make_one_source(tree):
    (source,) = resolve_sources([str(tree / "[ab].jsonl"), str(tree / "sub")], OPTIONS)
    assert [file.name for file in source.files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    (source,) = resolve_sources([str(tree / "**/c*.jsonl")], OPTIONS)
    assert [file.name for file in source.files] == ["sub/c.jsonl"]


def test_files_of_one_name_are_told_apart(tmp_path):
    for part in ("x", "y"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "train.jsonl").write_bytes(jsonl([part]))
    (source,) = resolve_sources([str(tmp_path / part / "train.jsonl") for part in "yx"], OPTIONS)
    assert [file.name for file in source.files] == ["x/train.jsonl", "y/train.jsonl"]


def test_names_make_sources_with_their_own_options(tree):
    chat = RecordOptions(kind="chat")
    specs = [f"web={tree}/a.jsonl", f"chat={tree}/b.jsonl", f"web={tree}/sub/c.jsonl"]
    web, talk = resolve_sources(specs, OPTIONS, {"chat": chat})
    assert (web.name, len(web.files), web.options.kind) == ("web", 2, "text")
    assert (talk.name, len(talk.files), talk.options) == ("chat", 1, chat)
    with pytest.raises(SourceError, match="source 'code' has options, but no SOURCE has that name"):
        resolve_sources(specs, OPTIONS, {"code": chat})


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.jsonl").write_bytes(jsonl())
    monkeypatch.chdir(tmp_path)
    (source,) = resolve_sources(["year=2024"], OPTIONS)
    assert source.name == "corpus"
    assert [source.name for source in resolve_sources(["x=year=2024/*.jsonl"], OPTIONS)] == ["x"]


def test_the_order_and_the_plan_do_not_depend_on_where_the_corpus_lies(tree, tmp_path_factory):
    import shutil

    moved = shutil.copytree(tree, tmp_path_factory.mktemp("moved") / "x")
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    plans = [[file.as_plan() for file in resolve_sources([str(root)], OPTIONS)[0].files] for root in (tree, moved)]
    assert plans[0] == plans[1]
    assert str(tree) not in json.dumps(plans[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: [f"{root}/nowhere.jsonl"], "nowhere.jsonl: no such file or directory"),
        (lambda root: [f"{root}/*.parquet"], "no files to read"),
        (lambda root: [f"{root}/empty.jsonl"], "empty.jsonl: empty file; expected at least one record"),
        (lambda root: [f"{root}/pic.png"], "pic.png: cannot tell the format"),
        (lambda root: ["hf:"], "hf: names no dataset"),
        (lambda root: ["my data=a.jsonl"], r"A name before = takes letters, digits"),
        (lambda root: [f"web/en={root}/a.jsonl"], r"no such file or directory; .* A name before = takes"),
        (lambda root: [f"{root}/a.jsonl", f"{root}/a.jsonl"], "a.jsonl is given twice"),
        (lambda root: [f"{root}/*.jsonl", f"{root}"], "is given twice"),
        (lambda root: [], "no SOURCE given"),
    ],
)
def test_what_cannot_be_found_is_named(tree, make, message):
    with pytest.raises(SourceError, match=message) as caught:
        resolve_sources(make(tree), OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_directory_without_anything_to_read_says_what_it_left_out(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(SourceError, match=r"no files to read \(1 \.png left out\)"):
        resolve_sources([str(tmp_path)], OPTIONS)


def test_the_format_can_be_said_where_names_do_not_tell(tmp_path, read_all):
    (tmp_path / "data.log").write_bytes(jsonl(["x"]))
    assert read_all(resolve_sources([str(tmp_path / "data.log")], RecordOptions(format="jsonl"))) == ["x"]
    with pytest.raises(SourceError, match="`format`: 'xml'; expected one of jsonl"):
        resolve_sources([str(tmp_path / "data.log")], RecordOptions(format="xml"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named_with_the_way_out(tmp_path, encoding, read_all):
    content = jsonl().decode().encode(encoding)
    (tmp_path / "a.jsonl").write_bytes(content if content[:1] == b"\xff" else b"\xfe\xff" + content)
    with pytest.raises(SourceError, match=r"a\.jsonl: is UTF-16; expected UTF-8. Convert it: iconv"):
        resolve_sources([str(tmp_path / "a.jsonl")], OPTIONS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz: is UTF-16"):
        read_all(resolve_sources([str(tmp_path / "a.jsonl.gz")], OPTIONS))


# Identity


@pytest.mark.parametrize("size", [1, 1000, 200_000, 3 << 20])
def test_the_fingerprint_follows_content_and_size_only(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(size))
    (file,) = resolve_sources([str(path)], OPTIONS)[0].files
    os.utime(path, (5, 5))
    assert resolve_sources([str(path)], OPTIONS)[0].files == (file,)
    for at in {0, size - 1, size // 15 if size > 1000 else size // 2}:  # ends, and the first sample
        content = bytearray(size)
        content[at] = 1
        path.write_bytes(content)
        assert resolve_sources([str(path)], OPTIONS)[0].files[0].fingerprint != file.fingerprint
    path.write_bytes(bytes(size + 1))
    assert resolve_sources([str(path)], OPTIONS)[0].files[0].fingerprint != file.fingerprint


def test_a_corpus_that_changes_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    sources = resolve_sources([str(path)], OPTIONS)
    windows, _ = cut_windows(sources)
    path.write_bytes(jsonl().replace(b"record 3", b"record X"))
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        check_unchanged(sources)
    path.write_bytes(jsonl()[:-20])
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        list(WindowReader(sources[0], windows[0].slices))
    path.write_bytes(jsonl())
    monkeypatch.setattr("pipeline.sources.reader.BATCH_BYTES", 100)
    reader = iter(WindowReader(sources[0], windows[0].slices))
    next(reader)
    os.utime(path, (1, 1))  # while a window is read, the time may tell what an unchanged size does not
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read"):
        list(reader)
    check_unchanged(sources)
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        check_unchanged(sources)


@pytest.mark.parametrize("spec", ["p.jsonl", "*.jsonl", "."])
def test_a_pipe_is_refused_beside_whatever_else_and_never_taken_for_an_empty_file(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    os.mkfifo("p.jsonl")
    with pytest.raises(SourceError, match=r"p\.jsonl: is a pipe; expected a file .* Use - and redirect it to stdin"):
        resolve_sources(["other=a.jsonl", spec], OPTIONS)


def test_process_substitution_is_refused_as_a_pipe_before_its_missing_suffix():
    read, write = os.pipe()
    try:
        with pytest.raises(SourceError, match=rf"^/dev/fd/{read}: is a pipe"):
            resolve_sources([f"/dev/fd/{read}"], OPTIONS)
    finally:
        os.close(read)
        os.close(write)
