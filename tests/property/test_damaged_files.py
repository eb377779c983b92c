"""Damaged and crafted files of a dataset: a named error or a correct read, never a traceback, a crash or a wild access.

Bytes are flipped at random, JSON values replaced and sealed again, tables and shards changed under hashes that are made
right again: what somebody could send. Whatever is handed out is checked by definition.
"""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner

import shards.verification
from pipeline.cli import main
from shards import Dataset, PackError, verify
from shards.ordering.step_order import StepOrder
from shards.plan import plan_id
from shards.publish import canonical, seal

PACKS = {"web": [[3, 2], [4], [1, 1, 2], [9]], "code": [[5], [2, 2]]}
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    7,
    1 << 40,
    1 << 70,
    1.5,
    -0.0,
    "",
    "x",
    "../../etc/passwd",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
]
NUM_PACKS = 6
ROUNDS = 150
REPORT_ROUNDS = 25


def read_everything(path: Path) -> int:
    """Read a dataset in every way; return the packs that came, each of which must keep the rules."""
    dataset = Dataset(path)
    repr(dataset)
    assert sum(stop - start for _, start, stop in dataset.sources) == len(dataset)
    for number in range(len(dataset)):
        row, pack = dataset[number], dataset.pack(number)
        dataset.advise([number])
        dataset.shard_of(number)
        bounds = pack.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(pack.input_ids) == len(pack.position_ids) == len(pack.loss_mask) <= dataset.seq_len
        assert all(start < stop for start, stop in pairwise(bounds))
        assert not pack.loss_mask[bounds[:-1]].any()
        assert pack.input_ids.max() <= dataset.max_token_id
        assert len(row["doc_ids"]) == len(bounds) - 1
        assert dataset.index.num_tokens[number] == bounds[-1]
    StepOrder(dataset.index, packs_per_step=2, last_step="pad").step_packs(0, 0)
    return len(dataset)


def is_intact(path: Path) -> bool:
    """Read and verify a dataset; return whether verify finds nothing wrong. What is refused by name is."""
    report, refusal = verify(path), ""
    try:
        assert read_everything(path) == NUM_PACKS
    except PackError as error:
        refusal = str(error)
    assert report.problems or not refusal, f"verify saw nothing of: {refusal}"
    assert all("\n" not in message for message in (refusal, *(problem.message for problem in report.problems)))
    return report.ok


def flip(data: bytes, rng: random.Random) -> bytes:
    """Change a few bytes, cut the end off, or put bytes in."""
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        place = rng.randrange(len(damaged))
        damaged[place] = rng.choice([damaged[place] ^ (1 << rng.randrange(8)), 0, 255, rng.randrange(256)])
    kind = rng.random()
    if kind < 0.1:
        del damaged[rng.randrange(len(damaged)) :]
    elif kind < 0.15:
        damaged[rng.randrange(len(damaged)) :] = bytes(rng.randrange(1, 64))
    return bytes(damaged)


def change(record: Any, rng: random.Random) -> None:
    """Replace, remove or add one value somewhere in a tree of JSON."""
    holder = record
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = rng.choice(list(keys))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.2:
            break
        holder = inner
    if rng.random() < 0.15:
        del holder[key]
    elif isinstance(inner, int) and not isinstance(inner, bool) and rng.random() < 0.5:
        holder[key] = inner + rng.choice([-1, 1, 1000, -(1 << 33)])
    else:
        holder[key] = rng.choice(VALUES)


def crafted_json(path: Path, name: str, rng: random.Random) -> None:
    """Change a value of a sealed file or of the plan, and make every seal right again."""
    file = path / name
    record = json.loads(file.read_text())
    record.pop("checksum", None)
    change(record, rng)
    if name != "plan.json":
        file.write_bytes(seal(record))
        return
    file.write_bytes(canonical(record))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    (path / "manifest.json").write_bytes(seal(manifest | {"plan_id": plan_id(record)}))


def crafted_table(path: Path, name: str, rng: random.Random) -> None:
    """Change bytes of a table, and make the manifest's record of it right again."""
    data = flip((path / name).read_bytes(), rng)
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    entry = manifest[name.removesuffix(".arrow")]
    entry |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    (path / "manifest.json").write_bytes(seal(manifest))


