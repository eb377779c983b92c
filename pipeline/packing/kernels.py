"""Numeric loops: plain Python where there is little to do, machine code by numba where there is much.

Importing numba and loading machine code takes half a second, and compiling it, once on a machine, about six; a corpus
of a few megabytes is packed by then. So a kernel runs as the Python that it is until a process has done so many steps
that compiling (or loading, where that has been done before) would have paid. Both give the same result: kernels hold
integer arithmetic on arrays alone. Add one as a function under `kernel`, and what it calls under `inner`.
"""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from pipeline.caches import temporary_directory

STEPS_TO_LOAD = 2_000_000  # of Python, about as long as importing numba and loading what it compiled before
STEPS_TO_COMPILE = 20_000_000

KERNELS: list["Kernel"] = []
_inner: list[Callable[..., Any]] = []
_state = {"steps": 0, "budget": STEPS_TO_COMPILE}
Function = TypeVar("Function", bound=Callable[..., Any])


class Kernel:
    """A function that is compiled when that pays.

    Args:
        function: Integer arithmetic on arrays.
        steps: About how many steps of its innermost loop it takes, from its arguments.
    """

    def __init__(self, function: Callable[..., Any], steps: Callable[..., int]) -> None:
        self.function, self.steps = function, steps
        self.__doc__ = function.__doc__
        KERNELS.append(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run it, compiled or not."""
        if self._runs_interpreted(arguments):
            with np.errstate(over="ignore"):  # random draws wrap around
                return self.function(*arguments)
        return self.compiled(*arguments)

    @cached_property
    def compiled(self) -> Any:
        """The function as numba compiles it (its first call does), kept for the next process where there is a place."""
        numba: Any = import_module("numba")
        while _inner:
            numba.extending.register_jitable(_inner.pop())
        try:
            return numba.njit(cache=True, nogil=True)(self.function)
        except RuntimeError:  # neither the package nor the home directory can be written
            directory = temporary_directory("numba")
        if directory is None:
            return numba.njit(nogil=True)(self.function)
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(directory)
        try:
            return numba.njit(cache=True, nogil=True)(self.function)
        finally:
            numba.config.CACHE_DIR = before

    def is_kept(self) -> bool:
        """Whether a process on this machine has compiled it before, from the same source and by the same numba."""
        cache = self.compiled._cache
        index = getattr(cache, "_cache_file", None)
        if index is None:  # there is no place to keep it
            return bool(self.compiled.signatures)
        target = self.compiled.targetctx.codegen().magic_tuple()
        return any(key[1] == target for key in index._load_index())

    def _runs_interpreted(self, arguments: tuple[Any, ...]) -> bool:
        if "compiled" in self.__dict__:
            return False
        steps = _state["steps"] + self.steps(*arguments)
        if steps > min(_state["budget"], STEPS_TO_LOAD) and (steps > _state["budget"] or self.is_kept()):
            return False
        _state["steps"] = steps
        return True


def kernel(steps: Callable[..., int]) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a kernel; `steps` says from its arguments about how many steps it takes."""
    return lambda function: Kernel(function, steps)


def inner(function: Function) -> Function:
    """Mark a function that kernels call, so that it is compiled into them."""
    _inner.append(function)
    return function


def always_compile() -> None:
    """Run no kernel as plain Python in this process from now on."""
    _state["budget"] = 0


def cache_note() -> str:
    """Say where machine code is kept where that is not beside the package or in the home directory; else nothing."""
    places = {str(entry.compiled.stats.cache_path) for entry in KERNELS}
    if "None" in places:
        return "numba has no place to keep what it compiles (package, home and temporary directory are read-only)"
    temporary = str(temporary_directory("numba"))
    if any(place.startswith(temporary) for place in places):
        return f"package and home directory are read-only: numba keeps what it compiles in {temporary}"
    return ""
