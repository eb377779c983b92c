"""The report page in a real browser: everything is drawn, nothing is fetched, nothing foreign is executed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
FLAGS = [
    *["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
    *["--disable-sync", "--no-first-run", "--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"],
    "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever anybody asks for, the browser itself included, stays here
]
EVIL = (
    "<script>document.documentElement.dataset.owned=1</script>"
    '<img src=x onerror="document.documentElement.dataset.owned=2">'
    "'\"\u202eright to left אבג{{ 7 * 7 }}"
)


def browse(page: Path, tmp_path: Path, *flags: str) -> tuple[str, list[str], list[str]]:
    """Open a page; return its document after all scripts ran, what the console said, and the URLs that it asked for."""
    log = tmp_path / "net.json"
    where = [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", *flags, page.as_uri()]
    done = subprocess.run([CHROMIUM, *FLAGS, *where], capture_output=True, text=True, timeout=300, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = [e["url"] for e in events if "url" in e and e.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, console, asked


def plots(document: str) -> list[str]:
    """Return the document cut at its plots; the text before the first is left out."""
    return document.split('<div class="plot js-plotly-plot"')[1:]


def inspect(*arguments: str) -> None:
    done = CliRunner().invoke(main, ["inspect", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture
def evil_dataset(tmp_path, tokenizer_dir):
    """A dataset of documents, files and a directory with names that a careless page would execute."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("plain.jsonl", "<script>alert(1)<&script>'\"אבג.jsonl"):
        records = [{"text": f"{EVIL} number {n} " * (1 + n % 7)} for n in range(40)]
        (corpus / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "<b onclick=x>&\"'אבג"
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "1024", "--out", str(out), "--workers", "1"]
    done = CliRunner().invoke(main, ["build", f"a={corpus}", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out


def test_every_plot_is_drawn_and_nothing_foreign_happens(evil_dataset, tmp_path):
    page = tmp_path / "page.html"
    inspect(str(evil_dataset), "--html", str(page))
    document, console, asked = browse(page, tmp_path)
    drawn = plots(document)
    assert len(drawn) >= 5
    for plot in drawn:
        assert re.search(r'<path class="js-line"[^>]* d="M|<g class="point"><path d="M', plot), plot[:300]
    assert console == []
    assert asked == []
    assert "data-owned" not in document[: document.index("<head")]
    assert "&lt;script&gt;document.documentElement" in document
    assert "{{ 7 * 7 }}" in document


def test_a_page_that_fetches_would_be_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<img src='http://example.com/x.png'><script>document.documentElement.dataset.owned = 1; f()</script>"
    )
    document, console, asked = browse(page, tmp_path)
    assert asked == ["http://example.com/x.png"]
    assert len(console) == 1
    assert "data-owned" in document[: document.index("<head")]


@pytest.mark.parametrize("packs", [0, 1, 10_000])
def test_a_dataset_of_any_size_has_a_page(packs, write_dataset, tokenizer_dir, tmp_path):
    dataset = write_dataset({EVIL: [[20 + n % 40] for n in range(packs)]}, tokenizer=tokenizer_dir)
    page = tmp_path / "page.html"
    inspect(str(dataset), "--html", str(page))
    document, console, _ = browse(page, tmp_path)
    assert console == []
    assert document.count("<details") == min(packs, 4)
    assert len(plots(document)) == document.count('class="plot js-plotly-plot"') > 0
    assert page.stat().st_size < 8_000_000


def test_datasets_and_runs_have_pages_too(write_dataset, tmp_path):
    one, two = (write_dataset({"web": [[60], [20, 30]]}, name=name) for name in ("one", "two"))
    for name in ("first", "second"):
        lines = [{"step": n, "loss": 5 / n, "tokens_per_s": 1000.0 + n, "data_wait": 0.01} for n in range(1, 50)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for paths, expected in (((one, two), 2), ((tmp_path / "first", tmp_path / "second"), 3)):
        page = tmp_path / "page.html"
        inspect(*map(str, paths), "--html", str(page))
        document, console, _ = browse(page, tmp_path)
        assert console == []
        assert document.count('class="plot js-plotly-plot"') == expected


def test_a_page_names_no_remote_address(write_dataset, tokenizer_dir, tmp_path):
    page = tmp_path / "page.html"
    inspect(str(write_dataset({"web": [[60]]}, tokenizer=tokenizer_dir)), "--html", str(page))
    text = page.read_text(encoding="utf-8")
    own = text[: text.index("<script>")] + text[text.rindex("<script>") :]
    assert not re.search(r"https?://|//[a-z]|@import|url\(", own.replace("data:", ""))
    assert "default-src 'none'" in own
