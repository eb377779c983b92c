"""The format stays readable, an older one is refused by name, and the same corpus still gives the same rows."""

import hashlib
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.building.progress import Progress
from pipeline.building.repacking import upgrade as upgrading
from pipeline.building.repacking.repack import repack
from pipeline.building.repacking.upgrade import FORGOTTEN
from pipeline.config import RepackConfig
from shards import Dataset, FormatError, PackError, verify
from shards.plan import plan_id
from shards.publish import canonical, seal

HERE = Path(__file__).parent


def decoded(root: Path) -> list[dict[str, list[object]]]:
    """Every shard and the index as plain values, in window order."""
    files = [*(shard["file"] for shard in Dataset(root).shards), "index.arrow"]
    return [pa.ipc.open_stream(root / file).read_all().to_pydict() for file in files]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = runpy.run_path(str(HERE / "write_v2.py"))
    return script["write"](tmp_path_factory.mktemp("golden"))


def test_the_golden_dataset_is_sound_and_readable():
    report = verify(HERE / "v2")
    assert report.ok, report.problems
    dataset = Dataset(HERE / "v2")
    rows = [pa.ipc.open_stream(HERE / "v2" / shard["file"]).read_all() for shard in dataset.shards]
    values = [row for table in rows for row in table.to_pylist()]
    assert len(dataset) == len(values) == 8
    for ours, theirs in zip(dataset, values, strict=True):
        assert {name: getattr(value, "tolist", lambda v=value: v)() for name, value in ours.items()} == theirs


def test_version_1_is_refused_in_one_line_that_names_the_upgrade():
    with pytest.raises(
        FormatError, match=r"version 1, this version reads 'shardpack' version 2 .*pack repack DATASET --out NEW"
    ):
        Dataset(HERE / "v1")
    (problem,) = verify(HERE / "v1").problems
    assert problem.rule == "F1"
    assert "pack repack DATASET --out NEW" in problem.message


def test_the_plan_is_canonical_json_known_by_its_hash_and_not_by_a_checksum():
    plan = (HERE / "v2" / "plan.json").read_bytes()
    assert plan == json.dumps(json.loads(plan), sort_keys=True, separators=(",", ":")).encode()
    assert "checksum" not in json.loads(plan)
    assert Dataset(HERE / "v2").manifest["plan_id"] == hashlib.sha256(plan).hexdigest()


def test_todays_build_of_the_same_corpus_gives_the_same_tables(rebuilt):
    old, new = decoded(HERE / "v2"), decoded(rebuilt)
    assert len(old) == 4
    assert old == new


def test_todays_plan_of_the_same_corpus_differs_by_new_options_at_most(rebuilt):
    old, new = Dataset(HERE / "v2").plan, Dataset(rebuilt).plan
    for source, before in zip(new["sources"], old["sources"], strict=True):
        source["records"] = {name: value for name, value in source["records"].items() if name in before["records"]}
    assert {name: value for name, value in new.items() if name in old} == old


def test_version_1_is_upgraded_to_the_rows_of_todays_build(tmp_path):
    result = repack(RepackConfig(dataset=HERE / "v1", out=tmp_path / "new"))
    report = verify(tmp_path / "new")
    assert report.ok, report.problems
    assert decoded(tmp_path / "new") == decoded(HERE / "v2")
    new, expected = Dataset(tmp_path / "new"), Dataset(HERE / "v2")
    assert sum(sum(row["start_targets"].tolist()) for row in new) > 0, "the golden corpus has a cut document"
    assert result.manifest["totals"] == expected.manifest["totals"]
    assert result.manifest["facts"]["upgraded_from"] == {"version": 1, "dataset_id": old_manifest()["dataset_id"]}
    assert (new.plan["recipe"], new.plan["windows"]) == (1, expected.plan["windows"])


