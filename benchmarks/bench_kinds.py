"""Does a build keep up with its tokenizer engine on every kind of text, and with the corpus still on disk?

For each corpus of `corpora.py`: `pack build`, wrapped and best fit, beside the fast engine alone (it reads, tokenizes
and writes ids, nothing else), in one run, the corpus in the page cache and dropped from it. Conversations are built
with the tokenizer's chat template; the engine alone encodes what their messages say, which is fewer tokens.

    python benchmarks/corpora.py
    python benchmarks/bench_kinds.py --tokenizer ./tokenizer
"""

import argparse
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import corpora
from bench_build import measure_path, shorten
from write_up import WriteUp, figure, middle, run, tell

PACKAGES = ("shardpack", "tokenizers", "fastokens", "pyarrow", "numpy")
BOUND = "bound: fast engine alone"
WRAPPED, BEST_FIT = "pack build, fast engine, wrapped", "pack build, fast engine, best fit"


def measure(arguments: argparse.Namespace) -> WriteUp:
    with tempfile.TemporaryDirectory(prefix="bench-kinds-") as folder:
        files, notes = corpora_there(arguments, Path(folder))
        return compare(files, notes, arguments)


def corpora_there(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the corpora to measure by kind, and a sentence on each kind; without a tokenizer, the demo's of both."""
    if not arguments.tokenizer:
        from trainer.demo_corpus import make_corpus

        made, tokenizer = make_corpus(folder)
        arguments.tokenizer = str(tokenizer)
        if arguments.quick:
            made = [Path(shorten(made[0], folder))]
        return {file.stem: file for file in made}, [
            "Corpora and tokenizer of the demo; --tokenizer takes those of Debian."
        ]
    files = {kind: corpora.path_of(kind, arguments.megabytes) for kind in arguments.kinds}
    absent = [kind for kind, file in files.items() if not file.is_file()]
    if absent == arguments.kinds:
        sys.exit(f"no corpus is there; `python benchmarks/corpora.py --megabytes {arguments.megabytes}` makes them.")
    notes = [f"{kind}: {corpora.KINDS[kind][1]}." for kind in files if kind not in absent]
    notes += [f"{kind} is left out; `python benchmarks/corpora.py {kind}` makes it." for kind in absent]
    return {kind: file for kind, file in files.items() if kind not in absent}, notes


def compare(files: dict[str, Path], notes: list[str], arguments: argparse.Namespace) -> WriteUp:
    rows = [row for kind, file in files.items() for row in rows_of(kind, file, arguments)]
    columns = ["text", "page cache", "MB", "tokens", "wrapped, s", "best fit, s", "engine alone, s"]
    columns += ["wrapped / engine", "CPU s of the same", "B/token", "fill rate, best fit"]
    columns += ["packs above bound by window", "above bound of the whole list"]
    return WriteUp(
        "Builds of several kinds of text beside their tokenizer engine",
        [
            f"seq_len {arguments.seq_len}, {arguments.workers} processes. Wall seconds, median (range) of "
            f"{arguments.repeats}, start-up included; interleaved over the repeats. MB is the size of the JSONL."
        ],
        [("", columns, rows)],
        notes,
    )


def rows_of(kind: str, file: Path, arguments: argparse.Namespace) -> list[list[str]]:
    """Measure one corpus, warm and cold."""
    walls: dict[tuple[bool, str], list[float]] = {}
    cpus: dict[tuple[bool, str], list[float]] = {}
    last: dict[str, dict[str, Any]] = {}
    for repeat in range(arguments.repeats + (not arguments.quick)):  # the first warms the page cache
        for cold, name in product((False, True), (WRAPPED, BEST_FIT, BOUND)):
            wanted = argparse.Namespace(
                **{**vars(arguments), "corpus": [str(file)], "cold": cold, "chats": kind == "chats"}
            )
            last[name] = measure_path(name, wanted)
            tell(f"{kind}, {'cold' if cold else 'warm'}, {name}: {last[name]['wall']:.2f} s")
            if repeat or arguments.quick:
                walls.setdefault((cold, name), []).append(last[name]["wall"])
                cpus.setdefault((cold, name), []).append(last[name]["cpu"])
    rows = []
    for cold in (False, True):
        wrapped, best_fit, alone = (walls[cold, name] for name in (WRAPPED, BEST_FIT, BOUND))
        ratio = statistics.median(wrapped) / statistics.median(alone)
        cpu = statistics.median(cpus[cold, WRAPPED]) / statistics.median(cpus[cold, BOUND])
        fill, packs = last[BEST_FIT]["fill"], sum(count for _, count in last[BEST_FIT]["fill"]["histogram"])
        rows.append(
            [
                kind, "cold" if cold else "warm", f"{file.stat().st_size / 1e6:.1f}", f"{last[WRAPPED]['tokens']:,}",
                middle(wrapped), middle(best_fit), middle(alone), figure(ratio), figure(cpu),
                f"{last[WRAPPED]['bytes'] / last[WRAPPED]['tokens']:.2f}",
                f"{fill['rate']:.3%}", f"{packs / fill['min_packs_of_windows'] - 1:.3%}",
                f"{packs / fill['min_packs'] - 1:.3%}",
            ]
        )  # fmt: skip
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=corpora.KINDS, default=list(corpora.KINDS), metavar="KIND")
    parser.add_argument("--megabytes", type=int, default=60, help="limit that the corpora were made with")
    parser.add_argument("--tokenizer", help="directory, with a chat template (default: the demo's, on its corpus)")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=2)


if __name__ == "__main__":
    run("kinds", __doc__ or "", measure, PACKAGES, add_flags)
