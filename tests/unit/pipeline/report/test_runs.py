"""Training runs read back from their metrics."""

import json

import pytest

from pipeline.report.html import render_page
from pipeline.report.runs import MAX_POINTS, curve_points, parts_tables, read_run, runs_page, summarize_run
from shards import PackError


def write_run(directory, lines, tail=""):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return str(directory)


LINES = [
    {"step": n, "loss": 8.0 - n, "tokens_per_s": 100.0 * n, "mfu": 0.1 * n, "data_wait": 0.01, "memory_gib": 2.0 + n}
    for n in (1, 2, 3)
]


def test_the_summary_has_last_losses_and_medians(tmp_path):
    run = read_run(write_run(tmp_path / "run", [*LINES, {"step": 3, "eval_loss": 5.5}, {"step": 2, "eval_loss": 5.25}]))
    assert summarize_run(run) == {
        "path": str(tmp_path / "run"),
        "steps": 3,
        "first_loss": 7.0,
        "last_loss": 5.0,
        "lowest_eval_loss": 5.25,
        "tokens_per_s": 200.0,
        "mfu": pytest.approx(0.2),
        "data_wait": 0.01,
        "memory_gib": 5.0,
        "last_loss_by_source": {},
        "last_eval_loss_by_dataset": {},
    }


def test_a_half_written_last_line_is_left_out(tmp_path):
    assert len(read_run(write_run(tmp_path / "run", LINES, tail='{"step": 4, "lo')).lines) == 3


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = write_run(tmp_path / "run", LINES, tail="{oops\n{}\n")
    with pytest.raises(PackError, match=r"metrics.jsonl, line 4: is not JSON"):
        read_run(path)


def test_a_line_without_a_step_is_named(tmp_path):
    with pytest.raises(PackError, match=r"line 1: has no step"):
        read_run(write_run(tmp_path / "run", [{"loss": 1.0}]))


def test_a_run_that_has_not_logged_yet_is_refused(tmp_path):
    with pytest.raises(PackError, match="holds no figures yet"):
        read_run(write_run(tmp_path / "run", []))


def test_long_runs_are_thinned_and_keep_their_last_point(tmp_path):
    run = read_run(write_run(tmp_path / "run", [{"step": n, "loss": 1 / n} for n in range(1, 5002)]))
    steps, losses = curve_points(run, "loss")
    assert len(steps) <= MAX_POINTS
    assert steps[-1] == 5001
    assert losses == [1 / step for step in steps]


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path):
    run = read_run(write_run(tmp_path / "run", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1e400}], tail=""))
    assert curve_points(run, "loss") == ([1], [2.0])


def test_a_page_draws_only_what_the_runs_have(tmp_path):
    first = read_run(write_run(tmp_path / "first", LINES))
    second = read_run(write_run(tmp_path / "second", [{"step": 1, "loss": 3.0}]))
    page = runs_page([first, second])
    captions = [plot.title for plot in page.sections[0].plots]
    assert captions[0] == "Training loss"
    assert "Learning rate" not in captions
    assert str(tmp_path / "second") in render_page(page)


BY_SOURCE = [
    {"step": 1, "loss": 3.0, "loss/web": 3.5, "loss/code": 2.5, "tokens/web": 7},
    {"step": 2, "loss": 2.0, "loss/web": 2.25},  # no token of code in this interval
    {"step": 2, "eval_loss": 2.5, "eval_loss/held": 2.5},
]


def test_losses_of_sources_are_drawn_together_and_summed_up(tmp_path):
    run = read_run(write_run(tmp_path / "run", BY_SOURCE))
    page = runs_page([run])
    plots = {plot.title: json.loads(plot.figure)["data"] for plot in page.sections[0].plots}
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in plots["Training loss by source"]}
    assert lines == {"web": ([1, 2], [3.5, 2.25]), "code": ([1], [2.5])}
    assert [trace["name"] for trace in plots["Evaluation loss by dataset"]] == ["held"]
    by_source, by_dataset = parts_tables([run])
    assert by_source.rows == [["web", "3.5000", "2.2500"], ["code", "2.5000", "2.5000"]]
    assert by_dataset.rows == [["held", "2.5000", "2.5000"]]
    summary = summarize_run(run)
    assert summary["last_loss_by_source"] == {"web": 2.25, "code": 2.5}
    assert summary["last_eval_loss_by_dataset"] == {"held": 2.5}


def test_several_runs_share_the_plot_by_source_and_say_which_is_which(tmp_path):
    runs = [read_run(write_run(tmp_path / name, BY_SOURCE)) for name in ("first", "second")]
    plot = next(plot for plot in runs_page(runs).sections[0].plots if plot.title == "Training loss by source")
    traces = json.loads(plot.figure)["data"]
    assert [trace["name"] for trace in traces] == [f"{s}, {run.path}" for s in ("web", "code") for run in runs]
    looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}
    assert len(looks) == 4
    assert parts_tables(runs)[0].rows[1][:2] == ["web", runs[1].path]


def test_a_run_of_one_source_has_no_plot_by_source(tmp_path):
    run = read_run(write_run(tmp_path / "run", LINES))
    assert "Training loss by source" not in [plot.title for plot in runs_page([run]).sections[0].plots]
    assert parts_tables([run]) == []
