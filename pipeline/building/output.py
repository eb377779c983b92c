"""The directory a build writes into, read once into a value; what to do with it is decided from that value alone.

    read_output -> OutputState -> decide -> start | continue | finished, or refused in words

An absent or empty directory is taken; this plan's own is continued; another build's, another program's, or a dataset
with files among its own that are not of it is refused. `owned_files` is the only place that says what may be removed:
files with the names of this format that the plan or the manifest there accounts for, and nothing else, ever.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import xxhash

from pipeline.building.sidecars import CommittedWindow, committed_window
from pipeline.config import BuildConfig
from pipeline.documents.tokenizer_files import FILES
from pipeline.sources.windows import Source
from shards import lock
from shards.errors import FormatError, PackError
from shards.manifest import INDEX_FILE, Manifest, datasets_files
from shards.metadata import list_shards, parse_manifest
from shards.plan import FORMAT, Plan, differences, parse_plan, plan_id
from shards.publish import TMP, Store, canonical
from shards.sidecar import read_sidecar, sidecar_name
from shards.tables.shard_list import SHARDS_FILE

SHARD_FILE = re.compile(r"(\d{8})(\.json|-[0-9a-f]{16}\.arrow)")  # what a build names its files in shards/
DATASETS_FILES = ("state.json", "dataset_info.json")
ROOT_FILES = ("manifest.json", *DATASETS_FILES, SHARDS_FILE, INDEX_FILE, "rejected.jsonl")  # as they are removed


class ShardFiles(NamedTuple):
    """A shard that a manifest lists."""

    window: int
    file: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class OutputState:
    """What an output directory holds."""

    location: str
    sizes: Mapping[str, Mapping[str, int]]
    'Bytes by name, of the directories "" (the root), shards and tokenizer.'
    plan: bytes | None
    manifest: Manifest | None
    "None where there is none, or a damaged one, or where its list of shards is damaged."
    shards: Sequence[ShardFiles]
    "What the manifest lists."
    small: Mapping[str, bytes]
    "Content of the files for `datasets` and of the tokenizer's, by name in the dataset."
    windows: Mapping[int, CommittedWindow]
    "The windows whose sidecar is intact."


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for, beside the plan."""

    resume: bool = False
    overwrite: bool = False
    windows: str | None = None
    finalize: bool = False


class Work(Protocol):
    """What is to be written there; a build's job, for one."""

    @property
    def plan(self) -> Plan:
        """What determines the bytes."""

    @property
    def plan_id(self) -> str:
        """Its identity."""

    @property
    def sources(self) -> Sequence[Source]:
        """The corpus; empty where none is read."""

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """Content of the files in tokenizer/, by name."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with an output directory."""

    action: Literal["start", "continue", "finished"]
    remove: tuple[str, ...] = ()
    "Files to remove before anything is written, in this order."
    manifest: Manifest | None = None
    "Of the finished dataset."


def read_output(store: Store, wanted: Collection[int] = ()) -> OutputState:
    """Read all that decisions need; no other function of a build's driver reads a file there.

    Args:
        store: The directory.
        wanted: Windows whose sidecars are read, besides those of streamed files.
    """
    sizes = {directory: store.sizes(directory) for directory in ("", "shards", "tokenizer")}
    plan = store.get("plan.json") if "plan.json" in sizes[""] else None
    manifest, shards = _read_manifest(store) if "manifest.json" in sizes[""] else (None, [])
    names = [name for name in DATASETS_FILES if name in sizes[""]]
    names += [f"tokenizer/{name}" for name in FILES if name in sizes["tokenizer"]]
    small = {name: store.get(name) for name in names} if plan is not None else {}
    num_planned = len((_own(plan) or {}).get("windows", ()))
    windows = {}
    for name in sizes["shards"] if plan is not None else ():
        match = SHARD_FILE.fullmatch(name)
        if match and match[2] == ".json" and (int(match[1]) in wanted or int(match[1]) >= num_planned):
            try:
                sidecar = read_sidecar(store, int(match[1]))
            except FormatError:  # damaged: the window is built again
                continue
            if sidecar is not None:
                windows[int(match[1])] = committed_window(sidecar)
    return OutputState(
        location=store.location,
        sizes=sizes,
        plan=plan,
        manifest=manifest,
        shards=shards,
        small={name: content for name, content in small.items() if content is not None},
        windows=windows,
    )


