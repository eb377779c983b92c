"""Which parameters learn: frozen by pattern, or frozen as a whole with LoRA adapters beside them."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shards.errors import PackError
from trainer.config import TrainConfig


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match any shell pattern.

    Raises:
        PackError: A pattern matches nothing.
    """
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matches:
            first = next(name for name, _ in model.named_parameters())
            raise PackError(
                f"--freeze: {pattern!r} matches no parameter; names look like {first!r}. Check the pattern."
            )
        for parameter in matches:
            parameter.requires_grad_(False)


def add_adapters(model: Any, config: TrainConfig) -> Any:
    """Freeze a transformers model and add LoRA adapters; the model itself where no rank is given.

    Raises:
        PackError: peft is missing, or no module has a target's name.
    """
    if not config.lora_rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PackError("--lora-rank: peft is not installed. Run pip install peft.") from error
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        lora_dropout=0.0,
        target_modules=list(config.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
            # the export gives tied weights of which one has adapters a copy each before it merges
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied layer is part")
            # adapters in fp32 beside a bf16 base, like the fp32 weights of a full run
            return get_peft_model(model, settings, autocast_adapter_dtype=config.dtype != "bf16-pure")
    except ValueError as error:
        raise PackError(f"--lora-targets: {', '.join(config.lora_targets)}: {str(error).splitlines()[0]}") from error
