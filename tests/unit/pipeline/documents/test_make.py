"""Texts and prompt/completion records: one BOS, one EOS, and a mask exact at the seam."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pipeline.config import RecordOptions
from pipeline.documents.added_tokens import AddedTokens
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker, explain_no_targets
from pipeline.documents.masked_encoding import ChunkEncoder
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents
from shards.errors import PackError, SourceError

TEMPLATES = Path(__file__).parents[3] / "templates"
TEXTS = [
    "The capital of France is Paris.",
    "  äöü ÄÖÜ ß — “quotes” 한국어 日本語 👩\u200d👩\u200d👧 é\n\n\t x",
    "one two  three\n\n\n1000 1,234.5\r\n",
    "e\u0301 A\u030a \u212b \u0958 ﬁ",
]


def refuse(index: int, reason: str) -> None:
    """Stop at a bad record, as a build does unless it is told to skip."""
    raise SourceError(f"record {index}: {reason}")


def make(encoder: Encoder, values: list[Any], kind: str = "text", **options: Any) -> tuple[Documents, dict[str, int]]:
    batch = RecordBatch(values, np.arange(len(values)) * 2, 0, str, refuse)
    return DocumentMaker(encoder, RecordOptions(kind=kind, **options)).make(batch)


def split(documents: Documents) -> list[list[int]]:
    """Return the ids of each document."""
    ends = documents.offsets.tolist()
    return [documents.input_ids[start:stop].tolist() for start, stop in pairwise(ends)]


def masks(documents: Documents) -> list[list[int]]:
    assert documents.loss_mask is not None
    ends = documents.offsets.tolist()
    return [documents.loss_mask[start:stop].tolist() for start, stop in pairwise(ends)]


class TestText:
    """Plain text."""

    def test_each_text_ends_in_one_eos_and_everything_is_a_target(self, encoder):
        documents, drops = make(encoder, TEXTS)
        plain = [encoder.encode([text])[0].tolist() for text in TEXTS]
        assert split(documents) == [[*ids, encoder.spec.eos_id] for ids in plain]
        assert documents.loss_mask is None
        assert documents.doc_ids.tolist() == [0, 2, 4, 6]
        assert drops == {}

    def test_eos_can_be_left_out(self, encoder):
        documents, _ = make(encoder, TEXTS, add_eos=False)
        assert split(documents) == [encoder.encode([text])[0].tolist() for text in TEXTS]

    def test_a_tokenizer_that_wants_bos_gives_exactly_one(self, bos_tokenizer_dir):
        encoder = Encoder(bos_tokenizer_dir)
        documents, _ = make(encoder, ["one two", "three"])
        bos, eos = encoder.spec.bos_id, encoder.spec.eos_id
        assert split(documents) == [[bos, *encoder.encode([text])[0].tolist(), eos] for text in ("one two", "three")]

    def test_a_tokenizer_that_adds_eos_itself_gives_exactly_one(self, unigram_tokenizer_dir):
        encoder = Encoder(unigram_tokenizer_dir)
        assert encoder.spec.suffix_ids == (encoder.spec.eos_id,)
        (ids,) = split(make(encoder, ["one two"])[0])
        assert ids == [*encoder.encode(["one two"])[0].tolist(), encoder.spec.eos_id]

    def test_control_text_stays_plain_and_so_does_not_count_as_an_end(self, encoder):
        (ids,) = split(make(encoder, ["c</s>"])[0])
        assert ids.count(encoder.spec.eos_id) == 1
        assert ids[-1] == encoder.spec.eos_id

    def test_parsed_control_text_that_ends_in_eos_is_not_ended_twice(self, tokenizer_dir):
        trusting = Encoder(tokenizer_dir, parse_special=True)
        one, two = split(make(trusting, ["a b", "c</s>"], parse_special=True)[0])
        assert [ids.count(trusting.spec.eos_id) for ids in (one, two)] == [1, 1]
        assert one[-1] == two[-1] == trusting.spec.eos_id

    def test_empty_texts_are_counted_and_leave_no_document(self, encoder):
        documents, drops = make(encoder, ["", "one", "", " "])
        assert drops == {"empty": 2}
        assert documents.doc_ids.tolist() == [2, 6]
        assert len(documents.offsets) == 3

    def test_nothing_at_all_is_no_fault(self, encoder):
        documents, drops = make(encoder, ["", ""])
        assert documents.offsets.tolist() == [0]
        assert drops == {"empty": 2}

    def test_text_has_no_roles(self, encoder):
        with pytest.raises(PackError, match="--train-on assistant: plain text has no roles"):
            make(encoder, TEXTS, train_on="assistant")

    @pytest.mark.parametrize("kind", ["text", "chat", "instruction"])
    @pytest.mark.parametrize("train_on", ["", " ", "assistant,", ",tool"])
    def test_roles_without_a_name_are_refused(self, encoder, kind, train_on):
        with pytest.raises(PackError, match=f"`train_on`: '{train_on}' holds an empty name; expected roles, such as"):
            make(encoder, [], kind=kind, train_on=train_on)


def pair(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def seam(full: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Encode both as one text; targets are the tokens that reach into the completion, and the EOS."""
    encoding = full.encode(prompt + completion, add_special_tokens=False)
    mask = [int(last > len(prompt)) for _, last in encoding.offsets]
    return [*encoding.ids, full.token_to_id("</s>")], [0, *mask[1:], 1]


