"""The windows of a plan as tasks: those that were planned, and those that the driver cuts while it reads."""

from collections.abc import Iterable, Iterator
from itertools import chain

from pipeline.building.window import Task
from pipeline.sources.streams import StreamedWindow, stream_windows
from pipeline.sources.windows import Slice, Source, enumerate_streams, streamed_files
from shards.plan import Plan


def planned_tasks(plan: Plan, chosen: Iterable[int]) -> list[Task]:
    """Return the tasks of windows that the plan lists."""
    windows = plan["windows"]
    return [
        Task(number, windows[number][0], tuple(Slice(*slice_) for slice_ in windows[number][1])) for number in chosen
    ]


def all_tasks(plan: Plan, sources: list[Source]) -> Iterator[Task]:
    """Yield every window of a plan in order; streamed sources are read again for theirs."""
    yield from planned_tasks(plan, range(len(plan["windows"])))
    yield from StreamTasks(plan, sources)


class StreamTasks:
    """The windows that the driver cuts while reading, numbered on from the planned ones; iterate once."""

    def __init__(self, plan: Plan, sources: list[Source]) -> None:
        self.sources = sources
        self.part_bytes: int = plan["part_bytes"]
        self.next_window = len(plan["windows"])
        self.files = enumerate_streams(sources)
        self._begun: dict[int, Iterator[StreamedWindow]] = {}

    def __iter__(self) -> Iterator[Task]:
        for number, source in enumerate(self.sources):
            parts = self._begun.get(number) or stream_windows(source, streamed_files(source), self.part_bytes)
            for slices, payloads in parts:
                self.next_window += 1
                yield Task(self.next_window - 1, number, slices, payloads)

    def first(self, number: int) -> Task | None:
        """Return the first window of a source, without using it up."""
        source = self.sources[number]
        parts = iter(stream_windows(source, streamed_files(source), self.part_bytes))
        part = next(parts, None)
        if part is None:
            return None
        if any(file.location == "-" for file in source.files):  # which cannot be read again
            self._begun[number] = chain([part], parts)
        return Task(self.next_window, number, *part)


def first_tasks(plan: Plan, sources: list[Source], stream: StreamTasks) -> Iterator[Task]:
    """Yield the first window of each source, for a look at its first records."""
    planned = planned_tasks(plan, range(len(plan["windows"])))
    for number in range(len(sources)):
        task = next((task for task in planned if task.source == number), None) or stream.first(number)
        if task is not None:
            yield task
