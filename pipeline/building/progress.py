"""What a person sees on stderr while a build runs."""

from typing import Any

from shards.text import printable


class Progress:
    """Progress callbacks of a build; the default does nothing."""

    def begin(self, raw_bytes: int | None) -> None:
        """Take the size of the corpus in bytes, where it is known."""

    def on_progress(self, documents: int, tokens: int, raw_bytes: int) -> None:
        """Count a window that is done."""

    def on_message(self, message: str) -> None:
        """Take one line for a person."""


class RichProgress(Progress):
    """A progress bar with documents, tokens/s, MB/s and time left; lines of text around it.

    Args:
        show: Whether to draw; None for when stderr is a terminal.
    """

    def __init__(self, show: bool | None) -> None:
        from rich import progress as rich_progress
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.show = self.console.is_terminal if show is None else show
        self.bar = rich_progress.Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.show,
            transient=True,
        )
        self.documents = self.tokens = self.raw_bytes = 0

    def __enter__(self) -> "RichProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def begin(self, raw_bytes: int | None) -> None:
        """Draw the bar."""
        self.task = self.bar.add_task("building", total=raw_bytes, figures="")

    def on_progress(self, documents: int, tokens: int, raw_bytes: int) -> None:
        """Move the bar."""
        self.documents, self.tokens = self.documents + documents, self.tokens + tokens
        self.raw_bytes += raw_bytes
        elapsed = max(self.bar.tasks[self.task].elapsed or 0.0, 1e-3)
        speeds = f"{self.tokens / elapsed / 1e6:.2f} Mtok/s  {self.raw_bytes / elapsed / 1e6:.1f} MB/s"
        figures = f"{self.documents:,} documents  {speeds}"
        self.bar.update(self.task, advance=raw_bytes, figures=figures)

    def on_message(self, message: str) -> None:
        """Show one line, on a terminal or not."""
        self.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)
