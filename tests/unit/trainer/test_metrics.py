"""What a run writes: lines of metrics, progress for a person, and nothing from other processes."""

import json
import sys

import pytest
import torch

from shards.cost import ModelCost
from trainer import load_model
from trainer.config import TrainConfig
from trainer.metrics import Metrics, cost_of, memory_gib

LINE = {
    "step": 3, "loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1234.0, "data_wait": 0.005,
    "memory_gib": 2.0, "mfu": 0.51, "step_s": 20.0,
}  # fmt: skip


def config(**fields) -> TrainConfig:
    return TrainConfig(dataset="d", model="m", out="o", **fields)


def test_a_resumed_run_keeps_the_lines_up_to_its_start_and_drops_the_rest(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo'
    )
    metrics = Metrics(config(progress=False), tmp_path, 9, 3, is_main=True)
    metrics.write({"step": 4, "loss": 2.0})
    metrics.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_other_processes_write_nothing(tmp_path, capsys):
    metrics = Metrics(config(progress=True), tmp_path, 9, 0, is_main=False)
    metrics.write(LINE)
    metrics.say("hello")
    metrics.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_for_each_line_of_metrics_and_its_evaluations(tmp_path, capsys):
    metrics = Metrics(config(), tmp_path, 2000, 0, is_main=True)
    metrics.write(LINE | {"step": 1990})
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (  # at once, not when the run ends; ten steps of 20 s are left
        "step 1,990/2,000  0:03:20 left  loss 1.2500  lr 1.00e-03  grad 0.500  1,234 tok/s  MFU 51.0%  wait 0.5%  "
        "2.0 GiB\n"
    )
    metrics.write({"step": 1990, "eval_loss": 1.5, "eval_perplexity": 4.48, "eval_targets": 9})
    assert capsys.readouterr().err == "step 1,990/2,000  eval loss 1.5000\n"
    metrics.close()


def test_a_terminal_gets_a_live_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    metrics = Metrics(config(), tmp_path, 9, 0, is_main=True)
    metrics.write(LINE)
    metrics.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 3/9" in err
    assert "loss 1.2500" in err
    assert "\x1b[" in err


def test_without_progress_there_are_only_the_notes(tmp_path, capsys):
    metrics = Metrics(config(progress=False), tmp_path, 9, 0, is_main=True)
    metrics.write(LINE)
    metrics.write({"step": 3, "eval_loss": 1.5})
    metrics.say("a note")
    metrics.close()
    assert capsys.readouterr() == ("", "a note\n")


def test_flops_of_a_step_by_hand():
    cost = ModelCost(per_token=10.0, per_pair=3.0, per_window_pair=2.0, sliding_window=4)
    assert cost.flops(7, 5, 4) == 70 + 15 + 8


def test_the_cost_of_a_model_by_hand(model_config):
    model = load_model(model_config()).model
    cost = cost_of(model)
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24  # q, k and v of one grouped head, o, feed-forward
    assert cost.per_token == 6 * (2 * layer + 16 * 97)  # the embedding is a lookup, the head is not
    assert cost.per_pair == 2 * 12 * 2 * 8
    assert cost.sliding_window is None
    tied = cost_of(load_model(model_config(tie_word_embeddings=True)).model)
    assert tied.per_token == cost.per_token


def test_the_cost_of_a_window_is_counted_inside_it(model_config):
    cost = cost_of(load_model(model_config("mistral-window")).model)
    assert (cost.sliding_window, cost.per_pair, cost.per_window_pair) == (5, 0, 2 * 12 * 2 * 8)


@pytest.mark.parametrize(
    ("fields", "full", "window"),
    [
        # latent attention: 4 heads, keys of 8 + 8, values of 4; 6 FLOPs a pair, head and width
        (
            {
                "model_type": "deepseek_v3", "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
                "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 4, "n_routed_experts": 4, "n_group": 1,
                "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            },
            2 * 6 * 2 * (16 + 4),
            0,
        ),
        # a windowed layer with heads of 8, a full one with heads of 16
        (
            {
                "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1,
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
            },
            6 * 2 * 32,
            6 * 2 * 16,
        ),
        # a convolution has no pairs
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_key_value_heads": 1},
            6 * 2 * 16,
            0,
        ),
    ],
    ids=["latent", "two widths", "convolution"],
)  # fmt: skip
def test_the_cost_of_layers_that_differ_by_hand(fields, full, window, model_config):
    cost = cost_of(load_model(model_config("llama", **fields)).model)
    assert (cost.per_pair, cost.per_window_pair) == (full, window)


def test_a_system_that_does_not_say_its_memory_use_reports_none(monkeypatch):
    assert memory_gib(torch.device("cpu")) > 0
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert memory_gib(torch.device("cpu")) == 0
