"""`pack bench`: the same documents, fed to the same model in every way there is, side by side on this machine.

Documents come from a dataset, or are read from a corpus until there are enough; nothing is written. The random choice
of packs, the steps and the first weights are the same for all strategies. What makes a strategy is in `strategies`, the
clock in `timing`; here is what is asked, what comes out, and how it is shown.
"""

import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.estimate.sampling import pack_rows, sample_documents
from pipeline.sources.discovery import resolve_sources
from shards import Dataset, PackError
from shards.reader import Pack
from trainer.bench.compare import COMPUTED, run_comparison
from trainer.bench.config import BenchConfig
from trainer.bench.strategies import Sizes, StepPacks, check_names, split_pack
from trainer.bench.view import print_result as print_result
from trainer.bench.view import write_result_page as write_result_page
from trainer.demo_corpus import make_corpus, write_model_config
from trainer.model.loading import check_segments, check_vocabulary, load_model

VERSION = 1
DEMO_STEPS, DEMO_SEQ_LEN = 5, 512
STEP_BATCHES = 3  # padded batches in a step
POOL, POOL_PACKS = 4, 256  # times the documents that are used, and packs, that are chosen from
Result = dict[str, Any]


@dataclass(frozen=True)
class Corpus:
    """What strategies are fed."""

    segments: list[Pack]
    "Documents of at most `seq_len` tokens, each a row of its own, in random order."
    seq_len: int
    max_token_id: int
    name: str
    notes: tuple[str, ...] = ()
    "What is worth knowing about the choice of documents."


def run_bench(config: BenchConfig, tell: Callable[[str], None] = lambda line: None) -> Result:
    """Run every strategy.

    Args:
        config: What is asked.
        tell: Takes a line of progress.

    Returns:
        What `run_comparison` returns, with the names of data and model.

    Raises:
        PackError: Data, model and settings do not fit.
    """
    check_names(config.strategies)
    device = _device(config.device)
    dtype = config.dtype or ("bf16" if device.type == "cuda" else "fp32")
    with tempfile.TemporaryDirectory(prefix="shardpack-bench-") as folder:
        corpus = _corpus(config, Path(folder), tell)
        model = str(config.model or _default_model(Path(folder), corpus))
        torch.manual_seed(config.seed)
        loaded = load_model(model, compute_dtype=COMPUTED[dtype], device=device, packed=False)
    sizes = _sizes(config, corpus)
    check_segments(loaded.report, sizes.longest)
    check_vocabulary(loaded.report, corpus.max_token_id)
    result = run_comparison(config.strategies, loaded, _steps(config, corpus, sizes), sizes, dtype, tell)
    result["notes"] = [*corpus.notes, *result["notes"]]
    return {"version": VERSION, "data": corpus.name, "model": config.model or "demo", "seed": config.seed} | result


def num_steps(config: BenchConfig) -> int:
    """Return the optimizer steps; on the demo's corpus all strategies take about a minute on two CPU cores."""
    return config.steps or (10 if config.data else DEMO_STEPS)


def _device(name: str | None) -> torch.device:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    found = [kind for kind, here in there.items() if here]
    if name is not None and name.partition(":")[0] not in found:
        raise PackError(
            f"--device {name}: this torch sees no such device; it sees {', '.join(found)}. Choose one of these."
        )
    return torch.device(name or found[0])


def _default_model(folder: Path, corpus: Corpus) -> str:
    write_model_config(folder / "model.json", corpus.max_token_id + 1, corpus.seq_len)
    return str(folder / "model.json")


def _corpus(config: BenchConfig, folder: Path, tell: Callable[[str], None]) -> Corpus:
    if config.data and any((Path(config.data) / name).exists() for name in ("manifest.json", "plan.json")):
        if config.seq_len:
            raise PackError(f"--seq-len: {config.data} is a dataset and has its own. Leave the flag out.")
        return of_dataset(Dataset(config.data), config)
    if config.data:
        source = str(config.data)
        if not source.startswith("hf:"):  # nothing is fetched before it is known that a tokenizer is there
            resolve_sources((source,), RecordOptions(text_field=config.text_field))
        tokenizer = str(config.tokenizer or config.model or "")
        if not tokenizer or (config.tokenizer is None and tokenizer.endswith(".json")):
            raise PackError(f"{source}: is no dataset, so its text needs a tokenizer. Add --tokenizer NAME_OR_DIR.")
        return of_source((source,), tokenizer, config)
    tell("making the demo's corpus and tokenizer …")
    files, made = make_corpus(folder)
    corpus = of_source((str(files[1]),), str(made), replace(config, seq_len=config.seq_len or DEMO_SEQ_LEN))
    return replace(corpus, name="docstrings of Python's standard library")


