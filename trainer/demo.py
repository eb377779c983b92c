"""`pack demo`: every step from raw text to a trained model, run by the commands that it prints.

Everything lies in one directory, marked by `demo.json`; a second run reuses corpus, tokenizer and dataset where they
are still what it would make, and trains again.
"""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline.cli import main
from pipeline.report.runs import curve_points, read_run
from pipeline.report.terminal import safe_text
from shards.errors import PackError
from shards.quiet import quiet
from shards.text import printable
from trainer.demo_corpus import SEQ_LEN, VOCAB_SIZE, make_corpus, write_model_config

VERSION = 2  # of what lies in the directory
SPARKS = "▁▂▃▄▅▆▇█"
YOURS = (
    "pack build corpus.jsonl --tokenizer ./model --seq-len 2048 --out data/corpus",
    "pack inspect data/corpus",
    "pack train data/corpus --model ./model --out runs/first",
)


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
    """Build, verify, inspect, train, compare and generate; show each on stdout.

    Raises:
        PackError: The directory holds something else, or a part failed.
    """
    out = Path(config.out)
    claim_directory(out)
    _head(1, "A corpus: the standard library of this Python, and a tokenizer trained on it")
    files, tokenizer = make_corpus(out)
    _say(f"{', '.join(f'{path.name}: {_megabytes(path)}' for path in files)}; {VOCAB_SIZE:,} tokens in {tokenizer}")
    write_model_config(out / "model.json", VOCAB_SIZE, SEQ_LEN)
    run = out / "run"
    shutil.rmtree(run, ignore_errors=True)
    for number, arguments in enumerate(list_commands(out, files, tokenizer, config.steps), 2):
        _head(number, shlex.join(["pack", *arguments]))
        main(arguments, prog_name="pack", standalone_mode=False)
        if arguments[0] == "train":
            _say(draw_losses(run))
    _head(7, f"A line from {run / 'model'}, after {config.steps} steps")
    _say(generate_text(run / "model"))
    _head(8, "The same with your own data")
    for line in YOURS:
        _say(line)
    _say("")
    _say(f"Everything lies in {out.resolve()}: corpus, tokenizer, data (shards), run (metrics, checkpoint, model).")


def list_commands(out: Path, files: list[Path], tokenizer: Path, steps: int) -> list[list[str]]:
    """Return the arguments of every `pack` command of the demo, in order."""
    data, model = str(out / "data"), str(out / "model.json")
    sources = [f"{path.stem}={path}" for path in files]
    return [
        ["build", *sources, "--tokenizer", str(tokenizer), "--seq-len", str(SEQ_LEN), "--out", data, "--resume"],
        ["verify", data, "--vocab-size", str(VOCAB_SIZE)],
        ["inspect", data, "--model", model, "--packs-per-step", "2"],
        [
            "train", data, "--model", model, "--out", str(out / "run"), "--steps", str(steps),
            "--tokens-per-batch", str(2 * SEQ_LEN), "--lr", "3e-3", "--warmup-steps", str(min(5, steps)),
            "--dtype", "fp32", "--log-every", str(max(1, steps // 20)),
        ],
        [
            "bench", data, "--model", model, "--steps", "2", "--batch", "8",
            "--strategies", "padded-longest,length-bucketed,packed-varlen",
        ],
    ]  # fmt: skip


def _head(number: int, text: str) -> None:
    Console(highlight=False).print(Text(f"\n{number}  {printable(text)}", style="bold cyan"), soft_wrap=True)


def _say(text: str) -> None:
    Console(highlight=False).print(safe_text(f"   {text}"), soft_wrap=True)  # commands stay in one piece


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def claim_directory(out: Path) -> None:
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


def draw_losses(run: Path) -> str:
    """Return how the loss of a run falls, in one line."""
    steps, losses = curve_points(read_run(str(run)), "loss")
    low, high = min(losses), max(losses)
    marks = [SPARKS[round((loss - low) / (high - low or 1) * (len(SPARKS) - 1))] for loss in losses]
    return f"loss {losses[0]:.2f} {''.join(marks)} {losses[-1]:.2f}   steps {steps[0]} to {steps[-1]}"


def generate_text(model_dir: Path, prompt: str = "def ", tokens: int = 40) -> str:
    """Return one line of text from a saved model, loaded by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False)
    model.eval()
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=40,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return " ".join(tokenizer.decode(written[0], skip_special_tokens=True).split())
