"""Compile every kernel that packing uses, once on a machine, so that several workers need not all do it."""

from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeline.packing.cutting import cut
from pipeline.packing.kernels import KERNELS, always_compile
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows, count_targets, mask_or_empty
from pipeline.tokens import Documents
from shards.schema import Layout


def kernels_compiled() -> bool:
    """Whether this machine has compiled every kernel before (that takes some six seconds otherwise)."""
    return all(kernel.is_kept() for kernel in KERNELS)


@lru_cache
def compile_kernels(layout: Layout) -> None:
    """Compile every kernel, or load what was compiled before; another process that does so already is waited for.

    Args:
        layout: Types of the columns that rows are written in.
    """
    always_compile()
    places = {kernel.compiled.stats.cache_path for kernel in KERNELS} - {None}
    with ExitStack() as stack:
        if places:
            lock = stack.enter_context((Path(min(places)) / "shardpack.lock").open("w"))
            with suppress(OSError, ImportError):  # no locks on this file system or system: each compiles for itself
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
        _run_all(layout)


def _run_all(layout: Layout) -> None:
    lengths = np.repeat(np.array([5, 6], np.int32), 64)  # two fit in 13, and a token stays free: the search runs too
    for packer in PACKERS.values():
        packer(lengths, 13)
    documents = Documents(np.zeros(2, np.int32), np.array([0, 2]), np.zeros(1, np.int64), np.ones(2, np.uint8))
    segments = cut(documents.lengths, layout.seq_len, "split")
    count_targets(mask_or_empty(documents), documents.offsets[:-1], documents.lengths)
    assemble_rows(documents, segments, PACKERS["next-fit"](segments.length, layout.seq_len), layout)
