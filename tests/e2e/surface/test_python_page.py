"""The code of docs/python.md, its blocks run in their order, and the examples that need no other trainer."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

import pipeline

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "python.md").read_text("utf-8")
BLOCKS = [
    (part.partition("\n")[0], re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for part in PAGE.split("\n## ")
]


@pytest.fixture
def workplace(tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the page takes for granted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lines = [json.dumps({"text": f"document {n}: " + "a few words more " * (n % 37)}) for n in range(100)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=4096, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of other projects' trainers
@pytest.mark.usefixtures("workplace")
def test_every_block_of_the_page_runs_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    ran = []
    for title, blocks in BLOCKS:
        if title == "TRL":
            pytest.importorskip("trl")
        for block in blocks:
            exec(compile(block, f"docs/python.md, {title}", "exec"), namespace)
            ran.append(title)
    assert ran == ["Build", "Build", "Read", "Pack only", "Train in a loop of your own", "transformers", "TRL"]
    assert "data/corpus" in capsys.readouterr().out


def test_the_examples_build_pack_and_train(workplace: Path) -> None:
    make = {name: runpy.run_path(str(ROOT / "examples" / f"{name}.py")) for name in ("build_and_read", "pack_lengths")}
    lengths = make["build_and_read"]["build_and_read"]("corpus.jsonl", "model", "out", 512)
    assert 0 < sum(lengths) <= 512
    assert sorted(map(sorted, make["pack_lengths"]["pack_lengths"]([7, 3, 6, 4], 10))) == [[0, 1], [2, 3]]
    losses = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["train"]("out", str(workplace / "model"), 3)
    assert len(losses) == 3


def test_names_and_version_are_there_to_be_found() -> None:
    assert set(dir(pipeline)) == set(pipeline.__all__)
    assert {"build", "BuildConfig", "BuildResult", "pack", "inspect", "Encoder", "PACKERS", "__version__"} <= set(
        dir(pipeline)
    )
    for name in pipeline.__all__:
        assert getattr(pipeline, name) is not None
