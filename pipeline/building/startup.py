"""What a build prepares beside its first windows."""

from collections.abc import Callable
from threading import Thread

from pipeline.packing.kernels import cache_note
from pipeline.packing.warm_up import compile_kernels, kernels_compiled
from shards.schema import Layout

SMALL_BYTES = 8 << 20  # a corpus up to this size is packed before compiling would have paid


def start_compiling(layout: Layout, on_message: Callable[[str], None]) -> Thread:
    """Compile or load the packing kernels while the first windows are read; workers wait for it when they pack.

    Args:
        layout: Types of the columns that rows are written in.
        on_message: Told what takes long, and where machine code is kept if not in the usual places.
    """

    def run() -> None:
        if not kernels_compiled():
            on_message("compiling the packing kernels, once on this machine: about ten seconds, beside reading")
            if note := cache_note():
                on_message(f"{note}.")
        compile_kernels(layout)

    thread = Thread(target=run, name="compiling", daemon=True)
    thread.start()
    return thread
