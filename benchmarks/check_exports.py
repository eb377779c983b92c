"""Do other projects read what `pack export` writes? Each with its own reader, token by token.

A corpus of known documents is built, exported, read in the environment that `make peers` made for each project, and
compared with what the format should hold by definition. Exit code 1 where anything differs.

    python benchmarks/check_exports.py
    python benchmarks/check_exports.py --out benchmarks/results/exports-2026-12.md
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import peers

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN = 256
COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths", "doc_ids", "doc_parts", "doc_offsets")
BRIDGE_COLUMNS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
Samples = list[dict[str, list[int]]]


def read_mds(folder: str) -> Samples:
    peers.with_torchvision()
    from streaming import StreamingDataset

    rows = StreamingDataset(local=folder, shuffle=False, batch_size=1)
    return [{name: rows[k][name].tolist() for name in COLUMNS} for k in range(len(rows))]


def read_litdata(folder: str) -> Samples:
    from litdata import StreamingDataset

    rows = StreamingDataset(folder, shuffle=False)
    return [{name: rows[k][name].tolist() for name in COLUMNS} for k in range(len(rows))]


def read_megatron(folder: str) -> Samples:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    rows = IndexedDataset(f"{folder}/corpus_document")
    assert len(rows.document_indices) == len(rows) + 1
    return [{"input_ids": rows[k].tolist()} for k in range(len(rows))]


def read_bridge(folder: str) -> Samples:
    """Batches as Megatron-Bridge's packed dataset makes them; its releases read rows like these from .npy files."""
    import numpy as np
    import pyarrow.parquet as pq

    sft = bridge_module()
    files = sorted(Path(folder).glob("*.idx.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    packed = f"{folder}/rows.npy"
    np.save(packed, np.array(rows, dtype=object))
    tokenizer = type("Tokenizer", (), {"eos_id": -1, "eod": -1})()  # no id is taken for the end of a text
    dataset = sft.GPTSFTPackedDataset(
        packed, tokenizer, max_seq_length=SEQ_LEN, prompt_template="{input} {answer}", truncation_field="input"
    )
    samples = []
    for number in range(len(rows)):
        batch = dataset.collate_fn([dataset[number]])
        count = batch["token_count"][0]
        sample = {name: batch[name][0].tolist()[:count] for name in BRIDGE_COLUMNS[:-1]}
        bounds = [int(bound) for bound in batch["cu_seqlens"][0] if 0 <= bound <= count]
        samples.append(sample | {"cu_seqlens": list(dict.fromkeys(bounds))})
    return samples


def bridge_module() -> Any:
    """Import the module of its packed datasets alone: the package imports every model that it converts."""
    roots = importlib.util.find_spec("megatron").submodule_search_locations
    for name in ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.datasets"):
        module = ModuleType(name)
        module.__path__ = [f"{root}/{name.partition('.')[2].replace('.', '/')}" for root in roots]
        sys.modules[name] = module
    for name in ("", ".tokenizers", ".tokenizers.tokenizer"):  # for annotations only
        module = peers.Anything(f"megatron.bridge.training{name}")
        module.__path__ = []
        sys.modules[module.__name__] = module
    return importlib.import_module("megatron.bridge.data.datasets.sft")


READERS: dict[str, tuple[str, Callable[[str], Samples]]] = {
    "mds": ("mosaicml-streaming", read_mds),
    "litdata": ("litdata", read_litdata),
    "megatron": ("megatron-core", read_megatron),
    "megatron-bridge": ("megatron-core", read_bridge),
}
"Format -> whose environment, and what reads it there."
OWN_WRITER = ("mds", "litdata")  # written in that environment too


def write_corpus(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Write documents of known ids and targets, and a tokenizer that has those ids; return the documents."""
    import numpy as np

    rng = np.random.default_rng(3)
    documents = []
    for length in np.clip(rng.lognormal(4, 1, 3000), 2, 2000).astype(int).tolist():
        mask = (rng.random(length) < 0.6).astype(int)
        mask[-1] = 1
        documents.append((rng.integers(3, 70_000, length).tolist(), [0, *mask[1:].tolist()]))
    for name, key in (("masked", "mask"), ("plain", None)):
        rows = [{"input_ids": ids} | ({key: mask} if key else {}) for ids, mask in documents]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = {f"w{number}": number for number in range(70_000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    content = {"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return documents


def build(folder: Path, name: str) -> Path:
    from pipeline import BuildConfig, RecordOptions
    from pipeline import build as run

    mask = "mask" if name == "masked" else None
    records = RecordOptions(kind="tokens", mask_field=mask, overlong="split")
    run(
        BuildConfig(
            sources=f"corpus={folder / name}.jsonl", out=folder / name, tokenizer=folder / "tokenizer", seq_len=SEQ_LEN,
            records=records, window_bytes=1 << 20,
        )
    )  # fmt: skip
    return folder / name


def pack_of(row: dict[str, Any]) -> dict[str, list[int]]:
    """What a sample holds, by definition, segment by segment."""
    bounds, ids, mask = (row[name].tolist() for name in ("cu_seqlens", "input_ids", "loss_mask"))
    return {
        "input_ids": ids,
        "labels": [token if one else -100 for token, one in zip(ids, mask, strict=True)],
        "position_ids": [place for begin, end in pairwise(bounds) for place in range(end - begin)],
        "seq_lengths": [end - begin for begin, end in pairwise(bounds)],
        **{name: row[name].tolist() for name in COLUMNS[4:]},
    }


def batch_of(row: dict[str, Any]) -> dict[str, list[int]]:
    """What Megatron-Bridge trains on: each token of a segment but the last, with its successor and that one's mask."""
    bounds, ids, mask = (row[name].tolist() for name in ("cu_seqlens", "input_ids", "loss_mask"))
    batch: dict[str, list[int]] = {name: [] for name in BRIDGE_COLUMNS}
    ends = [0]
    for begin, end in pairwise(bounds):
        batch["tokens"] += ids[begin : end - 1]
        batch["labels"] += ids[begin + 1 : end]
        batch["loss_mask"] += mask[begin + 1 : end]
        batch["position_ids"] += range(end - 1 - begin)
        ends.append(len(batch["tokens"]))
    return batch | {"cu_seqlens": list(dict.fromkeys(ends))}  # a segment of one token leaves nothing


def export(dataset: Path, to: str, out: Path, python: str) -> None:
    command = [python, "-m", "pipeline", "export", str(dataset), "--to", to, "--out", str(out)]
    if to == "mds":  # streaming imports torchvision, whatever it streams
        command[1:3] = ["-c", "import peers, pipeline.cli; peers.with_torchvision(); pipeline.cli.main()"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}
    subprocess.run(command, env=environment, check=True, cwd=out.parent)


def check(to: str, expected: Samples, dataset: Path, scratch: Path) -> str:
    """Export, read with the peer's reader, compare; return a row of the table."""
    peer, _ = READERS[to]
    python, out, found = str(peers.python_of(peer)), scratch / to, scratch / f"{to}.json"
    export(dataset, to, out, python if to in OWN_WRITER else sys.executable)
    subprocess.run([python, __file__, "--read", to, str(out), str(found)], check=True, cwd=scratch)
    samples = json.loads(found.read_text())
    tokens = sum(len(next(iter(sample.values()))) for sample in expected)
    alike = samples == expected
    what = f"{len(expected):,} {'documents' if to == 'megatron' else 'packs'}, {tokens:,} tokens"
    return f"| {to} | {peers.versions(peer)} | {what} | {'identical' if alike else 'DIFFERENT'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        to, folder, found = arguments.read
        Path(found).write_text(json.dumps(READERS[to][1](folder)))
        return
    there = [to for to, (peer, _) in READERS.items() if peers.python_of(peer)]
    for line in peers.missing(sorted({peer for peer, _ in READERS.values()})):
        print(line, file=sys.stderr)
    from shards import Dataset

    with tempfile.TemporaryDirectory(prefix="check-exports-") as folder:
        scratch = Path(folder)
        documents = write_corpus(scratch)
        masked, plain = build(scratch, "masked"), build(scratch, "plain")
        whole = [{"input_ids": ids} for ids, _ in documents]
        packs = list(Dataset(masked))
        samples = [pack_of(row) for row in packs]
        expected = {"megatron": whole, "megatron-bridge": [batch_of(row) for row in packs]}
        rows = [check(to, expected.get(to) or samples, plain if to == "megatron" else masked, scratch) for to in there]
    page = "\n".join(
        [
            "# Exports, read by the projects they are for",
            "",
            "`python benchmarks/check_exports.py`: 3,000 documents of random ids and masks, packed at 256 tokens with",
            "the longer ones cut, exported, and read in the environments of `make peers`. Every value is compared.",
            "",
            "| `--to` | read by | what | result |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print(page)
    if arguments.out:
        arguments.out.write_text(page)
    sys.exit(int(any("DIFFERENT" in row for row in rows)))


if __name__ == "__main__":
    main()