def _read_manifest(store: Store) -> tuple[Manifest | None, list[ShardFiles]]:
    try:
        manifest = parse_manifest(store.get("manifest.json") or b"", f"{store.location}/manifest.json")
        listed = list_shards(store, manifest)
        return manifest, [ShardFiles(shard["window"], shard["file"], shard["bytes"]) for shard in listed]
    except FormatError:
        return None, []


def decide(state: OutputState, config: BuildConfig | Request, job: Work) -> Decision:
    """Say what a build does with what is there.

    Raises:
        PackError: What is there is not this build's to continue or to replace.
    """
    if config.finalize and not state.sizes["shards"]:
        raise PackError(
            f"{state.location}: `finalize=True` found no window there; expected those that the parts of the build "
            "made. Run every part first: --windows i::n."
        )
    if _own(state.plan) is None:
        return _decide_without_plan(state, config)
    manifest = whole_manifest(state)
    _refuse_strays(state, manifest)
    if config.overwrite:
        return Decision(action="start", remove=owned_files(state))
    plan = parse_plan(state.plan or b"", f"{state.location}/plan.json")
    if plan_id(plan) != job.plan_id:
        if (
            not state.sizes["shards"] and "manifest.json" not in state.sizes[""]
        ):  # that build failed before it had written anything
            return Decision(action="start", remove=owned_files(state))
        raise _another_build(state, config, differences(plan, job.plan))
    if reads_stdin(job):
        raise PackError(
            f"{state.location}: holds a build from stdin, which cannot be read again; expected an empty or absent "
            "directory. Choose another `out`, or `overwrite=True`."
        )
    if manifest is not None and _is_complete(state, job, manifest):
        return Decision(action="finished", manifest=manifest)
    damaged = "manifest.json" in state.sizes[""]
    begun = state.sizes["shards"] or damaged
    if begun and not (config.resume or config.windows or config.finalize):
        raise PackError(
            f"{state.location}: holds an unfinished or damaged build of this plan. "
            "Add `resume=True` to build what is missing, or `overwrite=True`."
        )
    return Decision(action="continue", remove=("manifest.json",) if damaged else ())


def _decide_without_plan(state: OutputState, config: BuildConfig | Request) -> Decision:
    if state.manifest is not None:
        if not config.overwrite:
            raise PackError(
                f"{state.location}: plan.json is missing beside manifest.json; expected the plan of the dataset. "
                "Put it back, or build again with `overwrite=True`."
            )
        _refuse_strays(state, whole_manifest(state))
        return Decision(action="start", remove=owned_files(state))
    strangers = [name for name in state.sizes[""] if name not in (TMP, "shards", "tokenizer", lock.NAME, lock.CLAIM)]
    strangers += [f"{directory}/{name}" for directory in ("shards", "tokenizer") for name in state.sizes[directory]]
    if strangers:
        raise PackError(
            f"{state.location}: holds something else ({', '.join(sorted(strangers)[:3])}); expected an empty or absent "
            "directory. Choose another `out`."
        )
    return Decision(action="start")


def prepare(store: Store, state: OutputState, decision: Decision, job: Work) -> None:
    """Make the directory hold this plan: remove what was decided, then write the plan and after it the tokenizer."""
    store.create()
    for name in decision.remove:
        store.remove(name)
    store.sweep()
    if decision.action == "start" or state.plan is None:
        store.put("plan.json", canonical(job.plan))
    for name, content in job.tokenizer_files.items():
        path = f"tokenizer/{name}"
        if path in decision.remove or state.small.get(path) != content:
            store.put(path, content)


def owned_files(state: OutputState) -> tuple[str, ...]:
    """Return the files that builds wrote there, in the order of removal: what makes a dataset first, the plan last.

    A shard or sidecar is a build's where its window is one of the plan there, or where the manifest lists it; a
    tokenizer file where a build writes one of that name. Without a plan or manifest of this format nothing is.
    """
    plan, manifest = _own(state.plan), state.manifest
    if plan is None and manifest is None:
        return ()
    listed = _listed(state)
    owned = [name for name in ROOT_FILES if name in state.sizes[""]]
    for name in state.sizes["shards"]:
        match = SHARD_FILE.fullmatch(name)
        if match and (f"shards/{name}" in listed or (plan is not None and _is_planned(plan, int(match[1])))):
            owned.append(f"shards/{name}")
    names = {*FILES, *(manifest["tokenizer_files"] if manifest is not None else ())}
    owned += [f"tokenizer/{name}" for name in state.sizes["tokenizer"] if name in names]
    return (*owned, *(["plan.json"] if plan is not None else []))


