"""A run traced: against batches that were really served, and against the corpus itself."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from pipeline import BuildConfig, build
from pipeline.cli import main
from shards import Dataset, PackError
from shards.tables.provenance import Provenance
from trainer import TrainConfig
from trainer.documents.trace import RunTrace
from trainer.loader import PackLoader

EPOCHS = 2.4
SEQ_LEN = 64


def write_lines(path: Path, name: str, number: int) -> None:
    """Write records whose text names the file and the line, and some that give no document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"text": f"{name} line {k}: {'word ' * (k * 7 % 23)}" if k % 10 else ""} for k in range(1, number + 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> Dataset:
    """Two sources of two files each, one of them a stream, in windows that files share and that cut them."""
    root = tmp_path_factory.mktemp("traced")
    for name in ("web/a", "web/b", "code/c"):
        write_lines(root / f"{name}.jsonl", name, 90)
    write_lines(root / "code" / "lines.jsonl", "code/d", 40)
    records = [json.loads(line) for line in (root / "code" / "lines.jsonl").read_text().splitlines()]
    (root / "code" / "d.json").write_text(json.dumps(records))
    (root / "code" / "lines.jsonl").unlink()
    build(
        BuildConfig(
            sources=(f"web={root / 'web'}", f"code={root / 'code'}"), out=root / "dataset", tokenizer=tokenizer_dir,
            seq_len=SEQ_LEN, window_bytes=2048, tokenizer_engine="tokenizers", workers=1,
        )
    )  # fmt: skip
    dataset = Dataset(root / "dataset")
    assert len(dataset.shards) > 6
    return dataset


def make_run(path: Path, dataset: Dataset, taken: int, **settings: object) -> TrainConfig:
    """Write what a run leaves behind that took so many steps."""
    chosen = {"epochs": EPOCHS, "packs_per_step": 4, "seed": 3, **settings}
    config = TrainConfig(dataset=dataset.path, model="any", out=path, **chosen)  # type: ignore[arg-type]
    path.mkdir()
    (path / "train.json").write_text(json.dumps(config.to_dict()))
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": k + 1}) + "\n" for k in range(taken)))
    return config


ORDERS = [
    {},
    {"order": "cost-grouped", "last_step": "pad"},
    {"order": "block-shuffled", "shuffle_block_shards": 2},
    {"mix": (("web", 3.0), ("code", 1.0)), "mix_stop": "longest"},
]
DRAWN = [{"repack": True}, {"repack": True, "mix": (("web", 3.0), ("code", 1.0)), "mix_stop": "longest"}]


@pytest.mark.parametrize("settings", ORDERS, ids=lambda settings: next(iter(settings), "shuffled"))
def test_a_step_lists_what_two_processes_were_served(built, tmp_path, settings):
    config = make_run(tmp_path / "run", built, 10, **settings)
    traced = RunTrace(tmp_path / "run")
    fixed = dict(settings)
    served: dict[int, list[int]] = {}
    for rank in range(2):
        loader = PackLoader(built, packs_per_step=4, seed=3, rank=rank, world_size=2, **fixed)
        for number in range(traced.num_steps):
            served.setdefault(number, []).extend(np.concatenate(loader.step_at(number).batches).tolist())
    assert traced.num_steps == round(config.epochs * loader.steps_per_epoch) > loader.steps_per_epoch
    for number, packs in served.items():
        seen = traced.step(number + 1)
        assert (seen["step"], seen["epoch"]) == (number + 1, number // loader.steps_per_epoch + 1)
        assert seen["taken"] is (number < 10)
        expected = sorted((pack, document) for pack in packs for document in built[pack]["doc_ids"].tolist())
        assert sorted((segment["pack"], segment["doc_id"]) for segment in seen["segments"]) == expected
        assert seen["tokens"] == sum(len(built[pack]["input_ids"]) for pack in packs)
        assert seen["targets"] == sum(int(built[pack]["loss_mask"].sum()) for pack in packs)


@pytest.mark.parametrize("settings", DRAWN, ids=["shuffled", "mix"])
def test_a_step_of_packs_drawn_anew_lists_what_was_served(built, tmp_path, settings):
    make_run(tmp_path / "run", built, 10, **settings)
    traced, contents = RunTrace(tmp_path / "run"), dict[tuple[int, int, int], list[int]]()
    for pack, row in enumerate(built):
        for (start, stop), document in zip(pairwise(row["cu_seqlens"].tolist()), row["doc_ids"].tolist(), strict=True):
            contents[pack, document, stop - start] = row["input_ids"][start:stop].tolist()
    assert len(contents) == built.index.num_segments.sum()
    loader, others = PackLoader(built, packs_per_step=4, seed=3, **settings), 0
    for number, served in zip(range(traced.num_steps), batches_of_steps(loader), strict=False):
        seen = traced.step(number + 1)
        listed = [contents[entry["pack"], entry["doc_id"], entry["tokens"]] for entry in seen["segments"]]
        assert sorted(listed) == sorted(served)
        assert seen["packs"] == 4
        others += len({entry["pack"] for entry in seen["segments"]}) > 4
    assert others > 3, "the packs of the run are not those of the dataset"


def batches_of_steps(loader: PackLoader) -> Iterator[list[list[int]]]:
    """Yield the ids of each segment of each step, from the batches that a model would see."""
    segments: list[list[int]] = []
    for number, batch in enumerate(loader.forever(), 1):
        ids = batch["input_ids"][0].tolist()
        segments += [ids[start:stop] for start, stop in pairwise(batch["cu_seqlens"].tolist())]
        if number % loader.batches_per_step == 0:
            yield segments
            segments = []


@pytest.mark.parametrize("settings", [*ORDERS, *DRAWN], ids=lambda settings: "-".join(settings) or "shuffled")
def test_a_document_lists_the_steps_that_list_it(built, tmp_path, settings):
    make_run(tmp_path / "run", built, 5, **settings)
    traced = RunTrace(tmp_path / "run")
    by_document: dict[int, list[int]] = {}
    for step in range(1, traced.num_steps + 1):
        for document in {segment["doc_id"] for segment in traced.step(step)["segments"]}:
            by_document.setdefault(document, []).append(step)
    for document in np.unique(np.concatenate([row["doc_ids"] for row in built])).tolist():
        (trace,) = traced.document(str(document))
        assert [seen["step"] for seen in trace["steps"]] == by_document.get(document, [])
        assert trace["tokens"] == sum(
            int(np.diff(row["cu_seqlens"])[row["doc_ids"] == document].sum()) for row in built
        )


def test_records_are_the_lines_of_the_corpus(built, tmp_path, tokenizer_dir):
    make_run(tmp_path / "run", built, 5)
    tokenizer, provenance, begun = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json"), Provenance(built), 0
    for row in built:
        bounds = row["cu_seqlens"].tolist()
        for place, document in enumerate(row["doc_ids"].tolist()):
            record = provenance.record_of(document)
            assert record is not None
            assert provenance.find(f"{record.source}={record}") == [document]
            if row["doc_offsets"][place] == 0:
                text = tokenizer.decode(row["input_ids"][bounds[place] : bounds[place + 1]].tolist())
                assert text.strip().startswith(f"{record.source}/{Path(record.file).stem} line {record.number}:")
                begun += 1
    assert begun > 200
    assert RunTrace(tmp_path / "run").document("a.jsonl:11")[0]["document"]["file"] == "a.jsonl"


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        ("a.jsonl:91", "a.jsonl has 90 records, counted from 1"),
        ("a.jsonl:10", "left out"),
        ("z.jsonl:1", "expected one of the files"),
        ("a.jsonl", "expected FILE:RECORD"),
    ],
)
def test_a_document_that_is_not_there_is_named_with_the_reason(built, tmp_path, doc, message):
    make_run(tmp_path / "run", built, 5)
    with pytest.raises(PackError, match=message):
        RunTrace(tmp_path / "run").document(doc)


