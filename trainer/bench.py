"""`pack bench`: the same documents, fed to the same model in every way there is, side by side on this machine.

Documents come from a dataset, or are read from a corpus until there are enough; nothing is written. The random choice
of packs, the steps and the first weights are the same for all strategies. What makes a strategy is in `strategies`, the
clock in `measuring`; here is what is asked, what comes out, and how it is shown.
"""

import importlib.metadata
import math
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.bench_view import show as show
from pipeline.bench_view import write_page as write_page
from pipeline.config import RecordOptions
from pipeline.sampling import pack_rows, sample_documents
from pipeline.tokenizing import Encoder
from shards import Dataset, PackError
from trainer.batch import Pack
from trainer.demo import prepare, write_model_config
from trainer.loader import window_pairs
from trainer.measuring import Bench, Figures, Work, disagreements, summarize
from trainer.metrics import Cost, cost_of, peak_flops
from trainer.models import check_segments, check_vocabulary, load_model
from trainer.strategies import STRATEGIES, Cannot, Sizes, StepPacks, Strategy, check_names, make_strategies, split

VERSION = 1
LEAK = 1e-4  # relative change of a loss that is no rounding
BASELINE = "padded-longest"
STEP_BATCHES = 3  # padded batches in a step
POOL, POOL_PACKS = 4, 256  # times the documents that are used, and packs, that are chosen from
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative; a full leak moves the loss of random weights by about 1e-3
WIKITEXT = "hf:Salesforce/wikitext/wikitext-2-raw-v1"
PRESETS: dict[str, dict[str, Any]] = {
    "distilgpt2-wikitext2": {"data": WIKITEXT, "model": "distilbert/distilgpt2", "seq_len": 512, "batch": 8},
}
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One `pack bench`."""

    data: str | None = None
    "Dataset directory, or a SOURCE of text; None for the demo's corpus."
    model: str | None = None
    "Model name, directory or config JSON; None for the demo's model."
    tokenizer: str | None = None
    "Tokenizer of a SOURCE; None for the model's."
    text_field: str = "text"
    "Field of a SOURCE with the text."
    seq_len: int | None = None
    "Capacity of a pack, in tokens, for a SOURCE; None for 1024. A dataset has its own."
    batch: int = 16
    "Documents in a padded micro-batch."
    tokens_per_batch: int | None = None
    "Most tokens of any other micro-batch; None for as many as `batch` documents have on average."
    steps: int = 10
    "Optimizer steps, each of as many packs as fill one micro-batch."
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    "Keys of STRATEGIES."
    dtype: str | None = None
    "bf16 (autocast, fp32 weights) or fp32; None for bf16 on a GPU, fp32 elsewhere."
    device: str | None = None
    "cuda, mps or cpu; None for the best there is."
    seed: int = 0
    "Seed of the choice of packs, their order and random weights."

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "tokens_per_batch", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"--{name.replace('_', '-')}: {value}; expected at least 1.")
        if self.dtype not in (None, *TOLERANCE):
            raise PackError(f"--dtype: {self.dtype!r}; expected one of {', '.join(TOLERANCE)}.")
        check_names(self.strategies)


@dataclass(frozen=True)
class Corpus:
    """What strategies are fed."""

    segments: list[Pack]
    "Documents, or parts of at most `seq_len` tokens, each a row of its own, in random order."
    seq_len: int
    max_token_id: int
    name: str


def run_bench(config: BenchConfig, tell: Callable[[str], None] = lambda line: None) -> Result:
    """Run every strategy.

    Args:
        config: What is asked.
        tell: Takes a line of progress.

    Returns:
        Machine, model, data and settings; `rows`, one a strategy; `disagreements`, the strategies whose losses differ
        from the first row's; `notes`.

    Raises:
        PackError: Data, model and settings do not fit.
    """
    device = torch.device(config.device or _best_device())
    dtype = config.dtype or ("bf16" if device.type == "cuda" else "fp32")
    with tempfile.TemporaryDirectory(prefix="shardpack-bench-") as folder:
        corpus = _corpus(config, Path(folder), tell)
        model = config.model or _default_model(Path(folder), corpus)
        torch.manual_seed(config.seed)
        computed = torch.bfloat16 if dtype == "bf16" else torch.float32
        loaded = load_model(model, compute_dtype=computed, device=device, packed=False)
    sizes = _sizes(config, corpus)
    check_segments(loaded.report, sizes.longest)
    check_vocabulary(loaded.report, corpus.max_token_id)
    work = _work(config, corpus, sizes, cost_of(loaded.model))
    strategies = make_strategies(config.strategies, loaded, sizes, computed)
    bench = Bench(loaded.model, dtype == "bf16")
    measured, notes = [], []
    for strategy in strategies:
        tell(f"{strategy.name} …")
        if isinstance(strategy, Cannot):
            measured.append(Figures(strategy=strategy.name, failed=f"not run: {strategy.reason}"))
            continue
        measured.append(bench.measure(strategy, work))
        notes += _leak(strategy, bench, work) if not measured[-1].failed else []
    baseline = next((figures for figures in measured if figures.strategy == BASELINE), None)
    rows = [summarize(figures, work, baseline, peak_flops(device)) for figures in measured]
    return {
        "version": VERSION,
        "machine": machine(device),
        "model": {"name": config.model or "demo", "parameters": sum(p.numel() for p in loaded.model.parameters())},
        "data": {
            "name": corpus.name,
            "documents": sum(len(step.documents) for step in work.steps),
            "tokens": sum(work.tokens),
            "targets": sum(work.targets),
            "steps": len(work.steps),
            "packs": sum(len(step.packs) for step in work.steps),
        },
        "settings": asdict(sizes) | {"dtype": dtype, "seed": config.seed},
        "rows": rows,
        "disagreements": disagreements(rows, TOLERANCE[dtype]),
        "notes": [*notes, *_wide(rows)],
    }


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def machine(device: torch.device) -> Result:
    """Return what a figure depends on beside the code: device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    packages = ("torch", "transformers", "numpy", "shardpack")
    versions = {package: importlib.metadata.version(package) for package in packages}
    threads = torch.get_num_threads()
    return {"device": device.type, "name": name, "threads": threads, "python": platform.python_version(), **versions}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _default_model(folder: Path, corpus: Corpus) -> str:
    write_model_config(folder / "model.json", corpus.max_token_id + 1, corpus.seq_len)
    return str(folder / "model.json")


