"""Faults that users of other packers reported in public: boundaries, positions, padding and labels of rows.

Each test names one report; what is right there is written out, never taken from what we return. A, B and C are the
documents of 3, 2 and 4 tokens that most of these reports can be told with.
"""

import json
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows
from pipeline.tokens import Documents
from shards import Dataset, Pack, PackError
from shards.schema import Layout
from trainer import PackedCollator, PackedLM, PackLoader
from trainer.batch import HostBuffers, Shape
from trainer.model.loading import check_model, load_model

A, B, C = [11, 12, 13], [21, 22], [31, 32, 33, 34]
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0}


@pytest.fixture
def abc(build_words) -> Dataset:
    """A, B and C in one row, in this order."""
    return build_words([A, B, C], 9)


def batches_of(dataset: Dataset, **options) -> list[dict]:
    return list(PackLoader(dataset, **options))


def batch_of(dataset: Dataset, **options) -> dict:
    (batch,) = batches_of(dataset, **options)
    return batch


def write_config(path: Path, model_type: str, **fields) -> str:
    path.write_text(json.dumps({"model_type": model_type, **(GPT2 if model_type == "gpt2" else SIZES), **fields}))
    return str(path)


def in_one_row(lengths: list[int], seq_len: int, masks: list[list[int]] | None = None) -> tuple[np.ndarray, ...]:
    """Pack documents of these lengths by next-fit; return ids, positions, mask and cu_seqlens of the first row."""
    return rows_of(lengths, seq_len, masks)[0]


def rows_of(lengths: list[int], seq_len: int, masks: list[list[int]] | None = None) -> list[Pack]:
    total = sum(lengths)
    mask = np.ones(total, np.uint8) if masks is None else np.concatenate(masks).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    documents = Documents(np.arange(total, dtype=np.int32) % 60 + 3, offsets, np.arange(len(lengths)), mask)
    segments = cut(np.array(lengths, np.int64), seq_len, "split")
    bins = PACKERS["next-fit"](segments.length, seq_len)
    rows = assemble_rows(documents, segments, bins, Layout(seq_len=seq_len, max_token_id=63))
    found = []
    for row, (first, last) in enumerate(pairwise(rows.token_offsets.tolist())):
        begin = int(rows.segment_offsets[row]) + row
        cu = rows.cu_seqlens[begin : int(rows.segment_offsets[row + 1]) + row + 1]
        found.append(Pack(rows.input_ids[first:last], rows.position_ids[first:last], rows.loss_mask[first:last], cu))
    return found


def filled(packs: list[Pack], shape: Shape, rows: int = 1) -> dict:
    buffers = HostBuffers(256, 64, packs[0][0].dtype, packs[0][1].dtype, pin=False)
    buffers.fill(packs, max(int(np.diff(pack.cu_seqlens).max()) for pack in packs), shape)
    return buffers.to_device(torch.device("cpu"), rows)


def test_three_documents_in_a_row_have_19_attention_pairs_and_not_45(abc):
    """huggingface/trl#1230, unslothai/unsloth#126, karpathy/nanoGPT#280"""
    batch = batch_of(abc)
    query, key = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    document = torch.bucketize(torch.arange(9), batch["cu_seqlens"][1:], right=True)
    allowed = (document[query] == document[key]) & (key <= query)
    assert int(allowed.sum()) == 6 + 3 + 10 == batch["attention_pairs"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_mask_of_ones_changes_nothing_and_any_real_mask_is_refused(abc, tmp_path, model_type):
    """huggingface/transformers#46634"""
    model = load_model(write_config(tmp_path / "model.json", model_type)).model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)  # fresh weights are so small that attention hardly matters
    batch = batch_of(abc)
    ids, given = batch["input_ids"], {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    given |= {"cu_seq_lens_q": batch["cu_seqlens"], "max_length_q": batch["max_seqlen"], "use_cache": False}
    leaking = model(**given | {"cu_seq_lens_q": torch.tensor([0, 9], dtype=torch.int32), "max_length_q": 9}).logits
    bare, masked = model(**given).logits, model(**given, attention_mask=torch.ones_like(ids)).logits
    with pytest.raises(PackError, match="got an attention mask"):
        model(**given, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=torch.tensor([each])).logits[0] for each in (A, B, C)])
    for logits in (bare, masked):
        torch.testing.assert_close(logits[0], alone, rtol=1e-5, atol=1e-5)
    assert (leaking[0] - alone).abs().max() > 1e-3


