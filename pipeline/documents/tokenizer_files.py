"""The files of a tokenizer: found in a directory or on the hub, converted where they are older, and parsed as JSON.

`transformers` is imported only where there is no `tokenizer.json` to read. Code that a tokenizer brings along is never
run.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from shards.errors import TokenizerError, reason_of
from shards.quiet import quiet

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (JSON, CONFIG, "special_tokens_map.json", TEMPLATE)
NAMED_TEMPLATES = "additional_chat_templates"
MODEL = "config.json"


def read_files(name_or_dir: str) -> dict[str, bytes]:
    """Read the tokenizer files of a directory or a hub repository (name -> content).

    Raises:
        TokenizerError: Nothing there can be read as a tokenizer.
    """
    path = Path(name_or_dir).expanduser()
    if path.name == JSON and path.is_file():
        path = path.parent
    if path.is_dir():
        files = {name: (path / name).read_bytes() for name in (*FILES, MODEL) if (path / name).is_file()}
        files = _with_named_templates(files, path, name_or_dir)
    elif path.exists() or path.is_absolute() or name_or_dir.startswith((".", "~")) or name_or_dir.count("/") > 1:
        raise TokenizerError(
            f"--tokenizer: no directory {name_or_dir!r}; expected one that holds tokenizer.json, or a hub name. "
            "Check the path."
        )
    else:
        files = _download(name_or_dir)
    if JSON in files:
        return _with_eos(files, name_or_dir)
    _refuse_code(files, name_or_dir)
    return _convert(name_or_dir)


def _with_named_templates(files: dict[str, bytes], path: Path, where: str) -> dict[str, bytes]:
    """Name the templates of a folder of them in the configuration, so that no folder has to go with the dataset.

    Both say the same to transformers: files of that folder beside a default, and a list of names and templates.
    """
    named = {file.stem: file.read_bytes() for file in sorted((path / NAMED_TEMPLATES).glob("*.jinja"))}
    if not named:
        return files
    config = configuration({CONFIG: files.get(CONFIG, b"{}")}, where)
    templates = {
        **chat_templates(files, config),
        **{name: text.decode("utf-8") for name, text in named.items()},
    }
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    kept = {name: content for name, content in files.items() if name != TEMPLATE}
    return kept | {CONFIG: orjson.dumps(config, option=orjson.OPT_INDENT_2)}


def _with_eos(files: Mapping[str, bytes], where: str) -> dict[str, bytes]:
    """Leave out the model's configuration, but for the EOS that it alone may name (as in GPT-2's repository)."""
    kept = {name: content for name, content in files.items() if name != MODEL}
    config = configuration(kept, where)
    if MODEL not in files or "eos_token" in config:
        return kept
    try:
        named = orjson.loads(files[MODEL]).get("eos_token_id")
    except (orjson.JSONDecodeError, AttributeError):
        return kept
    wanted = named[0] if isinstance(named, list) and named else named
    ids = vocabulary(parse(kept[JSON], f"{where}/{JSON}"))
    texts = [text for text, index in ids.items() if index == wanted and wanted is not None]
    return kept | ({CONFIG: orjson.dumps({**config, "eos_token": texts[0]})} if texts else {})


@lru_cache(maxsize=1)
def parse(content: bytes | None, where: str) -> dict[str, Any]:
    """Parse a tokenizer.json, not to be changed: the last one is kept until an image is made of it.

    Raises:
        TokenizerError: It is missing, not JSON, or holds no model.
    """
    try:
        tokenizer: dict[str, Any] = orjson.loads(content or b"")
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{where}: not JSON ({error}); expected a tokenizer. Fetch the file again.") from None
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if not isinstance(model, dict) or not model.get("vocab"):
        raise TokenizerError(f"{where}: no model with a vocabulary in it; expected a tokenizer. Fetch the file again.")
    return tokenizer


def vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return text -> id of the model and of the added tokens together."""
    vocab = tokenizer["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    for token in tokenizer.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids


def configuration(files: Mapping[str, bytes], where: str) -> dict[str, Any]:
    """Merge special_tokens_map.json (older) and tokenizer_config.json (wins)."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        try:
            merged |= orjson.loads(files.get(name, b"{}"))
        except (orjson.JSONDecodeError, TypeError) as error:
            raise TokenizerError(f"{where}/{name}: not a JSON object ({error}). Fetch the file again.") from None
    return merged


def chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Find the chat templates by name: its own file is the default; the configuration may have several."""
    if TEMPLATE in files:
        return {"default": files[TEMPLATE].decode("utf-8")}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def _download(name: str) -> dict[str, bytes]:
    """Fetch the tokenizer files of a hub repository, from the cache where they are there."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files = {}
    for file in (*FILES, MODEL):
        try:
            with quiet():
                files[file] = Path(hf_hub_download(name, file)).read_bytes()
        except LocalEntryNotFoundError as error:  # no network and not in the cache
            if file == JSON:
                raise _unknown(name, error) from None
        except EntryNotFoundError:  # the repository has no such file
            continue
        except (OSError, ValueError) as error:  # transport errors are OSError, a wrong name is ValueError
            raise _unknown(name, error) from None
    try:
        with quiet():
            folder = snapshot_download(name, allow_patterns=f"{NAMED_TEMPLATES}/*.jinja")
    except (OSError, ValueError):  # the files came from the cache, which holds no more
        return files
    return _with_named_templates(files, Path(folder), name)


def _unknown(name: str, error: Exception) -> TokenizerError:
    reason = reason_of(error)
    return TokenizerError(
        f"--tokenizer: {name!r} is no directory here, and the hub gave no tokenizer of that name ({reason}). "
        "Check the name and the network, or give a directory."
    )


def _refuse_code(files: Mapping[str, bytes], name: str) -> None:
    """Refuse a tokenizer that is a program; transformers would offer to run it, and ask on the terminal."""
    for file in (CONFIG, MODEL):
        try:
            code = orjson.loads(files.get(file, b"{}")).get("auto_map")
        except (orjson.JSONDecodeError, AttributeError):
            continue
        if code and (file == CONFIG or "AutoTokenizer" in code):
            raise TokenizerError(
                f"--tokenizer: {name!r} brings code of its own (auto_map in {file}) and no tokenizer.json; code from a "
                "tokenizer is never run here. Convert it to a tokenizer.json first."
            )


def _convert(name: str) -> dict[str, bytes]:
    """Let transformers turn a tokenizer without tokenizer.json (sentencepiece, tiktoken) into one that has it."""
    import tempfile

    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = reason_of(error)
        raise TokenizerError(
            f"--tokenizer: {name!r} holds no tokenizer.json, and transformers cannot convert what it holds ({reason}). "
            "Save the tokenizer with save_pretrained first."
        ) from None
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = {file: (Path(directory) / file).read_bytes() for file in FILES if (Path(directory) / file).is_file()}
    if JSON not in files:
        raise TokenizerError(
            f"--tokenizer: {name!r} is a Python-only tokenizer ({type(tokenizer).__name__}); expected one that has a "
            "tokenizer.json. Convert it with tokenizers first."
        )
    return files
