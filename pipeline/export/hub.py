"""`pack push` and `pack pull`: whole datasets to the Hugging Face hub and back.

A push checks the dataset first, and is one commit, so a dataset is there whole or not at all; what an interrupted push
had uploaded is not sent again. A pull goes into `<out>.partial`, is checked byte by byte against the manifest, and then
takes its place; an interrupted one goes on where it stopped.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.export.card import MARK, card_of
from pipeline.export.config import check_directory
from shards.errors import PackError, counted, reason_of
from shards.manifest import INDEX_FILE
from shards.metadata import parse_manifest
from shards.publish import rename
from shards.reader import Dataset
from shards.sidecar import sidecar_name
from shards.tables.shard_list import SHARDS_FILE
from shards.verification import verify

ADDRESS = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?/?")
ROOT_FILES = ("manifest.json", "plan.json", SHARDS_FILE, INDEX_FILE, "state.json", "dataset_info.json")
FOLDERS = ("shards/", "tokenizer/")
CARD = "README.md"
NO_DATA = (".gitattributes", CARD)  # what a repository may hold before a dataset comes


class Address(NamedTuple):
    """A dataset repository of the hub."""

    repo: str
    "USER/NAME"
    revision: str | None


@dataclass(frozen=True)
class Transfer:
    """What a push or a pull did."""

    path: str
    "Where the dataset is now: an address of the hub, or a directory."
    dataset_id: str
    files: int
    "Files of the dataset."
    bytes: int
    unchanged: bool = False
    "Whether it was there already."


def parse_address(url: str) -> Address:
    """Parse hf://datasets/USER/NAME, or with @REVISION behind it.

    Raises:
        PackError: It is something else.
    """
    match = ADDRESS.fullmatch(url)
    if match is None:
        raise PackError(
            f"{url}: is no dataset of the hub; expected hf://datasets/USER/NAME, or …@REVISION to pull one."
        )
    return Address(match["repo"], match["revision"])


def push(path: str | Path, url: str, *, private: bool = False, overwrite: bool = False) -> Transfer:
    """Upload a dataset, with a card, in one commit.

    Args:
        path: The dataset directory.
        url: hf://datasets/USER/NAME.
        private: Make a new repository private.
        overwrite: Replace another dataset there.

    Raises:
        PackError: The dataset is damaged, the repository holds something else, or the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    repo, revision = parse_address(url)
    if revision is not None:
        raise PackError(f"{url}: names a revision; expected none, since a push makes one. Leave out @{revision}.")
    report = verify(path)
    if not report.ok:  # nothing but the dataset may leave this machine, links and foreign names least of all
        raise PackError(
            f"{path}: is no whole dataset ({report.problems[0].message.rstrip('.')}). Mend it; see pack verify."
        )
    dataset = Dataset(path)
    files = dataset_files(dataset)
    size = sum((dataset.path / name).stat().st_size for name in files)
    with hub_errors(url):
        api = HfApi()
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        there = set(api.list_repo_files(repo, repo_type="dataset"))
        if _dataset_id_of(api, repo, there) == dataset.dataset_id:
            return Transfer(url, dataset.dataset_id, len(files), size, unchanged=True)
        others = len(there - {*NO_DATA})
        if others and not overwrite:
            raise PackError(
                f"{url}: holds {counted(others, 'file')} of something else; expected an empty repository or this "
                "dataset. Choose another name, or set `overwrite=True`."
            )
        changes: list[Any] = [CommitOperationAdd(name, str(dataset.path / name)) for name in files]
        if CARD not in there or MARK in _read(api, repo, CARD).decode("utf-8", "replace"):
            changes.append(CommitOperationAdd(CARD, card_of(dataset, repo).encode()))
        stale = sorted(name for name in there - {*files} if name.startswith(FOLDERS) or name in ROOT_FILES)
        changes += [CommitOperationDelete(name) for name in stale]
        message = f"Push dataset {dataset.dataset_id[:12]}"
        api.create_commit(repo, changes, commit_message=message, repo_type="dataset")
    return Transfer(url, dataset.dataset_id, len(files), size)


def pull(url: str, out: str | Path) -> Transfer:
    """Download a dataset and check it whole.

    Args:
        url: hf://datasets/USER/NAME, or …@REVISION.
        out: Directory to write, not there yet.

    Raises:
        PackError: There is no such dataset, `out` is taken, or what came is damaged.
    """
    from huggingface_hub import HfApi

    repo, revision = parse_address(url)
    check_directory(str(out))
    out = Path(os.path.abspath(out))  # noqa: PTH100  # "." has no name
    if out.exists():
        raise PackError(f"`out`: {out} is there already; expected a new directory. Choose another.")
    beside = out.with_name(out.name + ".partial")
    with hub_errors(url):
        api = HfApi()
        commit = api.repo_info(repo, repo_type="dataset", revision=revision).sha
        there = api.list_repo_files(repo, repo_type="dataset", revision=commit)
        if "manifest.json" not in there:
            raise PackError(f"{url}: holds no manifest.json; expected a dataset that pack push wrote. Check the name.")
        wanted = sorted(name for name in there if name in (*ROOT_FILES, CARD) or name.startswith(FOLDERS))
        _clear(beside, {*wanted})
        api.snapshot_download(repo, repo_type="dataset", revision=commit, local_dir=beside, allow_patterns=wanted)
    report = verify(beside)
    if not report.ok:
        raise PackError(
            f"{url}: what came is damaged; expected a whole dataset ({report.problems[0].message.rstrip('.')}). "
            f"Remove {beside} and pull again, or push it again."
        )
    shutil.rmtree(beside / ".cache", ignore_errors=True)  # the client's notes on what is there
    rename(beside, out)
    dataset = Dataset(out)
    files = dataset_files(dataset)
    return Transfer(str(out), dataset.dataset_id, len(files), sum((out / name).stat().st_size for name in files))


def dataset_files(dataset: Dataset) -> list[str]:
    """Return the names of all files that make up a dataset; rejected records and a build's leftovers are none."""
    tokenizer = [f"tokenizer/{name}" for name in dataset.manifest["tokenizer_files"]]
    sidecars = [sidecar_name(number) for number in range(len(dataset.shards))]
    return [*ROOT_FILES, *sorted(tokenizer), *dataset.shards.files(), *sidecars]


@contextmanager
def hub_errors(url: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line.

    Raises:
        PackError: In the place of a refused, failed or impossible request.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # its bases are OSError and the root of what the HTTP library below raises; the client also has plain errors
    errors: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
    try:
        yield
    except errors as error:
        raise PackError(
            f"{url}: the hub's client gave up ({reason_of(error)}); expected a repository that can be reached. Check "
            "the name, the network and who is logged in (hf auth login)."
        ) from error


def _dataset_id_of(api: Any, repo: str, there: set[str]) -> str | None:
    if "manifest.json" not in there:
        return None
    return parse_manifest(_read(api, repo, "manifest.json"), f"{repo}/manifest.json")["dataset_id"]


def _read(api: Any, repo: str, name: str) -> bytes:
    return Path(api.hf_hub_download(repo, name, repo_type="dataset")).read_bytes()


def _clear(folder: Path, wanted: set[str]) -> None:
    """Remove what an interrupted pull of another commit left."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        name = path.relative_to(folder).as_posix()
        if name not in wanted and not name.startswith(".cache/"):
            path.unlink()
