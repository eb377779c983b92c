"""Commands of the trainer: flags to a config, one call, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from shards.errors import PackError
from trainer.config import CHOICES, TrainConfig, flag

DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
HELP = {name: hint.__metadata__[0] for name, hint in get_type_hints(TrainConfig, include_extras=True).items()}
LISTS = ("mix", "lora_targets")  # written with commas
Command = Callable[..., Any]


def _wait_idly() -> None:
    """Let threads sleep while they wait for each other; read when torch is imported.

    OpenMP lets them spin: 2 to 3 times the CPU seconds, and the time of a step where others use the same cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _train_options(command: Command) -> Command:
    for name, kind in reversed(get_type_hints(TrainConfig).items()):
        default, (base, *_) = DEFAULTS[name], get_args(kind) or (kind,)  # int of int | None, str of tuple[str, ...]
        if default is MISSING or name == "progress":
            continue
        shown: dict[str, Any] = {"help": HELP[name], "default": default, "type": base}
        if kind is bool:
            shown["is_flag"] = True
        elif name in LISTS:
            shown |= {"type": str, "default": ""}
        elif name in CHOICES:
            shown |= {"type": click.Choice(CHOICES[name]), "show_default": True}
        else:
            shown |= {"multiple": default == (), "show_default": default not in (None, ())}
        command = click.option(flag(name), name, **shown)(command)
    return command


@click.command()
@click.argument("dataset", type=click.Path())
@click.option("--model", required=True, help=HELP["model"])
@click.option("--out", required=True, type=click.Path(), help=HELP["out"])
@_train_options
@click.option("--progress/--no-progress", default=True, help=HELP["progress"])
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def train(as_json: bool, **flags: Any) -> None:
    """Train a causal language model on a packed dataset.

    \b
    Example:
      pack train data/corpus --model ./model --out runs/first --steps 1000 --lr 3e-4
      torchrun --no-python --nproc-per-node 8 pack train data/corpus --model ./model --out runs/first --shard full
    """
    flags["mix"] = _parse_mix(flags["mix"])
    flags["lora_targets"] = tuple(filter(None, flags["lora_targets"].split(",")))
    config = TrainConfig(**flags)
    _wait_idly()
    from transformers.utils import logging

    from trainer.loop import train as run

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        result = run(config)
    except KeyboardInterrupt:
        saved = any(Path(config.out, "checkpoints").glob("step-*"))
        way = "add --resume to continue from the newest checkpoint" if saved else "there is no checkpoint yet"
        click.echo(f"{config.out}: stopped; {way}.", err=True)
        raise SystemExit(130) from None
    if not result.is_main:
        return
    if as_json:
        figures = asdict(result) | {"model_dir": str(result.model_dir)}
        click.echo(json.dumps({name: value for name, value in figures.items() if name != "is_main"}))
    else:
        eval_loss = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
        steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
        click.echo(f"{steps}, loss {result.loss:.4f}{eval_loss}; model in {result.model_dir}")


def _parse_mix(text: str) -> tuple[tuple[str, float], ...]:
    pairs = []
    for part in text.split(",") if text else ():
        name, _, weight = part.partition("=")
        try:
            pairs.append((name.strip(), float(weight)))
        except ValueError as error:
            raise PackError(f"--mix: {part!r}; expected NAME=WEIGHT, such as web=0.7,code=0.3.") from error
    return tuple(pairs)


@click.command(name="check-model")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check_model(ctx: click.Context, model: str, as_json: bool) -> None:
    """Prove a model safe to pack, or say why it is not.

    \b
    Example:
      pack check-model ./model
    """
    from trainer.model.loading import check_model as check

    report = check(model)
    click.echo(json.dumps(asdict(report), default=str) if as_json else report.text())
    if not report.accepted:
        ctx.exit(1)


# the keys of STRATEGIES and PRESETS, which would import torch
STRATEGY_NAMES = (
    "padded-max", "padded-longest", "length-bucketed", "packed-dense", "packed-varlen", "hf-flattening", "trl-packed",
)  # fmt: skip
PRESET_NAMES = ("distilgpt2-wikitext2",)
BENCH_OPTIONS: list[tuple[str, Any, str]] = [
    ("model", str, "Model name, directory or config JSON. [default: the demo's small Llama]"),
    ("tokenizer", str, "Tokenizer of a SOURCE. [default: the model's]"),
    ("text_field", str, "Field of a SOURCE with the text. [default: text]"),
    ("seq_len", int, "Capacity of a pack, in tokens, for a SOURCE. [default: 1024]"),
    ("batch", int, "Documents in a padded micro-batch. [default: 16]"),
    ("tokens_per_batch", int, "Most tokens of other micro-batches. [default: what --batch documents have on average]"),
    ("steps", int, "Optimizer steps. [default: 10]"),
    ("dtype", str, "bf16 or fp32. [default: bf16 on a GPU, else fp32]"),
    ("device", str, "cuda, mps or cpu. [default: the best there is]"),
    ("seed", int, "Seed of the choice of documents and of random weights. [default: 0]"),
]


def _bench_options(command: Command) -> Command:
    for name, kind, text in reversed(BENCH_OPTIONS):
        command = click.option(flag(name), name, type=kind, help=text)(command)
    return command


@click.command()
@click.argument("data", required=False, metavar="[DATASET|SOURCE]")
@click.option("--preset", type=click.Choice(PRESET_NAMES), help="Settings of a well-known exercise.")
@click.option("--strategies", help=f"Ways of feeding, with commas: {', '.join(STRATEGY_NAMES)}. [default: all]")
@_bench_options
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(preset: str | None, strategies: str | None, html: str | None, as_json: bool, **flags: Any) -> None:
    """Compare padding, buckets and packing on this machine.

    The same documents go through every way of feeding, from the same weights; the losses must agree. Without arguments
    it runs on the demo's corpus and model. A preset is changed by any flag beside it, such as local directories.

    \b
    Example:
      pack bench data/corpus --model ./model --html bench.html
      pack bench --preset distilgpt2-wikitext2
    """
    _wait_idly()
    from trainer.bench.run import PRESETS, BenchConfig, print_result, run_bench, write_result_page

    if html and not Path(html).resolve().parent.is_dir():  # known before minutes of measuring
        raise PackError(f"--html {html}: there is no such directory. Create it, or choose another file.")
    given = {name: value for name, value in flags.items() if value is not None}
    if strategies is not None:
        given["strategies"] = tuple(name.strip() for name in strategies.split(",") if name.strip())
    result = run_bench(BenchConfig(**(PRESETS.get(preset or "", {}) | given)), lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(result))
    else:
        print_result(result)
    if html:
        write_result_page(result, html)


@click.command()
@click.option("--out", default="demo", show_default=True, type=click.Path(), help="Directory for everything it makes.")
@click.option("--steps", type=int, default=40, show_default=True, help="Training steps.")
def demo(out: str, steps: int) -> None:
    """Show the whole way on a corpus that every Python has.

    Builds, verifies and inspects a dataset of this Python's standard library, trains a small model on it, compares ways
    of feeding, and generates a line of text. Needs no network; a second run reuses what is there.

    \b
    Example:
      pack demo --out demo
    """
    _wait_idly()
    from trainer.demo import DemoConfig, run_demo

    run_demo(DemoConfig(out=out, steps=steps))
