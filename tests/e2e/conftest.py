"""A small dataset built from real text, and processes that train on it, forked from a server that has torch already."""

import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline import BuildConfig, RecordOptions, build
from shards import Dataset

BUCKETS = ("corpora", "datasets")
PROCESS = str(Path(__file__).parent / "train_process.py")


@pytest.fixture(scope="session")
def processes() -> Any:
    """The context that new processes come from."""
    context = multiprocessing.get_context("forkserver")
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # a build may have started one that has not the same imports
    context.set_forkserver_preload(["trainer.loop", "transformers.models.llama.modeling_llama"])
    return context


@pytest.fixture
def run_training(processes: Any, tmp_path: Path) -> Callable[..., list[int]]:
    """Run jobs (see `train_process.py`) one after another in `world_size` processes; return their exit codes."""
    calls = 0

    def run(jobs: list[dict[str, Any]], world_size: int = 1) -> list[int]:
        nonlocal calls
        calls += 1
        facts = {"jobs": jobs, "world_size": world_size, "rendezvous": str(tmp_path / f"rendezvous-{calls}")}
        started = [
            processes.Process(target=runpy.run_path, args=(PROCESS, facts | {"rank": rank}, "__main__"))
            for rank in range(world_size)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(240)
        return [process.exitcode for process in started]

    return run


def write_questions(path: Path, number: int, seed: int = 0) -> Path:
    """Instructions with answers of very different lengths."""
    rng = random.Random(seed)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "packing", "puts", "documents"]
    with path.open("w", encoding="utf-8") as file:
        for k in range(number):
            question, answer = (" ".join(rng.choices(words, k=rng.randint(1, most))) for most in (6, 14))
            file.write(json.dumps({"prompt": f"{k}: {question}?", "completion": answer}) + "\n")
    return path


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> str:
    """A dataset of 150 instructions in packs of at most 128 tokens."""
    root = tmp_path_factory.mktemp("packed")
    build(
        BuildConfig(
            sources=(str(write_questions(root / "questions.jsonl", 150)),), out=str(root / "dataset"),
            tokenizer=tokenizer_dir, seq_len=128, records=RecordOptions(kind="instruction"),
        )
    )  # fmt: skip
    return str(root / "dataset")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The configuration of a tiny Llama whose vocabulary holds every id of `tokenizer_dir`."""
    path = tmp_path / "llama.json"
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer for tests that fix their ids: `w11` is id 11, up to `w199`; `</s>` is EOS and padding both."""
    path = tmp_path_factory.mktemp("tokenizers") / "words"
    path.mkdir()
    specials = ["<unk>", "<s>", "</s>"]
    words = {word: id for id, word in enumerate([*specials, *(f"w{id}" for id in range(3, 200))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def build_words(words_dir: str, tmp_path: Path) -> Callable[..., Dataset]:
    """Build documents of fixed ids with `words_dir`, in corpus order; no EOS is added.

    A document is a list of ids, or a pair of such lists: prompt and completion. Options are those of RecordOptions and
    of BuildConfig.
    """

    def text(ids: Sequence[int]) -> str:
        return " ".join("</s>" if id == 2 else f"w{id}" for id in ids)

    def make(documents: Sequence[Any], seq_len: int, name: str = "dataset", **options: Any) -> Dataset:
        pairs = isinstance(documents[0], tuple)
        lines = [
            {"prompt": text(each[0]), "completion": " " + text(each[1])} if pairs else {"text": text(each)}
            for each in documents
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        chosen = {key: options.pop(key) for key in [*options] if key in RecordOptions.__dataclass_fields__}
        records = RecordOptions(kind="instruction" if pairs else "text", **{"add_eos": False, **chosen})
        config = {"packer": "next-fit", "records": records, **options}
        build(
            BuildConfig(sources=(str(path),), out=str(tmp_path / name), tokenizer=words_dir, seq_len=seq_len, **config)
        )
        return Dataset(tmp_path / name)

    return make


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """The file system of a store, moto's server on loopback; s3:// URLs lead there."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        filesystem = fsspec.filesystem("s3")
        for bucket in BUCKETS:
            filesystem.makedirs(bucket, exist_ok=True)  # moto remembers those of an earlier server
        yield filesystem
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
