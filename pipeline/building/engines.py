"""Where windows run: on this machine or on a Ray cluster.

An engine takes a job and an iterator of tasks and yields each window's record as it is done, in any order. It holds at
most two tasks per worker, so memory does not grow with the corpus. Engines know nothing of packing; the bytes of a
window depend on the plan alone. To add one, write such a function and enter it in `ENGINES`.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import islice
from multiprocessing import forkserver
from typing import Any

from pipeline.building.stages import Stages
from pipeline.building.window import Job, Task, run_window
from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from shards.errors import PackError
from shards.fetching.remote import open_store
from shards.publish import Store

TRIES = 3
Record = dict[str, Any]

_worker: "Worker | None" = None


class Worker:
    """What one process loads once: the store, the tokenizer, and what the records of each source share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store: Store = open_store(job.out)
        self.encoders: dict[bool, Encoder] = {}
        self.makers: dict[RecordOptions, DocumentMaker] = {}

    def run(self, task: Task) -> Record:
        """Build one window."""
        options, stages = self.job.sources[task.source].options, Stages()
        special = options.parse_special
        if special not in self.encoders:
            image, engines = self.job.images[special], self.job.engines
            with stages.time("load"):
                self.encoders[special] = Encoder(image, engine=engines, parse_special=special)
        if options not in self.makers:
            self.makers[options] = DocumentMaker(self.encoders[special], options)
        return run_window(self.job, task, self.store, self.makers[options], stages)


def run_local(job: Job, tasks: Iterator[Task], workers: int) -> Iterator[Record]:
    """Run windows in processes, or in this one where one suffices."""
    if workers == 1:
        worker = Worker(job)
        for task in tasks:
            yield worker.run(task)
        return
    pool = _WorkerPool(job, workers)
    try:
        yield from pool.run(tasks)
    finally:
        pool.stop()


class _WorkerPool:
    """Worker processes that may die.

    One that dies breaks the pool; it is rebuilt, and the windows that were in flight run again one at a time, so that a
    window which kills its worker is found out and blamed alone, after `TRIES` tries.
    """

    def __init__(self, job: Job, workers: int) -> None:
        self.job, self.workers = job, workers
        self.in_flight: dict[Future[Record], Task] = {}
        self.retry_queue: list[Task] = []
        self.deaths: dict[int, int] = {}  # by window that was ever in flight when a worker died: deaths on its own
        self._start()

    def _start(self) -> None:
        context = _context()
        arguments = (self.job, dict(os.environ))
        self.pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_start_worker, initargs=arguments)

    def run(self, tasks: Iterator[Task]) -> Iterator[Record]:
        """Yield the record of each task as it is done."""
        while self._send(tasks):
            done, _ = wait(self.in_flight, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    record = future.result()
                except BrokenProcessPool:
                    self._replace()
                    break
                del self.in_flight[future]
                yield record
        self.pool.shutdown()

    def _send(self, tasks: Iterator[Task]) -> bool:
        """Keep two tasks per worker in flight, or one of the retry queue alone; return whether there is any."""
        careful = self.retry_queue or any(task.window in self.deaths for task in self.in_flight.values())
        room = not self.in_flight if careful else 2 * self.workers - len(self.in_flight)
        source = iter([self.retry_queue.pop(0)] if self.retry_queue and room else []) if careful else tasks
        for task in islice(source, int(room)):
            try:
                self.in_flight[self.pool.submit(_run_task, task)] = task
            except BrokenProcessPool:  # a worker died with nothing to do
                self.retry_queue.append(task)
                self._replace()
                return self._send(tasks)
        return bool(self.in_flight)

    def _replace(self) -> None:
        """Start anew after a death, and note who was there."""
        alone = len(self.in_flight) == 1
        for task in self.in_flight.values():
            self.deaths[task.window] = self.deaths.get(task.window, 0) + alone
            if self.deaths[task.window] >= TRIES:
                raise PackError(
                    f"{task.describe(self.job.sources)}: its worker died {TRIES} times; expected it to finish. Look "
                    "for a lack of memory (smaller `window_bytes` or fewer `workers`; in a script, a missing "
                    "if __name__ == '__main__'), then `resume=True`."
                )
        self.retry_queue.extend(self.in_flight.values())
        self.in_flight.clear()
        self.pool.shutdown(cancel_futures=True)
        self._start()

    def stop(self) -> None:
        """End now: after an error or Ctrl-C nobody waits for half a window."""
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@cache
def _context() -> Any:
    """Return how this program starts processes; where it chose no way, from a server that has our imports ready.

    Asked once, before kernels are compiled: numba then settles on fork, and workers forked beside the thread that
    compiles would wait for locks which nobody releases.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method is not None or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context(method or "spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def start_server() -> None:
    """Start what workers come from, so that it does its imports while the driver plans."""
    if _context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def _start_worker(job: Job, environment: dict[str, str]) -> None:
    global _worker
    os.environ.update(environment)  # a server that started earlier knows an older one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver stops us
    threading.Thread(target=_end_with_driver, daemon=True).start()
    _worker = Worker(job)


def _end_with_driver() -> None:
    """End this process when the driver is gone, even if it had no time to say so."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _run_task(task: Task) -> Record:
    assert _worker is not None
    return _worker.run(task)


def run_ray(job: Job, tasks: Iterator[Task], workers: int) -> Iterator[Record]:
    """Run windows as Ray tasks on the cluster that RAY_ADDRESS names, or on a local one.

    Ray retries a task whose worker died or failed, `TRIES` times in all. The output must be a place that every node
    reaches: a shared file system or an object store.
    """
    try:
        import ray
    except ImportError as error:
        raise PackError(
            "--engine ray: ray is not installed; expected the extra. Run pip install 'shardpack[ray]'."
        ) from error
    if not ray.is_initialized():
        ray.init(
            log_to_driver=False, include_dashboard=False, num_cpus=None if os.environ.get("RAY_ADDRESS") else workers
        )
    shared: Any = ray.put(job)
    policy: dict[str, Any] = {"num_cpus": 1, "max_retries": TRIES - 1, "retry_exceptions": [OSError, MemoryError]}
    remote: Any = ray.remote(**policy)(_ray_task)
    in_flight: dict[Any, Task] = {}
    try:
        while True:
            for task in islice(tasks, 2 * workers - len(in_flight)):
                in_flight[remote.remote(shared, task)] = task
            if not in_flight:
                return
            for reference in ray.wait(list(in_flight), num_returns=1)[0]:
                task = in_flight.pop(reference)
                try:
                    record: Record = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    raise PackError(
                        f"{task.describe(job.sources)}: its Ray worker died {TRIES} times ({type(error).__name__}); "
                        "expected it to finish. Look for a lack of memory, then `resume=True`."
                    ) from error
                yield record
    finally:
        for reference in in_flight:  # after an error or Ctrl-C
            ray.cancel(reference, force=True)


def _ray_task(job: Job, task: Task) -> Record:
    global _worker
    if _worker is None or _worker.job != job:
        _worker = Worker(job)
    return _worker.run(task)


ENGINES: dict[str, Callable[[Job, Iterator[Task], int], Iterator[Record]]] = {"local": run_local, "ray": run_ray}
