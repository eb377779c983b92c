"""What a run writes: lines of metrics, a live line, and nothing from other processes."""

import json

import pytest

from trainer.config import TrainConfig
from trainer.metrics import Cost, Metrics

LINE = {
    "step": 3, "loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1234.0, "data_wait": 0.005,
    "memory_gib": 2.0, "mfu": 0.51,
}  # fmt: skip


def config(**fields) -> TrainConfig:
    return TrainConfig(dataset="d", model="m", out="o", **fields)


def test_a_resumed_run_keeps_the_lines_up_to_its_start_and_drops_the_rest(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo'
    )
    metrics = Metrics(config(), tmp_path, 9, 3, is_main=True)
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


@pytest.mark.parametrize("progress", [True, False, None])
def test_the_live_line_is_on_stderr_and_only_when_asked_or_on_a_terminal(tmp_path, capsys, progress):
    metrics = Metrics(config(progress=progress), tmp_path, 9, 0, is_main=True)
    metrics.write(LINE)
    metrics.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert bool(err) == (progress is True)
    if progress:
        shown = " ".join(err.split())
        assert "step 3/9" in shown
        assert "loss 1.2500" in shown


def test_flops_of_a_step_by_hand():
    cost = Cost(per_token=10.0, per_pair=3.0, per_window_pair=2.0, window=4)
    assert cost.flops(7, 5, 4) == 70 + 15 + 8
