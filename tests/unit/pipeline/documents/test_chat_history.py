"""Conversations of several turns: templates that rewrite earlier ones, and where turns end."""

from itertools import pairwise

import numpy as np
import pytest
from chats import AGAIN, ANSWER, ANSWERS, ASK, ASK_TEXT, LAST, REPLY, TALK, TALK_TEXT, USER, batch, expected, make, one

from pipeline.config import RecordOptions
from pipeline.documents.make import DocumentMaker
from shards.errors import SourceError


class TestHistory:
    """A template that shows reasoning in the last answer only."""

    def test_rewritten_turns_are_refused_with_the_ways_out(self, encoder):
        with pytest.raises(SourceError) as caught:
            one(encoder, TALK, "thinking", unroll="never")
        message = str(caught.value)
        assert message.startswith("record 0: the chat template rewrites earlier turns: ")
        ways = ("--unroll auto", "generation %}", "--train-on last-assistant", "--train-on all")
        assert all(way in message for way in ways)
        assert "\n" not in message

    def test_each_answer_gets_the_text_that_the_template_shows_at_its_time(self, encoder, full):
        documents = make(encoder, [{"messages": TALK}, {"messages": [ASK, REPLY]}], "thinking")
        head, middle, end = TALK_TEXT.partition("Paris.<|im_end|>\n")
        block = "<think>\n\n</think>\n\n"
        texts = [
            head + block + middle,
            head + middle + end.replace("Sleep", block + "Sleep"),
            ASK_TEXT + block + middle,
        ]
        wanted = [expected(full, *pair) for pair in zip(texts, (*ANSWERS, ANSWERS[0]), strict=True)]
        found = [documents.input_ids[start:stop].tolist() for start, stop in pairwise(documents.offsets)]
        masks = [[0, *documents.mask_of(start + 1, stop).tolist()] for start, stop in pairwise(documents.offsets)]
        assert list(zip(found, masks, strict=True)) == wanted
        assert documents.doc_ids.tolist() == [0, 0, 1]
        assert documents.doc_parts.tolist() == [2, 4, 0]  # the places of their last messages; 0 for the only one

    @pytest.mark.parametrize("train_on", ["last-assistant", "all"])
    def test_the_ways_out_work(self, encoder, full, train_on):
        head, end = TALK_TEXT.rsplit("Sleep", 1)
        text = head + "<think>\n\n</think>\n\nSleep" + end
        answers = [text] if train_on == "all" else ANSWERS[1:]
        assert one(encoder, TALK, "thinking", train_on=train_on) == expected(full, text, *answers)

    def test_a_single_answer_is_trained_without_the_empty_block_of_the_template(self, encoder, full):
        text = ASK_TEXT + "<think>\n\n</think>\n\nParis.<|im_end|>\n"
        assert one(encoder, [ASK, REPLY], "thinking") == expected(full, text, ANSWERS[0])
        whole = "<think>\n\n</think>\n\nParis.<|im_end|>"
        assert one(encoder, [ASK, REPLY], "thinking", train_template_tokens=True) == expected(full, text, whole)

    @pytest.mark.parametrize(
        "reply",
        [
            {"content": ANSWER, "reasoning_content": "A city."},
            {"content": ANSWER, "thinking": "A city."},
            {"content": "<think>\nA city.\n</think>\n\nParis."},
        ],
    )
    def test_reasoning_is_a_target_with_its_tags(self, encoder, full, reply):
        answer = "<think>\nA city.\n</think>\n\nParis.<|im_end|>"
        assert one(encoder, [ASK, {"role": "assistant", **reply}], "thinking") == expected(
            full, ASK_TEXT + answer + "\n", answer
        )

    def test_reasoning_that_the_template_leaves_out_is_not_lost_without_a_word(self, encoder):
        with pytest.raises(SourceError, match="leaves out reasoning_content of message 1"):
            one(encoder, [ASK, REPLY | {"reasoning": "A city."}], "chatml")

    def test_what_the_prompt_of_a_generation_opens_and_an_answer_closes_is_no_target(self, encoder, full):
        text = ASK_TEXT + "<think></think>Paris.<|im_end|>\n"
        assert one(encoder, [ASK, REPLY], "open_think") == expected(full, text, ANSWERS[0])


