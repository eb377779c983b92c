"""Which packs come when: every pack once, the same steps at any world size, exact resume, intact batches."""

import json
import pickle
import re
import shutil
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shards import Dataset, PackError
from shards.cost import padded_length
from trainer.feeding import feed as feeding
from trainer.feeding.feed import feed, whole_dataset
from trainer.loader import PackLoader
from trainer.model.loading import load_model


def served(loader: PackLoader, steps: range) -> list[list[int]]:
    return [[int(pack) for batch in loader.step_at(step).batches for pack in batch] for step in steps]


def ids_of(batch) -> list[int]:
    return batch["input_ids"].flatten().tolist()


def test_an_epoch_serves_every_pack_at_most_once_and_leaves_out_what_it_says(dataset):
    loader = PackLoader(dataset, packs_per_step=4)
    for epoch in range(3):
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        packs = [pack for step in served(loader, steps) for pack in step]
        assert len(packs) == len(set(packs)) == len(dataset) - loader.order.dropped
        assert 0 < loader.order.dropped < 4


def test_padding_the_last_step_serves_every_pack(dataset):
    loader = PackLoader(dataset, packs_per_step=4, last_step="pad")
    packs = Counter(pack for step in served(loader, range(loader.steps_per_epoch)) for pack in step)
    assert set(packs) == set(range(len(dataset)))
    assert sum(packs.values()) - len(packs) == loader.order.repeated > 0