def test_a_rejected_record_says_why(tmp_path, tokenizer_dir):
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n{"text": "three"}\n')
    build(
        BuildConfig(
            sources=tmp_path / "c.jsonl", out=tmp_path / "out", tokenizer=tokenizer_dir, seq_len=16, on_error="skip",
            max_rejected=1.0,
        )
    )  # fmt: skip
    make_run(tmp_path / "run", Dataset(tmp_path / "out"), 0, packs_per_step=1)
    with pytest.raises(PackError, match=r"c\.jsonl:2; no pack holds any token of it: it was rejected: .*'text'"):
        RunTrace(tmp_path / "run").document("c.jsonl:2")


def test_steps_beyond_the_run_and_other_datasets_are_refused(built, tmp_path):
    make_run(tmp_path / "run", built, 5, steps=7)
    traced = RunTrace(tmp_path / "run")
    for step in (0, 8):
        with pytest.raises(PackError, match=rf"`step`: {step}; expected 1 to 7"):
            traced.step(step)
    folder = tmp_path / "run" / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    loader = {"packs_per_step": 4, "dataset_id": "f" * 64}
    (folder / "checkpoint.json").write_text(json.dumps({"facts": {"loader": loader}}))
    with pytest.raises(PackError, match=r"expected ffffffffffff, which .*run was trained on"):
        RunTrace(tmp_path / "run")
    with pytest.raises(PackError, match=r"holds no run; expected train\.json"):
        RunTrace(tmp_path)


def test_the_command_shows_a_step_and_a_document(built, tmp_path):
    make_run(tmp_path / "run", built, 5)
    run = str(tmp_path / "run")
    step = CliRunner().invoke(main, ["trace", run, "--step", "2", "--json"], catch_exceptions=False)
    segment = json.loads(step.stdout)["segments"][0]
    shown = CliRunner().invoke(main, ["trace", run, "--step", "2", "--limit", "1"], catch_exceptions=False)
    assert f"{segment['file']}:{segment['record']}" in shown.stdout
    assert "more (--limit)" in shown.stdout
    name = f"{segment['source']}={segment['file']}:{segment['record']}"
    found = CliRunner().invoke(main, ["trace", run, "--doc", name, "--json"], catch_exceptions=False)
    assert 2 in [seen["step"] for seen in json.loads(found.stdout)[0]["steps"]]
    shown = CliRunner().invoke(main, ["trace", run, "--doc", name], catch_exceptions=False)
    assert "the run's metrics tell of 5 steps" in shown.stdout
    neither = CliRunner().invoke(main, ["trace", run])
    assert (neither.exit_code, "one of --step and --doc" in neither.stderr) == (2, True)