class TestInstruction:
    """Prompt and completion."""

    @pytest.mark.parametrize("prompt", ["The cap", "Où est ", "한국", "Q: é", "2 + 2 =\n\n"])
    @pytest.mark.parametrize("completion", ["ital of France", "\n\nParis", "é", "국어 👍"])
    def test_the_completion_is_trained_exactly(self, encoder, full, prompt, completion):
        documents, _ = make(encoder, [pair(prompt, completion)], "instruction")
        assert (split(documents)[0], masks(documents)[0]) == seam(full, prompt, completion)

    def test_a_token_across_the_seam_is_a_target(self, encoder, full):
        _, mask = seam(full, "The cap", "ital of France")
        lengths = [last - first for first, last in full.encode("The capital of France").offsets]
        across = next(i for i in range(len(lengths)) if sum(lengths[:i]) < len("The cap") < sum(lengths[: i + 1]))
        assert mask[across] == 1
        assert mask[across - 1] == 0
        documents, _ = make(encoder, [pair("The cap", "ital of France")], "instruction")
        assert masks(documents) == [mask]

    def test_training_on_all_takes_the_prompt_too(self, encoder, full):
        documents, _ = make(encoder, [pair("The cap", "ital")], "instruction", train_on="all")
        assert split(documents) == [seam(full, "The cap", "ital")[0]]
        assert documents.loss_mask is None

    def test_bos_comes_once_before_the_prompt(self, bos_tokenizer_dir):
        encoder = Encoder(bos_tokenizer_dir)
        full = Tokenizer.from_file(f"{bos_tokenizer_dir}/tokenizer.json")
        documents, _ = make(encoder, [pair("one two", " three\nfour")], "instruction")
        ids, mask = seam(full, "one two", " three\nfour")
        assert split(documents) == [[encoder.spec.bos_id, *ids]]
        assert masks(documents) == [[0, *mask]]

    def test_fields_may_have_other_names_and_stand_inside_objects(self, encoder, full):
        record = {"input": {"question": "The cap"}, "answer": "ital"}
        fields = {"prompt_field": "input.question", "completion_field": "answer"}
        documents, _ = make(encoder, [record], "instruction", **fields)
        assert (split(documents)[0], masks(documents)[0]) == seam(full, "The cap", "ital")

    @pytest.mark.parametrize("form", ["messages", "mixed"])
    def test_messages_are_rendered_and_the_answers_of_the_completion_trained(self, encoder, full, form):
        ask, reply = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
        tail = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "four"}]
        record = pair([ask, reply, ask], [reply, *tail])
        if form == "mixed":
            record = pair([ask, reply, ask], "two")
        text = "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"
            for m in [ask, reply, ask, reply, *(tail if form == "messages" else [])]
        )
        documents, _ = make(encoder, [record], "instruction")
        encoding = full.encode(text)
        second = text.rindex("two")
        wanted = [(second, second + len("two<|im_end|>"))]
        if form == "messages":
            wanted.append((text.rindex("four"), len(text) - 1))
        mask = [int(any(first < stop and last > start for start, stop in wanted)) for first, last in encoding.offsets]
        assert (split(documents)[0], masks(documents)[0]) == (encoding.ids, mask)

    def test_nothing_in_both_is_empty_and_nothing_in_the_completion_trains_the_end(self, encoder):
        documents, drops = make(encoder, [pair("", ""), pair("one", "")], "instruction")
        assert drops == {"empty": 1}
        assert masks(documents) == [[0] * (len(documents.input_ids) - 1) + [1]]

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"prompt": "a", "answer": "b"}, "no field 'completion', only 'prompt', 'answer'.*--completion-field"),
            ({"messages": []}, "no field 'prompt', only 'messages'.*Use `messages_field=.messages"),
            ({"prompt": "a", "completion": None}, "field 'completion' is null; expected text"),
            ({"prompt": 3, "completion": "b"}, "field 'prompt' is a number .3.; expected text or a list of messages"),
        ],
    )
    def test_a_missing_field_is_named(self, encoder, record, message):
        with pytest.raises(SourceError, match=f"^record 0: {message}"):
            make(encoder, [record], "instruction")

    def test_texts_have_no_roles(self, encoder):
        with pytest.raises(PackError, match="--train-on user: prompts and completions have no roles"):
            make(encoder, [pair("a", "b")], "instruction", train_on="user")