@pytest.mark.parametrize("order", ["shuffled", "cost-grouped"])
def test_a_step_is_the_same_packs_and_divisor_at_any_world_size(dataset, order):
    whole = PackLoader(dataset, packs_per_step=8, order=order)
    for world in (1, 2, 4, 8):
        loaders = [PackLoader(dataset, packs_per_step=8, order=order, rank=r, world_size=world) for r in range(world)]
        assert len({len(loader) for loader in loaders}) == 1
        for step in range(2 * whole.steps_per_epoch):
            views = [loader.step_at(step) for loader in loaders]
            packs = [int(pack) for view in views for batch in view.batches for pack in batch]
            assert sorted(packs) == sorted(whole.packs_of(step).tolist())
            assert {view.num_targets for view in views} == {int(dataset.index.num_targets[packs].sum())}
            assert {view.divisor for view in views} == {view.num_targets for view in views}
            assert all(len(view.batches) == 8 // world for view in views)
            assert all(view.straggler >= 1 for view in views)


def test_the_divisor_by_document_counts_segments_with_a_target(dataset):
    step = PackLoader(dataset, packs_per_step=4, weighting="document").step_at(0)
    expected = 0
    for pack in np.concatenate(step.batches):
        pack = dataset.pack(int(pack))
        mask, cu = pack.loss_mask, pack.cu_seqlens
        expected += sum(mask[a:b].any() for a, b in pairwise(cu))
    assert step.divisor == expected > 4


@pytest.mark.parametrize("order", ["block-shuffled", "block-cost-grouped"])
def test_a_block_order_goes_on_from_its_state_on_another_number_of_ranks(make_dataset, documents, order):
    sources = {f"part-{k}": documents(12, 40, seed=k) for k in range(6)}  # six shards
    dataset = make_dataset(sources, 48)
    options = {"packs_per_step": 4, "order": order, "shuffle_block_shards": 2, "seed": 3}
    loader = PackLoader(dataset, **options)
    whole = [sorted(loader.packs_of(number).tolist()) for number in range(2 * loader.steps_per_epoch)]
    assert sum(map(len, whole[: loader.steps_per_epoch])) == len(dataset) - loader.order.dropped
    ranks = [PackLoader(dataset, **options, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(loader.state_at(loader.steps_per_epoch + 1))
    steps = [next(iter(rank))["step"].batches for rank in ranks]
    assert sorted(int(pack) for rank in steps for batch in rank for pack in batch) == whole[loader.steps_per_epoch + 1]
    with pytest.raises(PackError, match="shuffle_block_shards 2, this run has 3"):
        PackLoader(dataset, **options | {"shuffle_block_shards": 3}).load_state_dict(loader.state_dict())


def test_a_block_order_of_rectangles_is_refused(make_dataset, documents):
    dataset = make_dataset({"main": documents(80, 200, seed=5)}, 256, "bucketed")
    with pytest.raises(PackError, match=r"`order`: block-shuffled does not go with a bucketed dataset\."):
        PackLoader(dataset, order="block-shuffled")


def test_batches_hold_the_packs_of_the_plan_in_order(dataset):
    loader = PackLoader(dataset, tokens_per_batch=100, packs_per_step=4)  # two packs of 48 in a micro-batch
    steps = 0
    for batch in loader:
        step = loader.step_at(steps // 2)
        packs = step.batches[steps % 2]
        expected = np.concatenate([dataset.pack(int(pack))[0] for pack in packs])
        assert ids_of(batch) == expected.tolist()
        assert batch["num_tokens"] == len(expected) == batch["cu_seqlens"][-1]
        assert batch["num_targets"] == int((batch["shift_labels"] != -100).sum())
        assert batch["attention_pairs"] == sum(n * (n + 1) // 2 for n in batch["cu_seqlens"].diff().tolist())
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
        steps += 1
    assert steps == len(loader) > 4


def test_the_loop_of_the_documentation_runs_and_a_batch_holds_what_its_table_says(
    make_dataset, documents, model_config, tmp_path, monkeypatch
):
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(make_dataset({"main": documents(60, 40)}, 48).path, tmp_path / "data" / "corpus")
    load_model(model_config()).model.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(example, "docs/training.md", "exec"), names)
    assert names["number"] == len(names["loader"]) > 4
    assert torch.isfinite(names["loss"])
    assert json.loads(names["state"])["epoch"] == 1

    table = re.findall(r"^\| (`.*?`) \| (.*?) \|$", page.partition("| in a batch of T tokens |")[2], re.MULTILINE)
    said = {key: text for keys, text in table[:6] for key in re.findall(r"`(\w+)`", keys)}
    batch = names["batch"]
    assert said.keys() == batch.keys()
    tokens, segments = batch["num_tokens"], len(batch["cu_seqlens"]) - 1
    for key, text in said.items():
        if "tensor" in text:
            shape = {"(1, T)": (1, tokens), "(segments + 1,)": (segments + 1,)}[re.search(r"\(.*?\)", text)[0]]
            assert (str(batch[key].dtype), batch[key].shape) == (f"torch.{text.split()[0]}", shape)
        elif key != "step":
            assert text.startswith("int")
            assert isinstance(batch[key], int)


def test_iterating_again_goes_on_with_the_next_epoch(dataset):
    loader = PackLoader(dataset, packs_per_step=4)
    first, second = ([ids_of(batch) for batch in loader] for _ in range(2))
    assert loader.state_dict()["epoch"] == 2
    assert len(first) == len(second) == len(loader)
    assert first != second


@pytest.mark.parametrize("cut", [0, 1, 5, 6, 7, 13])
def test_resuming_at_any_step_gives_exactly_the_rest(dataset, cut):
    whole = PackLoader(dataset, packs_per_step=4, seed=3)
    total = 2 * whole.steps_per_epoch * 4 + 4
    batches = whole.forever()
    expected = [ids_of(next(batches)) for _ in range(total)]
    batches.close()
    before = PackLoader(dataset, packs_per_step=4, seed=3)
    batches = before.forever()
    for _ in range(cut * 4):
        next(batches)
    batches.close()
    state = json.loads(json.dumps(before.state_dict()))
    assert state["epoch"] * before.steps_per_epoch + state["step"] == cut  # not what was prefetched
    after = PackLoader(dataset, packs_per_step=4, seed=3)
    after.load_state_dict(state)
    batches = after.forever()
    assert [ids_of(next(batches)) for _ in range(total - cut * 4)] == expected[cut * 4 :]
    batches.close()


def test_a_step_that_was_cut_off_starts_again(dataset):
    loader = PackLoader(dataset, packs_per_step=4)
    batches = loader.forever()
    for _ in range(6):  # one step and a half
        next(batches)
    batches.close()
    assert loader.state_dict()["step"] == 1


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"packs_per_step": 8}, {"order": "cost-grouped"}, {"last_step": "pad"}]
)
def test_a_state_of_another_order_is_refused(dataset, change):
    state = PackLoader(dataset, packs_per_step=4).state_dict()
    with pytest.raises(PackError, match=next(iter(change))):
        PackLoader(dataset, **{"packs_per_step": 4, **change}).load_state_dict(state)


def test_a_state_of_another_dataset_is_refused(dataset):
    loader = PackLoader(dataset)
    with pytest.raises(PackError, match="dataset_id 'other'"):
        loader.load_state_dict(loader.state_dict() | {"dataset_id": "other"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1, "world_size": 2}, "`rank`: -1; expected 0 to 1, since world_size is 2."),
        ({"rank": 2, "world_size": 2}, "`rank`: 2; expected 0 to 1, since world_size is 2."),
        ({"world_size": 0}, "`world_size`: 0; expected at least 1."),
        ({"packs_per_step": 0}, "`packs_per_step`: 0; expected at least 1."),
        ({"packs_per_step": -4}, "`packs_per_step`: -4; expected at least 1."),
        ({"tokens_per_batch": 0}, "`tokens_per_batch`: 0; expected at least one pack of 48 tokens."),
    ],
)
def test_ranks_and_sizes_that_cannot_be_are_refused(dataset, fields, message):
    with pytest.raises(PackError) as caught:
        PackLoader(dataset, **fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"epoch": -1}, "its epoch is -1; expected a whole number, 0 or more"),
        ({"epoch": "1"}, "its epoch is '1'; expected a whole number, 0 or more"),
        ({"step": -1}, "its step is -1; expected a whole number, 0 to {last}"),
        ({"step": 1.5}, "its step is 1.5; expected a whole number, 0 to {last}"),
        ({"step": True}, "its step is True; expected a whole number, 0 to {last}"),
        ({"step": 10**6}, "its step is 1000000; expected a whole number, 0 to {last}"),
    ],
)
def test_a_state_that_no_loader_can_be_in_is_refused_and_changes_nothing(dataset, change, fault):
    loader = PackLoader(dataset, packs_per_step=4)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2, "step": loader.steps_per_epoch - 1})
    before = loader.state_dict()
    with pytest.raises(PackError) as caught:
        loader.load_state_dict(before | change)
    fault = fault.format(last=loader.steps_per_epoch - 1)
    assert str(caught.value) == f"not a state of PackLoader: {fault}. Pass what state_dict() returned."
    assert loader.state_dict() == before


