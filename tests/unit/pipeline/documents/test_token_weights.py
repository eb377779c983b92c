"""A weight for each token: of a message, a prompt with its completion, a text, or of ids that come with the corpus."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from chats import ASK, ASK_TEXT, CALL, REPLY, TALK, TALK_TEXT, TEMPLATES

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents
from shards.errors import SourceError

LONG = {"role": "assistant", "content": "Paris, the capital of France"}


def make(encoder: Encoder, records: list[Any], **options: Any) -> Documents:
    chosen = RecordOptions(**{"kind": "chat", "weights_field": "w", **options})
    texts = [record["text"] for record in records] if chosen.kind == "text" else records

    def refuse(index: int, reason: str) -> None:
        raise SourceError(reason)

    batch = RecordBatch(texts, np.arange(len(records)), 0, str, refuse, records if chosen.kind == "text" else None)
    return DocumentMaker(encoder, chosen).make(batch)[0]


def parts(documents: Documents) -> list[list[float]]:
    return [documents.loss_weights[start:stop].tolist() for start, stop in pairwise(documents.offsets)]


def places(full, text: str, piece: str) -> list[int]:
    """Return which tokens of a text touch the last place where a piece of it stands."""
    start = text.rindex(piece)
    offsets = full.encode(text, add_special_tokens=False).offsets
    return [place for place, (a, b) in enumerate(offsets) if a < start + len(piece) and b > start]


def rising(number: int) -> list[float]:
    return [0.5 + place for place in range(number)]


class TestMessages:
    """A list as the weight of one message."""

    TEXT = ASK_TEXT + LONG["content"] + "<|im_end|>\n"

    def expected(self, full, factor: float = 1) -> tuple[list[float], list[float]]:
        """Return the weights to give, one for each token of the content, and those of the document's tokens."""
        own = places(full, self.TEXT, LONG["content"])
        given, wanted = rising(len(own)), [0.0] * len(full.encode(self.TEXT).ids)
        for place, weight in zip(own, given, strict=True):
            wanted[place] = weight * factor
        wanted[own[-1] + 1] = given[-1] * factor  # the end mark
        return given, wanted

    def test_each_token_of_the_content_has_its_own_and_the_end_mark_that_of_the_last(self, encoder, full):
        given, wanted = self.expected(full)
        assert len(given) > 3
        record = {"messages": [ASK, LONG | {"weight": given}]}
        assert parts(make(encoder, [record], message_weights=True)) == [wanted]

    def test_a_list_of_the_record_may_hold_such_lists(self, encoder, full):
        given, wanted = self.expected(full, factor=2)
        record = {"messages": [ASK, LONG], "w": [0, given]}
        assert parts(make(encoder, [record], train_on="assistant:2")) == [wanted]

    def test_a_weight_of_0_takes_the_token_alone_out(self, encoder, full):
        given, wanted = self.expected(full)
        given[1] = 0
        documents = make(encoder, [{"messages": [ASK, LONG | {"weight": given}]}], message_weights=True)
        hole = wanted.index(1.5)
        assert np.flatnonzero(documents.loss_mask).tolist() == [
            place for place, weight in enumerate(wanted) if weight and place != hole
        ]

    def test_every_document_of_an_unrolled_conversation_has_those_of_its_answer(self, encoder, full):
        given, _ = self.expected(full)
        record = {"messages": [ASK, LONG | {"weight": given}, ASK, REPLY]}
        first, second = parts(make(encoder, [record], message_weights=True, unroll="always"))
        assert [weight for weight in first if weight] == [*given, given[-1]]
        assert {weight for weight in second if weight} == {1.0}

    def test_another_number_of_weights_than_tokens_is_refused(self, encoder, full):
        given, _ = self.expected(full)
        record = {"messages": [ASK, LONG | {"weight": [*given, 1]}]}
        what = f"message 1 has {len(given) + 1} weights for {len(given)} tokens; expected one for each"
        with pytest.raises(SourceError, match=what):
            make(encoder, [record], message_weights=True)

    def test_a_bad_record_takes_no_other_with_it(self, encoder, full):
        given, wanted = self.expected(full)
        records = [{"messages": [ASK, LONG | {"weight": weights}]} for weights in (given, given[1:], given)]
        rejected: dict[int, str] = {}
        batch = RecordBatch(records, np.arange(3), 0, str, rejected.__setitem__)
        documents, _ = DocumentMaker(encoder, RecordOptions(kind="chat", message_weights=True)).make(batch)
        assert list(rejected) == [1]
        assert documents.doc_ids.tolist() == [0, 2]
        assert parts(documents) == [wanted, wanted]

    @pytest.mark.parametrize(
        ("answer", "options"),
        [
            ({"tool_calls": [CALL]}, {"chat_template": (TEMPLATES / "chatml.jinja").read_text()}),
            ({}, {"train_on": "all"}),
            ({"reasoning_content": "Hm."}, {"chat_template": (TEMPLATES / "thinking.jinja").read_text()}),
        ],
    )
    def test_where_tokens_of_the_content_are_not_all_it_is_one_number(self, encoder, answer, options):
        record = {"messages": [ASK, REPLY | {"weight": [1, 2]} | answer]}
        with pytest.raises(SourceError, match="message 1 has a weight for each token; expected an answer of content"):
            make(encoder, [record], message_weights=True, **options)

    def test_tokens_of_one_piece_of_text_are_told_apart(self, encoder, full):
        """In a template without control tokens a whole conversation is one piece."""
        text = "User: Hi\nAssistant: a long answer\n"
        own = places(full, text, "a long answer")
        record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a long answer"}]}
        record["messages"][1]["weight"] = given = rising(len(own))
        template = (TEMPLATES / "no_marks.jinja").read_text()
        (found,) = parts(make(encoder, [record], message_weights=True, chat_template=template))
        assert [found[place] for place in own] == given
        assert set(found[: own[0]]) == {0}
        assert set(found[own[-1] + 1 :]) == {given[-1]}  # the end of the line, and EOS