def _corpus(config: BenchConfig, folder: Path, tell: Callable[[str], None]) -> Corpus:
    if config.data and (Path(config.data) / "manifest.json").exists():
        if config.seq_len:
            raise PackError(f"--seq-len: {config.data} is a dataset and has its own. Leave the flag out.")
        return of_dataset(Dataset(config.data), config)
    if config.data:
        tokenizer = config.tokenizer or config.model
        if tokenizer is None or (config.tokenizer is None and tokenizer.endswith(".json")):
            raise PackError(
                f"{config.data}: is no dataset, so its text needs a tokenizer. Add --tokenizer NAME_OR_DIR."
            )
        return of_source((config.data,), tokenizer, config)
    tell("making the demo's corpus and tokenizer …")
    files, made = prepare(folder)
    return of_source(tuple(map(str, files)), str(made), config)


def of_dataset(dataset: Dataset, config: BenchConfig) -> Corpus:
    """Take segments from many random packs of a dataset."""
    if not len(dataset):
        raise PackError(f"{dataset.path}: has no packs; expected some. Build it from a corpus with documents.")
    index = dataset.index
    order = np.random.default_rng(config.seed).permutation(len(dataset))
    segments, tokens = index.num_segments[order].cumsum(dtype=np.int64), index.num_tokens[order].cumsum(dtype=np.int64)
    wanted = config.steps * documents_in_step(config, dataset.seq_len, int(tokens[-1] // segments[-1]))
    number = max(POOL_PACKS, int(np.searchsorted(segments, POOL * wanted)) + 1)
    rows = [segment for row in order[:number].tolist() for segment in split(dataset.pack(row))]
    random.Random(config.seed).shuffle(rows)
    return Corpus(rows, dataset.seq_len, dataset.max_token_id, str(dataset.path))


def of_source(specs: tuple[str, ...], tokenizer: str, config: BenchConfig) -> Corpus:
    """Read text from random places until there is enough."""
    encoder, seq_len = Encoder(tokenizer), config.seq_len or 1024

    def enough(documents: int, tokens: int) -> bool:
        return documents >= POOL * config.steps * documents_in_step(config, seq_len, tokens // documents)

    options = RecordOptions(text_field=config.text_field)
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


def _work(config: BenchConfig, corpus: Corpus, sizes: Sizes, cost: Cost) -> Work:
    """Deal documents to steps, the same number to each, pack those of a step, and count what it holds.

    Raises:
        PackError: There is not enough for one step.
    """
    lengths = np.array([len(ids) for ids, *_ in corpus.segments], np.int64)
    number = documents_in_step(config, sizes.seq_len, int(lengths.mean()))
    if len(lengths) < number:
        raise PackError(
            f"{corpus.name}: {len(lengths)} documents; expected at least {number} for a step. "
            "Lower --batch or --tokens-per-batch, or give more."
        )
    work = Work(steps=[], tokens=[], targets=[], flops=[])
    for start in range(0, len(lengths) - number + 1, number)[: config.steps]:
        segments, here = corpus.segments[start : start + number], lengths[start : start + number]
        pairs = int((here * (here + 1) // 2).sum())
        windowed = pairs if cost.window is None else sum(window_pairs(cu, cost.window) for *_, cu in segments)
        work.steps.append(StepPacks(pack_rows(segments, sizes.seq_len, config.seed), segments))
        work.tokens.append(int(here.sum()))
        work.targets.append(max(1, sum(int(mask.sum()) for _, _, mask, _ in segments)))
        work.flops.append(cost.flops(work.tokens[-1], pairs, windowed))
    return work


def _leak(strategy: Strategy, bench: Bench, work: Work) -> list[str]:
    """Show what a reference computes where `use_cache` is left as the model has it."""
    from trainer.references import Flattened

    if not isinstance(strategy, Flattened):
        return []
    most = max(range(len(work.steps)), key=lambda k: len(work.steps[k].documents) / len(work.steps[k].packs))
    with torch.no_grad(), bench.context():
        batches = [strategy.collate(micro) for micro in strategy.cut(work.steps[most])]
        right, bare = (
            float(sum(strategy.loss(batch, work.targets[most], **cache) for batch in batches))
            for cache in ({}, {"use_cache": True})
        )
    if abs(bare - right) <= LEAK * abs(right):
        return []
    return [
        f"{strategy.name} is right because use_cache=False is passed: left as the model's configuration has it, the "
        f"same batch has loss {bare:.5f} instead of {right:.5f}, since its documents see each other, without an error"
    ]


def _wide(rows: list[Result]) -> list[str]:
    names = [row["strategy"] for row in rows if row.get("wide")]
    return (
        [f"{', '.join(names)}: step rates spread widely; run again on a quiet machine, or with more --steps"]
        if names
        else []
    )
