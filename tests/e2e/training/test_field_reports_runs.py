"""Faults that users of other packers reported in public: repeats and gaps between ranks, resume, memory, silent damage.

Each test names one report; what is right there is written out, never taken from what we return.
"""

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch.utils.data import DataLoader

from pipeline.cli import main
from shards import Dataset, PackError
from trainer import PackedCollator, PackLoader
from trainer.model.loading import load_model
from trainer.run import _order_notes

WHOLE = {"packs_per_step": 12, "last_step": "pad"}


@pytest.fixture
def numbered(build_words) -> Dataset:
    """101 documents in 101 rows; the first id of document k is 10 + k."""
    return build_words([[10 + k, 5, 6] for k in range(101)], 4)


def served(loader: PackLoader, steps: Iterable[int]) -> list[int]:
    return [int(pack) for step in steps for batch in loader.step_at(step).batches for pack in batch]


def collate(rows: list[dict]) -> list[int]:
    """Return the first ids of rows; on the module's top level for workers to find."""
    return [int(id) for id in PackedCollator()(rows)["input_ids"][0, ::3]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_document_comes_once_an_epoch_on_any_number_of_ranks(numbered, world):
    """huggingface/datasets#3423: every rank repeated each sample"""
    loaders = [PackLoader(numbered, rank=rank, world_size=world, **WHOLE) for rank in range(world)]
    seen = Counter(int(id) for loader in loaders for batch in loader for id in batch["input_ids"][0, ::3])
    assert set(seen) == {10 + k for k in range(101)}
    assert loaders[0].order.repeated == 108 - 101
    assert sum(seen.values()) == 108
    assert max(seen.values()) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_other_loaders_share_the_rows_and_get_a_path_not_a_copy(numbered, workers, processes):
    """huggingface/datasets#4883, huggingface/nanoVLM#200"""
    assert len(pickle.dumps(numbered)) < 500
    context = {"multiprocessing_context": processes} if workers else {}
    loader = DataLoader(numbered, batch_size=4, num_workers=workers, collate_fn=collate, **context)
    for _ in range(2):  # and a second pass ends too: mosaicml/streaming#617
        assert sorted(id for batch in loader for id in batch) == [10 + k for k in range(101)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_survives_json_with_one_source_or_several(write_dataset, mixed):
    """Lightning-AI/litData#24: the state said index 0, or could not be loaded for mixed sources"""
    dataset = Dataset(write_dataset({name: [[40]] * 30 for name in ("web", "code")}))
    options = {"packs_per_step": 4, "mix": (("web", 0.75), ("code", 0.25)) if mixed else ()}
    whole, stopped, resumed = (PackLoader(dataset, **options) for _ in range(3))
    batches = stopped.forever()
    for _ in range(7 * 4):
        next(batches)
    batches.close()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed.load_state_dict(state)
    assert state["epoch"] * whole.steps_per_epoch + state["step"] == 7
    rest = resumed.forever()
    for step in range(7, 7 + 2 * whole.steps_per_epoch):
        expected = [dataset[int(pack)]["input_ids"].tolist() for pack in served(whole, [step])]
        assert [next(rest)["input_ids"][0].tolist() for _ in range(4)] == expected
    rest.close()


def test_a_resume_reads_nothing_of_what_was_served_before(write_dataset, monkeypatch):
    """huggingface/transformers#21934: 14 hours of reading and tokenizing, only to skip it"""
    dataset = Dataset(write_dataset({"web": [[8]] * 3000}))
    loader = PackLoader(dataset, packs_per_step=4)
    loader.load_state_dict(loader.state_dict() | {"step": 675})  # of 750
    read: list[int] = []
    pack = Dataset.pack
    monkeypatch.setattr(Dataset, "pack", lambda self, number: read.append(number) or pack(self, number))
    batches = loader.forever()
    first = next(batches)
    batches.close()
    wanted = served(loader, range(675, 679))
    assert np.array_equal(first["input_ids"][0], dataset[wanted[0]]["input_ids"])
    assert set(read) <= {0, *wanted}  # pack 0 tells the types
    assert len(read) < 12


def test_after_a_resume_later_epochs_are_whole(write_dataset):
    """huggingface/datasets#7447: all later epochs held only the rest of the first"""
    dataset = Dataset(write_dataset({"web": [[8]] * 200}))
    loader = PackLoader(dataset, packs_per_step=1)
    loader.load_state_dict(loader.state_dict() | {"step": 173})
    assert [sum(1 for _ in loader) for _ in range(3)] == [27, 200, 200]


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_on_4_ranks_resumes_on_fewer_without_a_document_twice(numbered, world):
    """mosaicml/streaming#37"""
    before = [PackLoader(numbered, rank=rank, world_size=4, packs_per_step=12) for rank in range(4)]
    first = [pack for loader in before for pack in served(loader, range(6))]
    after = [PackLoader(numbered, rank=rank, world_size=world, packs_per_step=12) for rank in range(world)]
    for loader in after:
        loader.load_state_dict(before[0].state_at(6))
        assert loader.steps_taken == 6
    rest = [pack for loader in after for pack in served(loader, range(6, loader.steps_per_epoch))]
    left_out = after[0].order.dropped
    assert (len(first), len(rest), left_out) == (72, 24, 5)
    assert len({*first, *rest}) == 96


@pytest.mark.parametrize(
    ("last_step", "steps", "said"),
    [("drop", 2, "2 packs that fill no step are left out"), ("pad", 3, "2 packs come twice in an epoch")],
)
def test_an_epoch_says_what_it_repeats_or_leaves_out(build_words, last_step, steps, said):
    """mosaicml/streaming#380: the epoch was rounded up in silence"""
    dataset = build_words([[10 + k, 5, 6] for k in range(10)], 4)
    loaders = [PackLoader(dataset, rank=rank, world_size=4, last_step=last_step) for rank in range(4)]
    packs = Counter(pack for loader in loaders for pack in served(loader, range(loader.steps_per_epoch)))
    assert {loader.steps_per_epoch for loader in loaders} == {len(loader) for loader in loaders} == {steps}
    assert (sum(packs.values()), len(packs)) == ((8, 8) if last_step == "drop" else (12, 10))
    assert [note for note in _order_notes(loaders[0]) if note.startswith(said)]


def test_the_largest_batch_comes_first_on_request(build_words):
    """huggingface/transformers#13794: memory peaked after hours"""
    lengths = np.random.default_rng(0).integers(2, 190, 120).tolist()
    dataset = build_words([[5] * length for length in lengths], 192, packer="bucketed")
    for seed in range(5):
        options = {"tokens_per_batch": 384, "packs_per_step": 2, "seed": seed}
        shapes = [batch["input_ids"].shape for batch in PackLoader(dataset, largest_first=True, **options)]
        assert all(shape.numel() <= 384 for shape in shapes)
        assert shapes[0] == (2, 192)
        state = PackLoader(dataset, **options).state_dict()
        with pytest.raises(PackError, match="largest_first False, this run has True"):
            PackLoader(dataset, largest_first=True, **options).load_state_dict(state)


def test_packed_losses_are_those_of_64_documents_alone_and_check_model_prints_how_close(tmp_path):
    """axolotl-ai-cloud/axolotl#3304, hiyouga/LlamaFactory#8277: a first loss up to 3 times too high"""
    config = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    model = load_model(str(path)).model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # fresh weights are so small that attention hardly matters
            parameter.mul_(3)
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 64).tolist()
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids, mask = rng.integers(3, 97, cu[-1]), np.ones(cu[-1], np.uint8)
    mask[cu[:-1]] = 0
    batch = PackedCollator()([{"input_ids": ids, "cu_seqlens": cu, "loss_mask": mask}])
    labels = batch.pop("labels")[0]
    parts = [slice(start, stop) for start, stop in pairwise(cu.tolist())]
    whole = torch.tensor([0, cu[-1]], dtype=torch.int32)
    packed, leaking = (
        model(**batch).logits[0],
        model(**batch | {"cu_seq_lens_q": whole, "max_length_q": cu[-1]}).logits[0],
    )
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=batch["input_ids"][:, part], use_cache=False).logits[0] for part in parts])

    def losses(logits: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of each document."""
        return torch.stack([F.cross_entropy(logits[part][:-1], labels[part][1:]) for part in parts])

    assert len(losses(alone)) == 64
    assert (losses(packed) - losses(alone)).abs().max() < 1e-4
    assert (losses(leaking) - losses(alone)).abs().max() > 1e-2
    printed = CliRunner().invoke(main, ["check-model", str(path)])
    assert printed.exit_code == 0
    (parity,) = re.findall(r"packed = alone +within (\S+) of what a leak would move", printed.output)
    assert float(parity) < 1e-4
