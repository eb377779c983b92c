"""How long until `pack trace` knows the documents of a step, and the steps of a document?

A dataset of a million packs: random token ids as a numpy stream, cut at EOS into documents of some 30 tokens, in packs
of 64. Each run is a fresh process that makes the order again from the run's settings; imports are told apart.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models
from write_up import WriteUp, figure, middle, run, tell

from pipeline import BuildConfig, RecordOptions, build
from shards import Dataset
from trainer.config import TrainConfig

PACKAGES = ("shardpack", "numpy", "pyarrow", "torch")
EOS, VOCAB, SEQ_LEN, PACKS_PER_STEP = 1, 5_000, 64, 256
SIZES = {"100,000 packs": 100_000, "1 million packs": 1_000_000}
QUICK = {"2,000 packs": 2_000}
MEASURE = """
import json, sys, time
begin = time.perf_counter()
from trainer.documents.trace import RunTrace
imported = time.perf_counter()
traced = RunTrace(sys.argv[1])
opened = time.perf_counter()
seen = traced.step(traced.order.steps_per_epoch // 2)
step = time.perf_counter()
(document,) = traced.document(str(seen["segments"][0]["doc_id"]))
done = time.perf_counter()
assert any(each["step"] == seen["step"] for each in document["steps"])
print(json.dumps(dict(
    packs=len(traced.dataset), imports=imported - begin, step=step - imported, document=done - step,
    segments=len(seen["segments"]),
)))
"""


def write_dataset(folder: Path, packs: int) -> Dataset:
    """Build a dataset of about so many packs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(2, VOCAB, packs * SEQ_LEN).astype(np.uint16)
    ids[rng.random(len(ids)) < 1 / 30] = EOS
    ids[-1] = EOS
    np.save(folder / "ids.npy", ids)
    words = {f"w{number}": number for number in range(VOCAB)}
    (folder / "tokenizer").mkdir()
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer" / "tokenizer.json"))
    build(
        BuildConfig(
            sources=folder / "ids.npy", out=folder / "dataset", tokenizer=folder / "tokenizer", seq_len=SEQ_LEN,
            records=RecordOptions(kind="tokens", eos_id=EOS), workers=2,
        )
    )  # fmt: skip
    return Dataset(folder / "dataset")


def write_run(folder: Path, dataset: Dataset) -> Path:
    """Write what a run of three epochs leaves behind that a trace reads."""
    path = folder / "run"
    path.mkdir()
    config = TrainConfig(dataset=dataset.path, model="any", out=path, epochs=3, packs_per_step=PACKS_PER_STEP)
    (path / "train.json").write_text(json.dumps(config.to_dict()))
    return path


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Trace in fresh processes, several times."""
    rows = []
    for name, packs in (QUICK if arguments.quick else SIZES).items():
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
            run_directory = write_run(Path(directory), write_dataset(Path(directory), packs))
            found = []
            for _ in range(arguments.repeats + 1):  # the first warms the page cache
                done = subprocess.run(
                    [sys.executable, "-c", MEASURE, str(run_directory)], capture_output=True, text=True, check=True
                )
                found.append(json.loads(done.stdout))
                tell(f"{name}: {found[-1]}")
        found = found[1:]
        rows.append(
            [
                name,
                f"{found[0]['packs']:,}",
                f"{found[0]['segments']:,}",
                *(middle([each[part] * 1e3 for each in found]) for part in ("imports", "step", "document")),
                figure(max(each["step"] + each["document"] for each in found) * 1e3),
            ]
        )
    columns = ["dataset", "packs", "segments in the step", "imports, ms", "a step's documents, ms"]
    columns += ["then a document's steps, ms", "slowest of both, ms"]
    setting = (
        f"Packs of {SEQ_LEN} tokens, {PACKS_PER_STEP} in a step, a run of three epochs. Median (range) of "
        f"{arguments.repeats} processes, page cache warm. The steps of a document are those of all three epochs."
    )
    return WriteUp("From a step to documents and back", [setting], [("", columns, rows)])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add where the dataset goes."""
    parser.add_argument("--scratch", type=Path, default=None, help="directory for 2 GB")


if __name__ == "__main__":
    run("trace", __doc__ or "", measure, PACKAGES, add_flags)