def leftovers(store: Store, kept: Collection[str], num_windows: int) -> list[str]:
    """Return files of this build's windows that are not among the `kept` ones: attempts that crashed or were redone."""
    found = []
    for name in store.sizes("shards"):
        match = SHARD_FILE.fullmatch(name)
        if match and int(match[1]) < num_windows and f"shards/{name}" not in kept:
            found.append(f"shards/{name}")
    return found


def _is_planned(plan: dict[str, Any], window: int) -> bool:
    """Whether a plan has a window of this number; streamed files have as many as reading them gives."""
    streamed = any(
        file["compression"] is not None
        or file["fingerprint"] == ""
        or file["format"] in ("json", "csv", "tsv", "arrow")
        for source in plan["sources"]
        for file in source["files"]
    )
    return streamed or window < len(plan["windows"])


def _refuse_strays(state: OutputState, manifest: Manifest | None) -> None:
    """Refuse files among a dataset's own that are not of it: they would break its rules, and are not ours to remove."""
    own = _listed(state) if manifest is not None else set(owned_files(state))
    there = [f"{directory}/{name}" for directory in ("shards", "tokenizer") for name in state.sizes[directory]]
    strays = sorted(name for name in there if name not in own)
    if strays:
        more = f" and {len(strays) - 3} more" if len(strays) > 3 else ""
        raise PackError(
            f"{state.location}: holds {', '.join(strays[:3])}{more}; expected no file there beside those of "
            "the dataset. Move them away, then run the same command again."
        )


def _listed(state: OutputState) -> set[str]:
    """Return the files in shards/ and tokenizer/ that the manifest accounts for."""
    listed = {shard.file for shard in state.shards} | {sidecar_name(shard.window) for shard in state.shards}
    tokenizer = () if state.manifest is None else state.manifest["tokenizer_files"]
    return listed | {f"tokenizer/{name}" for name in tokenizer}


def _is_complete(state: OutputState, job: Work, manifest: Manifest) -> bool:
    """Whether the small files beside whole shards are as they were written; if not, the commit is done again."""
    contents = datasets_files(job.plan, manifest["dataset_id"], [shard.file for shard in state.shards])
    expected = {name: canonical(content) for name, content in contents.items()}
    digests = {f"tokenizer/{name}": digest for name, digest in manifest["tokenizer_files"].items()}
    return all(state.small.get(name) == content for name, content in expected.items()) and all(
        name in state.small and xxhash.xxh3_128_hexdigest(state.small[name]) == digest
        for name, digest in digests.items()
    )


def _another_build(state: OutputState, config: BuildConfig | Request, changes: list[str]) -> PackError:
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    remove = "remove what is there" if config.windows or config.finalize else "add `overwrite=True`"
    return PackError(
        f"{state.location}: holds another build: {'; '.join(changes[:3])}{more}. "
        f"Choose another `out`, {remove}, or repeat its files and options."
    )


def reads_stdin(job: Work) -> bool:
    """Whether a source is standard input, which can be read once."""
    return any(file.location == "-" for source in job.sources for file in source.files)


def whole_manifest(state: OutputState) -> Manifest | None:
    """Return the manifest, unless it is damaged or a file that it lists is missing or has another size."""
    manifest = state.manifest
    if manifest is None:
        return None
    there = {f"shards/{name}": size for name, size in state.sizes["shards"].items()}
    whole = state.sizes[""].get(INDEX_FILE) == manifest["index"]["bytes"] and all(
        there.get(shard.file) == shard.bytes and sidecar_name(shard.window) in there for shard in state.shards
    )
    return manifest if whole else None


def finished_dataset(store: Store, job: Work) -> Manifest | None:
    """Return the manifest of this plan's whole dataset, if another builder of the plan was faster."""
    manifest = whole_manifest(read_output(store))
    return manifest if manifest is not None and manifest["plan_id"] == job.plan_id else None


def _own(data: bytes | None) -> dict[str, Any] | None:
    """Parse a plan of this format, of any version; None for anything else."""
    try:
        plan = json.loads(data or b"")
    except ValueError:
        return None
    return plan if isinstance(plan, dict) and plan.get("format") == FORMAT else None
