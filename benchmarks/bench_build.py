"""How long does it take from text to packed rows on disk, against other projects and against tokenizing alone?

Every path reads the same JSONL, ends every document with one EOS and keeps every token (packing `wrapped`; TRL's `bfd`
would drop what is over seq_len), with the same number of processes, each path in a process of its own, start-up and
imports included. datatrove, litdata, MDS and Megatron run in environments of their own (`peers.py` makes them) and
write a stream of ids: no masks, no positions, no document bounds in a row. Each runs with the tokenizer library that it
ships with and again with the fast engine in its place. The bounds only tokenize and write ids. Order is interleaved
over the repeats.

    python benchmarks/bench_build.py --quick
    python benchmarks/corpora.py code
    python benchmarks/bench_build.py --corpus .corpora/code-60mb.jsonl --tokenizer ./tokenizer --workers 2
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import peer_builds
import peers
from peer_builds import BATCH, FAST, texts_of
from write_up import WriteUp, middle, run, tell

PACKAGES = ("shardpack", "tokenizers", "fastokens", "transformers", "datasets", "trl", "pyarrow", "numpy")


def build_with(engine: str, packer: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Return a path through `pack build`."""

    def build_path(arguments: argparse.Namespace) -> dict[str, Any]:
        from pipeline import BuildConfig, build
        from pipeline.config import RecordOptions

        config = BuildConfig(
            records=RecordOptions(kind="chat" if arguments.chats else "text"),
            sources=tuple(arguments.corpus), out=arguments.scratch, tokenizer=arguments.tokenizer,
            seq_len=arguments.seq_len, packer=packer, tokenizer_engine=engine, workers=arguments.workers,
        )  # fmt: skip
        manifest = build(config).manifest
        return {"tokens": manifest["totals"]["tokens"]["packed"], "stages": manifest["facts"]["stages_s"]}

    return build_path


def trl_path(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, tokenize, pack and save as a TRL user would do offline."""
    if arguments.engine == FAST:
        import fastokens

        fastokens.patch_transformers()
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import pack_dataset

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"])["input_ids"]]}

    cache = f"{arguments.scratch}/cache"
    loaded = load_dataset("json", data_files=list(arguments.corpus), split="train", cache_dir=cache)
    names = loaded.column_names
    encoded = loaded.map(encode, batched=True, num_proc=arguments.workers, remove_columns=names)
    packed = pack_dataset(encoded, arguments.seq_len, "wrapped")
    packed.save_to_disk(f"{arguments.scratch}/out")
    return {"tokens": int(sum(len(row) for row in packed.with_format("numpy")["input_ids"]))}


def tokenize_only(arguments: argparse.Namespace, worker: int) -> int:
    """Tokenize a share of the texts with the reference library and write the ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{arguments.tokenizer}/tokenizer.json")
    texts, tokens = texts_of(arguments.corpus, worker, arguments.workers), 0
    with open(f"{arguments.scratch}/ids-{worker}.bin", "wb") as file:
        for start in range(0, len(texts), BATCH):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH]):
                np.array([*encoding.ids, 0], np.int32).tofile(file)
                tokens += len(encoding.ids) + 1
    return tokens


def tokenize_only_fast(arguments: argparse.Namespace, worker: int) -> int:
    """Tokenize with the fast engine and nothing around it: its own arrays, no comparison with the reference."""
    import fastokens

    tokenizer = fastokens.Tokenizer.from_file(f"{arguments.tokenizer}/tokenizer.json")
    texts, tokens = texts_of(arguments.corpus, worker, arguments.workers), 0
    with open(f"{arguments.scratch}/ids-{worker}.bin", "wb") as file:
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            ids, _ = tokenizer.encode_batch_flat(batch, add_special_tokens=True)
            file.write(ids)
            tokens += len(ids) // 4 + len(batch)  # and an EOS each
    return tokens


