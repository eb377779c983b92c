"""What every benchmark here shares: flags, a file of results with machine, versions, commit and command, medians."""

import argparse
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass
class WriteUp:
    """The results of one benchmark."""

    title: str
    setting: list[str]
    "Sentences: what was run on what."
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    "Heading, columns, rows."
    notes: list[str] = field(default_factory=list)


def figure(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def middle(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{figure(statistics.median(values))} ({figure(min(values))}–{figure(max(values))})"


def processor() -> str:
    """Return the name of the processor."""
    names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
    return str((names or [platform.processor() or "cpu"])[0]).strip()


def hardware() -> str:
    """Name the machine, for the file name: the GPU if torch was loaded and sees one, else processor and cores."""
    torch = sys.modules.get("torch")
    name = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return re.sub(r"[^a-z0-9]+", "-", (name or f"{processor()}-{cores}cpu").lower()).strip("-")


def versions(packages: Sequence[str]) -> str:
    """Return the installed ones of these packages with their versions."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Return the commit, marked where files other than results differ from it."""

    def git(*words: str) -> str:
        ask = ["git", "-C", str(RESULTS.parents[1]), *words]
        return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("-dirty" if changed else "")


def markdown(write_up: WriteUp, packages: Sequence[str], load: float) -> str:
    """Return the results as a page."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"# {write_up.title}", "", *write_up.setting, ""]
    lines += [f"* Command: `{command}`", f"* Commit: {commit()}"]
    lines += [f"* Machine: {processor()}, {cores} cores, load {load:.1f} at the start; {hardware()}"]
    lines += [f"* Versions: Python {platform.python_version()}, {versions(packages)}", ""]
    for heading, columns, rows in write_up.tables:
        lines += [f"## {heading}", ""] if heading else []
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join([*lines, *[f"* {note}" for note in write_up.notes]]).rstrip() + "\n"


def run(
    what: str,
    doc: str,
    measure: Callable[[argparse.Namespace], WriteUp],
    packages: Sequence[str],
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Parse flags, measure, and write `results/<what>-<hardware>-<YYYY-MM>.md`; with --quick print only."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, once: to see that it works; writes no file"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--hardware", help="name of the machine in the file's name")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the file")
    add_flags(parser)
    arguments = parser.parse_args()
    arguments.repeats = 1 if arguments.quick else arguments.repeats
    load = os.getloadavg()[0]
    text = markdown(measure(arguments), packages, load)
    if arguments.quick:
        print(text)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{what}-{arguments.hardware or hardware()}-{time.strftime('%Y-%m')}.md"
    file.write_text(text, encoding="utf-8")
    print(file)


def tell(line: str) -> None:
    """Show progress on stderr."""
    print(line, file=sys.stderr, flush=True)
