"""`pack push` and `pack pull` against a stand-in of the hub's HTTP interface on this machine."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from pipeline import BuildConfig, build
from pipeline.export.hub import Address, parse_address
from shards import Dataset, verify
from shards.errors import PackError
from shards.publish import seal

Hub = runpy.run_path(str(Path(__file__).with_name("hub_stand_in.py")))["Hub"]
URL = "hf://datasets/me/packed"
Pack = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Any]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def pack(hub: Any, tmp_path: Path) -> Pack:
    """Run the command in a process of its own: the client reads its address when it is imported."""

    def run(*arguments: object, code: int = 0) -> "CompletedProcess[str]":
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "hf_token",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, "-m", "pipeline", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def make(tmp_path: Path, tokenizer_dir: str) -> Callable[..., Path]:
    def build_texts(name: str, number: int = 40) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"text {k} of {name} " * (k % 7 + 1)}) + "\n" for k in range(number))
        )
        build(
            BuildConfig(
                sources=f"{name}={path}", out=tmp_path / name, tokenizer=tokenizer_dir, seq_len=64, window_bytes=2048
            )
        )
        (tmp_path / name / "rejected.jsonl").write_text("private\n")
        return tmp_path / name

    return build_texts


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_what_was_pulled_is_what_was_pushed(hub, pack, make, tmp_path):
    dataset = make("first")
    pushed = json.loads(pack("push", dataset, URL, "--json").stdout)
    assert pushed["dataset_id"] == Dataset(dataset).dataset_id
    assert len(hub.commits["me/packed"]) == 2  # that of the repository's creation, and one with everything
    assert any(request.startswith("PUT /objects/") for request in hub.requests)
    pulled = json.loads(pack("pull", URL, tmp_path / "again", "--json").stdout)
    assert pulled | {"path": ""} == pushed | {"path": ""}
    expected = contents(dataset)
    assert expected.pop("rejected.jsonl") == b"private\n"
    found = contents(tmp_path / "again")
    assert found.pop("README.md") == hub.files("me/packed")["README.md"]
    assert found == expected
    assert verify(tmp_path / "again").ok
    assert not (tmp_path / "again.partial").exists()


def test_the_card_says_what_is_inside_and_how_to_load_it(hub, pack, make):
    dataset = make("first")
    pack("push", dataset, URL)
    card = hub.files("me/packed")["README.md"].decode()
    totals = Dataset(dataset).manifest["totals"]
    for expected in (
        f"| documents | {totals['documents']['packed']:,} |",
        f"| tokens | {totals['tokens']['packed']:,} |",
        "| first | ",
        "path: shards/*.arrow",
        "pack pull hf://datasets/me/packed data/packed",
        'load_dataset("me/packed", split="train")',
        '"seq_len": 64',
        Dataset(dataset).dataset_id,
    ):
        assert expected in card


@pytest.mark.filterwarnings("ignore")  # of the library that reads
def test_the_files_that_the_card_names_open_as_a_split(make, tmp_path):
    import datasets

    dataset = make("first")
    files = {"train": str(dataset / "shards" / "*.arrow")}
    rows = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert [row["input_ids"] for row in rows] == [row["input_ids"].tolist() for row in Dataset(dataset)]


def test_pushing_the_same_again_does_nothing_and_another_needs_leave(hub, pack, make):
    pack("push", make("first"), URL)
    before = len(hub.commits["me/packed"])
    assert "was there already" in pack("push", make("first"), URL).stdout
    assert len(hub.commits["me/packed"]) == before
    other = make("second", 10)
    refused = pack("push", other, URL, code=1).stderr
    assert "of something else" in refused
    assert "--overwrite" in refused
    assert len(hub.commits["me/packed"]) == before
    pack("push", other, URL, "--overwrite")
    expected = {*contents(other), "README.md", ".gitattributes"} - {"rejected.jsonl"}
    assert {*hub.files("me/packed")} == expected  # no shard of the first is left


def test_a_card_of_ones_own_stays(hub, pack, make):
    pack("push", make("first"), URL)
    hub.commit("me/packed", hub.files("me/packed") | {"README.md": b"my own words"})
    pack("push", make("second"), URL, "--overwrite")
    assert hub.files("me/packed")["README.md"] == b"my own words"


def test_a_revision_is_pulled_as_it_was(hub, pack, make, tmp_path):
    first = make("first")
    pack("push", first, URL)
    revision = hub.commits["me/packed"][-1][0]
    pack("push", make("second"), URL, "--overwrite")
    pack("pull", f"{URL}@{revision}", tmp_path / "old")
    assert Dataset(tmp_path / "old").dataset_id == Dataset(first).dataset_id


def test_an_upload_that_breaks_off_leaves_no_dataset_and_is_not_sent_twice(hub, pack, make):
    dataset = make("first")
    hub.refuse = "/commit/"
    assert "the hub's client gave up" in pack("push", dataset, URL, code=1).stderr
    assert {*hub.files("me/packed")} == {".gitattributes"}
    sent = [request for request in hub.requests if request.startswith("PUT")]
    assert len(sent) > 3
    hub.refuse, hub.requests = None, []
    pack("push", dataset, URL)
    assert not [request for request in hub.requests if request.startswith("PUT")]
    assert "manifest.json" in hub.files("me/packed")


def test_a_download_that_breaks_off_goes_on(hub, pack, make, tmp_path):
    dataset = make("first")
    pack("push", dataset, URL)
    last = Dataset(dataset).shards.files()[-1]
    hub.refuse = f"GET /datasets/me/packed/resolve/{hub.commits['me/packed'][-1][0]}/{last}"
    assert "the hub's client gave up" in pack("pull", URL, tmp_path / "again", code=1).stderr
    assert not (tmp_path / "again").exists()
    hub.refuse, hub.requests = None, []
    pack("pull", URL, tmp_path / "again")
    fetched = [request for request in hub.requests if request.startswith("GET /datasets/")]
    assert 0 < len(fetched) < len(contents(dataset))
    assert verify(tmp_path / "again").ok


def test_a_damaged_dataset_is_not_put_in_place(hub, pack, make, tmp_path):
    dataset = make("first")
    pack("push", dataset, URL)
    name = Dataset(dataset).shards.files()[0]
    content = bytearray(hub.files("me/packed")[name])
    content[len(content) // 2] ^= 1
    hub.commit("me/packed", hub.files("me/packed") | {name: bytes(content)})
    assert "what came is damaged" in pack("pull", URL, tmp_path / "again", code=1).stderr
    assert not (tmp_path / "again").exists()


def test_a_dataset_that_names_a_file_of_its_own_machine_is_not_pushed(hub, pack, make, tmp_path):
    dataset = make("first")
    secret = tmp_path / "id_rsa"
    secret.write_bytes(b"secret")
    record = json.loads((dataset / "manifest.json").read_text())
    del record["checksum"]
    named = record["tokenizer_files"] | {"../../id_rsa": xxh3_128_hexdigest(b"secret")}
    (dataset / "manifest.json").write_bytes(seal(record | {"tokenizer_files": named}))
    assert "rule F15" in pack("push", dataset, URL, code=1).stderr
    (dataset / "manifest.json").write_bytes(seal(record))
    (dataset / "state.json").unlink()
    (dataset / "state.json").symlink_to(secret)
    assert "rule F16" in pack("push", dataset, URL, code=1).stderr
    assert not hub.commits
    assert not any(request.startswith("PUT") for request in hub.requests)


def test_what_is_no_dataset_is_named(hub, pack, make, tmp_path):
    assert "the hub's client gave up" in pack("pull", "hf://datasets/me/none", tmp_path / "again", code=1).stderr
    hub.commits["me/empty"] = [("0" * 40, {})]
    assert "holds no manifest.json" in pack("pull", "hf://datasets/me/empty", tmp_path / "again", code=1).stderr
    (tmp_path / "taken").mkdir()
    assert "taken is there already" in pack("pull", URL, tmp_path / "taken", code=1).stderr
    dataset = make("first")
    assert "Leave out @v1" in pack("push", dataset, f"{URL}@v1", code=1).stderr
    shutil.rmtree(dataset / "shards")
    assert "rule F3" in pack("push", dataset, URL, code=1).stderr


def test_addresses_name_a_dataset_of_the_hub():
    assert parse_address("hf://datasets/me/my.data_1") == Address("me/my.data_1", None)
    assert parse_address("hf://datasets/me/data@refs/pr/1") == Address("me/data", "refs/pr/1")
    for wrong in ("hf://me/data", "hf://datasets/me", "s3://datasets/me/data", "me/data", "hf://datasets/me/data/x"):
        with pytest.raises(PackError, match="is no dataset of the hub"):
            parse_address(wrong)
