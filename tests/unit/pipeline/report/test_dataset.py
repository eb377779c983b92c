"""Every figure of a report, computed again from the rows."""

import itertools
import re
import shlex
from statistics import mean

import numpy as np
import pytest

from pipeline.report.dataset import inspect_dataset
from pipeline.report.feedings import BATCH, FEEDINGS
from pipeline.report.flops import DEFAULT_SHAPE, ModelShape, shape_of
from pipeline.report.padding import PADDED, LengthHistogram, compare_feedings
from pipeline.report.summary import summary_lines
from shards import Dataset, PackError

WEB = [[30, 20, 10], [64], [5, 5, 5, 5], [40, 24], [17]]
CODE = [[60], [33, 31], [1, 2, 3]]
SHAPE = ModelShape(name="tiny", weights=1000, attention_width=16, full_layers=2)


@pytest.fixture
def dataset(write_dataset):
    return Dataset(write_dataset({"web": WEB, "code": CODE}, lost={"web": {"overlong": 100, "rejected": 0}}))


def test_counts_and_fill_are_those_of_the_rows(dataset):
    report = inspect_dataset(dataset)
    tokens = [len(row["input_ids"]) for row in dataset]
    assert report["packs"] == len(tokens) == 8
    assert report["segments"] == sum(len(row["doc_ids"]) for row in dataset) == 17
    assert report["tokens"]["packed"] == sum(tokens)
    assert report["tokens"]["read"] == sum(tokens) + 100
    assert report["targets"]["packed"] == sum(int(row["loss_mask"].sum()) for row in dataset)
    assert report["fill"]["rate"] == pytest.approx(sum(tokens) / (8 * 64))
    assert report["fill"]["min_packs"] == -(-sum(map(sum, WEB)) // 64) - (-sum(map(sum, CODE)) // 64)
    assert report["fill"]["above_min"] == pytest.approx(8 / report["fill"]["min_packs"] - 1)
    assert sum(packs for _, packs in report["fill"]["histogram"]) == 8
    assert report["segments_per_pack"]["mean"] == pytest.approx(17 / 8)
    assert report["segments_per_pack"]["histogram"] == [[1, 3], [2, 2], [3, 2], [4, 1]]


def test_percentiles_are_nearest_ranks_of_the_lengths(dataset):
    lengths = sorted(itertools.chain(*WEB, *CODE))
    figures = inspect_dataset(dataset)["lengths"]["documents"]
    for p in (1, 5, 25, 50, 75, 95, 99, 99.9):
        rank = next(k for k in range(1, len(lengths) + 1) if k / len(lengths) * 100 >= p)
        assert figures[f"p{p:g}"] == lengths[rank - 1]
    assert (figures["count"], figures["mean"], figures["max"]) == (17, pytest.approx(mean(lengths)), 64)


def test_percentiles_of_long_documents_are_within_two_percent(write_dataset):
    lengths = np.random.default_rng(1).integers(1, 8192, 500).tolist()
    figures = inspect_dataset(Dataset(write_dataset({"web": [[n] for n in lengths]}, seq_len=8192)))["lengths"][
        "segments"
    ]
    for p in (5, 50, 95):
        exact = np.percentile(lengths, p, method="inverted_cdf")
        assert figures[f"p{p}"] == pytest.approx(exact, rel=0.016)


def test_attention_work_is_the_sum_over_segments(dataset):
    pairs = [sum(n * (n + 1) // 2 for n in np.diff(row["cu_seqlens"]).tolist()) for row in dataset]
    cost = inspect_dataset(dataset)["cost"]
    assert cost["attention_pairs"] == sum(pairs)
    for low, packs in cost["octaves"]:
        assert packs == sum(low <= pair < 2 * low for pair in pairs)
    assert sum(packs for _, packs in cost["octaves"]) == 8


def test_the_straggler_factor_of_one_step_is_its_costliest_pack_over_the_mean(dataset):
    costs = [
        len(row["input_ids"]) + row["attention_pairs"] / 12288 for row in dataset
    ]  # as shards/ordering/step_order.py weighs them
    eight, sixty_four, _ = inspect_dataset(dataset)["cost"]["straggler"]
    assert eight["ranks"] == len(costs) == 8
    assert eight["orders"]["shuffled"] == pytest.approx(max(costs) / mean(costs))
    assert eight["orders"]["cost-grouped"] == pytest.approx(max(costs) / mean(costs))
    assert set(sixty_four["orders"].values()) == {None}


def test_steps_and_left_over_packs_are_a_division(dataset):
    assert inspect_dataset(dataset, packs_per_step=3)["steps"] == {
        "packs_per_step": 3,
        "per_epoch": 2,
        "left_over_packs": 2,
    }


def test_sources_share_tokens_and_targets(dataset):
    web, code = inspect_dataset(dataset)["sources"]
    assert (web["name"], code["name"]) == ("web", "code")
    total = sum(map(sum, WEB)) + sum(map(sum, CODE))
    assert web["share_of_tokens"] == pytest.approx(sum(map(sum, WEB)) / total)
    assert web["share_of_targets"] + code["share_of_targets"] == pytest.approx(1)
    assert web["tokens"]["lost"]["overlong"] == 100


def test_passes_of_a_mix_count_how_often_each_source_is_seen(dataset):
    web, code = sum(map(sum, WEB)), sum(map(sum, CODE))
    entries = {
        entry["source"]: entry["passes"] for entry in inspect_dataset(dataset, mix={"web": 0.1, "code": 0.9})["mix"]
    }
    # after t tokens web was seen 0.1 t / web times, code 0.9 t / code times; web has been seen once at t = 10 web
    assert entries["web"] == pytest.approx(1)
    assert entries["code"] == pytest.approx(0.9 * (10 * web) / code)


@pytest.mark.parametrize("mix", [{"web": 1.0}, {"web": 1.0, "code": 0.0}])
def test_a_source_that_a_mix_leaves_out_is_said_to_be_never_trained(dataset, mix):
    said = "Source 'code' has no weight in --mix, so it would never be trained."
    assert said in inspect_dataset(dataset, mix=mix)["warnings"]
    for other in ({}, {"web": 0.5, "code": 0.5}):
        assert not [
            warning for warning in inspect_dataset(dataset, mix=other)["warnings"] if "never be trained" in warning
        ]


def test_a_mix_of_unknown_sources_is_refused(dataset):
    with pytest.raises(PackError, match=r"`mix`: chat; .*it has web, code"):
        inspect_dataset(dataset, mix={"chat": 1.0})


def batches(order):
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def cost_of(rows, shape=SHAPE):
    """FLOPs of rows of these lengths: 6 per weight and token, 12 per pair, head dimension and layer."""
    pairs = sum(n * (n + 1) / 2 for n in rows)
    return 6 * shape.weights * sum(rows) + 12 * shape.attention_width * shape.full_layers * pairs


def test_padded_feedings_cost_what_their_rows_cost():
    lengths = [3, 3, 7, 10, 11, 12, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 31, 40, 41, 64]
    values, counts = np.unique(lengths, return_counts=True)
    ways = {
        way["name"]: way
        for way in compare_feedings(LengthHistogram(values.astype(float), counts.astype(float)), 64, SHAPE, packs=10)
    }
    assert set(ways) == set(FEEDINGS)
    packed = cost_of(lengths)
    to_max = [64] * len(lengths)
    buckets = [max(batch) for batch in batches(sorted(lengths)) for _ in batch]
    for name, rows in (
        ("packed-varlen", lengths),
        ("padded-max", to_max),
        ("length-bucketed", buckets),
        ("packed-dense", [64] * 10),
    ):
        assert ways[name]["slots"] == sum(rows)
        assert ways[name]["attention_pairs"] == sum(n * (n + 1) // 2 for n in rows)
        assert ways[name]["padding"] == pytest.approx(1 - sum(lengths) / sum(rows))
        assert ways[name]["relative_cost"] == pytest.approx(cost_of(rows) / packed)


@pytest.mark.parametrize(
    ("packer", "rows"),
    [("bucketed", [64, 64, 128, 128, 192, 200]), ("unpacked", [3, 64, 65, 128, 130, 200])],
)
def test_a_dataset_that_does_not_pack_is_compared_as_what_it_is(packer, rows):
    lengths = [3, 64, 65, 128, 130, 200]
    histogram = LengthHistogram(np.array(lengths, float), np.ones(len(lengths)))
    ways = {way["name"]: way for way in compare_feedings(histogram, 200, SHAPE, packer)}
    assert list(ways) == [packer, *PADDED]
    assert ways[packer]["slots"] == sum(rows)
    assert ways[packer]["attention_pairs"] == sum(n * (n + 1) // 2 for n in rows)
    assert ways[packer]["padding"] == pytest.approx(1 - sum(lengths) / sum(rows))
    assert ways[packer]["relative_cost"] == 1
    assert ways["padded-max"]["relative_cost"] == pytest.approx(cost_of([200] * 6) / cost_of(rows))


def test_random_batches_cost_what_shuffling_gives_on_average():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 40)
    values, counts = np.unique(lengths, return_counts=True)
    rows = PADDED["padded-longest"](LengthHistogram(values.astype(float), counts.astype(float)), 64)
    assert rows.counts.sum() == pytest.approx(40)
    slots = [sum(max(batch) * len(batch) for batch in batches(rng.permutation(lengths))) for _ in range(3000)]
    assert rows.slots == pytest.approx(np.mean(slots), abs=5 * np.std(slots) / np.sqrt(len(slots)))


LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072, "model_type": "llama",
}  # fmt: skip


def test_the_default_shape_is_the_one_of_llama_3_2_1b():
    shape = shape_of(LLAMA, "llama")
    layer = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert shape.weights == 16 * layer + 2048 * 128256
    assert (shape.weights, shape.attention_width) == (DEFAULT_SHAPE.weights, DEFAULT_SHAPE.attention_width)


def test_a_mixture_counts_the_experts_that_a_token_meets():
    config = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    dense, mixture = shape_of(LLAMA, "dense"), shape_of(config, "mixture")
    assert dense.weights - mixture.weights == 16 * (3 * 2048 * (8192 - 2 * 512) - 2048 * 8)


@pytest.mark.parametrize(
    ("fields", "full", "windowed"),
    [
        # latent attention: 16 heads, keys of 128 + 64, values of 128
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 4 * 16 * (192 + 128), 0),
        # every fourth layer has heads of 256 and sees everything
        (
            {
                "head_dim": 64, "sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "per_layer_config": {"3": {"head_dim": 256}},
            },
            1 * 16 * (256 + 256),
            3 * 16 * (64 + 64),
        ),
        ({"head_dim": 64, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1 * 16 * (64 + 64), 0),
        ({"head_dim": 64, "layer_types": ["conv", "conv", "hybrid", "full_attention"]}, 2 * 16 * (64 + 64), 0),
        (
            {"head_dim": 64, "attention_chunk_size": 512, "layer_types": ["chunked_attention", "full_attention"] * 2},
            2 * 16 * (64 + 64),
            2 * 16 * (64 + 64),
        ),
    ],
    ids=["latent", "two widths", "linear", "hybrid", "chunks"],
)  # fmt: skip
def test_layers_that_differ_cost_what_they_do(fields, full, windowed):
    base = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 1000}
    cost = shape_of(base | fields, "m").cost
    assert (cost.per_pair, cost.per_window_pair) == (6 * full, 6 * windowed)
    assert cost.sliding_window == (512 if windowed else None)


def test_a_state_space_model_has_no_pairs():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "expand": 2, "vocab_size": 100}
    shape = shape_of(config, "m")
    assert shape.cost.per_pair == shape.cost.per_window_pair == 0
    assert shape.weights == 2 * 3 * 64 * 128 + 64 * 100  # two inner projections and one back, twice as wide


def test_sliding_layers_are_those_that_the_config_names():
    kinds = ["sliding_attention"] * 10 + ["full_attention"] * 6
    shape = shape_of({**LLAMA, "sliding_window": 512, "layer_types": kinds}, "gemma")
    assert (shape.full_layers, shape.sliding_layers, shape.window) == (6, 10, 512)


def test_a_config_without_a_shape_is_refused():
    from shards.errors import ModelError

    with pytest.raises(ModelError, match="no hidden_size"):
        shape_of({"vocab_size": 10}, "x")


@pytest.mark.parametrize(
    ("sources", "options", "expected"),
    [
        ({"a": [[64], [63], [64]]}, {}, "Packing had little effect: 1.00 segments"),
        ({"a": [[10, 10], [10, 10]]}, {}, "Packs are only 31.2% full"),
        ({"a": [[3]]}, {}, "Packs are only 4.7% full"),  # nothing was there to share the pack
        (
            {"a": [[32, 32]]},
            {"lost": {"a": {"overlong": 64}}},
            "Source 'a': 50.0% of its tokens were lost (overlong 64)",
        ),
    ],
)
def test_a_person_is_warned_in_plain_words(write_dataset, sources, options, expected):
    warnings = inspect_dataset(Dataset(write_dataset(sources, **options)))["warnings"]
    assert [w for w in warnings if expected in w], warnings


def test_a_model_that_does_not_fit_is_named(dataset):
    small = ModelShape(name="m", weights=1, attention_width=1, full_layers=1, vocab_size=299, max_positions=63)
    warnings = inspect_dataset(dataset, shape=small)["warnings"]
    assert [w for w in warnings if "largest id is 299, the model's vocabulary ends at 298" in w]
    assert [w for w in warnings if "longest segment has 64 tokens, the model takes 63" in w]


def test_a_dataset_without_packs_has_a_report(write_dataset):
    report = inspect_dataset(Dataset(write_dataset({"web": []})))
    assert report["packs"] == 0
    assert report["fill"]["rate"] == 0.0
    assert report["warnings"] == ["The dataset holds no pack. See what was dropped and why."]


def test_a_finished_build_is_summed_up_in_a_few_lines(dataset):
    text = "\n".join(summary_lines(dataset.manifest, "data/x"))
    assert "17 documents" in text
    assert "8 packs" in text
    assert "tokens lost: overlong 100" in text


def test_one_document_in_one_pack_is_no_plural(write_dataset):
    first, last = summary_lines(Dataset(write_dataset({"web": [[64]]})).manifest, "my data/x")
    assert re.fullmatch(r"my data/x: 1 document, 64 tokens, \d\d targets in 1 pack of 64 \(100\.0% full\)", first)
    assert shlex.split(last.partition("see ")[2]) == ["pack", "inspect", "my data/x"]
