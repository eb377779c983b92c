"""Killed, interrupted, out of space, lied to by disk or engine: no false dataset ever, and the same bytes after."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

import shards.publish
import shards.writer
from pipeline import BuildConfig, build
from pipeline.building.progress import Progress
from pipeline.documents.engines import ENGINES, Encode, Engine
from shards import Dataset, PackError, verify

HERE = Path(__file__).parent
NUM_WINDOWS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "packing", "documents", "into", "rows"]
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    with path.open("w") as file:
        for number in range(300):
            text = " ".join(rng.choices(words, k=min(int(rng.lognormvariate(3, 1)), 300)))
            file.write(json.dumps({"text": f"{number}: {text}"}) + "\n")
    return path


@pytest.fixture(scope="module")
def options(corpus: Path, tokenizer_dir: str) -> dict[str, Any]:
    window_bytes = -(-corpus.stat().st_size // NUM_WINDOWS)
    return {"sources": (str(corpus),), "tokenizer": tokenizer_dir, "seq_len": 128, "window_bytes": window_bytes}


@pytest.fixture(scope="module")
def clean(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("clean") / "out"
    manifest = build(BuildConfig(out=str(out), **options)).manifest
    assert manifest["shards"]["rows"] == NUM_WINDOWS
    return arrow_files(out)


def arrow_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.arrow"))}


def check_published(out: Path) -> int:
    """Whatever stands under a final name is whole; return the number of windows."""
    for path in out.glob("shards/*.arrow"):
        assert xxhash.xxh3_128_hexdigest(path.read_bytes())[:16] == path.stem.split("-")[1]
        assert pa.ipc.open_stream(path).read_all().num_rows
    sidecars = list(out.glob("shards/*.json"))
    for path in sidecars:
        record = json.loads(path.read_bytes())["shard"]
        assert (out / record["file"]).stat().st_size == record["bytes"]
    if (out / "manifest.json").exists():
        report = verify(out)
        assert report.ok, report.problems
    else:
        with pytest.raises(PackError, match=r"unfinished build|not a shardpack dataset|no such directory"):
            Dataset(out)
    return len(sidecars)


def arguments(options: dict[str, Any], out: Path, *more: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "sources"]
    return ["build", *options["sources"], f"--out={out}", *flags, *more]


class Server:
    """Runs `pack` commands in children of one process that has everything imported."""

    def __init__(self, log: Path) -> None:
        self.log, self.peak_bytes = log, 0
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "build_process.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def start(self, arguments: list[str], **job: Any) -> int:
        self.stdin.write(json.dumps({"arguments": arguments, "log": str(self.log), **job}) + "\n")
        self.stdin.flush()
        return int(self.stdout.readline())

    def ended(self, within_s: float) -> bool:
        return bool(select.select([self.stdout], [], [], within_s)[0])

    def wait(self) -> int:
        code, self.peak_bytes = map(int, self.stdout.readline().split())
        return code

    def run(self, arguments: list[str], **job: Any) -> int:
        self.start(arguments, **job)
        return self.wait()

    def close(self) -> None:
        self.stdin.close()
        self.process.wait()
        self.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_bytes_do_not_depend_on_how_workers_start(server, options, clean, tmp_path, method):
    code = server.run(arguments(options, tmp_path / "out", "--workers=2"), start_method=method)
    assert code == 0, server.log.read_text()
    assert arrow_files(tmp_path / "out") == clean


def kill_and_resume(server: Server, options: dict[str, Any], out: Path, kills: int, seed: int) -> None:
    """Kill builds at random moments, each going on where the last one died, then let one finish."""
    rng = random.Random(seed)
    begin = time.perf_counter()
    assert server.run(arguments(options, out, "--workers=1")) == 0, server.log.read_text()
    longest_s = time.perf_counter() - begin
    shutil.rmtree(out)
    died = 0
    for _ in range(20 * kills):
        child = server.start(arguments(options, out, "--workers=1", "--resume"))
        if not server.ended(rng.uniform(0.0, longest_s)):
            os.kill(child, signal.SIGKILL)
        code = server.wait()
        assert code in (0, -signal.SIGKILL), server.log.read_text()
        if (out / "plan.json").exists():
            check_published(out)
        if code == 0:
            shutil.rmtree(out)  # too late; start over
        else:
            died += 1
        if died == kills:
            break
    assert died == kills
    assert server.run(arguments(options, out, "--workers=1", "--resume")) == 0, server.log.read_text()


def test_killed_builds_resume_to_the_same_bytes(server, options, clean, tmp_path):
    for k in range(2):
        kill_and_resume(server, options, tmp_path / str(k), kills=4, seed=k)
        assert arrow_files(tmp_path / str(k)) == clean
        assert verify(tmp_path / str(k)).ok
        assert not (tmp_path / str(k) / "_tmp").exists()


@pytest.mark.slow
def test_many_killed_builds_resume_to_the_same_bytes(server, options, clean, tmp_path):
    for k in range(20):
        kill_and_resume(server, options, tmp_path / str(k), kills=10, seed=100 + k)
        assert arrow_files(tmp_path / str(k)) == clean


def wait_for_window(server: Server, out: Path) -> None:
    for _ in range(6000):
        if list(out.glob("shards/*.json")):
            return
        assert not server.ended(0.01), server.log.read_text()
    raise AssertionError("no window appeared")


def is_group_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_build_leaves_no_process_behind_and_resumes(server, options, tmp_path, which):
    out, many = tmp_path / "out", options | {"window_bytes": 600}
    child = server.start(arguments(many, out, "--workers=2"))
    wait_for_window(server, out)
    if which == signal.SIGINT:
        os.killpg(child, which)  # as a terminal does: to all of them
    else:
        os.kill(child, which)  # the workers have to notice by themselves
    assert server.ended(20), "still running"
    assert server.wait() == (130 if which == signal.SIGINT else -signal.SIGKILL), server.log.read_text()
    assert any(is_group_gone(child) or server.ended(0.02) for _ in range(1000)), "a worker is left behind"
    assert ("Add --resume to continue" in server.log.read_text()) == (which == signal.SIGINT)
    assert 0 < check_published(out) < 100
    assert server.run(arguments(many, out, "--workers=1", "--resume")) == 0, server.log.read_text()
    assert len(Dataset(out).shards) > 100
    build(BuildConfig(out=str(tmp_path / "clean"), **many))
    assert arrow_files(out) == arrow_files(tmp_path / "clean")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], None]:
    """Make the worker of one window kill itself some times."""
    monkeypatch.syspath_prepend(HERE)
    import poison

    monkeypatch.setattr("pipeline.building.engines._start_worker", poison.start_poisoned_worker)
    return lambda window, times: (tmp_path / "poison.json").write_text(json.dumps({"window": window, "times": times}))


def test_a_worker_that_dies_is_replaced(poisoned, options, clean, tmp_path):
    poisoned(window=3, times=2)
    build(BuildConfig(out=str(tmp_path / "out"), workers=2, **options))
    assert json.loads((tmp_path / "poison.json").read_text())["times"] == 0
    assert arrow_files(tmp_path / "out") == clean


def test_a_window_that_kills_every_worker_stops_the_build_by_name(poisoned, options, clean, tmp_path):
    poisoned(window=3, times=100)
    with pytest.raises(PackError, match=r"window 3 \(source 'corpus': c\.jsonl\[\d+:\d+\]\): its worker died 3 times"):
        build(BuildConfig(out=str(tmp_path / "out"), workers=2, **options))
    assert json.loads((tmp_path / "poison.json").read_text())["times"] >= 96  # no more than once in company
    assert check_published(tmp_path / "out") >= 1
    poisoned(window=3, times=0)
    build(BuildConfig(out=str(tmp_path / "out"), workers=2, resume=True, **options))
    assert arrow_files(tmp_path / "out") == clean


class FailingDisk:
    """Makes the n-th write, fsync or rename fail, before or after it took effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at, self.after = -1, False
        self.synced: set[int] = set()
        for name in ("write", "fsync", "rename"):
            call = self.wrapped(name, getattr(shards.publish, name))
            monkeypatch.setattr(shards.publish, name, call)
            if hasattr(shards.writer, name):
                monkeypatch.setattr(shards.writer, name, call)

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if number >= self.fail_at >= 0 and not self.after:
                raise OSError(5, "Input/output error")
            result = real(*arguments)
            if name == "fsync":
                self.synced.add(os.fstat(arguments[0].fileno()).st_ino)
            if number >= self.fail_at >= 0:
                raise OSError(5, "Input/output error")
            return result

        return call

    def cut_power(self, root: Path) -> None:
        """Empty every file that no fsync made durable."""
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self.synced:
                path.write_bytes(b"")


