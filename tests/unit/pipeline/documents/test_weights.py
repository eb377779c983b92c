"""How much each message and token weighs."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.documents.messages import chat_conversation
from pipeline.documents.weights import message_weights, with_record_weights
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents
from shards.errors import PackError, SourceError

ASK, REPLY = {"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}
TALK = [ASK, REPLY, ASK, REPLY]


def weights(record: dict[str, Any], **options: Any) -> list[float]:
    chosen = RecordOptions(kind="chat", **options)
    return message_weights(with_record_weights(chat_conversation(record, chosen), record, chosen), chosen)


def refuse(index: int, reason: str) -> None:
    raise SourceError(reason)


def make(encoder: Encoder, records: list[Any], **options: Any) -> Documents:
    maker = DocumentMaker(encoder, RecordOptions(**{"kind": "chat", **options}))
    return maker.make(RecordBatch(records, np.arange(len(records)), 0, str, refuse))[0]


class TestMessages:
    """Weights by role, message and record."""

    def test_roles_have_weights(self):
        assert weights({"messages": TALK}, train_on="assistant:1,user:0.25") == [0.25, 1, 0.25, 1]
        assert weights({"messages": TALK}, train_on="user : 2") == [2, 0, 2, 0]

    def test_a_message_has_its_own_weight_on_demand(self):
        talk = [ASK, REPLY | {"weight": 0.5}, ASK, REPLY | {"weight": None}]
        assert weights({"messages": talk}, message_weights=True) == [0, 0.5, 0, 1]

    def test_a_weight_counts_for_all_that_is_trained_of_a_record(self):
        assert weights({"messages": TALK, "quality": 0.5}, weights_field="quality") == [0, 0.5, 0, 0.5]
        assert weights({"messages": TALK}, weights_field="quality") == [0, 1, 0, 1]

    def test_a_list_of_weights_has_one_for_each_message(self):
        record = {"messages": TALK, "w": [0, 2, 1, 0.5], "system": "Be brief."}
        assert weights(record, weights_field="w") == [0, 0, 2, 0, 0.5]

    def test_weights_of_role_message_and_record_are_multiplied(self):
        record = {"messages": [ASK, REPLY | {"weight": 0.5}], "w": 4}
        assert weights(record, weights_field="w", message_weights=True, train_on="assistant:3") == [0, 6]

    def test_flags_still_decide_what_is_trained(self):
        talk = [ASK | {"train": True, "weight": 0.5}, REPLY | {"loss": False, "weight": 3}]
        assert weights({"messages": talk}, message_weights=True) == [0.5, 0]


class TestBadWeights:
    """What is refused, and by which name."""

    @pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 2.0**-15, 65_505, "1", True, [], ["1"], [-1]])
    def test_a_weight_that_cannot_be_stored_is_refused(self, value):
        with pytest.raises(
            SourceError, match=r"message 1: weight(, token 0)? is .*; expected 0, or a number from 2\^-14"
        ):
            weights({"messages": [ASK, REPLY | {"weight": value}]}, message_weights=True)

    @pytest.mark.parametrize("value", [-1, float("nan"), "high"])
    def test_so_is_that_of_a_record(self, value):
        with pytest.raises(SourceError, match=f"field 'w' is {re.escape(repr(value))}; expected 0, or"):
            weights({"messages": TALK, "w": value}, weights_field="w")

    def test_more_weights_than_messages_are_refused(self):
        with pytest.raises(SourceError, match="field 'w' has 3 weights for 4 messages"):
            weights({"messages": TALK, "w": [0, 1, 0]}, weights_field="w")

    def test_a_weight_on_a_role_that_is_not_trained_is_refused(self):
        with pytest.raises(SourceError, match=r"message 0 has weight 0.5, .* 'user' is not trained.*--train-on"):
            weights({"messages": [ASK | {"weight": 0.5}, REPLY]}, message_weights=True)

    def test_a_product_that_cannot_be_stored_is_refused(self):
        record = {"messages": [ASK, REPLY | {"weight": 2.0**-10}], "w": 2.0**-10}
        with pytest.raises(SourceError, match="the product of the weights of message 1 is"):
            weights(record, weights_field="w", message_weights=True)

    def test_other_weights_than_0_and_1_name_the_option(self):
        with pytest.raises(SourceError, match=r"message 1: weight is 0.5; expected 0 or 1.*--message-weights"):
            weights({"messages": [ASK, REPLY | {"weight": 0.5}]})

    @pytest.mark.parametrize("train_on", ["assistant:high", "assistant:-1", "user:", "assistant:1e-9"])
    def test_a_role_without_a_right_weight_is_refused(self, encoder, train_on):
        with pytest.raises(PackError, match=r"`train_on`: .* has no weight; expected 0, or a number"):
            DocumentMaker(encoder, RecordOptions(kind="chat", train_on=train_on))

    @pytest.mark.parametrize("kind", ["text", "tokens"])
    def test_what_has_no_messages_has_no_weights_of_them(self, kind):
        with pytest.raises(PackError, match=r"no messages\. Use `weights_field`"):
            RecordOptions(kind=kind, message_weights=True)


class TestTokens:
    """Weights on tokens."""

    def expected(self, full: Tokenizer, wanted: dict[str, float]) -> list[float]:
        """Weigh the tokens of the rendered talk that touch each of these texts, found one after another."""
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
        encoding, position = full.encode(text), 0
        found = [0.0] * len(encoding.ids)
        for piece, weight in wanted:
            start = text.index(piece, position)
            position = start + len(piece)
            for place, (first, last) in enumerate(encoding.offsets):
                if first < position and last > start:
                    found[place] = weight
        return found

    def test_each_token_of_an_answer_has_the_weight_of_its_message(self, encoder, tokenizer_dir):
        full = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
        talk = [ASK, REPLY | {"weight": 0.5}, ASK, REPLY]
        documents = make(encoder, [{"messages": talk}], message_weights=True, train_on="assistant:1,user:2")
        wanted = [("one two<|im_end|>", 2), ("three four<|im_end|>", 0.5), ("one two<|im_end|>", 2)]
        assert documents.loss_weights.tolist() == self.expected(full, [*wanted, ("three four<|im_end|>", 1)])
        assert documents.loss_weights.dtype == np.float16
        assert documents.loss_mask.tolist() == [int(weight > 0) for weight in documents.loss_weights]

    def test_a_weight_holds_in_every_document_of_an_unrolled_conversation(self, encoder):
        talk = [ASK, REPLY | {"weight": 0.5}, ASK, REPLY | {"weight": 2}]
        documents = make(encoder, [{"messages": talk}], message_weights=True, unroll="always")
        parts = [documents.loss_weights[start:stop] for start, stop in pairwise(documents.offsets)]
        assert [set(part[part > 0].tolist()) for part in parts] == [{0.5}, {2.0}]

    def test_a_prompt_and_its_completion_have_the_weight_of_their_record(self, encoder):
        records = [{"prompt": "one", "completion": " two", "w": weight} for weight in (0.5, 0, 1)]
        documents = make(encoder, records, kind="instruction", weights_field="w")
        parts = [documents.loss_weights[start:stop].tolist() for start, stop in pairwise(documents.offsets)]
        plain = make(encoder, records[:1], kind="instruction").loss_mask.tolist()
        assert parts == [[weight * one for one in plain] for weight in (0.5, 0, 1)]

    def test_weights_that_are_all_0_leave_no_target(self, encoder):
        documents = make(encoder, [{"messages": TALK, "w": 0}], weights_field="w")
        assert not documents.loss_mask.any()

    def test_without_these_options_there_are_no_weights(self, encoder):
        assert make(encoder, [{"messages": TALK}]).loss_weights is None