def bound(tokenize: Callable[[argparse.Namespace, int], int]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Return a path that runs `tokenize` in every worker."""

    def bound_path(arguments: argparse.Namespace) -> dict[str, Any]:
        os.makedirs(arguments.scratch)
        with multiprocessing.get_context("fork").Pool(arguments.workers) as pool:
            shares = pool.starmap(tokenize, [(arguments, worker) for worker in range(arguments.workers)])
            pool.close()
            pool.join()
        return {"tokens": sum(shares)}

    return bound_path


PATHS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "pack build, fast engine, wrapped": build_with("auto", "wrapped"),
    "pack build, fast engine, best fit": build_with("auto", "auto"),
    "pack build, reference engine, wrapped": build_with("tokenizers", "wrapped"),
    "TRL: load, map, pack wrapped, save": trl_path,
    "TRL, fast engine": trl_path,
    "bound: reference engine alone": bound(tokenize_only),
    "bound: fast engine alone": bound(tokenize_only_fast),
}
PEERS = {
    "datatrove: DocumentTokenizer": "datatrove",
    "datatrove, fast engine": "datatrove",
    "litdata: optimize, TokensLoader": "litdata",
    "litdata, fast engine": "litdata",
    "MDS: concatenate, MDSWriter": "mosaicml-streaming",
    "MDS, fast engine": "mosaicml-streaming",
    "Megatron: the loop of preprocess_data.py": "megatron-core",
    "Megatron, fast engine": "megatron-core",
}
NAMES = sorted([*PATHS, *PEERS], key=lambda name: name.startswith("bound"))


def measure_path(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one path in a process of its own; wall and CPU seconds, largest process, bytes written."""
    with tempfile.TemporaryDirectory(prefix="bench-build-") as folder:
        wanted = vars(arguments) | {"scratch": f"{folder}/scratch", "result": f"{folder}/result.json", "out": ""}
        wanted["engine"] = FAST if name.endswith(", fast engine") else "tokenizers"
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": f"{folder}/hf", "TQDM_DISABLE": "1"}
        command = [sys.executable, __file__, "--path", name, json.dumps(wanted)]
        if name in PEERS:
            command = [str(peers.python_of(PEERS[name])), peer_builds.__file__, PEERS[name], json.dumps(wanted)]
        if arguments.cold:
            forget(arguments.corpus)
        wall, cpu, gib = timed(command, environment, name)
        found = json.loads(Path(wanted["result"]).read_text())
        aside = {"cache", "tokenizer"}
        kept = (path for path in Path(wanted["scratch"]).rglob("*") if path.is_file() and not aside & {*path.parts})
        size = sum(path.stat().st_size for path in kept)
        if name.startswith("pack build"):
            from pipeline import inspect

            found["fill"] = inspect(wanted["scratch"])["fill"]
    return found | {"wall": wall, "cpu": cpu, "gib": gib, "bytes": size}


def forget(files: list[str]) -> None:
    """Drop files from the page cache, as if they had never been read."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())  # what is not on disk yet stays in memory
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: list[str], environment: dict[str, str], name: str) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds of all processes together, and GiB of the largest one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that outlive their parents are ours then
    begin = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{name}: exit code {child.returncode}")
    usages = [usage]
    with suppress(ChildProcessError):
        while True:
            usages.append(os.wait4(-1, 0)[2])
    scale = 2**30 if sys.platform == "darwin" else 2**20
    return wall, sum(u.ru_utime + u.ru_stime for u in usages), max(u.ru_maxrss for u in usages) / scale


def measure(arguments: argparse.Namespace) -> WriteUp:
    with tempfile.TemporaryDirectory(prefix="bench-build-corpus-") as folder:
        if not arguments.corpus or not arguments.tokenizer:
            from trainer.demo_corpus import make_corpus

            files, tokenizer = make_corpus(Path(folder))
            arguments.corpus, arguments.tokenizer = arguments.corpus or list(map(str, files)), str(tokenizer)
        if arguments.quick:
            arguments.corpus = [shorten(Path(arguments.corpus[0]), Path(folder))]
        return compare(arguments)


def shorten(file: Path, folder: Path) -> str:
    """Write the first documents of a corpus, about 300 KB."""
    short, size = folder / "short.jsonl", 0
    with file.open("rb") as lines, short.open("wb") as out:
        for line in lines:
            out.write(line)
            size += len(line)
            if size > 300_000:
                break
    return str(short)


def compare(arguments: argparse.Namespace) -> WriteUp:
    wanted = [name for name in NAMES if name in (arguments.paths or NAMES)]
    names = [name for name in wanted if name not in PEERS or peers.python_of(PEERS[name])]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    warm = arguments.quick or arguments.no_warm_up
    for repeat in range(arguments.repeats + (not warm)):  # the first warms the page cache and numba's
        for name in names:
            found = measure_path(name, arguments)
            tell(f"{name}: {found['wall']:.1f} s")
            if repeat or warm:
                runs[name].append(found)
    text_bytes = sum(os.path.getsize(path) for path in arguments.corpus)
    trl = next((name for name in names if name.startswith("TRL")), None)
    rows = [_row(name, runs[name], text_bytes, runs[trl] if trl else None) for name in names]
    stages = runs[names[0]][-1].get("stages", {})
    tokens = {name: found[-1]["tokens"] for name, found in runs.items()}
    first = tokens[names[0]]
    differing = [f"NOT EQUAL: {name} kept {count:,} tokens." for name, count in tokens.items() if count != first]
    columns = ["path", "wall s", "CPU s", "MB/s", "Mtok/s", "largest process", "B/token", "x TRL"]
    return WriteUp(
        "From text to packed rows on disk",
        [
            f"{text_bytes / 1e6:.1f} MB of JSONL, {tokens[names[0]]:,} tokens, seq_len {arguments.seq_len}, "
            f"{arguments.workers} processes. Median (range) of {arguments.repeats}, start-up included; the corpus is "
            + ("dropped from the page cache before each run." if arguments.cold else "in the page cache.")
        ],
        [
            ("", columns, rows),
            (f"Stages of {names[0]}, seconds over all workers", list(stages), [[f"{s:.2f}" for s in stages.values()]]),
        ],
        (differing or ["All paths kept the same tokens."])
        + [f"{peer} ran with {peers.versions(peer)}." for peer in peers_of(names)]
        + peers.missing(peers_of(wanted)),
    )  # fmt: skip


def peers_of(names: list[str]) -> list[str]:
    """Return the environments of some paths."""
    return list(dict.fromkeys(PEERS[name] for name in names if name in PEERS))


def _row(name: str, runs: list[dict[str, Any]], text_bytes: int, peers: list[dict[str, Any]] | None) -> list[str]:
    walls = [found["wall"] for found in runs]
    mid = sorted(walls)[len(walls) // 2]
    versus = sorted(found["wall"] for found in peers)[len(peers) // 2] / mid if peers else None
    return [
        name, middle(walls), middle([found["cpu"] for found in runs]), f"{text_bytes / mid / 1e6:.2f}",
        f"{runs[0]['tokens'] / mid / 1e6:.3f}", f"{max(found['gib'] for found in runs):.2f} GiB",
        f"{runs[0]['bytes'] / runs[0]['tokens']:.2f}", f"{versus:.1f}" if versus else "–",
    ]  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", nargs="+", help="JSONL files with a field text (default: the demo's corpus)")
    parser.add_argument("--tokenizer", help="tokenizer directory (default: the demo's)")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--paths", nargs="+", choices=NAMES, metavar="PATH", help="some of the paths, by name")
    parser.add_argument("--chats", action="store_true", help="the corpus holds conversations, in a field messages")
    parser.add_argument("--cold", action="store_true", help="drop the corpus from the page cache before each run")
    parser.add_argument("--no-warm-up", action="store_true", help="leave out the run that warms the page cache")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--path"]:
        arguments = argparse.Namespace(**json.loads(sys.argv[3]))
        Path(arguments.result).write_text(json.dumps(PATHS[sys.argv[2]](arguments)))
    else:
        run("build", __doc__ or "", measure, PACKAGES, add_flags)
