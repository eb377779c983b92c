"""Datasets of the `datasets` library: folders of `save_to_disk`, and the hub through its cache.

Both are lists of Arrow files. Only finding the hub's needs `datasets`; workers map the files themselves.
"""

import os
from collections.abc import Iterator
from shlex import quote

import orjson

from pipeline.sources.files import open_source
from pipeline.sources.tables import arrow_batches
from shards.errors import SourceError, reason_of
from shards.quiet import quiet


def saved_files(path: str) -> list[str] | None:
    """Return the Arrow files of a `save_to_disk` folder, in its own order; None for other directories.

    Raises:
        SourceError: The folder holds several splits, or its state cannot be read.
    """
    splits = os.path.join(path, "dataset_dict.json")
    if os.path.isfile(splits):
        names = orjson.loads(_read(splits)).get("splits", [])
        if len(names) != 1:
            one = quote(os.path.join(path, *names[:1]))
            raise SourceError(f"{path}: holds the splits {', '.join(names)}; expected one. Name it, such as {one}.")
        return saved_files(os.path.join(path, names[0]))
    state = os.path.join(path, "state.json")
    if not os.path.isfile(state) or not os.path.isfile(os.path.join(path, "dataset_info.json")):
        return None
    try:
        content = orjson.loads(_read(state))
        return [os.path.join(path, entry["filename"]) for entry in content["_data_files"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(f"{state}: not the state of a saved dataset ({error!r}). Save the dataset again.") from None


def hub_files(argument: str) -> list[tuple[str, str]]:
    """Fetch a dataset through `datasets`, and return (stable name, path) of its Arrow files.

    Args:
        argument: hf:NAME[/CONFIG][:SPLIT]; NAME may be a directory here. The split is train by default.

    Raises:
        SourceError: There is no such dataset, configuration or split.
    """
    import datasets

    name, split = argument[3:], "train"
    head, _, tail = name.rpartition(":")
    if head and "/" not in tail and not os.path.exists(name):
        name, split = head, tail
    if not name.strip("/"):
        raise SourceError(f"{argument} names no dataset; expected hf:NAME, hf:NAME/CONFIG or hf:NAME:SPLIT.")
    faults: list[Exception] = []
    for path, config in _candidates(name):
        try:
            with quiet(bars=True):
                dataset = datasets.load_dataset(path, config, split=split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            faults.append(error)
            continue
        files = [entry["filename"] for entry in dataset.cache_files]
        if sum(batch.num_rows for file in files for batch in arrow_batches(file)) != len(dataset):
            raise SourceError(f"{argument}: is a part of its files; expected a whole split. Use save_to_disk first.")
        return [(f"{name}:{split}/{os.path.basename(file)}", file) for file in files]
    raise SourceError(
        f"{argument}: no such dataset or split here or on the hub ({reason_of(faults[0])}). "
        "Check the name, the split and the network, or give files or a directory."
    )


def _candidates(name: str) -> Iterator[tuple[str, str | None]]:
    """Read NAME[/CONFIG] in every way it can be meant, the likeliest first."""
    parts = name.split("/")
    if os.path.isdir(name):
        yield name, None
    elif os.path.isdir(os.path.dirname(name)):
        yield os.path.dirname(name), os.path.basename(name)
    elif len(parts) == 3:
        yield "/".join(parts[:2]), parts[2]
    else:
        yield name, None
        if len(parts) == 2:
            yield parts[0], parts[1]


def _read(path: str) -> bytes:
    with open_source(path) as stream:
        return stream.read()
