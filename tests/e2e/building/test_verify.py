"""`pack verify` finds every damage that was tried and names the rule; `Dataset` refuses in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, build
from pipeline.cli import main
from shards import Dataset, FormatError, verify
from shards.publish import seal

FILES = ("shard", "sidecar", "index", "list", "manifest", "plan", "state", "info", "tokenizer")
RULES = {
    "shard": {"F3", "F4"}, "sidecar": {"F5"}, "index": {"F13"}, "list": {"F17"}, "manifest": {"F1"}, "plan": {"F2"},
    "state": {"F16"}, "info": {"F16"}, "tokenizer": {"F15"},
}  # fmt: skip
Place = Callable[[str], Path]


def build_small(root: Path, tokenizer: str, text: str = "one two") -> Path:
    path = root / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"{text} {k}"}) + "\n" for k in range(6)))
    build(BuildConfig(sources=(str(path),), out=str(root / "out"), tokenizer=tokenizer, seq_len=32, window_bytes=64))
    return root / "out"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> Path:
    return build_small(tmp_path_factory.mktemp("intact"), tokenizer_dir)


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


@pytest.fixture
def place(copy: Path) -> Place:
    """Where each kind of file lies in the copy."""
    names = {
        "index": "index.arrow",
        "list": "shards.arrow",
        "manifest": "manifest.json",
        "plan": "plan.json",
        "state": "state.json",
    }
    names |= {"info": "dataset_info.json", "sidecar": "shards/00000000.json", "tokenizer": "tokenizer/tokenizer.json"}
    names["shard"] = next(copy.glob("shards/00000000-*.arrow")).relative_to(copy).as_posix()
    return lambda kind: copy / names[kind]


def run_verify(root: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify", str(root)])
    return result.exit_code, result.stderr


def test_an_intact_dataset_verifies_at_every_level(intact):
    for level in ("size", "sample", "full"):
        report = verify(intact, level)
        assert report.ok, report.problems
        assert (report.shards_checked > 2) == (level != "size")


@pytest.mark.parametrize("kind", FILES)
def test_truncation_at_every_byte_is_found_and_named(copy, place, kind):
    path = place(kind)
    whole = path.read_bytes()
    step = 1 if kind == "shard" else max(1, len(whole) // 60)
    cuts = [*range(0, len(whole), step), len(whole) - 1]
    assert len(cuts) > 40
    for cut in cuts:
        path.write_bytes(whole[:cut])
        report = verify(copy, "size" if kind == "shard" else "full")
        assert report.problems, f"{kind} cut at {cut} of {len(whole)}"
        assert {problem.rule for problem in report.problems} <= RULES[kind], (cut, report.problems)


@pytest.mark.parametrize("kind", FILES)
def test_every_single_bit_flip_tried_is_found_and_named(copy, place, kind):
    path = place(kind)
    whole = path.read_bytes()
    step = max(1, len(whole) // 150)
    tried = 0
    for byte in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << (byte // step) % 8
        path.write_bytes(damaged)
        report = verify(copy)
        assert report.problems, f"{kind}, byte {byte}"
        assert {problem.rule for problem in report.problems} <= RULES[kind], (byte, report.problems)
        tried += 1
    assert tried > 60


@pytest.mark.slow
def test_every_third_bit_of_a_shard_is_guarded(copy, place):
    path = place("shard")
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 3):  # prime to 8, so every place in a byte has its turn
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert [problem.rule for problem in verify(copy).problems] == ["F4"], bit


@pytest.mark.parametrize("kind", FILES)
def test_a_missing_file_is_named(copy, place, kind):
    place(kind).unlink()
    code, stderr = run_verify(copy)
    assert code == 1
    assert re.search(r"\(rule F\d+\)|\(F\d+\)", stderr)
    assert place(kind).name in stderr or kind == "tokenizer"
    assert "Traceback" not in stderr


@pytest.mark.parametrize("change", ["flipped", "cut off"])
@pytest.mark.parametrize("kind", ["shard", "sidecar", "index", "list", "manifest", "state", "info", "tokenizer"])
def test_what_verify_advises_for_a_damaged_file_fixes_it(copy, place, intact, tokenizer_dir, kind, change):
    data = place(kind).read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if change == "flipped" else data[:middle]
    place(kind).write_bytes(damaged)
    assert "Restore it, or delete it and build with --resume." in run_verify(copy)[1]
    place(kind).unlink()
    options = {"sources": (str(intact.parent / "c.jsonl"),), "tokenizer": tokenizer_dir, "seq_len": 32}
    build(BuildConfig(out=str(copy), window_bytes=64, resume=True, **options))
    assert verify(copy).problems == []


def test_an_extra_shard_is_named(copy, place):
    extra = copy / "shards" / "00000099-0123456789abcdef.arrow"
    shutil.copy(place("shard"), extra)
    code, stderr = run_verify(copy)
    assert code == 1
    assert f"shards/{extra.name}: is not in the shard list (rule F3). Move it away." in stderr


def test_the_shard_of_another_plan_is_named(copy, place, tmp_path, tokenizer_dir):
    (tmp_path / "foreign").mkdir()
    foreign = build_small(tmp_path / "foreign", tokenizer_dir, "owt eno")
    stranger = next(foreign.glob("shards/00000000-*.arrow"))
    assert stranger.stat().st_size == place("shard").stat().st_size  # or the size alone would tell
    shutil.copy(stranger, place("shard"))
    code, stderr = run_verify(copy)
    assert code == 1
    assert "does not match its checksum in the shard list (rule F4)" in stderr
    shutil.copy(foreign / "shards" / "00000000.json", place("sidecar"))
    assert "belongs to plan" in run_verify(copy)[1]


def test_shards_that_are_exchanged_are_named(copy):
    first, second = sorted(copy.glob("shards/0000000[01]-*.arrow"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert run_verify(copy)[0] == 1


@pytest.mark.parametrize("change", [{"version": 3}, {"version": None}, {"format": "parquet"}])
def test_an_unknown_version_is_refused_with_what_is_read_instead(copy, place, change):
    record = json.loads(place("manifest").read_text()) | change
    del record["checksum"]
    place("manifest").write_bytes(seal(record))
    code, stderr = run_verify(copy)
    assert code == 1
    assert "this version reads 'shardpack' version 2" in stderr
    with pytest.raises(FormatError, match=r"found format .* version .*, this version reads 'shardpack' version 2"):
        Dataset(copy)


def test_a_shard_of_the_wrong_size_is_refused_before_it_is_mapped(copy, place):
    path = place("shard")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FormatError, match=r"has [\d,]+ bytes, the manifest says [\d,]+ \(rule F3\)") as caught:
        Dataset(copy)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_dataset_is_one_line(tmp_path):
    code, stderr = run_verify(tmp_path)
    assert code == 1
    assert stderr.strip().splitlines() == [
        f"{tmp_path}: is not a shardpack dataset; expected manifest.json (rule F1). "
        "Name a directory that pack build wrote."
    ]


def test_a_path_that_is_not_there_is_called_that(tmp_path):
    code, stderr = run_verify(tmp_path / "corpsu")
    assert code == 1
    assert stderr.strip().splitlines() == [
        f"{tmp_path / 'corpsu'}: no such directory; expected a dataset (rule F1). "
        "Name a directory that pack build wrote."
    ]


def test_an_id_beyond_a_models_vocabulary_is_named_with_its_document(intact):
    largest = max(int(row["input_ids"].max()) for row in Dataset(intact))
    assert verify(intact, vocab_size=largest + 1).ok
    problems = verify(intact, vocab_size=largest).problems
    assert {problem.rule for problem in problems} == {"F11"}
    assert f"is id {largest}; expected 0 to {largest - 1}" in problems[0].message