def of_dataset(dataset: Dataset, config: BenchConfig) -> Corpus:
    """Take whole documents from many random packs of a dataset; parts of cut ones where there are too few.

    Padding is what people do to documents, so parts that fill a row would flatter it.
    """
    if not len(dataset):
        raise PackError(f"{dataset.path}: has no packs; expected some. Build it from a corpus with documents.")
    index = dataset.index
    order = np.random.default_rng(config.seed).permutation(len(dataset))
    segments, tokens = index.num_segments[order].cumsum(dtype=np.int64), index.num_tokens[order].cumsum(dtype=np.int64)
    wanted = num_steps(config) * documents_in_step(config, dataset.seq_len, int(tokens[-1] // segments[-1]))
    number = max(POOL_PACKS, int(np.searchsorted(segments, POOL * wanted)) + 1)
    whole, parts = list[Pack](), list[Pack]()
    for row in order[:number].tolist():
        cut = _is_cut(dataset, row)
        for segment, is_part in zip(split_pack(dataset.pack(row)), cut.tolist(), strict=True):
            (parts if is_part else whole).append(segment)
    notes: tuple[str, ...] = ()
    mean = sum(len(segment.input_ids) for segment in whole) // max(1, len(whole))
    if len(whole) < documents_in_step(config, dataset.seq_len, mean):
        whole += parts
    elif parts:
        notes = (f"{len(parts):,} parts of cut documents were left out: they are no documents, and fill their rows",)
    random.Random(config.seed).shuffle(whole)
    return Corpus(whole, dataset.seq_len, dataset.max_token_id, str(dataset.path), notes)


def _is_cut(dataset: Dataset, row: int) -> np.ndarray:
    """Tell which segments of a pack are parts of cut documents; bool (num_segments,).

    A later part does not begin at its document's first token, a first part fills its row; packer wrapped cuts the last
    segment of a row wherever the row ends.
    """
    pack = dataset[row]
    cut: np.ndarray = (pack["doc_offsets"] > 0) | (np.diff(pack["cu_seqlens"]) >= dataset.seq_len)
    if dataset.packer == "wrapped":
        cut[-1] = True
    return cut


def of_source(specs: tuple[str, ...], tokenizer: str, config: BenchConfig) -> Corpus:
    """Read text from random places until there is enough."""
    encoder, seq_len = Encoder(tokenizer), config.seq_len or 1024

    def enough(documents: int, tokens: int) -> bool:
        return documents >= POOL * num_steps(config) * documents_in_step(config, seq_len, tokens // documents)

    options = RecordOptions(text_field=config.text_field, overlong="truncate")  # as people do who pad
    segments = sample_documents(specs, encoder, options, seq_len, config.seed, enough)
    return Corpus(segments, seq_len, encoder.spec.max_id, ", ".join(specs))


def documents_in_step(config: BenchConfig, seq_len: int, mean: int) -> int:
    """Return how many documents a step needs: a few padded batches to choose from, and a full packed one."""
    return max(STEP_BATCHES * config.batch, math.ceil(max(config.tokens_per_batch or 0, seq_len) / max(1, mean)))


def _sizes(config: BenchConfig, corpus: Corpus) -> Sizes:
    lengths = [len(ids) for ids, *_ in corpus.segments]
    rows = max(1, round(config.batch * sum(lengths) / len(lengths) / corpus.seq_len))
    tokens = config.tokens_per_batch or rows * corpus.seq_len
    if tokens < corpus.seq_len:
        raise PackError(f"--tokens-per-batch: {tokens}; expected at least one pack of {corpus.seq_len} tokens.")
    return Sizes(seq_len=corpus.seq_len, batch=config.batch, tokens_per_batch=tokens, longest=max(lengths))


def _steps(config: BenchConfig, corpus: Corpus, sizes: Sizes) -> list[StepPacks]:
    """Deal documents to steps, the same number to each, and pack those of each step.

    Raises:
        PackError: There is not enough for one step.
    """
    segments, total = corpus.segments, len(corpus.segments)
    number = documents_in_step(config, sizes.seq_len, sum(len(ids) for ids, *_ in segments) // total)
    if total < number:
        raise PackError(
            f"{corpus.name}: {total} documents; expected at least {number} for a step. "
            "Lower --batch or --tokens-per-batch, or give more."
        )
    dealt = [segments[start : start + number] for start in range(0, total - number + 1, number)][: num_steps(config)]
    return [StepPacks(pack_rows(documents, sizes.seq_len, config.seed), documents) for documents in dealt]