class TestTexts:
    """A field beside a text, or beside a prompt and its completion."""

    @pytest.mark.parametrize("name", ["tokenizer_dir", "bos_tokenizer_dir"])
    def test_a_text_has_one_weight_or_one_for_each_token(self, name, request):
        encoder = Encoder(request.getfixturevalue(name))
        before = len(encoder.spec.prefix_ids)
        tokens = len(encoder.encode(["one two three"])[0])
        given = rising(tokens)
        records = [{"text": "one two three", **more} for more in ({"w": 0.25}, {"w": given}, {})]
        documents = make(encoder, records, kind="text")
        plain = make(encoder, records, kind="text", weights_field=None)
        assert documents.input_ids.tolist() == plain.input_ids.tolist()
        assert parts(documents) == [
            [0.25] * (before + tokens + 1), [0.5] * before + [*given, given[-1]], [1] * (before + tokens + 1),
        ]  # fmt: skip
        assert documents.loss_mask.all()

    def test_a_text_of_weight_0_has_no_target(self, encoder):
        assert not make(encoder, [{"text": "one", "w": 0}], kind="text").loss_mask.any()

    def test_text_with_a_wrong_list_is_refused_and_the_others_stay(self, encoder):
        rejected: dict[int, str] = {}
        records = [{"text": "one two", "w": weights} for weights in (1, [1], "x", 2)]
        texts = [record["text"] for record in records]
        batch = RecordBatch(texts, np.arange(10, 14), 0, str, rejected.__setitem__, records)
        documents, empty = DocumentMaker(encoder, RecordOptions(weights_field="w")).make(batch)
        assert documents.doc_ids.tolist() == [10, 13]
        assert [set(part) for part in parts(documents)] == [{1}, {2}]
        assert not empty
        assert "field 'w' has 1 weights for" in rejected[11]
        assert "field 'w' is 'x'; expected 0, or a number" in rejected[12]

    @pytest.mark.parametrize("train_on", ["auto", "all"])
    def test_a_completion_has_one_weight_for_each_token_that_is_trained(self, encoder, full, train_on):
        text, completion = "What is it? Paris, in France", " Paris, in France"
        own = places(full, text, text if train_on == "all" else completion)
        given = rising(len(own))
        record = {"prompt": text.removesuffix(completion), "completion": completion, "w": given}
        (found,) = parts(make(encoder, [record], kind="instruction", train_on=train_on))
        assert [found[place] for place in own] == given
        assert set(found[: own[0]]) <= {0}
        assert found[-1] == given[-1], "EOS"
        with pytest.raises(SourceError, match="field 'w' has 1 weights for"):
            make(encoder, [record | {"w": [1]}], kind="instruction", train_on=train_on)


class TestIds:
    """A column of weights beside token ids."""

    def test_rows_have_one_weight_or_one_for_each_id(self, encoder):
        records = [{"input_ids": [5, 6, 7], **more} for more in ({"w": 0.5}, {"w": [0, 1, 2]}, {}, {"w": None})]
        assert parts(make(encoder, records, kind="tokens")) == [[0.5] * 3, [0, 1, 2], [1] * 3, [1] * 3]

    def test_labels_and_weights_hold_together(self, encoder):
        records = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "w": [4, 2, 0]}]
        documents = make(encoder, records, kind="tokens", labels_field="labels")
        assert parts(documents) == [[0, 2, 0]]
        assert documents.loss_mask.tolist() == [0, 1, 0]

    def test_rows_that_were_packed_take_their_weights_apart(self, encoder):
        records = [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1], "w": [1, 2, 3]}]
        assert parts(make(encoder, records, kind="tokens")) == [[1, 2], [3]]

    def test_an_added_eos_weighs_like_the_token_before_it(self, encoder):
        records = [{"input_ids": [5, 6], "w": weights} for weights in ([1, 2], [1, 0])]
        assert parts(make(encoder, records, kind="tokens", append_eos=True, eos_id=9)) == [[1, 2, 2], [1, 0, 0]]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1, 2], "field 'w' holds 2 values, 'input_ids' 3; expected as many"),
            ([1, -1, 1], "field 'w', weight 1, is -1.0; expected 0, or a number from"),
            ([1, 1e9, 1], "field 'w', weight 1, is 1000000000.0; expected 0"),
            ("high", "field 'w' is text .'high'.; expected a number, or a list of one for each id"),
            ([1, "2", 1], "field 'w' is a list; expected a number, or a list of one for each id"),
        ],
    )
    def test_weights_of_another_form_are_refused(self, encoder, weights, message):
        with pytest.raises(SourceError, match=message):
            make(encoder, [{"input_ids": [5, 6, 7], "w": weights}], kind="tokens")


def test_a_talk_of_several_turns_keeps_weights_of_messages_and_tokens(encoder, full):
    own = places(full, TALK_TEXT, "Sleep for a while")
    given = rising(len(own))
    (found,) = parts(make(encoder, [{"messages": TALK, "w": [0, 0, 3, 0, given]}]))
    wanted = dict(zip(own, given, strict=True)) | {own[-1] + 1: given[-1]}
    wanted |= dict.fromkeys(places(full, TALK_TEXT[: TALK_TEXT.index("And then")], "Paris.<|im_end|>"), 3)
    assert found == [wanted.get(place, 0) for place in range(len(found))]