def test_a_batch_holds_no_mask_that_could_be_summed_or_compared_with_one(abc):
    """hiyouga/LlamaFactory#7754: lengths came out as [8, 8], the sums of the documents' numbers"""
    assert set(batch_of(abc)) == {
        *("input_ids", "position_ids", "shift_labels", "cu_seqlens", "max_seqlen", "step"),
        *("num_tokens", "num_targets", "attention_pairs", "window_pairs"),
    }
    assert set(PackedCollator()([abc[0]])) == {
        *("input_ids", "position_ids", "labels", "use_cache"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }


def test_a_model_whose_first_position_is_2_keeps_its_own_positions(tmp_path):
    """huggingface/transformers#47496: positions from 0 quietly degrade it"""
    config = write_config(tmp_path / "model.json", "roberta", is_decoder=True, max_position_embeddings=130)
    loaded = load_model(config)
    packed = PackedLM(loaded.model, backend=loaded.backend, plain_head=loaded.report.plain_head).eval()
    native = transformers.RobertaForCausalLM(transformers.AutoConfig.for_model(**json.loads(Path(config).read_text())))
    native.load_state_dict(loaded.model.state_dict())
    documents = [[5, 9, 11, 7, 20], [8, 30, 12, 40, 41, 6, 9, 50, 13], [17, 21, 33]]
    lengths = torch.tensor([len(ids) for ids in documents])
    ids = torch.tensor([list(chain.from_iterable(documents))])
    labels = torch.cat([torch.tensor([*ids[1:], -100]) for ids in documents])[None]
    batch = {
        "input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "shift_labels": labels,
        "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), "max_seqlen": int(lengths.max()),
    }  # fmt: skip
    alone = sum(
        torch.nn.functional.cross_entropy(
            native.eval()(input_ids=torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="sum"
        )
        for ids in documents
    )
    assert packed(batch).item() == pytest.approx(alone.item(), rel=1e-5)


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path):
    report = check_model(write_config(tmp_path / "model.json", "roberta", is_decoder=False))
    assert not report.accepted
    assert "not causal" in report.text()


def test_a_row_that_begins_inside_a_document_has_boundaries_like_any_other(build_words):
    """verl-project/verl#1270: segment starts were inferred from zeros in positions 5, 6, 7, 0, 1"""
    dataset = build_words([[10, 11, 12, 13, 14, 15, 16, 17], [20, 21]], 5, packer="wrapped")
    row = dataset[1]
    assert row["input_ids"].tolist() == [15, 16, 17, 20, 21]
    assert row["cu_seqlens"].tolist() == [0, 3, 5]
    assert row["max_seqlen"] == 3
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert row["doc_offsets"].tolist() == [5, 0]


def test_padding_makes_every_field_as_long_as_the_ids():
    """hiyouga/LlamaFactory#10736: positions were forgotten"""
    batch = filled([in_one_row([3, 2, 4], 9)], Shape(fill_to=16))
    assert {batch[name].shape for name in ("input_ids", "position_ids", "shift_labels")} == {(1, 16)}
    assert batch["cu_seqlens"][-1] == 16


def test_a_micro_batch_never_exceeds_its_budget_of_tokens(build_words):
    """OpenRLHF/OpenRLHF#1025: the limit held for each sample, not for the flattened batch"""
    dataset = build_words([list(range(10, 19))] * 3, 16)
    assert [batch["input_ids"].numel() for batch in batches_of(dataset, tokens_per_batch=16)] == [9, 9, 9]


def test_offsets_are_int32_from_0_strictly_rising_to_the_number_of_tokens():
    """Dao-AILab/flash-attention#880, huggingface/transformers#35861"""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        lengths = rng.integers(1, 12, rng.integers(1, 9)).tolist()
        cu = in_one_row(lengths, 128).cu_seqlens
        assert cu.dtype == np.int32
        assert cu[0] == 0
        assert np.diff(cu).tolist() == lengths
        assert cu[-1] == sum(lengths)


def test_the_longest_length_is_an_int_that_the_host_knows(abc):
    """Dao-AILab/flash-attention#1894: a tensor there syncs with the device and breaks graph capture"""
    for batch in (batch_of(abc), batch_of(abc, static_shapes=True)):
        assert type(batch["max_seqlen"]) is int
        assert batch["max_seqlen"] == 4
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].unique().tolist() == [0, 3, 5, 9]


