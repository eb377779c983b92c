"""From segment lengths to packs: cutting, packers, rows."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.packing.packers import PACKERS as PACKERS
    from pipeline.packing.packers import Bins as Bins
    from pipeline.packing.packers import lower_bound as lower_bound
    from pipeline.packing.packers import pack as pack

__all__ = ["PACKERS", "Bins", "lower_bound", "pack"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # numba loads only when somebody packs
        return getattr(import_module("pipeline.packing.packers"), name)
    raise AttributeError(f"module 'pipeline.packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