def small(options: dict[str, Any], corpus: Path) -> dict[str, Any]:
    return options | {"window_bytes": corpus.stat().st_size // 2}


def break_every_call(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], root: Path, chosen: Callable[[list[str]], list[int]]
) -> int:
    disk = FailingDisk(monkeypatch)
    build(BuildConfig(out=str(root / "whole"), **options))
    whole, calls = arrow_files(root / "whole"), list(disk.calls)
    broken = chosen(calls)
    for number in broken:
        for after in (False, True):
            disk.after = after
            out = root / f"{number}-{disk.after}"
            disk.calls, disk.fail_at, disk.synced = [], number, set()
            with pytest.raises(PackError, match=r"Input/output error"):
                build(BuildConfig(out=str(out), **options))
            assert len(disk.calls) > number
            disk.cut_power(out)
            if (out / "plan.json").exists():
                check_published(out)
            assert not (out / "manifest.json").exists() or (disk.after and number == len(calls) - 1)
            disk.fail_at = -1
            build(BuildConfig(out=str(out), resume=True, **options))
            assert arrow_files(out) == whole, (number, calls[number])
            shutil.rmtree(out)
    return len(broken)


def test_every_failing_fsync_and_rename_and_some_writes_leave_no_false_dataset(monkeypatch, options, corpus, tmp_path):
    def chosen(calls: list[str]) -> list[int]:
        writes = [number for number, name in enumerate(calls) if name == "write"]
        others = [number for number, name in enumerate(calls) if name != "write"]
        return sorted({*writes[:: len(writes) // 6], writes[-1], *others[::3], others[-1]})

    assert break_every_call(monkeypatch, small(options, corpus), tmp_path, chosen) > 10


@pytest.mark.slow
def test_every_failing_system_call_leaves_no_false_dataset(monkeypatch, options, corpus, tmp_path):
    def chosen(calls: list[str]) -> list[int]:
        return list(range(len(calls)))

    assert break_every_call(monkeypatch, small(options, corpus), tmp_path, chosen) > 50


def test_system_calls_come_in_the_order_that_survives_a_power_cut(options, tmp_path):
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace is not installed or may not trace here")
    trace, out = tmp_path / "trace", tmp_path / "out"
    command = [strace, "-f", "-y", "-o", str(trace), "-e", "trace=fsync,fdatasync,rename,renameat,renameat2"]
    subprocess.run(
        [*command, sys.executable, "-m", "pipeline", *arguments(options, out, "--workers=1")],
        check=True, capture_output=True,
    )  # fmt: skip
    events = [line.split(" ", 1)[1].strip() for line in trace.read_text().splitlines() if str(out) in line]
    renamed = []
    for before, event, after in zip(events, events[1:], events[2:], strict=False):
        if event.startswith("rename"):
            source, target = (Path(part) for part in event.split('"')[1::2])
            assert before.startswith("fsync") and f"<{source}>" in before, (before, event)  # noqa: PT018
            assert after.startswith("fsync") and f"<{target.parent}>" in after, (event, after)  # noqa: PT018
            assert source.parent == out / "_tmp"
            renamed.append(target.relative_to(out).as_posix())
    shard_files = [name for name in renamed if name.startswith("shards/")]
    assert len(shard_files) == 2 * NUM_WINDOWS
    for shard, sidecar in zip(shard_files[::2], shard_files[1::2], strict=True):
        assert shard.endswith(".arrow")
        assert sidecar == f"shards/{shard[7:15]}.json"
    first, last = renamed.index(shard_files[0]), renamed.index(shard_files[-1])
    assert renamed[0] == "plan.json"  # by which what follows is known to be a build's
    assert sorted(renamed[1:first]) == ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    at_the_end = ["index.arrow", "shards.arrow", "state.json", "dataset_info.json", "manifest.json"]
    assert renamed[last + 1 :] == at_the_end


def check_out_of_space(server: Server, out: Path, code: int) -> None:
    lines = server.log.read_text().strip().splitlines()
    assert code == 1
    assert len(lines) == 1, lines
    assert "no space left" in lines[0]
    assert "--resume" in lines[0]
    check_published(out)
    assert not verify(out).ok


def test_a_limit_on_file_sizes_is_one_line_about_space(server, options, corpus, tmp_path):
    out, large = tmp_path / "out", small(options, corpus)
    code = server.run(arguments(large, out, "--workers=1"), limit_bytes=40 << 10)
    check_out_of_space(server, out, code)
    assert server.run(arguments(large, out, "--workers=1", "--resume")) == 0
    assert all(shard["bytes"] > 40 << 10 for shard in Dataset(out).shards)
    check_published(out)


def test_a_full_disk_is_one_line_about_space_and_resumes_when_there_is_room(server, options, clean, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(map(len, clean.values())) // 2 + (100 << 10)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        code = server.run(arguments(options, disk / "out", "--workers=1"))
        check_out_of_space(server, disk / "out", code)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert server.run(arguments(options, disk / "out", "--workers=1", "--resume")) == 0
        assert arrow_files(disk / "out") == clean
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def liar(honest_documents: int) -> Engine:
    """An engine that gives the reference's ids for a while, then others."""

    def open_liar(content: bytes) -> Encode:
        reference, seen = ENGINES["tokenizers"].open(content), [0]

        def encode(texts: list[str]) -> Any:
            ids, offsets = reference(texts)
            seen[0] += sum(text[:1].isdigit() and ": " in text[:6] for text in texts)
            return (ids if seen[0] <= honest_documents else ids[::-1].copy()), offsets

        return encode

    return Engine("tokenizers", open_liar)


class Listener(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, message: str) -> None:
        self.said.append(message)


def test_a_lying_engine_costs_time_but_never_a_token(monkeypatch, options, clean, tmp_path):
    listener = Listener()
    monkeypatch.setitem(ENGINES, "gigatoken", liar(150))
    manifest = build(BuildConfig(out=str(tmp_path / "out"), tokenizer_engine="gigatoken", **options), listener).manifest
    assert arrow_files(tmp_path / "out") == clean
    assert "gave other ids than the reference" in listener.said[0]
    results = {(fact["engine"], fact["guard"]["result"]) for fact in manifest["facts"]["tokenizer"]}
    assert results == {("tokenizers", "differs"), ("tokenizers", "not needed")}


def test_a_lie_in_one_part_of_a_job_array_has_the_other_parts_built_again(monkeypatch, options, clean, tmp_path):
    listener = Listener()
    out = str(tmp_path / "out")
    for part, honest in ((0, 10_000), (1, 0), (2, 10_000)):
        monkeypatch.setitem(ENGINES, "gigatoken", liar(honest))
        build(BuildConfig(out=out, tokenizer_engine="gigatoken", windows=f"{part}::3", **options), listener)
    assert arrow_files(tmp_path / "out") == clean
    assert f"building its {NUM_WINDOWS * 2 // 3} windows again" in listener.said[-1]


def test_a_liar_that_was_killed_with_its_build_is_found_out_on_resume(monkeypatch, options, clean, tmp_path):
    out = str(tmp_path / "out")
    monkeypatch.setitem(ENGINES, "gigatoken", liar(150))
    monkeypatch.setattr(
        "pipeline.building.driver.rebuild_with_reference", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        build(BuildConfig(out=out, tokenizer_engine="gigatoken", **options))
    monkeypatch.undo()
    build(BuildConfig(out=out, resume=True, **options))
    assert arrow_files(tmp_path / "out") == clean
