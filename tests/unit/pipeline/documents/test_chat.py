"""Conversations: each template trap, its text written out by hand, its answers located in that text."""

import pytest
from chats import (
    AGAIN,
    ANSWER,
    ANSWERS,
    ASK,
    ASK_TEXT,
    LAST,
    REPLY,
    SYSTEM,
    TALK,
    TALK_TEXT,
    USER,
    batch,
    expected,
    make,
    one,
    targets,
)
from tokenizers import Tokenizer

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker


@pytest.mark.parametrize("template", ["chatml", "marked", "looks", "parts"])
def test_answers_and_their_end_marks_are_targets_with_and_without_generation_marks(encoder, full, template):
    assert one(encoder, TALK, template) == expected(full, TALK_TEXT, *ANSWERS)


@pytest.mark.parametrize(
    ("train_on", "answers"),
    [
        ("assistant", ANSWERS),
        ("last-assistant", ANSWERS[1:]),
        ("user", (f"{USER}<|im_end|>", "And then?<|im_end|>")),
        ("system, assistant", (f"{SYSTEM}<|im_end|>", *ANSWERS)),
        ("tool", ()),
    ],
)
@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_roles_are_chosen_by_name(encoder, full, template, train_on, answers):
    assert one(encoder, TALK, template, train_on=train_on) == expected(full, TALK_TEXT, *answers)


def test_training_on_all_needs_no_mask(encoder, full):
    documents = make(encoder, [{"messages": TALK}], "chatml", train_on="all")
    assert documents.loss_mask is None
    assert documents.input_ids.tolist() == full.encode(TALK_TEXT).ids


@pytest.mark.parametrize("template", ["chatml", "marked"])
@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}])
def test_a_message_can_leave_training(encoder, full, template, off):
    talk = [*TALK[:2], REPLY | off, *TALK[3:]]
    assert one(encoder, talk, template) == expected(full, TALK_TEXT, ANSWERS[1])


def test_a_message_can_leave_training_on_all(encoder, full):
    text, off = TALK_TEXT, {"weight": 0}
    answers = text[: text.index(USER)], text[text.index("<|im_start|>assistant") :]
    assert one(encoder, [TALK[0], ASK | off, *TALK[2:]], "chatml", train_on="all") == expected(
        full, text, answers[0], "\n" + answers[1]
    )


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_a_message_can_join_training_against_its_role(encoder, full, template):
    talk = [TALK[0], ASK | {"train": True}, REPLY | {"weight": 1}, AGAIN | {"weight": 1}, LAST]
    assert one(encoder, talk, template) == expected(full, TALK_TEXT, f"{USER}<|im_end|>", *ANSWERS)


def test_from_and_value_text_parts_and_role_names_of_old_sets_are_understood(encoder, full):
    record = {
        "conversations": [
            {"from": "system", "value": SYSTEM},
            {"from": "human", "value": USER},
            {"from": "gpt", "value": ANSWER, "weight": None},
            {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]},
            {"role": "assistant", "content": ["Sleep for ", "a while"]},
        ]
    }
    documents = make(encoder, [record], "chatml", messages_field="conversations")
    assert (documents.input_ids.tolist(), targets(documents)) == expected(full, TALK_TEXT, *ANSWERS)


def test_contents_that_the_template_trims_keep_an_exact_mask(encoder, full):
    talk = [{"role": "user", "content": f"  {USER}\n"}, {"role": "assistant", "content": "\n\nParis. \n"}]
    text = f"<s><|im_start|>user\n\n{USER}<|im_end|><|im_start|>assistant\n\nParis.<|im_end|>"
    assert one(encoder, talk, "trims") == expected(full, text, ANSWERS[0])


def test_a_template_that_writes_bos_gives_one_bos(encoder):
    ids, _ = one(encoder, [ASK, REPLY], "trims")
    assert ids.count(encoder.spec.bos_id) == 1
    assert ids[0] == encoder.spec.bos_id


def test_a_tokenizer_that_adds_bos_does_not_double_that_of_the_template(bos_tokenizer_dir):
    encoder = Encoder(bos_tokenizer_dir)
    assert encoder.spec.prefix_ids == (encoder.spec.bos_id,)
    ids, mask = one(encoder, [ASK, REPLY], "instruct")
    whole = Tokenizer.from_file(f"{bos_tokenizer_dir}/tokenizer.json")
    assert (ids, mask) == expected(whole, f"<s>[INST] {USER} [/INST] Paris.</s>", "Paris.</s>")


def test_a_system_prompt_may_move_into_the_first_question(encoder, full):
    text = f"<s>[INST] {SYSTEM}\n\n{USER} [/INST] Paris.</s><s>[INST] And then? [/INST] Sleep for a while</s>"
    assert one(encoder, TALK, "instruct") == expected(full, text, "Paris.</s>", "Sleep for a while</s>")


class TestEnd:
    """One EOS where the template has no end mark of its own, nothing otherwise."""

    def test_a_template_without_marks_gets_one_eos_as_a_target(self, encoder, full):
        text = f"User: {USER}\nAssistant: Paris.\n"
        ids, mask = expected(full, text, "Paris.\n")
        assert one(encoder, [ASK, REPLY], "no_marks") == ([*ids, encoder.spec.eos_id], [*mask, 1])

    def test_eos_can_be_left_out(self, encoder, full):
        text = f"User: {USER}\nAssistant: Paris.\n"
        assert one(encoder, [ASK, REPLY], "no_marks", add_eos=False) == expected(full, text, "Paris.\n")

    def test_eos_after_a_turn_that_is_not_trained_is_no_target(self, encoder):
        ids, mask = one(encoder, [ASK, REPLY, AGAIN], "no_marks")
        assert (ids[-1], mask[-1]) == (encoder.spec.eos_id, 0)

    @pytest.mark.parametrize("template", ["chatml", "trims", "instruct"])
    def test_an_end_mark_or_eos_of_the_template_is_not_repeated(self, encoder, template):
        ids, mask = one(encoder, [ASK, REPLY], template)
        ends = [id for id in ids if id in (encoder.spec.eos_id, encoder.spec.added["<|im_end|>"])]
        assert len(ends) == (1 if template == "instruct" else 2)
        assert sum(mask) == mask.count(1) > 0


def test_a_template_that_prints_the_date_gives_the_same_tokens_every_day(encoder, full):
    text = "<|im_start|>system\nToday: 26 Jul 2024<|im_end|>\n" + ASK_TEXT + "Paris.<|im_end|>\n"
    assert one(encoder, [ASK, REPLY], "today") == expected(full, text, ANSWERS[0])


def test_a_template_that_names_the_prompt_of_a_generation_and_writes_none_still_has_a_header(encoder, full):
    text = "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif %}" + (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    options = RecordOptions(kind="chat", chat_template=text)
    documents, _ = DocumentMaker(encoder, options).make(batch([{"messages": TALK}]))
    assert (documents.input_ids.tolist(), targets(documents)) == expected(full, TALK_TEXT, *ANSWERS)


def test_an_answer_may_come_first(encoder, full):
    text = "<|im_start|>assistant\nParis.<|im_end|>\n"
    assert one(encoder, [REPLY], "chatml") == expected(full, text, ANSWERS[0])


def test_an_empty_answer_trains_its_end_mark(encoder, full):
    text = ASK_TEXT + "<|im_end|>\n"
    ids, mask = one(encoder, [ASK, {"role": "assistant", "content": ""}], "chatml")
    assert ids == full.encode(text).ids
    assert mask == [0] * (len(ids) - 2) + [1, 0]
