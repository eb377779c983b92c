"""Checkpoints under a URL: each sealed one is uploaded, its seal last, and the newest intact one comes back.

URL/step-00000100/   the files of the checkpoint; without checkpoint.json it is not whole, and nobody reads it
URL/best.json        the name of the one with the lowest evaluation loss
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from shards.errors import PackError, SourceError, reason_of
from shards.fetching.remote import RemoteStore, hide_secrets, io_errors
from trainer.metrics import say

SEAL, BEST = "checkpoint.json", "best.json"
STEP = re.compile(r"step-\d{8,}")


class RemoteCheckpoints:
    """The checkpoints of one run under a URL.

    Args:
        url: Where they go; of this run alone.
    """

    def __init__(self, url: str) -> None:
        self.store = RemoteStore(url)

    def refuse_others(self) -> None:
        """Refuse a place that holds checkpoints already, for a run that does not go on from them.

        Raises:
            PackError: It does, or it cannot be read.
        """
        if steps := self._steps():
            raise PackError(
                f"`checkpoint_url`: {self.store.shown} holds {steps[-1]} of a run already; expected a place of this "
                "run alone. Go on from it with `resume`, or choose another."
            )

    def upload(self, path: Path, keep: int, best: bool) -> None:
        """Upload a sealed checkpoint, then remove those that are no longer kept.

        Raises:
            SourceError: The place cannot be written.
        """
        for file in sorted(path.iterdir(), key=lambda file: file.name == SEAL):
            self.store.send(file, f"{path.name}/{file.name}")
        try:
            if best:
                self.store.put(BEST, json.dumps({"checkpoint": path.name}).encode())
            kept = {self._best(), *self._steps()[-keep:]}
            for name in self._steps():
                if name not in kept:
                    self._remove(name)
        except io_errors() as error:
            raise self._fault("written", error) from None

    def fetch_newest(self, root: Path, is_intact: Callable[[Path], bool]) -> None:
        """Bring the newest intact checkpoint here, unless a newer or the same one is here.

        Raises:
            SourceError: The place cannot be read.
        """
        here = {path.name for path in root.glob("step-*") if is_intact(path)}
        for name in reversed(self._steps()):
            if here and name <= max(here):
                return
            if self._fetch(name, root) and is_intact(root / name):
                say(f"{self.store.shown}: took {name} from there")
                return

    def _fetch(self, name: str, root: Path) -> bool:
        """Download a checkpoint; return whether it was whole there."""
        temporary = root / f"_tmp-{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            seal = self.store.read(f"{name}/{SEAL}")
            files = json.loads(seal or b"null")["files"]
            for file, (size, digest) in files.items():
                if Path(file).name != file:
                    raise ValueError(file)
                self.store.fetch(f"{name}/{file}", temporary / file, size, digest, "its seal")
        except SourceError:
            raise
        except (PackError, ValueError, TypeError, KeyError, AttributeError):
            say(f"{self.store.shown}/{name}: is not whole; this checkpoint is skipped")
            shutil.rmtree(temporary)
            return False
        (temporary / SEAL).write_bytes(seal or b"")
        shutil.rmtree(root / name, ignore_errors=True)  # it is damaged here
        temporary.rename(root / name)
        return True

    def _steps(self) -> list[str]:
        """Return the names of the checkpoints, in order of their steps."""
        try:
            return sorted(name for name in self.store.sizes("") if STEP.fullmatch(name))
        except io_errors() as error:
            raise self._fault("listed", error) from None

    def _best(self) -> str | None:
        data = self.store.read(BEST)
        return None if data is None else str(json.loads(data)["checkpoint"])

    def _remove(self, name: str) -> None:
        for file in sorted(self.store.sizes(name), key=lambda file: file != SEAL):  # unsealed first: never half read
            self.store.remove(f"{name}/{file}")
        self.store.remove_directory(name)

    def _fault(self, verb: str, error: Exception) -> SourceError:
        return SourceError(
            f"{self.store.shown}: cannot be {verb} ({hide_secrets(reason_of(error))}). Check the URL, the network and "
            "the credentials."
        )
