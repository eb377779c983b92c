"""Corpora that anyone on Debian or Ubuntu can make again: text of packages, one JSON object a line, in .corpora/.

    python benchmarks/corpora.py                            # every kind, 60 MB each, where there is as much
    python benchmarks/corpora.py code --megabytes 700

Packages come by `apt-get download` (no root, nothing installed; 200 MB for all kinds). What a kind holds, see `KINDS`.
Documents are in an order drawn with a fixed seed. The file names the kind and the limit: `.corpora/code-60mb.jsonl`.
"""

import argparse
import html
import json
import random
import re
import string
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from gzip import decompress
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / ".corpora"
LANGUAGES = {"de": "de-DE", "es": "es-ES", "fr": "fr-FR", "ja": "ja-JP", "pl": "pl-PL", "ru": "ru-RU", "zh": "zh-CN"}
KERNEL, DICTIONARY, HANDBOOK = "linux-source-6.1", "dict-gcide", "debian-handbook"
SIXTY_FOUR = {
    char: place for place, char in enumerate(string.ascii_uppercase + string.ascii_lowercase + "0123456789+/")
}
"Digits of the index of a dictd dictionary."


def unpacked(package: str) -> Path:
    """Fetch a Debian package and unpack it, if it is not there."""
    target = HOME / "packages" / package
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "--quiet", package], cwd=target.parent, check=True)
        archive = next(target.parent.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "--extract", archive.name, package], cwd=target.parent, check=True)
        print(f"{archive.name}")
    return target


def kernel(*suffixes: str) -> Iterator[str]:
    """Yield the kernel's files of these kinds."""
    chosen = unpacked(KERNEL) / "chosen"
    if not chosen.is_dir():
        with tarfile.open(next(unpacked(KERNEL).glob("usr/src/*.tar.xz"))) as archive:
            kept = (
                member for member in archive if member.isfile() and member.name.endswith((".c", ".h", ".rst", ".txt"))
            )
            archive.extractall(chosen, kept, filter="data")
    yield from read(path for path in chosen.rglob("*") if path.suffix in suffixes)


def read(paths: Iterator[Path]) -> Iterator[str]:
    """Yield files in an order drawn with a fixed seed."""
    files = sorted(path for path in paths if path.is_file() and not path.is_symlink())
    random.Random(0).shuffle(files)
    for path in files:
        content = path.read_bytes()
        yield (decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "replace")


def page_text(page: str) -> str:
    """Return what a page of HTML says."""
    body = re.sub(r"(?s)<(script|style|head).*?</\1>", "", page)
    text = html.unescape(re.sub(r"(?s)<[^>]+>", " ", re.sub(r"</(p|div|h\d|li|pre|tr)>", "\n", body)))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", text)).strip()


def manual_text(page: str) -> str:
    """Return what a page of a manual says, most of troff's marks left out."""
    lines = (
        line for line in page.split("\n") if not line.startswith(('.\\"', "'\\\"", ".if", ".ie", ".el", ".de", ".."))
    )
    text = "\n".join(re.sub(r"^\.[A-Za-z]+ ?", "", line) for line in lines)
    return re.sub(r"\\(f.|[&/,|^~])", "", text.replace("\\-", "-")).replace('"', "").strip()


def code() -> Iterator[dict[str, Any]]:
    yield from ({"text": text} for text in kernel(".c", ".h"))


def prose() -> Iterator[dict[str, Any]]:
    yield from ({"text": text} for text in kernel(".rst", ".txt"))
    yield from ({"text": text} for _, text in entries())


def languages() -> Iterator[dict[str, Any]]:
    """Take turns, so that a part of the corpus holds all languages too."""
    running = [language_pages(name, region) for name, region in LANGUAGES.items()]
    running.append(page_text(page) for page in read(unpacked(HANDBOOK).glob("usr/share/doc/*/html/en-US/*.html")))
    while running:
        for pages in [*running]:
            if (text := next(pages, None)) is None:
                running.remove(pages)
            elif text:
                yield {"text": text}


def language_pages(name: str, region: str) -> Iterator[str]:
    """Yield the handbook and the manual of one language."""
    yield from map(page_text, read(unpacked(HANDBOOK).glob(f"usr/share/doc/*/html/{region}/*.html")))
    yield from map(manual_text, read(unpacked(f"manpages-{name}").glob("usr/share/man/*/man*/*.gz")))


def entries() -> Iterator[tuple[str, str]]:
    """Yield headword and text of every entry of the GNU Collaborative International Dictionary of English."""
    home = unpacked(DICTIONARY) / "usr/share/dictd"
    content = decompress((home / "gcide.dict.dz").read_bytes())
    places = sorted(
        (number(start), number(size), word)
        for word, start, size in (line.split("\t") for line in (home / "gcide.index").read_text("utf-8").splitlines())
        if not word.startswith("00-database")
    )
    drawn = list({start: (start, size, word) for start, size, word in places}.values())
    random.Random(0).shuffle(drawn)
    for start, size, word in drawn:
        yield word, content[start : start + size].decode("utf-8", "replace").strip()


def number(digits: str) -> int:
    """Read a number of the index: base 64, highest digit first."""
    value = 0
    for digit in digits:
        value = value * 64 + SIXTY_FOUR[digit]
    return value


def chats() -> Iterator[dict[str, Any]]:
    """Ask the dictionary for one to six words a conversation: short questions, answers of natural lengths."""
    rng, messages, wanted = random.Random(0), list[dict[str, str]](), 1
    for word, text in entries():
        messages.append({"role": "user", "content": f"What does “{word}” mean?"})
        messages.append({"role": "assistant", "content": text})
        if len(messages) >= 2 * wanted:
            yield {"messages": messages}
            messages, wanted = [], rng.randint(1, 6)


def lines() -> Iterator[dict[str, Any]]:
    for _, text in entries():
        yield from ({"text": line.strip()} for line in text.split("\n") if line.strip())


KINDS: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], str]] = {
    "prose": (
        prose,
        "English: the kernel's documentation, then the entries of a dictionary (linux-source-6.1, dict-gcide)",
    ),
    "languages": (
        languages,
        "German, English, Spanish, French, Japanese, Polish, Russian, Chinese in turn: handbook and manuals "
        "(debian-handbook, manpages-*)",
    ),
    "code": (code, "C: files of linux-source-6.1"),
    "chats": (chats, "questions for words and a dictionary's answers, 1 to 6 a conversation (dict-gcide)"),
    "lines": (lines, "lines of a dictionary, each a document (dict-gcide)"),
}


def path_of(kind: str, megabytes: int) -> Path:
    return HOME / f"{kind}-{megabytes}mb.jsonl"


def make(kind: str, megabytes: int) -> Path:
    """Write one corpus, at most so large."""
    HOME.mkdir(exist_ok=True)
    target, size, count = path_of(kind, megabytes), 0, 0
    with target.with_suffix(".part").open("wb") as file:
        for record in KINDS[kind][0]():
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            if size + len(line) > megabytes * 1_000_000:
                break
            size, count = size + file.write(line), count + 1
    target.with_suffix(".part").rename(target)
    print(f"{target}: {size / 1e6:.1f} MB, {count:,} documents")
    return target


def main() -> None:
    kinds = "\n".join(f"    {kind:<11}{what}" for kind, (_, what) in KINDS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{kinds}\n", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--megabytes", type=int, default=60, help="limit of each file")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: no such kind; there are {', '.join(KINDS)}")
    for kind in arguments.kinds or KINDS:
        make(kind, arguments.megabytes)


if __name__ == "__main__":
    main()
