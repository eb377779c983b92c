"""Requests to stop: noted when the signal comes, answered between two steps, on all processes at the same one.

Ctrl-C, SIGTERM, a terminal that closes (SIGHUP) and a scheduler's notice (SIGUSR1, as Slurm sends it) all mean: finish
this step, save, end. Processes get signals at different times, so each one says after every step whether it was asked,
and hears after the next what all had said. That goes over the CPU in the background; nobody waits for the device:

    step 7 ends    rank 0 was asked: it says yes; rank 1 says no
    step 8 ends    both read "somebody was asked", save step 8 and stop
"""

import signal
import threading
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from trainer.distributed import World

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # not every system has them all


class Interrupt:
    """Notes requests to stop while its context is open.

    A single process stops at once at the second request. Several do not: torchrun passes on a Ctrl-C that they have got
    already, and ends them itself when they take too long.
    """

    def __init__(self, world: World) -> None:
        self._asked = False
        self._alone = world.size == 1
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        listens = threading.current_thread() is threading.main_thread()  # others handle no signals
        known = [getattr(signal, name) for name in NAMES if hasattr(signal, name)] if listens else []
        # nohup: whoever ignores a signal goes on doing so
        self._signals = [number for number in known if signal.getsignal(number) != signal.SIG_IGN]

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._vote is not None and kind is None:
            self._vote[1].wait()

    def asked(self) -> bool:
        """Whether to stop after the step that just ended, the same on every process; all call it after every step."""
        if self._alone:
            return self._asked
        earlier, vote = self._vote, torch.tensor(int(self._asked))
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._vote = vote, work
        if earlier is None:
            return False
        earlier[1].wait()
        return bool(earlier[0])

    def asked_of_any(self) -> bool:
        """Whether any process was asked so far, the same on every process; all wait here for each other."""
        if self._alone:
            return self._asked
        if self._vote is not None:
            self._vote[1].wait()
        vote = torch.tensor(int(self._asked))
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
        return bool(vote)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked and self._alone:
            raise KeyboardInterrupt
        self._asked = True
