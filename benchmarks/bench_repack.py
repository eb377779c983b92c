"""How fast are token ids packed that somebody tokenized, and datasets that are packed anew?

Random ids of a 150,000-entry vocabulary, log-normal lengths, one worker. The same documents come as Arrow, Parquet,
Megatron's .bin/.idx, a .npy stream and JSONL, and as a dataset that is repacked to half the length; each path takes its
turn in a process of its own, start-up and imports included. CPU seconds are those of the process.
Beside them stands a copy of the dataset's files, synced, in the same run.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from random_dataset import write_dataset
from write_up import WriteUp, middle, run, tell

from pipeline import DatasetExportConfig, export_dataset
from pipeline.building.repacking.joining import join_documents
from shards import Dataset

PACKAGES = ("shardpack", "numpy", "pyarrow", "orjson")
SEQ_LEN, VOCAB_SIZE, MEAN_TOKENS = 8192, 150_000, 490
FEW = 10  # documents of a run that is start-up and nothing else
EOS = VOCAB_SIZE  # of the stream: no random id is it
# one worker is this process: CPU seconds of others, which the fork server starts, would not be counted
FLAGS = ["--vocab-size", str(VOCAB_SIZE + 1), "--seq-len", str(SEQ_LEN), "--no-progress", "--workers", "1"]


def write_arrow(dataset: Dataset, out: Path) -> None:
    """Write one row a document."""
    with pa.OSFile(str(out), "wb") as file, pa.ipc.new_stream(file, _schema()) as writer:
        for table in _tables(dataset):
            writer.write_table(table)


def write_parquet(dataset: Dataset, out: Path) -> None:
    """Write one row a document, uncompressed: random ids do not compress."""
    with pq.ParquetWriter(out, _schema(), compression="none", use_dictionary=False) as writer:
        for table in _tables(dataset):
            writer.write_table(table, row_group_size=1 << 15)


def write_jsonl(dataset: Dataset, out: Path) -> None:
    """Write one object a document."""
    with out.open("w") as file:
        for table in _tables(dataset):
            for ids in table.column("input_ids").to_pylist():
                file.write(json.dumps({"input_ids": ids}) + "\n")


def write_stream(dataset: Dataset, out: Path) -> None:
    """Write all ids, each document ended by EOS."""
    parts = []
    for window in range(len(dataset.shards)):
        documents = join_documents(dataset, window).documents
        parts.append(np.insert(documents.input_ids, documents.offsets[1:], EOS))
    np.save(out, np.concatenate(parts).astype(np.int32))


def write_megatron(dataset: Dataset, out: Path) -> None:
    """Write Megatron's pair."""
    export_dataset(DatasetExportConfig(dataset=dataset.path, to="megatron", out=out.parent / "megatron"))


def _schema() -> pa.Schema:
    return pa.schema([("input_ids", pa.list_(pa.int32()))])


def _tables(dataset: Dataset) -> "list[pa.Table]":
    tables = []
    for window in range(len(dataset.shards)):
        documents = join_documents(dataset, window).documents
        column = pa.ListArray.from_arrays(pa.array(documents.offsets.astype(np.int32)), pa.array(documents.input_ids))
        tables.append(pa.table([column], schema=_schema()))
    return tables


SOURCES: dict[str, tuple[str, Callable[[Dataset, Path], None], list[str]]] = {
    "Arrow": ("rows.arrow", write_arrow, ["--ids-field", "input_ids"]),
    "Parquet": ("rows.parquet", write_parquet, ["--ids-field", "input_ids"]),
    "Megatron .bin/.idx": ("megatron", write_megatron, ["--ids-field", "input_ids"]),
    ".npy stream": ("stream.npy", write_stream, ["--eos-id", str(EOS)]),
    "JSONL": ("rows.jsonl", write_jsonl, ["--ids-field", "input_ids"]),
}


def timed(command: list[str]) -> tuple[float, float]:
    """Run `pack` in a process of its own; return seconds and CPU seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "pipeline", *command], check=True, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Import from every form, and repack."""
    number = (2_000_000 if arguments.quick else arguments.tokens) // MEAN_TOKENS
    lengths = np.clip(np.random.default_rng(0).lognormal(5.7, 1.0, number), 2, SEQ_LEN).astype(np.int64)
    tokens = int(lengths.sum())
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        scratch = Path(directory)
        commands = commands_on(scratch / "whole", lengths, arguments.repack_only)
        start_up = commands_on(scratch / "few", lengths[:FEW], arguments.repack_only)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        copies = []
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                _, least = timed([*start_up[name], "--out", str(scratch / "least")])
                found[name].append((*timed([*command, "--out", str(scratch / "out")]), least))
                tell(f"{name}: {found[name][-1]}")
                shutil.rmtree(scratch / "out")
                shutil.rmtree(scratch / "least")
            copies.append(copied(scratch / "whole" / "dataset", scratch / "copy"))
    rows = [
        [
            name,
            middle([seconds for seconds, _, _ in runs]),
            middle([cpu for _, cpu, _ in runs]),
            middle([least for _, _, least in runs]),
            middle([tokens / (cpu - least) / 1e6 for _, cpu, least in runs]),
        ]
        for name, runs in found.items()
    ]
    rows.append(["(the dataset copied, synced)", middle(copies), "", "", ""])
    setting = (
        f"{tokens:,} tokens in documents of {MEAN_TOKENS} on average, packed at {SEQ_LEN:,} and repacked to "
        f"{SEQ_LEN // 2:,}. Median (range) of {arguments.repeats} runs, page cache warm, one worker. Start-up is "
        f"the same command on {FEW} documents, in the same run."
    )
    columns = ["from", "seconds", "CPU seconds", "of these start-up", "Mtok a CPU second above start-up"]
    return WriteUp("Packing what is tokenized already", [setting], [("", columns, rows)])


def commands_on(folder: Path, lengths: np.ndarray, repack_only: bool) -> dict[str, list[str]]:
    """Write documents in every form; return the command that packs each."""
    folder.mkdir()
    dataset = write_dataset(folder / "dataset", lengths, SEQ_LEN, VOCAB_SIZE)
    commands = {}
    for name, (file, write, flags) in SOURCES.items():
        if not repack_only:
            write(dataset, folder / file)
            commands[name] = ["build", str(folder / file), *flags, *FLAGS]
    half = ["--seq-len", str(SEQ_LEN // 2), "--no-progress"]
    commands["a dataset, repacked"] = ["repack", str(dataset.path), *half]
    return commands


def copied(source: Path, target: Path) -> float:
    """Return the seconds of a synced copy."""
    begin = time.perf_counter()
    shutil.copytree(source, target)
    subprocess.run(["sync", "--file-system", str(target)], check=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add size and place."""
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens of the dataset")
    parser.add_argument("--repack-only", action="store_true", help="import nothing")
    parser.add_argument("--scratch", type=Path, default=None, help="directory for 3 GB")


if __name__ == "__main__":
    run("repack", __doc__ or "", measure, PACKAGES, add_flags)
