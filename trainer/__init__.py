"""From packed shards to a trained model: loader, batch, attention, loss, loop, and collators for other trainers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.collator import PackedCollator as PackedCollator
    from trainer.collator import WeightedTrainer as WeightedTrainer
    from trainer.config import TrainConfig as TrainConfig
    from trainer.documents.trace import RunTrace as RunTrace
    from trainer.evaluation import evaluate as evaluate
    from trainer.loader import PackLoader as PackLoader
    from trainer.loop import TrainResult as TrainResult
    from trainer.loop import train as train
    from trainer.model.backends.registry import ATTENTION_BACKENDS as ATTENTION_BACKENDS
    from trainer.model.loading import check_model as check_model
    from trainer.model.loading import load_model as load_model
    from trainer.model.loss import PackedLM as PackedLM

_HOMES = {
    "ATTENTION_BACKENDS": "trainer.model.backends.registry",
    "PackLoader": "trainer.loader",
    "PackedCollator": "trainer.collator",
    "PackedLM": "trainer.model.loss",
    "RunTrace": "trainer.documents.trace",
    "TrainConfig": "trainer.config",
    "TrainResult": "trainer.loop",
    "WeightedTrainer": "trainer.collator",
    "check_model": "trainer.model.loading",
    "evaluate": "trainer.evaluation",
    "load_model": "trainer.model.loading",
    "train": "trainer.loop",
}
__all__ = [
    "ATTENTION_BACKENDS", "PackLoader", "PackedCollator", "PackedLM", "RunTrace", "TrainConfig", "TrainResult",
    "WeightedTrainer", "__version__", "check_model", "evaluate", "load_model", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("shardpack")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
