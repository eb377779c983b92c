"""Checkpoints: written beside, sealed, renamed; the newest intact one is found again.

    checkpoints/step-00000100/   tensors (torch.distributed.checkpoint), rng-<rank>.pt, checkpoint.json written last
    checkpoints/best             link to the step with the lowest evaluation loss

The state is copied to host memory before `save` returns, so the optimizer may move on while a thread writes. A name
without `_tmp-` is complete: `checkpoint.json` holds size and hash of every file, the rename is last. What does not
match its hashes is skipped with a message. Only trained parameters are kept; frozen ones come from the model itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from shards.errors import PackError
from trainer.distributed import World

VERSION = 1


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: Directory that holds them; made on the first save.
        keep: Newest checkpoints kept beside the best one, at least 1.
    """

    def __init__(self, root: Path, keep: int, world: World) -> None:
        self.root, self.keep, self.world = root, keep, world
        self._alone = world.size == 1
        if self._alone:  # said at every save and load, though we ask for it
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any], best: bool = False
    ) -> None:
        """Stage the state of a step and write it in the background; every process calls this.

        Args:
            step: Steps taken.
            facts: JSON-able state of the loop.
            best: Name this one the best.
        """
        self.wait()
        temporary, final = self.root / f"_tmp-{_name(step)}", self.root / _name(step)
        if self.world.is_main:
            for stale in self.root.glob("_tmp-step-*"):  # of a run that died while it wrote
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        self._barrier()
        torch.save(_rng_state(self.world.device), temporary / f"rng-{self.world.rank}.pt")
        written = async_save(
            _tensors(model, optimizer), checkpoint_id=temporary, process_group=self._group, no_dist=self._alone
        )
        content = {"version": VERSION, "step": step, "world_size": self.world.size, "facts": facts}

        def finish() -> None:
            written.result()  # type: ignore[union-attr]  # a Future, since no stager of our own is passed
            if self.world.is_main:  # its part of the write ends after everybody else's
                self._publish(temporary, final, content, best)

        self._pending = self._thread.submit(finish)

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            PackError: It cannot be written.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except (OSError, CheckpointException) as error:
            raise PackError(
                f"{self.root}: cannot write a checkpoint ({_reason(error)}); expected room and the right to write. "
                "Earlier checkpoints are intact: make room, then run again with `resume`."
            ) from error

    def close(self) -> None:
        """Finish the last save; after this every process sees it."""
        self.wait()
        self._barrier()
        self._thread.shutdown()

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files match their hashes, the same on every process."""
        found = [None]
        if self.world.is_main:
            found = [next((str(path) for path in reversed(self._all()) if self._is_intact(path)), None)]  # type: ignore[list-item]
        if self.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return Path(found[0]) if found[0] else None

    def facts(self, path: Path) -> dict[str, Any]:
        """Return the facts that a checkpoint was saved with."""
        facts: dict[str, Any] = json.loads((path / "checkpoint.json").read_text())["facts"]
        return facts

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load a checkpoint into model, optimizer and this process's random state.

        Processes that the saving run did not have keep their own random state.
        """
        _allocate(optimizer)
        load(_tensors(model, optimizer), checkpoint_id=path, process_group=self._group, no_dist=self._alone)
        rng = path / f"rng-{self.world.rank}.pt"
        if rng.exists():
            _set_rng_state(torch.load(rng, weights_only=True), self.world.device)

    def _publish(self, temporary: Path, final: Path, content: dict[str, Any], best: bool) -> None:
        content["files"] = {
            path.name: [path.stat().st_size, _hash(path)] for path in sorted(temporary.iterdir()) if path.is_file()
        }
        for path in temporary.iterdir():
            _sync(path)
        seal = temporary / "checkpoint.json"
        seal.write_text(json.dumps(content, indent=1))
        _sync(seal)
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)  # the same step again, after a resume from an older one
        temporary.rename(final)
        if best:
            link = self.root / "_tmp-best"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.rename(self.root / "best")
        _sync(self.root)
        kept = {(self.root / "best").resolve().name, *(path.name for path in self._all()[-self.keep :])}
        for path in self._all():
            if path.name not in kept:
                shutil.rmtree(path)

    def _all(self) -> list[Path]:
        return sorted(self.root.glob("step-*"))

    def _is_intact(self, path: Path) -> bool:
        try:
            content = json.loads((path / "checkpoint.json").read_text())
            if content["version"] != VERSION:
                raise PackError(f"{path}: found version {content['version']}, this program reads {VERSION}.")
            for name, (size, digest) in content["files"].items():
                file = path / name
                if not file.exists() or file.stat().st_size != size or _hash(file) != digest:
                    print(f"{file}: does not match its checksum; this checkpoint is skipped", file=sys.stderr)
                    return False
        except (OSError, ValueError, KeyError, TypeError):
            print(f"{path}: has no readable checkpoint.json; this checkpoint is skipped", file=sys.stderr)
            return False
        return True

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def _reason(error: OSError | CheckpointException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "; ".join(str(cause[0]) for cause in error.failures.values())


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every trained parameter and its optimizer state by name, as the tensors themselves."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    state = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        state |= {f"optimizer.{names[parameter]}.{key}": value for key, value in values.items()}
    return state


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state it would have after its first step, for a checkpoint to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
