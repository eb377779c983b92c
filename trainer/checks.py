"""What is checked against each other before the first step: dataset, model, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from shards import Dataset, PackError
from trainer.config import TrainConfig
from trainer.model.loading import check_segments, check_vocabulary
from trainer.model.report import ModelReport

_TOKENIZER_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"What of a dataset's `tokenizer/` goes into a model; a dataset may come from anybody, so nothing else does."


def check_datasets(dataset: Dataset, eval_datasets: Collection[Dataset], force: bool) -> None:
    """Check what is trained on, and what is evaluated on, for what a run needs.

    Raises:
        PackError: One of them holds nothing to learn from, or they have different tokenizers; unless `force` is on,
            the first is one that only reports and comparisons are made of.
    """
    for each in (dataset, *eval_datasets):
        if not len(each):
            raise PackError(f"{each.path}: has no packs; expected some. Build it from a corpus with documents.")
        if not each.index.num_targets.any():
            raise PackError(f"{each.path}: has no targets; expected some. Build it with another `train_on`.")
    _refuse_links(dataset)
    if force:
        return
    if dataset.packer == "unpacked":
        raise PackError(
            f"{dataset.path}: is unpacked, one document in a row; a row costs a whole pack's share of the step. "
            "Build it with `packer` auto, or pass `force`."
        )
    for other in eval_datasets:
        if differing := _differing(_own_tokenizer(dataset), _own_tokenizer(other)):
            raise PackError(
                f"`eval` {other.path}: its tokenizer differs from the one of {dataset.path} ({', '.join(differing)}); "
                "expected the same. Build both with one."
            )


def _refuse_links(dataset: Dataset) -> None:
    """Refuse tokenizer files that are links or worse: what they lead to would be copied into the exported model.

    Raises:
        PackError: One of them is no regular file.
    """
    for path in [dataset.path / "tokenizer", *(dataset.path / "tokenizer" / name for name in TOKENIZER_FILES)]:
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            raise PackError(
                f"{path}: is a link or no regular file; expected a file of its own, since it becomes part of the "
                "model. Copy the file there."
            )


def check_fit(dataset: Dataset, report: ModelReport, config: TrainConfig) -> list[str]:
    """Check a dataset against the model that will learn from it, or be scored on it.

    Returns:
        Notes for a person.

    Raises:
        PackError: Training would fail, or succeed at the wrong thing.
    """
    check_vocabulary(report, dataset.max_token_id)
    notes = check_segments(report, int(dataset.index.max_seqlen.max()))
    return notes + check_tokenizer(dataset, str(config.model), config.force)


def check_tokenizer(dataset: Dataset, model: str, force: bool) -> list[str]:
    """Check a dataset's tokenizer against the model's own, where it has one.

    Raises:
        PackError: They differ, and `force` is off.
    """
    if Path(model).suffix == ".json":  # random weights: no tokenizer is theirs
        return []
    ours, theirs = _own_tokenizer(dataset), _tokenizer_file(model)
    if not ours.exists():
        return ["tokenizer: the dataset has none (its ids were imported), so nobody checked that they are the model's"]
    if theirs is None:
        return ["tokenizer: the model brings none to compare the dataset's with"]
    differing = _differing(ours, theirs)
    if not differing:
        return []
    message = f"{dataset.path}: its tokenizer differs from the one of {model} ({', '.join(differing)})"
    if force:
        return [message]
    raise PackError(f"{message}; the same ids would mean other text. Build with `tokenizer` {model}, or pass `force`.")


def _own_tokenizer(dataset: Dataset) -> Path:
    return dataset.path / "tokenizer" / "tokenizer.json"


def _differing(left: Path, right: Path) -> list[str]:
    """Return the parts in which two tokenizer.json differ; none where one of them is not there."""
    if not (left.exists() and right.exists()):
        return []
    one, other = (json.loads(path.read_text(encoding="utf-8")) for path in (left, right))
    return [part for part in _TOKENIZER_PARTS if one.get(part) != other.get(part)]


def _tokenizer_file(model: str) -> Path | None:
    if Path(model).is_dir():
        file = Path(model) / "tokenizer.json"
        return file if file.exists() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        model,
        "tokenizer.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None
