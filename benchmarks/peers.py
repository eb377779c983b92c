"""Other projects' builders and readers, each in an environment of its own, since their pins exclude each other.

The environments lie in .peers/; this makes them, and a benchmark leaves out what is not there. `--pip` hands options to
pip, for instance the index of a CPU build of torch.

    python benchmarks/peers.py                      # all of them
    python benchmarks/peers.py litdata --pip=--quiet
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = Path(__file__).resolve().parents[1] / ".peers"
EXPORTING = ["click", "numpy>=2.1", "pyarrow", "rich", "xxhash"]  # what `pack export` needs there
ENGINES = ["tokenizers>=0.22", "fastokens==0.3.5"]
PACKAGES = {
    "datatrove": ["datatrove[io,processing]==0.10.1", *ENGINES, "orjson"],
    "litdata": ["litdata==0.2.76", *ENGINES, "torch==2.13.0", *EXPORTING],
    "megatron-core": ["megatron-core==0.16.1", "datasets", "transformers", *ENGINES, "torch==2.13.0", *EXPORTING],
    "mosaicml-streaming": ["mosaicml-streaming==0.13.0", *ENGINES, "torch==2.13.0", *EXPORTING],
}
ALONE = {"megatron-core": ["megatron-bridge==0.3.1"]}  # without what they need: CUDA kernels, for a reader of files
CHUNK_BYTES = 1 << 26  # of a file of chunks: what litdata and MDS recommend


def python_of(peer: str) -> Path | None:
    """Return the interpreter of a peer's environment, or None where there is none."""
    python = HOME / peer / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return python if python.exists() else None


def missing(peers: list[str]) -> list[str]:
    """Return a sentence for each environment that is not there."""
    return [
        f"{peer} is left out; `python benchmarks/peers.py {peer}` makes its environment."
        for peer in peers
        if not python_of(peer)
    ]


def versions(peer: str) -> str:
    """Name what a peer ran with."""
    names = ["megatron-bridge", "torch", "tokenizers", "numpy", "pyarrow"]
    code = (
        "from importlib import metadata as m\n"
        "have = {d.metadata['Name'].lower() for d in m.distributions()}\n"
        f"print(', '.join(f'{{n}} {{m.version(n)}}' for n in {[peer, *names]} if n in have))"
    )
    return subprocess.run([str(python_of(peer)), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def with_torchvision() -> None:
    """Put empty modules in torchvision's place where it does not load (PyPI's build beside a CPU build of torch).

    Streaming imports it whatever it streams; only images use it.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module = Anything(f"torchvision{name}")
            module.__spec__, module.__path__ = importlib.util.spec_from_loader(module.__name__, None), []
            sys.modules[module.__name__] = module


class Anything(ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def read_litdata(ids: str, seq_len: int, packs: int, scratch: str) -> Callable[[], int]:
    """Write blocks as litdata's chunks, and return an epoch over them."""
    import numpy as np
    import torch
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(scratch, chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader(block_size=seq_len))
    flat = np.memmap(ids, np.uint16, "r")
    for number, start in enumerate(range(0, len(flat), seq_len)):
        writer[number] = torch.from_numpy(flat[start : start + seq_len].astype(np.int32))
    writer.done()
    writer.merge()

    def epoch() -> int:
        rows = StreamingDataset(scratch, item_loader=TokensLoader(block_size=seq_len), shuffle=True)
        batches = torch.utils.data.DataLoader(rows, batch_size=packs, drop_last=True)
        return sum(batch.long().numel() for batch in batches)

    return epoch


def read_mosaicml(ids: str, seq_len: int, packs: int, scratch: str) -> Callable[[], int]:
    """Write blocks as MDS, and return an epoch over them."""
    with_torchvision()
    import numpy as np
    import torch
    from streaming import MDSWriter, StreamingDataset

    flat = np.memmap(ids, np.uint16, "r")
    with MDSWriter(out=scratch, columns={"tokens": f"ndarray:int32:{seq_len}"}, size_limit=CHUNK_BYTES) as writer:
        for start in range(0, len(flat) // seq_len * seq_len, seq_len):
            writer.write({"tokens": flat[start : start + seq_len].astype(np.int32)})
    rows = StreamingDataset(local=scratch, shuffle=True, batch_size=packs)
    batches = torch.utils.data.DataLoader(rows, batch_size=packs, drop_last=True)
    return lambda: sum(batch["tokens"].long().numel() for batch in batches)


READ: dict[str, Callable[..., Callable[[], int]]] = {"litdata": read_litdata, "mosaicml-streaming": read_mosaicml}


@contextmanager
def reader(peer: str, ids: Path, seq_len: int, packs: int) -> Iterator[Callable[[], tuple[int, float]]]:
    """Yield a call that runs an epoch in a process of the peer's environment; it returns tokens and CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        arguments = {"ids": str(ids), "seq_len": seq_len, "packs": packs, "scratch": f"{folder}/data"}
        command = [str(python_of(peer)), __file__, "--read", peer, json.dumps(arguments)]
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as process:

            def epoch() -> tuple[int, float]:
                process.stdin.write("\n")
                if not (line := process.stdout.readline()):
                    sys.exit(f"{peer}: its reader stopped with exit code {process.wait()}")
                tokens, seconds = line.split()
                return int(tokens), float(seconds)

            yield epoch
            process.stdin.close()  # it ends where its input ends


def serve(peer: str, arguments: dict[str, Any]) -> None:
    """Run an epoch for each line on stdin; answer with tokens and CPU seconds. What else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        epoch = READ[peer](**arguments)
        for _ in sys.stdin:
            begin = time.process_time()
            print(epoch(), time.process_time() - begin, file=answers, flush=True)


def make(peer: str, options: list[str]) -> None:
    """Make a peer's environment anew."""
    venv.create(HOME / peer, with_pip=True, clear=True)
    for wanted in (["pip"], PACKAGES[peer], *([["--no-deps", *ALONE[peer]]] if peer in ALONE else [])):
        pip = [str(python_of(peer)), "-m", "pip", "install", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*pip, *options, *wanted], check=True)
    print(f"{HOME / peer}: {versions(peer)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"some of {', '.join(PACKAGES)} (default: all)")
    parser.add_argument("--pip", action="append", default=[], metavar="OPTION", help="an option for pip")
    parser.add_argument("--read", nargs=2, metavar=("PEER", "JSON"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        serve(arguments.read[0], json.loads(arguments.read[1]))
    else:
        if unknown := set(arguments.peers) - set(PACKAGES):
            parser.error(f"{', '.join(sorted(unknown))}: no such peer; there are {', '.join(PACKAGES)}")
        for peer in arguments.peers or PACKAGES:
            make(peer, arguments.pip)


if __name__ == "__main__":
    main()
