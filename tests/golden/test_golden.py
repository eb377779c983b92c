"""The format stays readable, an older one is refused by name, and the same corpus still gives the same rows."""

import hashlib
import json
import runpy
from pathlib import Path

import pyarrow as pa
import pytest

from shards import Dataset, FormatError, verify
from shards.versions.version_1 import Version1

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
    with pytest.raises(FormatError, match=r"version 1, this version reads 'shardpack' version 2 .*Build it again"):
        Dataset(HERE / "v1")
    (problem,) = verify(HERE / "v1").problems
    assert problem.rule == "F1"
    assert "Build it again" in problem.message


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


def test_version_1_is_read_as_rows_of_version_2():
    old = Version1(HERE / "v1")
    rows = [
        (window, {name: batch.row(name, local).tolist() for name in batch.lists})
        for window, _, batch in old.batches()
        for local in range(batch.num_rows)
    ]
    new = Dataset(HERE / "v2")
    assert len(rows) == len(new) == 8
    for number, (window, columns) in enumerate(rows):
        expected = new[number]
        assert window == new.shard_of(number)[0]["window"]
        assert columns == {name: expected[name].tolist() for name in columns}
    assert sum(sum(columns["start_targets"]) for _, columns in rows) > 0, "the golden corpus has a cut document"
    assert old.targets_lost == 0
    assert {**old.plan, "recipe": 2} == {**new.plan, "recipe": 2} | {"sources": old.plan["sources"]}