def old_manifest() -> dict[str, Any]:
    return json.loads((HERE / "v1" / "manifest.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / "v1", tmp_path / "old"))


def test_an_upgraded_dataset_is_repacked_like_todays(tmp_path):
    repack(RepackConfig(dataset=HERE / "v1", out=tmp_path / "new"))
    for name, path in (("new", tmp_path / "new"), ("today", HERE / "v2")):
        repack(RepackConfig(dataset=path, out=tmp_path / f"{name}-48", seq_len=48))
    assert decoded(tmp_path / "new-48") == decoded(tmp_path / "today-48")
    assert verify(tmp_path / "new-48").ok


def test_targets_that_version_1_forgot_stay_lost_and_are_said(tmp_path, old):
    plan = json.loads((old / "plan.json").read_text())
    plan["sources"][0]["records"]["kind"] = "instruction"  # no rule tells which first tokens were targets
    (old / "plan.json").write_bytes(canonical(plan))
    for file in [old / "manifest.json", *old.glob("shards/*.json")]:
        record = json.loads(file.read_text())
        del record["checksum"]
        file.write_bytes(seal(record | {"plan_id": plan_id(plan)}))
    said: list[str] = []
    progress = Progress()
    progress.on_message = said.append  # type: ignore[method-assign]
    result = repack(RepackConfig(dataset=old, out=tmp_path / "new"), progress)
    assert "cuts hid 3 targets" in said[0]
    assert result.manifest["totals"]["targets"]["lost"] == {FORGOTTEN: 3}
    assert verify(tmp_path / "new").ok
    again = repack(RepackConfig(dataset=tmp_path / "new", out=tmp_path / "again", seq_len=512)).manifest["totals"]
    assert again["targets"] == {"read": 680, "packed": 677, "lost": {FORGOTTEN: 3}}
    assert verify(tmp_path / "again").ok


def test_an_upgrade_changes_nothing_else(tmp_path):
    with pytest.raises(PackError, match=r"v1: is of format version 1.*expected no `seq_len`. Upgrade it first"):
        repack(RepackConfig(dataset=HERE / "v1", out=tmp_path / "new", seq_len=64))
    assert not (tmp_path / "new").exists()


def test_an_interrupted_upgrade_goes_on(tmp_path, monkeypatch):
    written: list[int] = []
    real = upgrading.write_shard

    def fail_at(window: int) -> Any:
        def write(store: Any, layout: Any, identity: str, number: int, rows: Any) -> Any:
            if number == window:
                raise KeyboardInterrupt
            written.append(number)
            return real(store, layout, identity, number, rows)

        return write

    monkeypatch.setattr(upgrading, "write_shard", fail_at(2))
    with pytest.raises(KeyboardInterrupt):
        repack(RepackConfig(dataset=HERE / "v1", out=tmp_path / "new"))
    monkeypatch.setattr(upgrading, "write_shard", fail_at(-1))
    repack(RepackConfig(dataset=HERE / "v1", out=tmp_path / "new", resume=True))
    assert written == [0, 1, 2]
    assert verify(tmp_path / "new").ok


@pytest.mark.parametrize(
    ("name", "place", "value", "expected"),
    [
        ("manifest.json", "shards", [], "no document is left"),
        ("manifest.json", "shards", [{"bytes": 1}], r"shards\[0\].source is missing"),
        ("manifest.json", "facts", {"trained_end_ids": "x"}, "facts.trained_end_ids is a str"),
        ("manifest.json", "plan_id", "0" * 64, "is not the plan that the manifest names"),
        ("plan.json", "seq_len", 10**12, "is not the plan"),
        ("shards/00000001.json", "spans", [[0, 0]], "expected 5 numbers"),
        ("shards/00000001.json", "counts", {}, "counts.documents is missing"),
    ],
)
def test_a_damaged_dataset_of_version_1_is_named(tmp_path, old, name, place, value, expected):
    record = json.loads((old / name).read_text())
    record.pop("checksum", None)
    record[place] = value
    (old / name).write_bytes(canonical(record) if name == "plan.json" else seal(record))
    with pytest.raises(PackError, match=expected):
        repack(RepackConfig(dataset=old, out=tmp_path / "new"))


def test_a_flipped_bit_in_a_shard_of_version_1_is_found(tmp_path, old):
    shard = next(old.glob("shards/00000001-*.arrow"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PackError, match=r"does not match its checksum \(rule F4\)"):
        repack(RepackConfig(dataset=old, out=tmp_path / "new"))