def test_an_eos_that_closes_every_rendering_is_no_rewriting(encoder, full):
    assert one(encoder, TALK, "closes") == expected(
        full, TALK_TEXT + "</s>", ANSWERS[0], "Sleep for a while<|im_end|>\n</s>"
    )


def test_an_answer_whose_end_mark_changes_as_the_talk_goes_on_is_trained_with_the_mark_of_its_moment(encoder, full):
    head = "<|im_start|>system\nReasoning: medium<|im_end|>"
    ask = f"{head}<|im_start|>user\n{USER}<|im_end|><|im_start|>assistant"
    documents = make(encoder, [{"messages": [ASK, REPLY, AGAIN]}, {"messages": [ASK, REPLY, AGAIN, LAST]}], "harmony")
    first = "<|channel|>final\nParis.</s>"
    last = "<|channel|>final\nSleep for a while</s>"
    whole = (
        f"{ask}{first.replace('</s>', '<|im_end|>')}<|im_start|>user\nAnd then?<|im_end|><|im_start|>assistant{last}"
    )
    wanted = [expected(full, ask + first, first), expected(full, ask + first, first), expected(full, whole, last)]
    found = [documents.input_ids[start:stop].tolist() for start, stop in pairwise(documents.offsets)]
    masks = [[0, *documents.mask_of(start + 1, stop).tolist()] for start, stop in pairwise(documents.offsets)]
    assert list(zip(found, masks, strict=True)) == wanted


def test_turns_end_where_the_text_of_the_first_turns_ends(encoder, full):
    documents = make(encoder, [{"messages": TALK}, {"messages": [ASK, REPLY]}], "chatml", overlong="truncate-turns")
    mark = "<|im_end|>\n"
    ends = [end + len(mark) for end in range(len(TALK_TEXT)) if TALK_TEXT.startswith(mark, end)]
    first = [len(full.encode(TALK_TEXT[:end]).ids) for end in ends]
    asked = len(full.encode(ASK_TEXT.rsplit("<|im_start|>", 1)[0]).ids)
    assert documents.turn_ends.tolist() == [*first, asked, len(documents.input_ids) - first[-1]]
    assert documents.turn_offsets.tolist() == [0, 5, 7]


def test_turns_cut_off_on_the_left_are_exchanges_so_that_a_user_speaks_first(encoder, full):
    records = [{"messages": TALK}, {"messages": [ASK, REPLY]}]
    documents = make(encoder, records, "chatml", overlong="truncate-turns", truncate_side="left")
    starts = [at for at in range(len(TALK_TEXT)) if TALK_TEXT.startswith("<|im_start|>user", at)]
    questions = [len(full.encode(TALK_TEXT[:start]).ids) for start in starts if start]
    sizes = np.diff(documents.offsets).tolist()
    assert len(questions) == sum(message["role"] == "user" for message in TALK[1:])
    assert documents.turn_ends.tolist() == [*questions, *sizes]
    assert documents.turn_offsets.tolist() == [0, len(questions) + 1, len(questions) + 2]


def test_a_completion_is_never_left_without_its_prompt(encoder):
    options = {"kind": "instruction", "overlong": "truncate-turns", "truncate_side": "left"}
    record = {"prompt": "Where is Paris?", "completion": " In France."}
    documents, _ = DocumentMaker(encoder, RecordOptions(**options)).make(batch([record]))
    assert documents.turn_ends.tolist() == [len(documents.input_ids)]


def test_turns_without_marks_end_inside_a_piece_of_text(encoder, full):
    documents = make(encoder, [{"messages": [ASK, REPLY]}], "no_marks", overlong="truncate-turns")
    text = f"User: {USER}\nAssistant: Paris.\n"
    offsets = full.encode(text).offsets
    ends = sum(last <= len(f"User: {USER}\n") for _, last in offsets)
    assert 0 < ends < len(offsets)
    assert documents.turn_ends.tolist() == [ends, len(offsets) + 1]


def test_a_turn_that_the_template_rewrites_has_no_end_of_its_own(encoder):
    options = {"overlong": "truncate-turns", "train_on": "last-assistant"}
    documents = make(encoder, [{"messages": TALK}], "thinking", **options)
    assert len(documents.turn_ends) == 4  # the first answer reads differently alone, so it stays with the next turn