def test_the_tail_is_one_segment_and_not_one_for_each_pad():
    """axolotl-ai-cloud/axolotl#2739"""
    batch = filled([in_one_row([3, 2], 8)], Shape(fill_to=8))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["cu_seqlens"].unique().tolist() == [0, 3, 5, 8]
    assert len(batch["cu_seqlens"]) == 5  # the last offset again, to a power of two segments: an empty one


def test_the_last_offset_is_the_length_of_the_row_whatever_the_padding():
    """pytorch/pytorch#186786: tokens that no segment covers give NaN gradients after a clean forward pass"""
    rng = np.random.default_rng(1)
    for _ in range(500):
        lengths = rng.integers(1, 17, rng.integers(1, 5)).tolist()
        pack = in_one_row(lengths, 64)
        batch = filled([pack], Shape(fill_to=None if rng.random() < 0.3 else int(rng.integers(64, 200))))
        assert batch["cu_seqlens"][-1] == batch["input_ids"].numel() >= sum(lengths)
        single = in_one_row(lengths[:1], 64)
        rectangle = filled([single, single], Shape(row_len=17), rows=2)
        assert rectangle["cu_seqlens"][-1] == rectangle["input_ids"].numel() == 34


def test_documents_padded_inside_a_rectangle_have_no_target_in_their_pads():
    """NVIDIA-NeMo/RL#4070: true and padded boundaries were mixed up"""
    packs = [in_one_row([length], 4) for length in (3, 2, 4)]
    batch = filled(packs, Shape(row_len=4), rows=3)
    assert batch["cu_seqlens"].tolist() == [0, 4, 8, 12]
    assert (batch["shift_labels"] != -100).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]


def test_every_target_of_a_stream_cut_into_rows_is_used_once_or_counted_as_lost(build_words):
    """karpathy/llm.c#321: is a row L or L + 1 tokens? Here L, and its first token is no target."""
    stream = list(range(100, 121))
    dataset = build_words([stream], 4, packer="wrapped")
    used = [int(id) for row in dataset for id in row["input_ids"][row["loss_mask"] == 1]]
    starts = [int(row["input_ids"][0]) for row in dataset][1:]
    assert sorted([*used, *starts]) == stream[1:]
    assert dataset.manifest["totals"]["targets"] == {"read": 20, "packed": 15, "lost": {"boundary": 5}}


def test_the_first_token_of_a_document_is_never_a_target(abc):
    """meta-pytorch/torchtune#2613"""
    unshifted = PackedCollator()([abc[0]])["labels"]
    assert unshifted.tolist() == [[-100, 12, 13, -100, 22, -100, 32, 33, 34]]
    assert batch_of(abc)["shift_labels"].tolist() == [[12, 13, -100, 22, -100, 32, 33, 34, -100]]
    assert batch_of(abc)["num_targets"] == 6


def test_a_weight_belongs_to_the_token_that_is_predicted():
    """AI-Hypercomputer/maxtext#5222: the first token of every answer was never trained on"""
    batch = filled([in_one_row([4, 3], 7, [[0, 0, 1, 1], [0, 1, 1]])], Shape())
    assert (batch["shift_labels"][0] != -100).int().tolist() == [0, 1, 1, 0, 1, 1, 0]


