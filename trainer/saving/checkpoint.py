"""Checkpoints: written beside, sealed, renamed; the newest intact one is found again.

    checkpoints/step-00000100/   state-<rank>.safetensors (slices), rng-<rank>.json, checkpoint.json written last
    checkpoints/best             link to the step with the lowest evaluation loss

The state is copied to host memory before `save` returns, so the optimizer may move on while a thread writes. A name
without `_tmp-` is complete: `checkpoint.json` holds size and hash of every file, the rename is last. What does not
match its hashes is skipped with a message. Only trained parameters are kept; frozen ones come from the model itself.
Nothing is pickled: a checkpoint is numbers and JSON, so reading one that somebody sent runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from torch import nn

from shards.errors import PackError, reason_of
from trainer.distributed import World
from trainer.metrics import say
from trainer.saving.elsewhere import SEAL, RemoteCheckpoints
from trainer.saving.slices import SliceReader, stage, write

VERSION = 2


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: Directory that holds them; made on the first save.
        keep: Newest checkpoints kept beside the best one, at least 1.
        elsewhere: Where each sealed checkpoint is uploaded too; None for nowhere.
    """

    def __init__(self, root: Path, keep: int, world: World, elsewhere: RemoteCheckpoints | None = None) -> None:
        self.root, self.keep, self.world, self.elsewhere = root, keep, world, elsewhere
        self._not_uploaded = ""
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
        staged = stage(_tensors(model, optimizer), self.world.rank, self.world.size)
        (temporary / f"rng-{self.world.rank}.json").write_text(json.dumps(_rng_state(self.world.device)))
        content = {"version": VERSION, "step": step, "world_size": self.world.size, "facts": facts}

        def finish() -> None:
            fault = None
            try:
                write(staged, temporary / f"state-{self.world.rank}.safetensors")
            except (OSError, SafetensorError) as error:
                fault = error.strerror if isinstance(error, OSError) and error.strerror else reason_of(error)
            self._agree(fault)
            if self.world.is_main:
                self._publish(temporary, final, content, best)
                self._upload(final, best)

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
        except OSError as error:
            raise PackError(
                f"{self.root}: cannot write a checkpoint ({error.strerror or error}); expected room and the right to "
                "write. Earlier checkpoints are intact: make room, then run again with `resume`."
            ) from error

    def close(self) -> None:
        """Finish the last save; after this every process sees it.

        Raises:
            PackError: It cannot be written, or is not where it was to be uploaded.
        """
        self.wait()
        self._barrier()
        self._thread.shutdown()
        if self._not_uploaded:
            raise PackError(self._not_uploaded)

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files match their hashes, the same on every process."""
        found = [None]
        if self.world.is_main:
            if self.elsewhere is not None:
                self.elsewhere.fetch_newest(self.root, self._is_intact)
            found = [next((str(path) for path in reversed(self._all()) if self._is_intact(path)), None)]  # type: ignore[list-item]
        if self.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return Path(found[0]) if found[0] else None

    def find(self, step: int | None, best: bool) -> Path:
        """Return the checkpoint of a step, the best one, or with neither the newest.

        Raises:
            PackError: There is no such checkpoint, or it is damaged.
        """
        steps = [path.name for path in self._all()]
        path = (self.root / "best").resolve() if best else self.root / (_name(step) if step is not None else "")
        if step is None and not best:
            path = next((each for each in reversed(self._all()) if self._is_intact(each)), self.root)
        if path.parent != self.root.resolve() and path.parent != self.root:
            path = self.root
        if path.name not in steps:
            wanted = "best checkpoint" if best else f"checkpoint of step {step}" if step is not None else "checkpoint"
            if not steps:
                raise PackError(f"{self.root}: holds no checkpoint; expected a run that saved one. Name its directory.")
            there = ", ".join(name.removeprefix("step-").lstrip("0") for name in steps)
            raise PackError(f"{self.root}: no {wanted}; expected one of steps {there}. Choose one of these.")
        if not self._is_intact(path):
            raise PackError(f"{path}: is damaged; expected an intact checkpoint. Choose another.")
        return path

    def facts(self, path: Path) -> dict[str, Any]:
        """Return the facts that a checkpoint was saved with."""
        facts: dict[str, Any] = json.loads((path / SEAL).read_text())["facts"]
        return facts

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load a checkpoint into model, optimizer and this process's random state.

        Processes that the saving run did not have keep their own random state.

        Raises:
            PackError: It holds other tensors than the model and the optimizer.
        """
        _allocate(optimizer)
        tensors = _tensors(model, optimizer)
        self._read(path, tensors)
        for name, values, key in _state(model, optimizer):
            if not isinstance(values[key], torch.Tensor):  # the number of steps, of some
                values[key] = type(values[key])(tensors[name].item())
        rng = path / f"rng-{self.world.rank}.json"
        if rng.exists():
            _set_rng_state(json.loads(rng.read_text()), self.world.device)

    def load_weights(self, path: Path, model: nn.Module) -> None:
        """Load the trained parameters of a checkpoint into a model, and nothing else.

        Raises:
            PackError: It holds other tensors than the model.
        """
        self._read(path, _parameters(model))

    def _read(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        reader = SliceReader(sorted(path.glob("state-*.safetensors")))
        with torch.no_grad():
            for name, tensor in tensors.items():
                reader.read_into(name, tensor)

    def _agree(self, fault: str | None) -> None:
        """Wait until every process has written its part.

        Raises:
            OSError: One of them could not.
        """
        faults: list[str | None] = [fault]
        if self._group is not None:
            faults = [None] * self.world.size
            dist.all_gather_object(faults, fault, group=self._group)
        if found := [each for each in faults if each is not None]:
            raise OSError(None, found[0])

    def _publish(self, temporary: Path, final: Path, content: dict[str, Any], best: bool) -> None:
        content["files"] = {
            path.name: [path.stat().st_size, _hash(path)] for path in sorted(temporary.iterdir()) if path.is_file()
        }
        for path in temporary.iterdir():
            _sync(path)
        seal = temporary / SEAL
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

    def _upload(self, final: Path, best: bool) -> None:
        """Upload a checkpoint; a failure is said, and ends the run only if the next ones fail too, up to the last."""
        if self.elsewhere is None:
            return
        self._not_uploaded = ""
        try:
            self.elsewhere.upload(final, self.keep, best)
        except PackError as error:
            self._not_uploaded = f"{error} The checkpoint is intact in {final}: copy it there, or run with `resume`."
            say(self._not_uploaded)

    def _all(self) -> list[Path]:
        return sorted(self.root.glob("step-*"))

    def _is_intact(self, path: Path) -> bool:
        try:
            content = json.loads((path / SEAL).read_text())
            if content["version"] != VERSION:
                pickled = "; the first version holds pickles, which can run code as they are read"
                raise PackError(
                    f"{path}: is a checkpoint of version {content['version']}; expected {VERSION}"
                    f"{pickled if content['version'] == 1 else ''}. Start again "
                    "with another `out`, from the model that this run exported."
                )
            files = content["files"]
            if strangers := {file.name for file in path.iterdir()} - {SEAL, *files}:
                _tell(f"{path}: holds {min(strangers)}, a stranger")
                return False
            for name, (size, digest) in files.items():
                file = path / name
                if not file.exists() or file.stat().st_size != size or _hash(file) != digest:
                    _tell(f"{file}: does not match its checksum")
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            _tell(f"{path}: has no readable {SEAL}")
            return False
        return True

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every trained parameter by name, as the tensor itself."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {f"model.{name}": parameter.detach() for name, parameter in trained}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each value of an optimizer's state: its name in a checkpoint, and the dict and key where it stands."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    for parameter, values in optimizer.state.items():
        for key in values:
            yield f"optimizer.{names[parameter]}.{key}", values, key


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every trained parameter and its optimizer state by name, as the tensors themselves."""
    state = _parameters(model)
    return state | {name: torch.as_tensor(values[key]) for name, values, key in _state(model, optimizer)}


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that it has after a step, by one that moves nothing, to be loaded into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _rng_state(device: torch.device) -> dict[str, str]:
    """Return the state of this process's generators, as hexadecimal bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def _set_rng_state(saved: dict[str, str], device: torch.device) -> None:
    states = {name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for name, text in saved.items()}
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tell(fault: str) -> None:
    """Say on stderr why a checkpoint is passed over."""
    say(f"{fault}; this checkpoint is skipped")