def crafted_shard(path: Path, name: str, rng: random.Random) -> None:
    """Change bytes of a shard without changing its size."""
    data = (path / name).read_bytes()
    (path / name).write_bytes((flip(data, rng) + bytes(len(data)))[: len(data)])


def damaged(path: Path, name: str, rng: random.Random) -> None:
    """Change bytes of any file, and nothing else."""
    (path / name).write_bytes(flip((path / name).read_bytes(), rng))


CASES: dict[str, tuple[Callable[[Path, str, random.Random], None], str]] = {
    "damaged manifest": (damaged, "manifest.json"),
    "damaged plan": (damaged, "plan.json"),
    "damaged sidecar": (damaged, "shards/00000000.json"),
    "damaged shard list": (damaged, "shards.arrow"),
    "damaged index": (damaged, "index.arrow"),
    "crafted manifest": (crafted_json, "manifest.json"),
    "crafted plan": (crafted_json, "plan.json"),
    "crafted sidecar": (crafted_json, "shards/00000000.json"),
    "crafted shard list": (crafted_table, "shards.arrow"),
    "crafted index": (crafted_table, "index.arrow"),
    "crafted shard": (crafted_shard, "shard"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_file_ends_in_a_named_error_or_a_correct_read(write_dataset, monkeypatch, case):
    spoil, name = CASES[case]
    path = write_dataset(PACKS, seq_len=16)
    if name == "shard":
        name = next(path.glob("shards/00000000-*.arrow")).relative_to(path).as_posix()
        digests = {Path(shard["file"]).name: shard["xxh3_128"] for shard in Dataset(path).shards}
        hashed = shards.verification.hash_file  # all shards have the listed hash, as if it were made right again
        monkeypatch.setattr(shards.verification, "hash_file", lambda file: digests.get(file.name) or hashed(file))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert is_intact(path)
    changed = intact = 0
    for number in range(ROUNDS):
        spoil(path, name, random.Random(f"{case} {number}"))
        if any(file.read_bytes() != data for file, data in before.items()):
            changed += 1
            intact += is_intact(path)
        for file, data in before.items():
            file.write_bytes(data)
    assert changed > ROUNDS / 2
    # a seal covers the values of a JSON file, not its white space; what is crafted may keep every rule: facts, padding,
    # another token of the vocabulary
    assert intact <= (0.02 if spoil is damaged else 0.9) * changed


@pytest.fixture(scope="module")
def built(tmp_path_factory, tokenizer_dir):
    """A dataset of two sources, one of them cut to windows of a few records, as `pack build` writes it."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("web", "code"):
        lines = (json.dumps({"text": f"{name} one two three " * (1 + number % 5)}) for number in range(40))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = [f"{name}={folder / name}.jsonl" for name in ("web", "code")]
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "32", "--workers", "1", "--window-bytes", "1000"]
    done = CliRunner().invoke(main, ["build", *sources, *flags, "--out", str(folder / "data")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder / "data"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "shards/00000000.json"])
def test_what_a_person_reads_of_crafted_files_is_text_or_a_named_error(built, tmp_path, name):
    path, page = str(built), str(tmp_path / "page.html")
    commands = [
        ["inspect", path, "--html", page], ["inspect", path, "--json"], ["show", path, "0"],
        ["show", path, "--doc", "web.jsonl:1"], ["verify", path],
    ]  # fmt: skip
    before = {file: file.read_bytes() for file in built.rglob("*") if file.is_file()}
    refused = 0
    for number in range(REPORT_ROUNDS):
        crafted_json(built, name, random.Random(f"{name} {number}"))
        for command in commands:
            done = CliRunner().invoke(main, command, catch_exceptions=False)
            error = done.stderr.strip()
            refused += bool(done.exit_code)
            assert done.exit_code in (0, 1, 2), (number, command, done.output)
            assert "Traceback" not in done.output
            if done.exit_code and command[0] != "verify":  # which says all that it finds
                assert error
                assert "\n" not in error, (number, command, error)
        for file, data in before.items():
            file.write_bytes(data)
    assert refused > REPORT_ROUNDS / 4
