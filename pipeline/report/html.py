"""One self-contained page from figures: opens offline, on a phone, in print, in light and dark.

A page is data (`Page`): headline cards, warnings, sections of plots, tables and sample packs; the template lays it out.
All text is escaped by the template, text inside plots by `label`, and the page's own security policy forbids it to
fetch anything. Plots are drawn by plotly.js, taken from the installed plotly package; a plot never carries more points
than a screen shows.
"""

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from shards.errors import PackError
from shards.text import printable

# Okabe and Ito: told apart by all
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")


@dataclass(frozen=True)
class Plot:
    """One figure."""

    title: str
    figure: str
    "Data and layout as plotly's JSON."


@dataclass(frozen=True)
class Table:
    """A table; the first column is text, the others are figures unless `text`."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    text: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it."""

    title: str
    text: str = ""
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    packs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """Everything that a page shows."""

    title: str
    subtitle: str
    cards: list[dict[str, str]]
    warnings: list[str]
    sections: list[Section]


def render_page(page: Page) -> str:
    """Return the page as HTML.

    Raises:
        PackError: plotly is not installed.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PackError("`html`: plotly is not installed. Run: pip install 'shardpack[report]'.") from error
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        files("pipeline.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    script = get_plotlyjs().replace("</script", "<\\/script")  # the only text that is not escaped
    return template.render(page=page, plotly=Markup(script))


def write_page(page: Page, file: str) -> None:
    """Write the page.

    Raises:
        PackError: plotly is not installed, or the file cannot be written.
    """
    text = render_page(page)
    try:
        Path(file).write_bytes(text.encode("utf-8", "replace"))  # names that are not UTF-8
    except OSError as error:
        raise PackError(f"`html`: {file}; cannot be written ({error.strerror}). Name another file.") from error


def escape_label(text: str) -> str:
    """Escape a name for use inside a plot, where plotly reads a few tags."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def make_plot(title: str, data: list[dict[str, Any]], *, x: str = "", y: str = "", **layout: Any) -> Plot:
    """Return a figure.

    Args:
        title: Its caption.
        data: Traces, as plotly takes them.
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        layout: More of plotly's layout; `xaxis` and `yaxis` are added to.
    """
    for name, text in (("xaxis", x), ("yaxis", y)):
        layout[name] = {"title": {"text": text}, **layout.get(name, {})}
    return Plot(title, orjson.dumps({"data": data, "layout": {"colorway": COLOURS, **layout}}).decode())


def bar_trace(x: list[Any], y: list[Any], name: str = "", **more: Any) -> dict[str, Any]:
    """Return a trace of bars."""
    return {"type": "bar", "x": x, "y": y, "name": escape_label(name), **more}


def step_trace(x: list[Any], y: list[Any], name: str = "", **more: Any) -> dict[str, Any]:
    """Return a trace of filled steps, for histograms on a log axis: `y[i]` holds from `x[i]` to `x[i + 1]`."""
    return line_trace(x, y, name, **{"fill": "tozeroy", "line": {"shape": "hv"}, **more})


def line_trace(x: list[Any], y: list[Any], name: str = "", **more: Any) -> dict[str, Any]:
    """Return a trace of a line."""
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": escape_label(name), **more}


def vertical_line(x: float) -> dict[str, Any]:
    """Return a vertical line across a plot."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
