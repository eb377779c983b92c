"""URLs through fsspec: web servers, object stores, what cannot be reached."""

import gzip
import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import fsspec
import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import check_unchanged, resolve_sources
from shards.errors import SourceError

TEXTS = [f"record {number}: " + "words äöü 👍 " * (number % 7) for number in range(100)]
OPTIONS = RecordOptions()


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def test_a_remote_folder_is_chosen_from_as_one_here(tree):
    filesystem = fsspec.filesystem("memory")
    for file in tree.rglob("*"):
        if file.is_file():
            filesystem.pipe_file(f"/bucket/{file.relative_to(tree)}", file.read_bytes())
    try:
        (remote,), (here,) = (resolve_sources([spec], OPTIONS) for spec in ("memory://bucket", str(tree)))
        assert [file.name for file in remote.files] == [file.name for file in here.files]
        assert remote.skipped == here.skipped
    finally:
        filesystem.rm("/bucket", recursive=True)


def test_a_file_is_read_from_a_web_server(tmp_path, read_all):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["<a href='b.jsonl'>a link</a>"]))
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        sources = resolve_sources([f"http://127.0.0.1:{server.server_port}/a.jsonl"], OPTIONS)
        assert [file.name for file in sources[0].files] == ["a.jsonl"]
        assert read_all(sources) == ["<a href='b.jsonl'>a link</a>"]
        signed = f"http://me:secret@127.0.0.1:{server.server_port}/a.jsonl?X-Signature=abc/def"
        (source,) = resolve_sources([signed.replace("me:secret@", "")], OPTIONS)
        assert [file.as_plan()["name"] for file in source.files] == ["a.jsonl"]
        assert read_all([source]) == ["<a href='b.jsonl'>a link</a>"]
        with pytest.raises(SourceError) as caught:
            resolve_sources([signed.replace("a.jsonl", "none.jsonl")], OPTIONS)
        assert "none.jsonl" in str(caught.value)
        assert not any(secret in str(caught.value) for secret in ("secret", "abc", "def/"))
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(SourceError, match="nothing://x/y: Protocol not known"):
        resolve_sources(["nothing://x/y"], OPTIONS)


def test_an_object_store_is_read_by_range_and_identified_by_etag(monkeypatch, read_all):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    try:
        filesystem.mkdir("corpus")
        filesystem.pipe_file("corpus/a/x.jsonl", jsonl())
        filesystem.pipe_file("corpus/a/y.jsonl.gz", gzip.compress(jsonl()))
        sources = resolve_sources(["s3://corpus/a"], OPTIONS)
        assert [file.name for file in sources[0].files] == ["x.jsonl", "y.jsonl.gz"]
        assert all(file.fingerprint.startswith("etag:") for file in sources[0].files)
        assert read_all(sources, 2000) == TEXTS * 2
        check_unchanged(sources)
        filesystem.pipe_file("corpus/a/x.jsonl", jsonl().replace(b"record 3", b"record X"))
        with pytest.raises(SourceError, match=r"x\.jsonl: changed while it was read"):
            check_unchanged(sources)
        with pytest.raises(SourceError, match="s3://corpus/none: nothing there"):
            resolve_sources(["s3://corpus/none"], OPTIONS)
    finally:
        server.stop()


def test_an_error_of_a_store_s_own_class_is_one_line():
    from shards.fetching.remote import reaching

    class NoCredentialsError(Exception):
        """As an object store's client defines its own."""

    with (
        pytest.raises(SourceError, match=r"^s3://b/x: cannot be read \(no keys\)\. Check the URL"),
        reaching("s3://b/x"),
    ):
        raise NoCredentialsError("no keys\nmore")
    with pytest.raises(SourceError, match=r"^http://h/x: cannot be read \(no range"), reaching("http://h/x"):
        raise ValueError("no range requests. Only reading from the beginning")
    with pytest.raises(TypeError), reaching("s3://b/x"):
        raise TypeError("a bug stays a bug")
