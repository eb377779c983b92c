"""`pack export-model`: a checkpoint of a run, written as a model that transformers loads.

One process does it, without optimizer and without GPU, also for runs of many: slices are put together as they are read,
and adapters that a sharded run could only save by themselves are merged.
"""

from dataclasses import fields, replace
from pathlib import Path

from shards import Dataset
from shards.errors import PackError
from trainer import distributed
from trainer.checks import check_datasets
from trainer.config import ExportConfig, TrainConfig
from trainer.run import build_model
from trainer.saving.checkpoint import Checkpoints
from trainer.saving.export import export


def export_model(config: ExportConfig) -> tuple[Path, list[str]]:
    """Write a checkpoint as a model.

    Returns:
        The directory that `AutoModelForCausalLM.from_pretrained` loads, and what a person should know, one line each.

    Raises:
        PackError: There is no such checkpoint, what it was trained on has moved, or the directory is taken.
    """
    run = Path(config.run)
    checkpoints = Checkpoints(run / "checkpoints", 1, distributed.start("cpu"))
    path = checkpoints.find(config.step, config.best)
    facts = checkpoints.facts(path)
    out = Path(config.out) if config.out else run / "export" / path.name
    if (out / "model").exists():
        raise PackError(f"{out / 'model'}: is there already; expected none. Choose another `out`, or remove it.")
    known = {each.name for each in fields(TrainConfig)}
    settings = TrainConfig(**{name: value for name, value in facts["config"].items() if name in known})
    settings = replace(
        settings, dataset=config.dataset or settings.dataset, model=config.model or settings.model, out=run
    )
    dataset = Dataset(settings.dataset)
    check_datasets(dataset, (), force=True)
    # random weights that stay frozen come from the generator of the device that the run had
    world = distributed.start(settings.device if Path(settings.model).suffix == ".json" else "cpu")
    plain = replace(settings, attention="auto", liger="off", shard="none", compile=False)
    lm, _, _ = build_model(plain, world, [dataset])
    checkpoints.load_weights(path, lm.model)
    figures = {"steps": facts["step"], "loss": facts["loss"], "eval loss": facts["eval_loss"]}
    return export(lm.model, out, dataset, settings, world, figures)
