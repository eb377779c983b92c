"""Faults that users of other packers reported in public: lost tokens, memory, races, foreign ids.

Each test names one report; what is right there is written out, never taken from what we return.
"""

import json
import resource
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pipeline.building.engines
import shards.reader
from pipeline import BuildConfig, RecordOptions, build
from pipeline.cli import main
from pipeline.packing.cutting import cut
from pipeline.packing.kernels import always_compile
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.streams import stream_windows
from pipeline.tokens import Documents
from shards import Dataset, PackError, verify
from shards.ordering.step_order import StepOrder
from shards.schema import Layout
from trainer import PackLoader


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ids(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def totals(dataset: Dataset) -> dict[str, Any]:
    return dataset.manifest["totals"]


def test_an_example_that_truncation_leaves_without_targets_is_dropped_and_counted(build_words):
    """huggingface/trl#6668: such runs report a loss of 0.0 and succeed"""
    documents = [(ids(10, 10), ids(50, 2)), (ids(20, 3), ids(60, 2)), (ids(30, 3), ids(70, 2))]
    dataset = build_words(documents, 8, overlong="truncate")
    assert totals(dataset)["documents"]["dropped"] == {"no_target": 1}
    assert totals(dataset)["targets"] == {"read": 6, "packed": 4, "lost": {"no_target": 2}}
    assert [row["num_targets"] for row in dataset] == [2, 2]
    with pytest.raises(PackError, match="no target in 1 of 1 document; expected"):
        build_words(documents[:1], 8, "alone", overlong="truncate")


@pytest.mark.parametrize(
    ("prompt", "answer", "seq_len", "side", "expected"),
    [(6, 6, 9, "right", [0, 0, 0, 0, 0, 0, 1, 1, 1]), (6, 4, 7, "left", [0, 0, 0, 1, 1, 1, 1])],
    ids=["huggingface/transformers#34494", "verl-project/verl#601"],
)
def test_what_survives_of_an_answer_that_is_cut_stays_a_target(build_words, prompt, answer, seq_len, side, expected):
    document = (ids(10, prompt), ids(50, answer))
    row = build_words([document], seq_len, overlong="truncate", truncate_side=side)[0]
    assert row["loss_mask"].tolist() == expected
    whole = [*document[0], *document[1]]
    assert row["input_ids"].tolist() == (whole[:seq_len] if side == "right" else whole[-seq_len:])


def test_tokens_in_are_tokens_packed_and_tokens_reported(build_words):
    """huggingface/trl#4554: 99.8 % of a code corpus was cut off without a word"""
    documents = [ids(10, 7), ids(20, 2), ids(30, 4), ids(40, 1)]
    split, truncated = (
        totals(build_words(documents, 5, policy, overlong=policy, keep_no_target=True))["tokens"]
        for policy in ("split", "truncate")
    )
    assert split == {"read": 14, "packed": 14, "lost": {}}
    assert truncated == {"read": 14, "packed": 12, "lost": {"truncated": 2}}


def test_a_document_ends_in_eos_or_the_build_says_that_it_cannot(words_dir, tmp_path):
    """huggingface/trl#1623: the model never learned to stop. The files of GPT-2's tokenizer name no EOS, only its
    model's configuration does"""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((Path(words_dir) / "tokenizer.json").read_bytes())
    (tokenizer / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    source = tmp_path / "c.jsonl"
    source.write_text('{"text": "w11 w12"}\n')

    def made(name: str, *flags: str):
        arguments = "build", source, "--tokenizer", tokenizer, "--seq-len", 8, "--out", tmp_path / name, *flags
        return run(*arguments), tmp_path / name

    refused, _ = made("none")
    assert refused.exit_code == 1
    assert "the tokenizer names no EOS to end documents with" in refused.stderr
    assert Dataset(made("asked", "--no-eos")[1])[0]["input_ids"].tolist() == [11, 12]
    (tokenizer / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 2}')
    _, named = made("named")
    assert Dataset(named)[0]["input_ids"].tolist() == [11, 12, 2]
    assert json.loads((named / "tokenizer" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert run("verify", named, "--against", source).exit_code == 0


def test_columns_may_be_missing_null_or_elsewhere_but_the_texts_own_is_named(words_dir, tmp_path):
    """huggingface/datasets#7092: a cast error deep inside, the schema guessed from the first file"""
    records = [{"text": "w11"}, {"text": "w12", "meta": None}, {"meta": 1, "text": "w13"}, {"txt": "w14"}]
    for number, record in enumerate(records):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(record | {"id": number}) + "\n")
    flags = "--tokenizer", words_dir, "--seq-len", 8
    sources = [tmp_path / f"{number}.jsonl" for number in range(4)]
    assert run("build", *sources[:3], *flags, "--out", tmp_path / "out").exit_code == 0
    assert totals(Dataset(tmp_path / "out"))["documents"]["packed"] == 3
    failed = run("build", *sources, *flags, "--out", tmp_path / "bad")
    assert failed.exit_code == 1
    assert "3.jsonl, line 1: no field 'text', only 'txt', 'id'" in failed.stderr


def test_a_conversation_is_never_split_unless_asked_for(build_words):
    """huggingface/trl#5075: fragments began in the middle of a turn"""
    dataset = build_words([(ids(10, 6), ids(50, 11)), (ids(30, 6), ids(70, 6))], 12)
    assert [row["input_ids"].tolist() for row in dataset] == [[*ids(30, 6), *ids(70, 6)]]
    assert totals(dataset)["documents"]["dropped"] == {"overlong": 1}
    assert totals(dataset)["tokens"]["lost"] == {"overlong": 17}


def test_seven_long_documents_of_a_hundred_are_counted_or_stop_the_build_by_name(build_words, tmp_path, words_dir):
    """axolotl-ai-cloud/axolotl#775"""
    documents = [ids(10, 25 if k % 14 == 3 else 8) for k in range(98)] + [ids(10, 8)] * 2
    assert sum(len(each) > 20 for each in documents) == 7
    dataset = build_words(documents, 20, overlong="drop")
    report = json.loads(run("inspect", dataset.path, "--json").output)
    assert report["documents"]["dropped"] == {"overlong": 7}
    assert report["tokens"]["lost"] == {"overlong": 7 * 25}
    assert any("lost (overlong 175)" in warning for warning in report["warnings"])
    stopped = run(
        "build", tmp_path / "dataset.jsonl", "--tokenizer", words_dir, "--out", tmp_path / "strict", "--seq-len", 20,
        "--no-eos", "--overlong", "error",
    )  # fmt: skip
    assert stopped.exit_code == 1
    assert "line 4: has 25 tokens; expected at most 20" in stopped.stderr
    assert not (tmp_path / "strict" / "manifest.json").exists()


def peak_of_build(out: str, source: str, tokenizer: str) -> None:
    """Build, and leave beside the dataset how much memory this process came to, in bytes."""
    always_compile()  # whatever the size: numba's memory is no part of the comparison
    build(
        BuildConfig(
            sources=(source,), out=out, tokenizer=tokenizer, seq_len=512, window_bytes=1 << 17, position_ids=False,
            tokenizer_engine="tokenizers",
        )
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    Path(f"{out}.peak").write_text(str(peak))


def test_memory_does_not_grow_with_the_number_of_documents(processes, tmp_path, words_dir):
    """bigcode-project/Megatron-LM#34: tens of millions of small documents filled 1.5 TB when the index was written"""
    peaks = []
    for number in (20_000, 200_000):
        source = tmp_path / f"{number}.jsonl"
        source.write_text('{"text": "w11 w12"}\n' * number)
        process = processes.Process(target=peak_of_build, args=(str(tmp_path / f"{number}"), str(source), words_dir))
        process.start()
        process.join(120)
        assert totals(Dataset(tmp_path / f"{number}"))["documents"]["packed"] == number
        peaks.append(int((tmp_path / f"{number}.peak").read_text()))
    # of the larger corpus the text is 3.6 MB more, a list of it 14 MB, a list of lists of ids 30 MB
    assert peaks[1] - peaks[0] < 8e6


class CountingInput(BytesIO):
    """Bytes that know how many of them were read."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_the_first_part_of_a_stream_is_there_after_a_bounded_look_ahead(monkeypatch):
    """huggingface/trl#1468: a stream was read to its end before anything was packed"""
    line = b'{"text": "w11 w12 w13"}\n'
    stream = CountingInput(line * (20 * (1 << 20) // len(line)))
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(stream))
    (source,) = resolve_sources(["-"], RecordOptions())
    _, (part,) = next(stream_windows(source, [0], 1 << 16))
    assert 1 << 16 <= len(part) < (1 << 16) + len(line)
    assert stream.taken <= 2 << 20


def files_of(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def test_a_dataset_serves_runs_of_any_batch_size_and_is_never_written_again(build_words):
    """meta-pytorch/torchtune#1149, NVIDIA/Megatron-LM#907: ranks raced for a file that the first of them wrote"""
    dataset = build_words([ids(10, 9)] * 12, 10)
    before = files_of(dataset.path)
    for tokens_per_batch, rank in ((10, 0), (10, 1), (30, 0), (30, 1)):
        again = Dataset(dataset.path)
        batches = list(PackLoader(again, tokens_per_batch=tokens_per_batch, rank=rank, world_size=2))
        assert sum(batch["num_tokens"] for batch in batches) == 6 * 9
        assert again.dataset_id == dataset.dataset_id
    assert run("inspect", dataset.path).exit_code == run("verify", dataset.path).exit_code == 0
    assert files_of(dataset.path) == before


def test_builds_of_one_plan_into_one_place_all_end_with_the_same_dataset(tmp_path, tokenizer_dir, monkeypatch):
    """NVIDIA/Megatron-LM#907: here one build overtakes another, ends, and clears the unpublished files of both"""
    source = tmp_path / "c.jsonl"
    source.write_text("".join(json.dumps({"text": f"one two three {k}"}) + "\n" for k in range(100)))
    config = {"sources": (str(source),), "tokenizer": tokenizer_dir, "seq_len": 64, "window_bytes": 500}
    real, calls, overtaking = pipeline.building.engines.run_window, [], []

    def run_window(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            overtaking.append(build(BuildConfig(out=str(tmp_path / "out"), resume=True, **config)).manifest)
        return real(*arguments)

    monkeypatch.setattr(pipeline.building.engines, "run_window", run_window)
    manifest = build(BuildConfig(out=str(tmp_path / "out"), **config)).manifest
    assert manifest["shards"]["rows"] > 4
    assert [each["dataset_id"] for each in overtaking] == [manifest["dataset_id"]]
    assert verify(tmp_path / "out").ok


def test_rows_stay_readable_when_their_shard_is_unmapped_for_others(write_dataset, monkeypatch):
    """Lightning-AI/litData#846: a shard was removed while another worker still read it"""
    path = write_dataset({name: [[5, 4], [9]] for name in "abcdef"})
    expected = [(row["input_ids"].tolist(), row["cu_seqlens"].tolist()) for row in Dataset(path)]
    monkeypatch.setattr(shards.reader, "MAX_MAPS", 2)
    dataset = Dataset(path)
    held = [dataset.pack(pack) for pack in range(len(dataset))]
    assert len(dataset._maps) == 2
    assert [(ids.tolist(), cu.tolist()) for ids, _, _, cu, _ in held] == expected
    assert len(expected) == 12


@pytest.mark.parametrize("max_id", [65_535, 65_536, 131_071])
def test_an_id_is_stored_as_it_is_or_refused(max_id):
    """huggingface/transformers#2825: 45 % of a vocabulary wrapped around in 16 bits"""
    tokens = np.array([0, 65_535, 65_536, 131_071], np.int32)
    documents = Documents(tokens, np.array([0, 4]), np.arange(1))
    segments = cut(np.array([4]), 8, "split")
    arguments = documents, segments, PACKERS["next-fit"](segments.length, 8), Layout(seq_len=8, max_token_id=max_id)
    if max_id == 131_071:
        assert assemble_rows(*arguments).input_ids.tolist() == tokens.tolist()
    else:
        with pytest.raises(PackError, match=f"token id 131,071.*the tokenizer's largest, {max_id:,}"):
            assemble_rows(*arguments)


def test_offsets_above_two_to_the_31_are_exact():
    """NVIDIA/Megatron-LM#1672: offsets came out negative"""
    big = 1_500_000_000
    segments = cut(np.array([3 * big, 5]), big, "split")
    assert segments.document.tolist() == [0, 0, 0, 1]
    assert segments.start.tolist() == [0, big, 2 * big, 0]
    wrapped = cut(np.array([big - 1, 2 * big]), big, "wrapped")
    assert wrapped.start.tolist() == [0, 0, 1, big + 1]

    class Figures:
        num_tokens = num_targets = np.full(6, big, np.int32)
        attention_pairs = np.full(6, big, np.int64) * (big + 1) // 2

    sources = [("one", 0, 3), ("two", 3, 6)]
    order = StepOrder(Figures, packs_per_step=2, sources=sources, mix=(("one", 0.5), ("two", 0.5)))
    assert order.steps_per_epoch == 3
    assert all((order.step_packs(0, step) < 3).sum() == 1 for step in range(3))
    assert (order.costs > big).all()


def test_an_id_beyond_a_models_vocabulary_is_named_with_document_and_position(build_words):
    """sillsdev/silnlp#1033: a device assert far from the cause"""
    dataset = build_words([[11, 12], [21, 22, 23], [31, 100, 33]], 5)
    small, enough = (run("verify", dataset.path, "--vocab-size", size) for size in (100, 101))
    assert small.exit_code == 1
    assert "row 1: token 1 (document 2) is id 100; expected 0 to 99 (rule F11)" in small.stderr
    assert enough.exit_code == 0


def test_packing_without_effect_is_said_and_fails_a_strict_inspection(build_words):
    """unslothai/unsloth#7234: packing was never on, and nobody noticed"""
    alone = build_words([ids(10, 6)] * 8, 10)
    shared = build_words([ids(10, 5)] * 16, 10, "shared")
    flags = ("--packs-per-step", 8, "--json")
    unpacked, packed = (run("inspect", dataset.path, "--strict", *flags) for dataset in (alone, shared))
    assert unpacked.exit_code == 1
    report = json.loads(unpacked.stdout)
    assert report["segments_per_pack"]["mean"] == 1.0
    assert report["fill"]["rate"] == pytest.approx(0.6)
    assert any(warning.startswith("Packing had little effect") for warning in report["warnings"])
    assert "Packing had little effect" in run("inspect", alone.path).stdout
    assert run("inspect", alone.path).exit_code == 0
    assert (json.loads(packed.stdout)["warnings"], packed.exit_code) == ([], 0)
    assert run("inspect", shared.path, alone.path, "--strict", *flags).exit_code == 1