class TestChunks:
    """Borders of tokens, from ids alone where they tell it."""

    @pytest.mark.parametrize("name", ["tokenizer_dir", "bos_tokenizer_dir", "unigram_tokenizer_dir"])
    def test_borders_cut_a_text_where_the_offsets_do(self, name, request):
        self.check_borders(Encoder(request.getfixturevalue(name)))

    def test_a_tokenizer_that_marks_spaces_tells_borders_without_a_second_encoding(
        self, bos_tokenizer_dir, tmp_path, monkeypatch
    ):
        """Gemma's normalizer: spaces are replaced, and nothing stands before a text."""
        for file in Path(bos_tokenizer_dir).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        encoder = Encoder(tmp_path)
        self.check_borders(encoder)
        text = "one two, three"
        ids = encoder.encode([text])[0]
        monkeypatch.setattr(encoder, "encode_with_spans", None)
        ChunkEncoder(encoder).token_offsets(text, ids, [4], begins=True)

    def check_borders(self, encoder):
        chunks, cuts = ChunkEncoder(encoder), 0
        for text in TEXTS:
            ids, spans = encoder.encode_with_spans(text)
            for point in range(len(text) + 1):
                starts, stops, (at,) = chunks.token_offsets(text, ids, [point], begins=True)
                assert (stops > at).tolist() == (spans[:, 1] > point).tolist()
                assert (starts < at).tolist() == (spans[:, 0] < point).tolist()
                cuts += at > 0
        assert cuts > 100

    def test_a_space_that_the_tokenizer_puts_before_a_text_comes_before_the_first_chunk_only(
        self, bos_tokenizer_dir, tmp_path
    ):
        for file in Path(bos_tokenizer_dir).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        tokenizer |= {"normalizer": None, "pre_tokenizer": metaspace, "post_processor": None}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        full = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        for template, text in (
            ("instruct", "<s>[INST] one [/INST] two</s>"),
            ("no_marks", "User: one\nAssistant: two\n"),
        ):
            chosen = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
            documents, _ = make(
                Encoder(tmp_path), [{"messages": messages}], "chat", chat_template=chosen, add_eos=False
            )
            encoding = full.encode(text)
            start = text.index("two")
            assert split(documents) == [encoding.ids]
            assert masks(documents) == [[int(last > start) for _, last in encoding.offsets]]


class TestAddedTokens:
    """Control tokens are found where `tokenizers` finds them."""

    FLAGS = (
        ("<a>", ()),
        ("<ab>", ()),
        ("<a", ()),
        ("<a><b>", ("rstrip",)),
        ("[x]", ("lstrip",)),
        ("yes", ("single_word",)),
    )

    @given(
        st.lists(st.sampled_from(["<a>", "<ab>", "<a", "b>", "<b>", "[x]", "yes", "z", " ", "\n", "."]), max_size=12)
    )
    def test_the_matches_are_those_of_the_library(self, parts):
        tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokens = [AddedToken(text, normalized=False, **dict.fromkeys(flags, True)) for text, flags in self.FLAGS]
        tokenizer.add_tokens(tokens)
        ids, flags = {text: tokenizer.token_to_id(text) for text, _ in self.FLAGS}, dict(self.FLAGS)
        text = "".join(parts)
        encoding = tokenizer.encode(text)
        theirs = [(*span, id) for id, span in zip(encoding.ids, encoding.offsets, strict=True) if id]
        assert [tuple(control) for control in AddedTokens(ids, flags).find(text)] == theirs

    def test_no_added_tokens_match_nothing(self):
        assert AddedTokens({}).find("text") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RecordOptions(kind="text"), "--text-field"),
        (RecordOptions(kind="instruction", completion_field="answer"), "'answer'"),
        (RecordOptions(kind="chat"), "No message has the role assistant"),
        (RecordOptions(kind="chat", train_on="model"), "--train-on model"),
    ],
)
def test_the_likely_cause_of_missing_targets_is_named(options, words):
    assert words in explain_no_targets(options)
