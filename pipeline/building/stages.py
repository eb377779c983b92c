"""Where the seconds of a build go: read, parse, tokenize, pack, gather, write, hash (and load, wait of the driver)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stages:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time spent inside to stage `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - begin)

    def inside(self, outer: str) -> Callable[[str, float], None]:
        """Return a function that books seconds under a name of their own, not under the stage around them."""

        def book(name: str, seconds: float) -> None:
            self._add(name, seconds)
            self._add(outer, -seconds)

        return book

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
