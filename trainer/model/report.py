"""What is known about a model's fitness for packed rows, and the words for it."""

import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from shards.errors import counted
from trainer.model.attention import chunk_of
from trainer.model.backends.interface import Needs
from trainer.model.unflatten import Unflattening

_KERNELS = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')


@dataclass
class ModelReport:
    """What is known about a model's fitness for packed rows."""

    name: str
    model_type: str
    accepted: bool = False
    reason: str | None = None
    "Why it is refused."
    num_layers: int = 0
    ways: list[str] = field(default_factory=list)
    "How each kind of layer keeps documents apart, one line each."
    unflattening: Unflattening = field(default_factory=Unflattening)
    "The modules that run on rectangles; none of them where all take boundaries."
    attention_calls: int = 0
    "Calls of packed attention in one forward."
    needs: list[Needs] = field(default_factory=list)
    "Distinct shapes of attention."
    windows: list[int] = field(default_factory=list)
    "Distinct sliding windows, in tokens."
    leak: float = float("nan")
    "Mean change in the second document when the first one changes, relative to `control`."
    parity: float = float("nan")
    "Mean difference of the second document, packed against alone, relative to `control`."
    control: float = float("nan")
    "Mean change in the second document when the boundary is removed, in units of logits."
    plain_head: bool = False
    "Logits are exactly `lm_head(hidden)`: no scale, no soft-cap."
    vocab_size: int = 0
    max_positions: int | None = None
    position_limit: str | None = None
    "Why no segment may be longer than `max_positions`; None where longer ones are merely untrained."
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report for a person to read."""
        if not self.accepted:
            return f"{self.name} ({self.model_type}): refused, it {self.reason}."
        windows = f"windows of {', '.join(map(str, self.windows))} tokens" if self.windows else "no sliding window"
        limit = f" at most: {self.position_limit}" if self.position_limit else ""
        head = (
            "in chunks, from hidden states" if self.plain_head else "from its own logits (scaled or soft-capped head)"
        )
        lines = [
            f"{self.name} ({self.model_type}): safe to pack",
            f"  layers          {self.num_layers}, {self.attention_calls} attention calls, {windows}",
            *(f"  kind            {way}" for way in self.ways),
            f"  isolation       another first document moves the second by {self.leak:.1e} of what a leak would",
            f"  packed = alone  within {self.parity:.1e} of what a leak would move",
            f"  positions       {self.max_positions}{limit}",
            f"  vocabulary      {self.vocab_size} ids",
            f"  loss            {head}",
        ]
        return "\n".join(lines + [f"  note            {note}" for note in self.notes])


def attention_lines(calls: list[tuple[nn.Module, Needs]]) -> list[str]:
    """Say which attention layers there are, one line for each kind."""
    kinds: dict[str, set[nn.Module]] = {}
    for module, needs in calls:
        chunk = chunk_of(module)
        what = [
            f"heads of {needs.head_dim}" + (f" and {needs.value_dim}" if needs.value_dim != needs.head_dim else ""),
            *(["sliding window"] if needs.sliding_window else []),
            *(["chunks"] if chunk else []),
            *([f"soft-cap {needs.softcap:g}"] if needs.softcap else []),
            *(["sinks"] if needs.sinks else []),
        ]
        kinds.setdefault(f"{type(module).__name__} ({', '.join(what)})", set()).add(module)
    return [f"{kind}, {counted(len(modules), 'layer')}: packed attention" for kind, modules in kinds.items()]


def mixer_lines(names: Iterable[str], mixers: dict[str, nn.Module], how: str) -> list[str]:
    """Say which modules mix tokens otherwise, one line for each kind."""
    counts = Counter(type(mixers[name]).__name__ for name in names)
    return [f"{kind}, {counted(count, 'layer')}: {how}" for kind, count in counts.items()]


def faster(mixers: dict[str, nn.Module], said: str | None) -> str:
    """Name the packages whose kernels would take the boundaries, where transformers' code names some."""
    sources = {type(module).__module__ for module in mixers.values()}
    text = " ".join(inspect.getsource(sys.modules[name]) for name in sources)
    packages = sorted(set(_KERNELS.findall(text)))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f" ({' and '.join(missing)} would be faster)" if missing or said else ""
