"""`pack demo`: the whole way, from raw text to a trained model, on a corpus that every Python has.

The corpus is the running Python's standard library: module sources, and every docstring as a document of its own, so
thousands of documents from one line to tens of thousands of tokens. Tokenizer and model are made on the spot; nothing
is fetched. Everything lies in one directory, marked by `demo.json`; a second run reuses corpus, tokenizer and dataset
where they are still what it would make, and trains again.
"""

import ast
import json
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline.building.driver import build
from pipeline.building.progress import RichProgress
from pipeline.config import BuildConfig
from pipeline.report.inspection import Inspection
from pipeline.report.runs import curve_points, read_run
from pipeline.report.terminal import print_view
from shards.errors import PackError
from shards.verification import verify
from trainer.bench import view as bench_view
from trainer.config import TrainConfig

VERSION = 1  # of what lies in the directory
VOCAB_SIZE = 8192
SEQ_LEN = 1024
TOKENIZER_TEXT = 3 << 20  # characters: enough for 8k words, a few seconds
# tests, tools with a face, and other people's packages: not what one would call the library
SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}
MODEL = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": True,
}  # fmt: skip
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """One `pack demo`."""

    out: str = "demo"
    "Directory for everything it makes."
    steps: int = 40
    "Training steps."

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PackError(f"--steps: {self.steps}; expected at least 1.")


def run_demo(config: DemoConfig) -> None:
    """Build, verify, inspect, train, compare and generate; tell each on stdout.

    Raises:
        PackError: The directory holds something else, or a part failed.
    """
    out = Path(config.out)
    claim(out)
    _head(1, "A corpus: the standard library of this Python, and a tokenizer trained on it")
    sources, tokenizer = prepare(out)
    _say(f"{', '.join(f'{path.name}: {_megabytes(path)}' for path in sources)}; {VOCAB_SIZE:,} tokens in {tokenizer}")
    dataset = out / "data"
    _head(2, f"pack build {sources[0]} {sources[1]} --tokenizer {tokenizer} --seq-len {SEQ_LEN} --out {dataset}")
    build_dataset(sources, tokenizer, dataset, workers=2)
    _head(3, f"pack verify {dataset}")
    report = verify(str(dataset), "full", VOCAB_SIZE)
    if not report.ok:
        raise PackError(report.problems[0].message)
    _say(f"sound: {report.shards_checked} shards, {report.packs_checked:,} packs, {report.tokens_checked:,} tokens")
    _head(4, f"pack inspect {dataset}")
    model = _model_config(out)
    inspection = Inspection((str(dataset),), packs_per_step=4, model=str(model), mix={}, rows=False)
    print_view(inspection.view())
    run = out / "run"
    _head(5, f"pack train {dataset} --model {model} --out {run} --steps {config.steps}")
    train_model(dataset, model, run, config.steps)
    _head(6, "The same documents, fed in other ways: pack bench")
    compare(dataset, model)
    _head(7, f"A line from {run / 'model'}, after {config.steps} steps")
    _say(generate(run / "model"))
    _head(8, "The same with your own data")
    for line in YOURS:
        _say(line)
    _say("")
    _say(f"Everything lies in {out.resolve()}: corpus, tokenizer, data (shards), run (metrics, checkpoint, model).")


YOURS = (
    "pack build corpus.jsonl --tokenizer ./model --seq-len 2048 --out data/corpus",
    "pack inspect data/corpus",
    "pack train data/corpus --model ./model --out runs/first",
)


def _head(number: int, text: str) -> None:
    Console(highlight=False).print(Text(f"\n{number}  {text}", style="bold cyan"), soft_wrap=True)


def _say(text: str) -> None:
    Console(highlight=False).print(Text(f"   {text}"), soft_wrap=True)  # commands stay in one piece


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def claim(out: Path) -> None:
    """Make the directory, unless something else is in it; clear it if another version of Python or demo filled it.

    Raises:
        PackError: It holds something else, or cannot be written.
    """
    mark = out / "demo.json"
    facts = {"shardpack": metadata.version("shardpack"), "demo": VERSION, "python": sys.version}
    try:
        if out.exists() and not mark.exists() and any(out.iterdir()):
            raise PackError(
                f"{out}: holds something else; expected an empty or absent directory. Choose another --out."
            )
        if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) != facts:
            for part in ("corpus", "tokenizer", "data", "run"):
                shutil.rmtree(out / part, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps(facts), encoding="utf-8")
    except OSError as error:
        raise PackError(f"{out}: cannot write here ({error.strerror}). Choose another --out.") from error