@pytest.mark.parametrize(("state", "fault"), [({}, "lacks dataset_id, epoch, "), (None, "is NoneType")])
def test_what_is_no_state_of_a_loader_is_refused(dataset, state, fault):
    with pytest.raises(PackError, match=f"^not a state of PackLoader: it {fault}"):
        PackLoader(dataset).load_state_dict(state)


def test_mixed_sources_come_in_their_shares(make_dataset, documents):
    dataset = make_dataset({"web": documents(400, 20, seed=1), "code": documents(400, 20, seed=2)}, 48)
    loader = PackLoader(dataset, packs_per_step=4, mix=(("web", 0.75), ("code", 0.25)))
    _, _, stop = next(source for source in dataset.sources if source[0] == "web")
    packs = np.array([pack for step in served(loader, range(loader.steps_per_epoch)) for pack in step])
    tokens = dataset.index.num_tokens[packs]
    assert tokens[packs < stop].sum() / tokens.sum() == pytest.approx(0.75, abs=0.02)
    assert len(packs) > 40


def test_static_shapes_are_one_shape(dataset):
    loader = PackLoader(dataset, tokens_per_batch=96, packs_per_step=2, static_shapes=True)
    batches = list(loader)
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(1, 96)}
    assert all(batch["cu_seqlens"][-1] == 96 for batch in batches)
    assert all(len(batch["cu_seqlens"]) - 1 in (2, 4, 8, 16, 32) for batch in batches)
    assert all(batch["max_seqlen"] in (16, 32, 64, 128) for batch in batches)
    assert all(batch["max_seqlen"] >= batch["cu_seqlens"].diff().max() for batch in batches)
    assert any(batch["num_tokens"] < 96 for batch in batches)
    assert all(batch["position_ids"].max() < dataset.index.max_seqlen.max() for batch in batches)


