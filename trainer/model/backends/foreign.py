"""Code of others, called so that whatever it raises is a reason and not the end of a run."""

import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shards.errors import reason_of


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """Run foreign code and return what it raised, if anything.

    Kernels and their compilers raise classes of their own, and packages built for another torch raise whatever their
    first line trips over: no list of classes would be complete. Nothing of this project's may run in here but the call.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).exception()


def describe_failure(error: BaseException) -> str:
    """Return an exception's class and the first line of what it says."""
    return f"{type(error).__name__}: {reason_of(error)}"


@functools.cache
def import_reason(module: str, package: str) -> str | None:
    """Return why a module cannot be used: its package is not installed, or is and cannot be imported."""
    error = failure_of(lambda: importlib.import_module(module))
    if error is None:
        return None
    parts = module.split(".")
    parents = {".".join(parts[: i + 1]) for i in range(len(parts))}
    if isinstance(error, ModuleNotFoundError) and error.name in parents:
        return f"{package} is not installed"
    return f"{package} is installed, but cannot be imported ({describe_failure(error)})"
