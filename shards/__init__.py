"""The dataset format: what a directory of packed shards is, how it is written, read, ordered and verified."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shards.errors import FormatError as FormatError
    from shards.errors import OptionError as OptionError
    from shards.errors import PackError as PackError
    from shards.fetching.cache import Cache as Cache
    from shards.ordering.step_order import StepOrder as StepOrder
    from shards.reader import Dataset as Dataset
    from shards.reader import Pack as Pack
    from shards.verification import verify as verify

_HOMES = {
    "Cache": "shards.fetching.cache",
    "Dataset": "shards.reader",
    "FormatError": "shards.errors",
    "OptionError": "shards.errors",
    "Pack": "shards.reader",
    "PackError": "shards.errors",
    "StepOrder": "shards.ordering.step_order",
    "verify": "shards.verification",
}
__all__ = ["Cache", "Dataset", "FormatError", "OptionError", "Pack", "PackError", "StepOrder", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shards' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
