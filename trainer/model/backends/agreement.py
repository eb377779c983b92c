"""Which attention backend a run takes where none was named: the fastest on its own lengths, the same on all ranks.

`load_model` has proved the first that can serve. Where others are proven too, rank 0 times them on the first
micro-batch of the run, and its answer is everybody's. A resumed run keeps the backend of its checkpoint while that is
there, so that its numbers go on as they were.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.model.backends import timing
from trainer.model.backends.choice import rivals
from trainer.model.backends.interface import Backends, Needs


def to_json(backends: Backends | None) -> Any:
    """Return a model's backends as a checkpoint keeps them: {"64 64": "torch"} where there are several."""
    if backends is None or isinstance(backends, str):
        return backends
    return {f"{query} {value}": name for (query, value), name in backends.items()}


def agree_on_backend(
    backends: Backends,
    needs: Sequence[Needs],
    boundaries: Callable[[], np.ndarray],
    before: Any = None,
    *,
    gather: Callable[[Any], list[Any]],
    is_main: bool,
    measure: timing.Measure = timing.measure,
) -> tuple[Backends, list[str]]:
    """Choose among the proven backends, on all processes alike.

    Args:
        backends: What `load_model` chose on this process: the first that can.
        needs: What the layers ask for.
        boundaries: Returns where the segments of a micro-batch end, int32 (n + 1,).
        before: What `to_json` gave for the checkpoint that the run goes on from; None for a new run.
        gather: Returns what each process holds, in the order of ranks.
        is_main: Whether this process times.
        measure: What times a backend.

    Returns:
        The backends, and what a person should know, one line each.
    """
    chosen: dict[tuple[int, int], str] = {}
    lines: list[str] = []
    kinds = {each.heads: [other for other in needs if other.heads == each.heads] for each in needs}
    for heads, same in kinds.items():
        first = backends if isinstance(backends, str) else backends[heads]
        everywhere = gather(rivals(first, same))
        names = [name for name in everywhere[0] if all(name in each for each in everywhere)]
        earlier = before.get(f"{heads[0]} {heads[1]}") if isinstance(before, dict) else before
        if earlier is not None and earlier in names:
            chosen[heads], said = earlier, ["kept, the checkpoint was trained with it"] if len(names) > 1 else []
        elif len(names) > 1:
            chosen[heads], said = _fastest(
                gather(timing.time_all(names, same, boundaries(), measure) if is_main else {})[0], names
            )
        else:
            chosen[heads], said = first, []
        where = f"heads of {heads[0]}: " if len(kinds) > 1 else ""
        lines += [f"{where}attention {chosen[heads]}: {line}" for line in said]
        if earlier not in (None, chosen[heads]):
            lines.append(f"resume: {where}attention {earlier} before, {chosen[heads]} now")
    return (next(iter(chosen.values())) if len(chosen) == 1 else chosen), lines


def _fastest(seconds: dict[str, float], names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the fastest, and what is said of it."""
    if not seconds:
        return names[0], ["stays, none could be timed"]
    name = min(seconds, key=lambda name: seconds[name])
    what = "stays" if name == names[0] else "takes its place"
    return name, [f"{what}, fastest on this dataset's lengths: {timing.describe(seconds)}"]
