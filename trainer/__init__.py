"""From packed shards to a trained model: loader, batch, attention, loss, loop, and collators for other trainers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.collator import PackedCollator as PackedCollator
    from trainer.config import TrainConfig as TrainConfig
    from trainer.loader import PackLoader as PackLoader
    from trainer.loop import Trained as Trained
    from trainer.loop import train as train

_HOMES = {
    "PackLoader": "trainer.loader",
    "PackedCollator": "trainer.collator",
    "TrainConfig": "trainer.config",
    "Trained": "trainer.loop",
    "train": "trainer.loop",
}
__all__ = ["PackLoader", "PackedCollator", "TrainConfig", "Trained", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
