"""What is timed to choose among backends, what is remembered of it, and what processes agree on."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.model.backends import timing
from trainer.model.backends.agreement import agree_on_backend, to_json
from trainer.model.backends.choice import rivals
from trainer.model.backends.interface import Backend, Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS
from trainer.run import boundaries

CPU = Needs(device=torch.device("cpu"), dtype=torch.float32, head_dim=8, value_dim=8)
CU = np.array([0, 3, 3, 10], dtype=np.int32)
LOADER: Any = SimpleNamespace(
    steps_taken=2,
    step_at=lambda number: SimpleNamespace(batches=[np.array([number, ~0])]),
    drawn=None,
    dataset=SimpleNamespace(pack=lambda i: SimpleNamespace(cu_seqlens=np.array([[0, 4], [0, 1], [0, 5, 7]][i]))),
)


def agree(*args: Any, **fields: Any) -> Any:
    """Choose on one process, by the loader above."""
    backends, needs, *before = args
    alone = {"gather": lambda value: [value], "is_main": True}
    return agree_on_backend(backends, needs, lambda: boundaries(LOADER), *before, **alone | fields)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardpack" / "attention"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three backends that serve here, the middle one wrong."""
    loop = ATTENTION_BACKENDS["cpu"]
    monkeypatch.setitem(ATTENTION_BACKENDS, "flash-attn-4", Backend(loop.attend, lambda needs: None))
    monkeypatch.setitem(ATTENTION_BACKENDS, "flash-attn-3", Backend(lambda q, k, v, *rest: v, lambda needs: None))
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch", Backend(loop.attend, lambda needs: None))


class Clock:
    """Says how long backends take, by name, and notes what it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {name.replace("_", "-"): value for name, value in seconds.items()}
        self.asked: list[tuple[str, list[int]]] = []

    def __call__(self, backend: Backend, needs: Sequence[Needs], cu_seqlens: np.ndarray) -> float:
        name = next(name for name, each in ATTENTION_BACKENDS.items() if each is backend)
        self.asked.append((name, cu_seqlens.tolist()))
        if name not in self.seconds:
            raise RuntimeError("no kernel image")
        return self.seconds[name]


@pytest.mark.usefixtures("kernels")
def test_only_proven_backends_that_never_wait_for_the_host_are_rivals() -> None:
    assert rivals("flash-attn-4", [CPU]) == ["flash-attn-4", "torch"]
    assert rivals("cpu", [CPU]) == ["cpu"]


@pytest.mark.usefixtures("kernels")
def test_the_fastest_on_the_next_micro_batch_is_taken_and_said() -> None:
    clock = Clock(flash_attn_4=2e-3, torch=1e-3)
    chosen, lines = agree("flash-attn-4", [CPU], measure=clock)
    assert chosen == "torch"
    assert lines == [
        "attention torch: takes its place, fastest on this dataset's lengths: torch 1 ms, flash-attn-4 2 ms"
    ]
    assert {tuple(lengths) for _, lengths in clock.asked} == {(0, 5, 7, 11)}  # pack 2, then pack 0 that fills up


@pytest.mark.usefixtures("kernels")
def test_what_was_timed_is_remembered_until_lengths_or_heads_change(cache: Path) -> None:
    clock = Clock(flash_attn_4=2e-3, torch=1e-3)
    names = ["flash-attn-4", "torch"]
    first = timing.time_all(names, [CPU], CU, clock)
    assert first == {"flash-attn-4": 2e-3, "torch": 1e-3}
    again = Clock()
    assert timing.time_all(names, [CPU], CU, again) == first
    assert again.asked == []
    for needs, lengths in ((replace(CPU, num_heads=8), CU), (CPU, np.array([0, 10], dtype=np.int32))):
        fresh = Clock(flash_attn_4=1.0, torch=1.0)
        timing.time_all(names, [needs], lengths, fresh)
        assert len(fresh.asked) == 2
    for file in cache.iterdir():
        file.write_text('{"torch"')  # as a disk that ran full leaves it
    assert timing.time_all(names, [CPU], CU, Clock(flash_attn_4=1.0, torch=1.0)) == {"flash-attn-4": 1.0, "torch": 1.0}


@pytest.mark.usefixtures("kernels")
def test_a_backend_that_fails_while_it_is_timed_is_out() -> None:
    chosen, _ = agree("flash-attn-4", [CPU], measure=Clock(torch=9.0))
    assert chosen == "torch"


@pytest.mark.usefixtures("kernels")
def test_a_resumed_run_keeps_its_backend_without_timing_or_says_the_change() -> None:
    clock = Clock(flash_attn_4=2e-3, torch=1e-3)
    chosen, lines = agree("flash-attn-4", [CPU], "flash-attn-4", measure=clock)
    assert (chosen, clock.asked) == ("flash-attn-4", [])
    assert lines == ["attention flash-attn-4: kept, the checkpoint was trained with it"]
    chosen, lines = agree("flash-attn-4", [CPU], "flash-attn", measure=clock)
    assert chosen == "torch"
    assert lines[-1] == "resume: attention flash-attn before, torch now"


def test_where_there_is_one_backend_nothing_is_timed_nor_said() -> None:
    assert agree("cpu", [CPU], measure=Clock()) == ("cpu", [])
    assert agree("cpu", [CPU], "cpu", measure=Clock()) == ("cpu", [])
    assert agree({}, [], measure=Clock()) == ({}, [])


@pytest.mark.usefixtures("kernels")
def test_heads_of_two_widths_are_chosen_apart_and_come_back_from_a_checkpoint() -> None:
    wide = replace(CPU, head_dim=16, value_dim=16)
    both = {(8, 8): "flash-attn-4", (16, 16): "flash-attn-4"}
    before = to_json({(8, 8): "torch", (16, 16): "flash-attn-4"})
    assert before == {"8 8": "torch", "16 16": "flash-attn-4"}
    chosen, _ = agree(both, [CPU, wide], before, measure=Clock())
    assert chosen == {(8, 8): "torch", (16, 16): "flash-attn-4"}


@pytest.mark.usefixtures("kernels")
def test_rank_0_decides_for_all() -> None:
    barrier, slots = threading.Barrier(2), dict[int, Any]()

    def exchange(value: Any, rank: int) -> list[Any]:
        slots[rank] = value
        barrier.wait(60)
        found = [slots[0], slots[1]]
        barrier.wait(60)
        return found

    clocks = [Clock(flash_attn_4=2e-3, torch=1e-3), Clock(flash_attn_4=1e-3, torch=2e-3)]
    results: dict[int, Any] = {}

    def process(rank: int) -> None:
        results[rank] = agree(
            "flash-attn-4", [CPU], gather=lambda value: exchange(value, rank), is_main=rank == 0, measure=clocks[rank]
        )

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    assert results[0][0] == "torch"
    assert clocks[1].asked == []


def test_timing_runs_forward_and_backward_of_every_kind_of_layer() -> None:
    windows: list[int | None] = []

    def attend(q: Any, k: Any, v: Any, cu: Any, longest: int, window: int | None, *rest: Any) -> torch.Tensor:
        windows.append(window)
        assert cu.tolist() == CU.tolist()
        assert longest == 7
        return ATTENTION_BACKENDS["cpu"](q, k, v, cu, longest, window, *rest)

    kinds = [CPU, replace(CPU, sliding_window=4, softcap=3.0, sinks=True)]
    assert timing.measure(Backend(attend, lambda needs: None), kinds, CU) > 0
    assert set(windows) == {None, 4}
