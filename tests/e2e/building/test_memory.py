"""Peak memory of a build depends on the window and the longest document, not on the corpus (docs/building.md)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shards import Dataset, verify

HERE = Path(__file__).parent
KIB = 1 << 10
BYTES_PER_TOKEN, FIXED_BYTES = 16, 48 << 20  # of a window; batches in flight and what libraries keep


@pytest.fixture(scope="module")
def words() -> list[str]:
    rng = random.Random(1)
    letters = "etaoinshrdlu"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(4000)]


def write_corpus(path: Path, words: list[str], num_bytes: int) -> Path:
    rng, size = random.Random(2), 0
    with path.open("w") as file:
        while size < num_bytes:
            size += file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(1, 800)))}) + "\n")
    return path


def peak_bytes(source: Path, tokenizer: str, out: Path, window_bytes: int, engine: str = "tokenizers") -> int:
    """Build in a process of its own; return its peak memory."""
    chosen = f"--tokenizer-engine={engine}"
    job = {"arguments": ["build", str(source), f"--out={out}", f"--tokenizer={tokenizer}", "--seq-len=2048", chosen,
                         f"--window-bytes={window_bytes}", "--workers=1"], "log": f"{out}.log"}  # fmt: skip
    answer = subprocess.run(
        [sys.executable, str(HERE / "build_process.py")], input=json.dumps(job), text=True, stdout=subprocess.PIPE,
        check=True,
    ).stdout.split()  # fmt: skip
    assert answer[1] == "0", Path(f"{out}.log").read_text()
    return int(answer[2])


@pytest.mark.parametrize("engine", ["tokenizers", "fastokens"])  # auto takes the second where the corpus is worth it
def test_ten_times_the_corpus_takes_the_same_memory(tmp_path, words, tokenizer_dir, engine):
    peaks = []
    for times in (1, 10):
        corpus = write_corpus(tmp_path / f"{times}.jsonl", words, times * 1000 * KIB)
        peaks.append(peak_bytes(corpus, tokenizer_dir, tmp_path / f"out{times}", 250 * KIB, engine))
    assert len(Dataset(tmp_path / "out10").shards) > 35
    assert peaks[1] <= 1.3 * peaks[0]


def test_memory_follows_the_formula(tmp_path, words, tokenizer_dir):
    corpus = write_corpus(tmp_path / "c.jsonl", words, 12_000 * KIB)
    small = peak_bytes(corpus, tokenizer_dir, tmp_path / "small", 250 * KIB)
    large = peak_bytes(corpus, tokenizer_dir, tmp_path / "large", 12_000 * KIB)
    largest = max(shard["tokens"] for shard in Dataset(tmp_path / "large").shards)
    assert largest > 3_000_000
    assert large <= small + BYTES_PER_TOKEN * largest + FIXED_BYTES


def test_a_build_of_plain_files_imports_nothing_that_it_does_not_need(tmp_path, words, tokenizer_dir):
    corpus = write_corpus(tmp_path / "c.jsonl", words, 10 * KIB)
    code = f"""
import sys
from pipeline import BuildConfig, build
build(BuildConfig(sources=({str(corpus)!r},), out={str(tmp_path / "out")!r}, tokenizer={tokenizer_dir!r}, seq_len=128))
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    loaded = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert "pyarrow" in loaded
    assert not {"torch", "transformers", "datasets", "pandas", "ray", "jinja2"} & set(loaded)


@pytest.mark.slow
def test_ten_thousand_small_files_take_the_memory_of_one(tmp_path, words, tokenizer_dir):
    rng = random.Random(3)
    texts = [" ".join(rng.choices(words, k=60)) for _ in range(10_000)]
    (tmp_path / "files").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "files" / f"{number:05d}.txt").write_text(text)
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    one = peak_bytes(tmp_path / "one.jsonl", tokenizer_dir, tmp_path / "one", 500 * KIB)
    many = peak_bytes(tmp_path / "files", tokenizer_dir, tmp_path / "many", 500 * KIB)
    assert Dataset(tmp_path / "many").manifest["totals"]["documents"]["packed"] == 10_000
    assert verify(tmp_path / "many").ok
    assert many <= 1.3 * one


@pytest.mark.slow
def test_one_long_document_is_split_within_the_formula(tmp_path, words, tokenizer_dir):
    rng = random.Random(4)
    text = " ".join(rng.choices(words, k=5_000_000))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text(text[:100_000])
    short = peak_bytes(tmp_path / "short.txt", tokenizer_dir, tmp_path / "short", 1000 * KIB)
    long = peak_bytes(tmp_path / "long.txt", tokenizer_dir, tmp_path / "long", 1000 * KIB)
    totals = Dataset(tmp_path / "long").manifest["totals"]
    assert totals["documents"]["packed"] == totals["documents"]["split"] == 1
    assert long <= short + BYTES_PER_TOKEN * totals["tokens"]["packed"] + 8 * len(text) + FIXED_BYTES
