"""Commands of the trainer: flags to a config, one call, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline.cli import given, options_of, say, settings_file
from shards.errors import PackError
from shards.quiet import quiet
from trainer.bench.config import PRESETS, BenchConfig
from trainer.config import ExportConfig, TrainConfig


def wait_idly() -> None:
    """Let threads sleep while they wait for each other; read when torch is imported.

    OpenMP lets them spin: 2 to 3 times the CPU seconds, and the time of a step where others use the same cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@click.command()
@click.argument("dataset", required=False, metavar="DATASET", type=click.Path())
@options_of(TrainConfig, omit=("dataset",))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@settings_file(TrainConfig, positional="dataset")
def train(as_json: bool, **settings: Any) -> None:
    """Train a causal language model on a packed dataset.

    \b
    Example:
      pack train data/corpus --model ./model --out runs/first --steps 1000 --lr 3e-4
      torchrun --no-python --nproc-per-node 8 pack train data/corpus --model ./model --out runs/first --shard full
    """
    config = TrainConfig(**settings)
    wait_idly()
    from trainer.loop import train as run

    try:
        with quiet():
            result = run(config)
    except KeyboardInterrupt:
        saved = any(Path(config.out, "checkpoints").glob("step-*"))
        way = "add --resume to continue from the newest checkpoint" if saved else "there is no checkpoint yet"
        say(f"{config.out}: stopped; {way}.", err=True)
        raise SystemExit(130) from None
    if not result.is_main:
        return
    if as_json:
        figures = asdict(result) | {"model_dir": str(result.model_dir)}
        click.echo(json.dumps({name: value for name, value in figures.items() if name != "is_main"}))
    else:
        eval_loss = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
        steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
        say(f"{steps}, loss {result.loss:.4f}{eval_loss}; model in {result.model_dir}")


@click.command(name="export-model")
@click.argument("run", type=click.Path())
@options_of(ExportConfig, omit=("run",))
def export_model(**flags: Any) -> None:
    """Write a checkpoint of a run as a model.

    \b
    Example:
      pack export-model runs/first --best
      pack export-model runs/first --step 340 --out models/at-340
    """
    wait_idly()
    from trainer.export_model import export_model as export

    with quiet():
        model_dir, notes = export(ExportConfig(**given(flags)))
    for note in notes:
        say(note, err=True)
    say(f"model in {model_dir}")


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
    say(json.dumps(asdict(report), default=str) if as_json else report.text())
    if not report.accepted:
        ctx.exit(1)


@click.command()
@click.argument("data", required=False, metavar="[DATASET|SOURCE]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Settings of a well-known exercise.")
@options_of(BenchConfig, omit=("data",))
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(preset: str | None, html: str | None, as_json: bool, **flags: Any) -> None:
    """Compare padding, buckets and packing on this machine.

    The same documents go through every way of feeding, from the same weights; the losses must agree. Without arguments
    it runs on the demo's corpus and model. A preset is changed by any flag beside it, such as local directories.

    \b
    Example:
      pack bench data/corpus --model ./model --html bench.html
      pack bench --preset distilgpt2-wikitext2
    """
    wait_idly()
    from trainer.bench.run import print_result, run_bench, write_result_page

    if html and not Path(html).resolve().parent.is_dir():  # known before minutes of measuring
        raise PackError(f"--html {html}: there is no such directory. Create it, or choose another file.")
    settings = PRESETS.get(preset or "", {}) | given(flags)
    result = run_bench(BenchConfig(**settings), lambda line: say(line, err=True))
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
    wait_idly()
    from trainer.demo import DemoConfig, run_demo

    run_demo(DemoConfig(out=out, steps=steps))
