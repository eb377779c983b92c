"""What `pack build` says: bad records, options, outputs, and one line where it cannot go on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, RecordOptions, build
from pipeline.cli import main
from shards import Dataset, PackError, verify


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def corpus(number: int, seed: int = 0) -> list[str]:
    """Texts of 1 to about 60 words."""
    return [f"{k}: " + " ".join(["some", f"words{seed}"] * (k * 7 % 31)) for k in range(number)]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.arrow"))}


def config(path: Path, tokenizer: str, out: Path, **options) -> BuildConfig:
    return BuildConfig(sources=(str(path),), out=str(out), tokenizer=tokenizer, **({"seq_len": 128} | options))


def test_parts_of_a_build_are_refused_before_anything_is_written_where_they_cannot_work(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(10))
    flags = ["build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out")]
    assert "expected i::n" in run(*flags, "--windows", "3").stderr
    assert "expected i::n" in run(*flags, "--windows", "3::3").stderr
    for part in (["--windows", "0::2"], ["--finalize"]):
        assert "would remove what other parts wrote" in run(*flags, "--overwrite", *part).stderr
    assert not (tmp_path / "out").exists()
    build(config(path, tokenizer_dir, tmp_path / "out"))
    other = run(*flags, "--window-bytes", "1KB", "--windows", "0::2")
    assert "another build: seq_len 128 there, 64 here. Choose another --out, remove what is there" in other.stderr


def test_fields_of_two_kinds_of_records_are_named(tmp_path, tokenizer_dir):
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out")]
    result = run("build", "c.jsonl", *flags, "--text-field", "a", "--messages-field", "b")
    assert "messages_field and text_field belong to records of different kinds" in result.stderr


def test_text_that_looks_like_a_control_token_stays_text(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["say </s> or <|im_start|>system now"])
    build(config(path, tokenizer_dir, tmp_path / "plain"))
    build(config(path, tokenizer_dir, tmp_path / "parsed", records=RecordOptions(parse_special=True)))
    plain, parsed = (Dataset(tmp_path / name)[0]["input_ids"].tolist() for name in ("plain", "parsed"))
    assert [token for token in plain[:-1] if token < 5] == []
    assert [token for token in parsed[:-1] if token < 5] == [1, 3]


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


BAD_LINES = {
    "missing field": (b'{"txt": "x"}\n', "text"),
    "wrong type": (b'{"text": 7}\n', "text"),
    "null": (b'{"text": null}\n', "text"),
    "line cut in half": (b'{"text": "abc\n', "line 2"),
    "invalid UTF-8": (b'{"text": "\xff"}\n', "UTF-8"),
    "lone surrogate": (b'{"text": "\\ud800"}\n', "surrogate"),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_record_is_one_line_and_leaves_no_dataset(tmp_path, tokenizer_dir, fault):
    line, word = BAD_LINES[fault]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'{"text": "good"}\n')
    arguments = ("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out"))
    result = run(*arguments)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("compiling")]
    assert [line[:7] for line in lines] == ["Error: "]
    assert "c.jsonl" in result.stderr
    assert word.lower() in result.stderr.lower()
    assert run("verify", str(tmp_path / "out")).exit_code == 1
    skipped = run(*arguments, "--resume", "--on-error", "skip", "--max-rejected", "0.5")
    assert skipped.exit_code == 0, skipped.output
    manifest = Dataset(tmp_path / "out").manifest
    assert manifest["totals"]["documents"] == {
        "read": 3, "packed": 2, "split": 0, "truncated": 0, "dropped": {"rejected": 1}
    }  # fmt: skip
    rejected = [json.loads(entry) for entry in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == 1
    assert "c.jsonl" in rejected[0]["where"]
    assert verify(tmp_path / "out").ok


def test_numbers_and_nouns_agree_and_commands_can_be_pasted(tmp_path, tokenizer_dir):
    path, out = write_jsonl(tmp_path / "c.jsonl", ["x y z"]), str(tmp_path / "my data")
    built = run("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", out, "--workers", "1")
    assert f"{out}: 1 document, " in built.stdout
    assert " in 1 pack of 64" in built.stdout
    assert f"pack inspect '{out}'" in built.stdout
    assert "1 shard, 1 pack, " in run("verify", out).stdout
    write_jsonl(path, [""])
    with pytest.raises(PackError, match=r"no document to pack \(1 record read: empty 1\)"):
        build(config(path, tokenizer_dir, tmp_path / "none"))


def test_a_tilde_behind_an_equals_sign_is_the_home_directory(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    done = run("build", "web=~/c.jsonl", "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out=~/out", "--workers=1")
    assert done.exit_code == 0, done.output
    assert verify(tmp_path / "out").ok


def test_too_many_bad_records_stop_the_build(tmp_path, tokenizer_dir):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 3 + b"{}\n")
    with pytest.raises(PackError, match=r"1 bad of 4 records, more than `max_rejected` 0\.01"):
        build(config(path, tokenizer_dir, tmp_path / "out", on_error="skip"))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty file"), (b"\n\n", "no document"), (b'{"text": ""}\n', "no document")]
)
def test_a_corpus_without_documents_is_an_error(tmp_path, tokenizer_dir, content, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    result = run("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_corpus_of_documents_that_are_all_too_long_says_what_to_do(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["a long text of many words"] * 3)
    with pytest.raises(PackError, match=r"no document to pack \(3 records read: overlong 3\).* Raise `seq_len`, or"):
        build(config(path, tokenizer_dir, tmp_path / "out", seq_len=4, records=RecordOptions(overlong="drop")))


def test_an_unknown_tokenizer_or_source_is_one_line(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    for source, tokenizer in ((path, tmp_path / "no"), (tmp_path / "no.jsonl", tokenizer_dir)):
        result = run(
            "build", str(source), "--tokenizer", str(tokenizer), "--seq-len", "9", "--out", str(tmp_path / "o")
        )
        assert result.exit_code == 1
        assert "no" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "chat"}, "the tokenizer has no chat template; expected one for conversations"),
        ({"kind": "chat", "train_on": "completion"}, "--train-on completion: a conversation has no completion"),
        ({"kind": "text", "train_on": "assistant"}, "--train-on assistant: plain text has no roles"),
    ],
)
def test_options_that_fit_no_record_are_refused_before_anything_is_written(
    tmp_path, bos_tokenizer_dir, options, message
):
    (tmp_path / "c.jsonl").write_text("\n")
    wanted = config(tmp_path / "c.jsonl", bos_tokenizer_dir, tmp_path / "out", records=RecordOptions(**options))
    with pytest.raises(PackError, match=message):
        build(wanted)
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be_made_is_one_line(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    (tmp_path / "file").write_text("in the way")
    result = run(
        "build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "file" / "o")
    )
    assert result.exit_code == 1
    assert "is a file, or lies in one; expected a directory. Choose another --out." in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_flags_are_usage_errors(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    common = ("build", str(path), "--tokenizer", tokenizer_dir, "--out", str(tmp_path / "o"))
    assert run(*common).exit_code == 2
    assert run(*common, "--seq-len", "many").exit_code == 2
    assert run(*common, "--seq-len", "9", "--window-bytes", "lots").exit_code == 2
    assert run(*common, "--seq-len", "1").exit_code == 1


def test_verify_against_the_sources_finds_every_document_or_names_the_first_that_is_not(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(100))
    build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096))
    found = run("verify", str(tmp_path / "out"), "--against", str(path))
    assert found.exit_code == 0, found.output
    assert "100 documents" in found.output
    other = write_jsonl(tmp_path / "other.jsonl", corpus(100, seed=1))
    wrong = run("verify", str(tmp_path / "out"), "--against", str(other))
    assert wrong.exit_code == 1
    assert "F2" in wrong.stderr


def test_a_build_that_failed_before_it_wrote_anything_leaves_room_for_the_fixed_command(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"] * 9)
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), "--workers", "1"]
    assert run("build", str(path), *flags, "--text-field", "body").exit_code == 1
    with path.open("a") as file:
        file.write("{}\n")
    assert "line 10" in run("build", str(path), *flags).stderr
    assert run("build", str(path), *flags, "--on-error", "skip", "--max-rejected", "0.2").exit_code == 0
    other = run("build", str(path), *flags, "--seed", "1")
    assert other.exit_code == 1
    assert "another build: seed 0 there, 1 here" in other.stderr


def test_the_speed_after_a_resumed_build_counts_what_that_run_read(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", [f"{number} x y z" for number in range(400)])
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "o"), "--workers", "1"]
    flags += ["--window-bytes", "2KB"]
    whole = json.loads(run("build", str(path), *flags, "--json").stdout)
    tokens = whole["totals"]["tokens"]["read"]
    assert whole["facts"]["tokens_read"] == tokens
    next((tmp_path / "o" / "shards").glob("00000001-*.arrow")).unlink()
    rest = json.loads(run("build", str(path), *flags, "--json", "--resume").stdout)
    assert 0 < rest["facts"]["tokens_read"] < tokens / 2
    assert f"for the last {rest['facts']['tokens_read']:,} tokens" in run("inspect", str(tmp_path / "o")).stdout


def test_files_of_a_directory_that_are_left_out_are_named(tmp_path, tokenizer_dir):
    write_jsonl(tmp_path / "a.jsonl", ["x y z"])
    (tmp_path / "b.png").write_bytes(b"x")
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), "--workers", "1"]
    assert "source 'corpus': files left out: 1 .png" in run("build", str(tmp_path), *flags).stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-len", "3000000000"], "--seq-len: 3,000,000,000; expected 2 to 16,777,216 tokens."),
        (["--workers", "0"], "--workers: 0; expected at least 1."),
        (["--max-rejected", "2"], "--max-rejected: 2; expected a share from 0 to 1, such as 0.01."),
    ],
)
def test_a_flag_out_of_range_is_one_line(tmp_path, tokenizer_dir, flags, message):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    result = run(
        "build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), *flags
    )
    assert result.stderr == f"Error: {message}\n"


@pytest.mark.parametrize("policy", ["truncate", "truncate-turns", "drop", "error"])
def test_wrapped_refuses_a_policy_for_long_documents_that_it_would_not_heed(tmp_path, tokenizer_dir, policy):
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "assistant", "content": "one two"}]}\n' * 9)
    chat = RecordOptions(kind="chat", overlong=policy)
    for options in ({"records": chat}, {"source_records": {"corpus": chat}}):
        with pytest.raises(
            PackError, match=rf'`overlong="{policy}"`: `packer="wrapped"` cuts every document where a row'
        ):
            build(config(tmp_path / "c.jsonl", tokenizer_dir, tmp_path / "out", packer="wrapped", **options))
    assert not (tmp_path / "out").exists()
    for allowed in ("auto", "split"):
        options = {"records": RecordOptions(kind="chat", overlong=allowed), "seq_len": 8}
        built = build(
            config(tmp_path / "c.jsonl", tokenizer_dir, tmp_path / allowed, packer="wrapped", **options)
        ).manifest
        assert built["totals"]["documents"]["packed"] == 9


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["build", "inspect", "inspect --json", "show", "verify", "--help"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, tokenizer_dir, command):
    path, out = write_jsonl(tmp_path / "c.jsonl", corpus(60)), tmp_path / "out"
    name, *flags = command.split()
    flags.append(str(path if name == "build" else out))
    if name == "build":
        flags += ["--tokenizer", tokenizer_dir, "--seq-len", "128", "--out", str(out), "--workers", "1"]
    else:
        build(config(path, tokenizer_dir, out))
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "pipeline", name, *flags], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.returncode == 1
    lines = [line for line in process.stderr.splitlines() if not line.startswith("compiling")]
    assert lines == [
        "Error: stdout: cannot be written (No space left on device); what the command made is kept. "
        "Send the output elsewhere."
    ]
    assert verify(out).ok


def test_an_empty_out_or_source_is_named(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--workers", "1"]
    no_out = run("build", "c.jsonl", *flags, "--out", "")
    assert no_out.stderr == (
        "Error: --out: is an empty string; expected a directory or an fsspec URL. Is a shell variable unset?\n"
    )
    no_source = run("build", "c.jsonl", "", *flags, "--out", "o")
    assert no_source.stderr == (
        "Error: SOURCE is an empty string; expected a file, directory, dataset or URL. Is a shell variable unset?\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_build_says_once_what_is_spelled_like_control_text_and_that_dropout_is_off(tmp_path, tokenizer_dir):
    noisy = Path(shutil.copytree(tokenizer_dir, tmp_path / "noisy"))
    parsed = json.loads((noisy / "tokenizer.json").read_text("utf-8"))
    parsed["model"]["dropout"] = 0.25
    (noisy / "tokenizer.json").write_text(json.dumps(parsed), "utf-8")
    texts = ["plain text", "how a turn ends: <|im_end|>", "see </s>", "nothing here"] * 3
    path = write_jsonl(tmp_path / "c.jsonl", texts)
    arguments = ("build", str(path), "--tokenizer", str(noisy), "--seq-len", "64", "--window-bytes", "100")
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    said = [line for line in result.stdout.splitlines() if line.startswith("control text: ")]
    assert said == [
        "control text: 6 texts spell control tokens, such as '<|im_end|>'; it was kept as text "
        "(--parse-special reads it as control tokens)"
    ]
    assert result.stderr.count("BPE dropout of 0.25 is switched off") == 1
    facts = Dataset(tmp_path / "out").manifest["facts"]
    assert facts["spelled_controls"] == {"texts": 6, "example": "<|im_end|>"}
    assert len(Dataset(tmp_path / "out").manifest["shards"]) > 1
    again = run(*arguments, "--out", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")
    special = run(*arguments, "--parse-special", "--out", str(tmp_path / "special"))
    assert "control text" not in special.stdout
