"""The directory a build writes into: what it may hold before, and what is missing of it.

An absent or empty directory is taken; this plan's own is continued; another build's, another program's, or a dataset
with files among its own that are not of it is refused in words. Nothing is removed that a build did not write.
"""

import re
from collections.abc import Callable

import xxhash

from pipeline.building.window import Job
from pipeline.config import BuildConfig
from shards.errors import FormatError, PackError
from shards.manifest import INDEX_FILE, Manifest, datasets_files, digest_files
from shards.plan import FORMAT, differences, parse_plan, plan_id
from shards.publish import Store, canonical, unseal
from shards.reader import list_shards, parse_manifest
from shards.sidecar import sidecar_name

OWN = re.compile(r"\d{8}(\.json|-[0-9a-f]{16}\.arrow)")  # what a build names its files in shards/


def prepare(store: Store, config: BuildConfig, job: Job, say: Callable[[str], None]) -> Manifest | None:
    """Make the output directory hold this plan; return the manifest if the dataset is already there."""
    data = store.get("plan.json")
    if data is None:
        _check_planless(store, config)
    if config.finalize and not store.sizes("shards"):
        raise PackError(
            f"{config.out}: --finalize found no window there; expected those that the parts of the build made. "
            "Run every part first: --windows i::n."
        )
    if config.overwrite or (data is not None and _abandoned(store, data, config)):
        if data is not None or store.size("manifest.json") is not None:
            store.clear()
    elif data is not None:
        _check_same(data, config, job)
        manifest = whole_manifest(store)
        _refuse_strays(store, manifest)
        lost = {} if manifest is None else _lost_files(store, job, manifest)
        if (manifest is None or lost != {}) and not (config.resume or config.windows or config.finalize):
            raise PackError(
                f"{config.out}: holds an unfinished or damaged build of this plan. "
                "Add --resume to build what is missing, or --overwrite."
            )
        if manifest is not None and lost is not None:
            _restore(store, lost, say)
            say(f"{config.out}: is already built (dataset {manifest['dataset_id'][:12]}); nothing to do")
            return manifest
        store.remove("manifest.json")
    store.create()
    store.sweep()
    for name, content in job.tokenizer_files.items():
        if store.get(f"tokenizer/{name}") != content:
            store.put(f"tokenizer/{name}", content)
    if store.get("plan.json") is None:
        store.put("plan.json", canonical(job.plan))
    return None


def _check_planless(store: Store, config: BuildConfig) -> None:
    """Refuse a directory without a plan where it holds what is not ours, or a dataset that lost its plan."""
    try:
        dataset = unseal(store.get("manifest.json") or b"", "manifest.json", "F1").get("format") == FORMAT
    except FormatError:
        dataset = False
    if dataset and not config.overwrite:
        raise PackError(
            f"{config.out}: plan.json is missing beside manifest.json; expected the plan of the dataset. "
            "Put it back, or build again with --overwrite."
        )
    if not dataset and (strangers := sorted(store.sizes("").keys() - {"_tmp", "shards", "tokenizer"})):
        raise PackError(
            f"{config.out}: holds something else ({', '.join(strangers[:3])}); expected an empty or absent directory. "
            "Choose another --out."
        )


def _refuse_strays(store: Store, manifest: Manifest | None) -> None:
    """Refuse files among a dataset's own that are not of it: they would break its rules, and are not ours to remove."""
    if manifest is None:
        strays = [f"shards/{name}" for name in store.sizes("shards") if not OWN.fullmatch(name)]
    else:
        shards = list_shards(store, manifest)
        listed = {shard["file"] for shard in shards} | {sidecar_name(shard["window"]) for shard in shards}
        listed |= {f"tokenizer/{name}" for name in manifest["tokenizer_files"]}
        there = [f"{directory}/{name}" for directory in ("shards", "tokenizer") for name in store.sizes(directory)]
        strays = [name for name in there if name not in listed]
    if strays:
        more = f" and {len(strays) - 3} more" if len(strays) > 3 else ""
        raise PackError(
            f"{store.location}: holds {', '.join(sorted(strays)[:3])}{more}; expected no file there beside those of "
            "the dataset. Move them away, then run the same command again."
        )


def _lost_files(store: Store, job: Job, manifest: Manifest) -> dict[str, bytes] | None:
    """Return what a dataset whose shards are whole lacks beside them, by name; None where it must be committed anew."""
    files = [shard["file"] for shard in list_shards(store, manifest)]
    contents = datasets_files(job.plan, manifest["dataset_id"], files)
    expected = {name: canonical(content) for name, content in contents.items()}
    lost = {name: content for name, content in expected.items() if store.get(name) != content}
    ours = digest_files(job.tokenizer_files)  # the same tokenizer may be written otherwise now
    for name, digest in manifest["tokenizer_files"].items():
        there = store.get(f"tokenizer/{name}")
        if there is None or xxhash.xxh3_128_hexdigest(there) != digest:
            if ours.get(name) != digest:
                return None
            lost[f"tokenizer/{name}"] = job.tokenizer_files[name]
    return lost


def _restore(store: Store, lost: dict[str, bytes], say: Callable[[str], None]) -> None:
    """Write again what is lost of a dataset whose shards are whole."""
    if not lost:
        return
    store.create()
    for name, content in lost.items():
        store.put(name, content)
    store.sweep(everything=True)
    say(f"{store.location}: wrote again {', '.join(lost)}")


def _abandoned(store: Store, data: bytes, config: BuildConfig) -> bool:
    """Whether all that is there is the plan of a build that failed before it had written anything."""
    parse_plan(data, f"{config.out}/plan.json")  # or it is no plan, and not ours to remove
    if config.windows:  # another part of the same build may be about to write
        return False
    return not (store.sizes("shards") or store.sizes("_tmp") or store.size("manifest.json"))


def _check_same(data: bytes, config: BuildConfig, job: Job) -> None:
    """Refuse a directory whose plan is another one, or one that read what cannot be read again."""
    old = parse_plan(data, f"{config.out}/plan.json")
    if plan_id(old) != job.plan_id:
        changes = differences(old, job.plan)
        more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
        remove = "remove" if config.windows or config.finalize else "--overwrite"
        raise PackError(
            f"{config.out}: holds another build: {'; '.join(changes[:3])}{more}. "
            f"Choose another --out, {remove} what is there, or repeat its files and options."
        )
    if reads_stdin(job):
        raise PackError(
            f"{config.out}: holds a build from stdin, which cannot be read again; expected an empty or absent "
            "directory. Choose another --out, or --overwrite."
        )


def reads_stdin(job: Job) -> bool:
    """Whether any source of the build is standard input, which cannot be read twice."""
    return any(file.location == "-" for source in job.sources for file in source.files)


def whole_manifest(store: Store) -> Manifest | None:
    """Return the manifest, unless it is damaged or a file that it lists is missing or has another size."""
    data = store.get("manifest.json")
    if data is None:
        return None
    try:
        manifest = parse_manifest(data, f"{store.location}/manifest.json")
        shards = list_shards(store, manifest)
    except FormatError:
        return None
    there = {f"shards/{name}": size for name, size in store.sizes("shards").items()}
    whole = store.size(INDEX_FILE) == manifest["index"]["bytes"] and all(
        there.get(shard["file"]) == shard["bytes"] and sidecar_name(shard["window"]) in there for shard in shards
    )
    return manifest if whole else None


def finished_dataset(store: Store, job: Job) -> Manifest | None:
    """Return the manifest of this plan's whole dataset, if it is there."""
    manifest = whole_manifest(store)
    return manifest if manifest is not None and manifest["plan_id"] == job.plan_id else None