def test_bucketed_rows_are_rectangles_of_one_length(make_dataset, documents):
    dataset = make_dataset({"main": documents(80, 200, seed=5)}, 256, "bucketed")
    lengths = padded_length(dataset.index.max_seqlen, dataset.seq_len)
    assert lengths.tolist() == [dataset[i]["padded_length"] for i in range(len(dataset))]
    loader = PackLoader(dataset, tokens_per_batch=512, packs_per_step=4)
    shapes = Counter()
    for batch in loader:
        rows, width = batch["input_ids"].shape
        assert width % 64 == 0
        assert rows <= 512 // width
        assert batch["cu_seqlens"].tolist() == list(range(0, rows * width + 1, width))
        assert batch["num_targets"] == int((batch["shift_labels"] != -100).sum())
        shapes[width] += rows
    assert len(shapes) > 1


@pytest.mark.parametrize("packer", ["ffd", "bucketed", "unpacked"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_whole_dataset_is_scored_once_with_equal_counts(make_dataset, documents, packer, world):
    dataset = make_dataset({"main": documents(31, 100, seed=2)}, 128, packer)
    counts, targets, packs = [], 0, Counter()
    for rank in range(world):
        batches = list(whole_dataset(dataset, 256, rank, world))
        counts.append(len(batches))
        packs.update(int(pack) for rows, _ in batches for pack in rows if pack >= 0)
        for batch, _ in feed(dataset, iter(batches), 256, torch.device("cpu")):
            targets += int((batch["shift_labels"] != -100).sum())
    assert len(set(counts)) == 1
    assert packs == Counter(range(len(dataset)))
    assert targets == dataset.index.num_targets.sum() > 100


def test_the_thread_that_prepares_batches_works_on_the_device_of_the_run(dataset, monkeypatch):
    current = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.update({threading.current_thread().name: device})
    )
    prepare = feeding._use_device
    monkeypatch.setattr(feeding, "_use_device", lambda device: prepare(torch.device("cuda", 1)))  # as if it had two
    next(iter(feed(dataset, iter(whole_dataset(dataset, 256, 0, 1)), 256, torch.device("cpu"))))
    assert current == {"prefetch_0": torch.device("cuda", 1)}


def test_a_dataset_in_another_process_is_the_same(dataset):
    assert (
        PackLoader(pickle.loads(pickle.dumps(dataset))).packs_of(3).tolist() == PackLoader(dataset).packs_of(3).tolist()
    )


def test_a_fault_in_the_thread_reaches_the_loop(dataset, monkeypatch):
    def broken(self, pack):
        raise PackError("shard 3 is gone")

    loader = PackLoader(dataset)
    batches = loader.forever()
    next(batches)
    monkeypatch.setattr(Dataset, "pack", broken)
    with pytest.raises(PackError, match="shard 3 is gone"):
        for _ in batches:
            pass


def test_a_flipped_bit_in_a_token_stops_the_loader_before_the_first_batch_of_its_shard(dataset):
    entry = dataset.shards[0]
    ids = dataset[0]["input_ids"][:8].copy()
    file = dataset.path / entry["file"]
    data = bytearray(file.read_bytes())
    data[data.index(ids.tobytes()) + 2] ^= 1  # the second id is another one of the vocabulary
    file.write_bytes(data)
    with pytest.raises(PackError, match=rf"{file.name}: does not match its checksum in the shard list \(rule F4\)"):
        next(iter(PackLoader(Dataset(dataset.path))))