def test_a_document_that_begins_with_an_answer_is_not_scored_from_the_one_before_it():
    """huggingface/trl#5854"""
    _, _, mask, *_ = in_one_row([3, 2], 8, [[1, 1, 1], [1, 1]])
    assert mask.tolist() == [0, 1, 1, 0, 1]


def test_a_mask_stays_on_its_ids_when_documents_share_a_row():
    """huggingface/trl#3728: packing dropped the column"""
    ids, _, mask, *_ = in_one_row([4, 2], 8, [[0, 0, 1, 1], [0, 1]])
    assert ids[mask == 1].tolist() == [5, 6, 8]


def test_padding_is_known_by_length_so_a_true_eos_is_trained_where_both_have_one_id(words_dir, build_words):
    """mlabonne/llm-course#33, huggingface/trl#976"""
    assert json.loads((Path(words_dir) / "tokenizer_config.json").read_text())["pad_token"] == "</s>"
    dataset = build_words([[11, 12]], 5, add_eos=True)
    for options in ({}, {"static_shapes": True}):
        labels = batch_of(dataset, **options)["shift_labels"][0].tolist()
        assert labels == [12, 2, -100, -100, -100][: len(labels)]
    assert PackedCollator()([dataset[0]])["labels"].tolist() == [[-100, 12, 2]]


def test_an_end_of_turn_inside_a_document_is_no_boundary(build_words):
    """pytorch/torchtitan#2560: masks were built from the ids of EOS"""
    row = build_words([[11, 2, 12, 2], [21, 2]], 8, parse_special=True, add_eos=True)[0]
    assert row["input_ids"].tolist() == [11, 2, 12, 2, 21, 2]
    assert row["cu_seqlens"].tolist() == [0, 4, 6]


def test_pads_are_not_among_the_tokens_of_a_batch_and_never_balance_experts(build_words, tmp_path):
    """huggingface/transformers#28505: expert balancing counted pads"""
    batch = batch_of(build_words([A, B], 8), static_shapes=True)
    assert (batch["input_ids"].numel(), batch["num_tokens"]) == (8, 5)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert "its loss for balancing experts is left out" in " ".join(
        check_model(write_config(tmp_path / "model.json", "mixtral", **experts)).notes
    )


def test_what_describes_500_documents_in_131072_tokens_is_a_list_of_501_offsets():
    """NVIDIA/Megatron-LM#1155: a dense mask of this row has 17 thousand million entries"""
    lengths = np.diff(np.linspace(0, 131_072, 501).astype(int)).tolist()
    pack = in_one_row(lengths, 131_072)
    buffers = HostBuffers(131_072, 501, pack[0].dtype, pack[1].dtype, pin=False)
    buffers.fill([pack], max(lengths), Shape())
    batch = buffers.to_device(torch.device("cpu"))
    per_token = {name: value for name, value in batch.items() if torch.is_tensor(value) and value.numel() > 501}
    assert {value.numel() for value in per_token.values()} == {131_072}
    assert batch["cu_seqlens"].numel() == 501
    assert sum(value.nbytes for value in batch.values() if torch.is_tensor(value)) < 4e6


def test_with_packing_off_every_document_has_a_row_and_pads_weigh_nothing(build_words):
    """marin-community/marin#7209: off was a count of 0, and pads and the last real slot were trained"""
    dataset = build_words([A, B], 4, packer="bucketed")
    batch = batch_of(dataset, tokens_per_batch=8)
    weights = {
        int(ids[0]): (row != -100).int().tolist()
        for ids, row in zip(batch["input_ids"], batch["shift_labels"], strict=True)
    }
    assert weights == {11: [1, 1, 0, 0], 21: [1, 0, 0, 0]}
    assert [row["input_ids"].tolist() for row in build_words([A, B], 4, "unpacked", packer="unpacked")] == [A, B]
    with pytest.raises(PackError, match="`max_segments`: 0; expected at least 1"):
        build_words([A, B], 4, "off", max_segments=0)