def prepare(out: Path) -> tuple[list[Path], Path]:
    """Write corpus and tokenizer under a directory, unless they are there.

    Returns:
        The two JSONL files, sources and docstrings; the tokenizer's directory.
    """
    corpus, tokenizer = out / "corpus", out / "tokenizer"
    files = [corpus / "sources.jsonl", corpus / "docstrings.jsonl"]
    if not (tokenizer / "tokenizer.json").exists():  # written last
        corpus.mkdir(parents=True, exist_ok=True)
        modules = list(stdlib_modules())
        _write(files[0], modules)
        _write(files[1], [(name, text) for module, source in modules for name, text in docstrings(module, source)])
        train_tokenizer([text for file in files for text in _read(file)], tokenizer)
    return files, tokenizer


def stdlib_modules() -> Iterator[tuple[str, str]]:
    """Yield name and source of every module of the standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py":
                try:
                    source = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):  # a few sources are Latin-1, to test the tokenizer of Python
                    continue
                if source.strip():
                    yield path.relative_to(root).as_posix(), source


def docstrings(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of every docstring of a module."""
    try:
        with warnings.catch_warnings(action="ignore"):  # old escapes in strings
            tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module}:{getattr(node, 'name', '')}", text


def _write(path: Path, documents: list[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, text in documents:
            file.write(json.dumps({"name": name, "text": text}) + "\n")


def _read(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def train_tokenizer(texts: list[str], out: Path) -> None:
    """Train a byte-level BPE on about `TOKENIZER_TEXT` characters, taken evenly from all texts, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    share = min(1.0, TOKENIZER_TEXT / max(1, sum(map(len, texts))))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((text[: max(80, int(len(text) * share))] for text in texts), trainer)
    out.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))


def write_model_config(path: Path, vocab_size: int, max_positions: int) -> None:
    """Write the configuration of a Llama-shaped model of a few million parameters."""
    config = MODEL | {"vocab_size": vocab_size, "max_position_embeddings": max_positions}
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def _model_config(out: Path) -> Path:
    path = out / "model.json"
    write_model_config(path, VOCAB_SIZE, SEQ_LEN)
    return path


def build_dataset(sources: list[Path], tokenizer: Path, dataset: Path, workers: int) -> None:
    """Build the dataset, or find it built."""
    named = tuple(f"{path.stem}={path}" for path in sources)
    there = (dataset / "manifest.json").exists()
    config = BuildConfig(
        sources=named, out=str(dataset), tokenizer=str(tokenizer), seq_len=SEQ_LEN, workers=workers, resume=there,
        overwrite=not there,
    )  # fmt: skip
    with RichProgress(None) as progress:
        build(config, progress)


def train_model(dataset: Path, model: Path, run: Path, steps: int) -> None:
    """Train from random weights, and show how the loss falls."""
    from trainer.loop import train

    _hide_bars()
    shutil.rmtree(run, ignore_errors=True)
    config = TrainConfig(
        dataset=str(dataset), model=str(model), out=str(run), steps=steps, tokens_per_batch=2 * SEQ_LEN, lr=3e-3,
        warmup_steps=min(5, steps), dtype="fp32", log_every=max(1, steps // 20),
    )  # fmt: skip
    train(config)
    at, losses = curve_points(read_run(str(run)), "loss")
    low, high = min(losses), max(losses)
    marks = [SPARKS[round((loss - low) / (high - low or 1) * (len(SPARKS) - 1))] for loss in losses]
    _say(f"loss {losses[0]:.2f} {''.join(marks)} {losses[-1]:.2f}   steps {at[0]} to {at[-1]}")


def _hide_bars() -> None:
    """Let transformers load and save a small model without a progress bar."""
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()


def compare(dataset: Path, model: Path) -> None:
    """Print what padding, buckets and packing make of the same documents."""
    from trainer.bench.config import BenchConfig
    from trainer.bench.run import run_bench

    strategies = ("padded-longest", "length-bucketed", "packed-varlen")
    config = BenchConfig(data=str(dataset), model=str(model), steps=2, batch=8, strategies=strategies)
    bench_view.print_result(run_bench(config))


def generate(model_dir: Path, prompt: str = "def ", tokens: int = 40) -> str:
    """Return one line of text from a saved model, loaded by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _hide_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    model.eval()
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=40,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    text = " ".join(tokenizer.decode(written[0], skip_special_tokens=True).split())
    return "".join(letter for letter in text if letter.isprintable())  # a young model may write any byte
