"""Records as people write them, and the fields of them that nobody reads."""

import json

import pytest

from pipeline.config import RecordOptions
from pipeline.documents.messages import chat_conversation, instruction, used_fields
from pipeline.documents.unread_fields import UnreadFields
from shards.errors import SourceError

ASK, REPLY = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
CHAT = RecordOptions(kind="chat")


def roles(record: dict, options: RecordOptions = CHAT) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat_conversation(record, options).messages]


def train(message: dict) -> bool | None:
    return chat_conversation({"messages": [ASK, REPLY | message]}, CHAT).train[1]


class TestSystem:
    """A system prompt that stands beside the messages."""

    def test_it_becomes_the_first_message(self):
        """axolotl-ai-cloud/axolotl#520: dropped without a word"""
        options = RecordOptions(kind="chat", messages_field="conversations")
        record = {"system": "Be brief.", "conversations": [{"from": "human", "value": "one"}]}
        assert roles(record, options) == [("system", "Be brief."), ("user", "one")]

    def test_it_has_another_name_where_one_is_given(self):
        options = RecordOptions(kind="chat", system_field="meta.prompt")
        assert roles({"meta": {"prompt": "Be brief."}, "messages": [ASK]}, options)[0] == ("system", "Be brief.")

    @pytest.mark.parametrize("system", ["", " ", None, 3])
    def test_one_without_text_is_none(self, system):
        assert roles({"system": system, "messages": [ASK]}) == [("user", "one")]

    def test_messages_that_begin_with_one_keep_their_own(self):
        own = {"role": "system", "content": "Mine."}
        assert roles({"system": "Other.", "messages": [own, ASK]}) == [("system", "Mine."), ("user", "one")]

    def test_it_stands_before_a_prompt_of_messages_too(self):
        record = {"system": "Be brief.", "prompt": [ASK], "completion": [REPLY]}
        made = instruction(record, RecordOptions(kind="instruction"))
        assert [message["role"] for message in made.messages] == ["system", "user", "assistant"]
        assert made.completion_from == 2


class TestMasks:
    """A message that says itself whether it is trained."""

    @pytest.mark.parametrize("name", ["train", "trainable", "loss"])
    @pytest.mark.parametrize("value", [True, False, None])
    def test_each_usual_name_is_read(self, name, value):
        """hiyouga/LlamaFactory#2571, modelscope/ms-swift#9029: trained all the same"""
        assert train({name: value}) is value

    def test_names_that_contradict_each_other_are_refused(self):
        with pytest.raises(SourceError, match="message 1: train and loss say different things"):
            train({"train": True, "loss": False})

    @pytest.mark.parametrize(("name", "value"), [("loss", "no"), ("trainable", 0.5), ("train", "true")])
    def test_other_values_are_refused(self, name, value):
        with pytest.raises(SourceError, match=f"message 1: {name} is {value!r}; expected true or false"):
            train({name: value})


class TestForms:
    """Messages and prompts in other forms."""

    def test_messages_may_be_json_text(self):
        assert roles({"messages": json.dumps([ASK, REPLY])}) == roles({"messages": [ASK, REPLY]})

    def test_other_text_is_no_list_of_messages(self):
        with pytest.raises(SourceError, match="field 'messages' is text"):
            roles({"messages": "hello"})

    @pytest.mark.parametrize(
        ("record", "prompt"),
        [
            ({"instruction": "Add.", "input": "1, 2"}, "Add.\n\n1, 2"),
            ({"instruction": "Add.", "input": ""}, "Add."),
            ({"instruction": "Add.", "input": None}, "Add."),
            ({"instruction": "Add."}, "Add."),
            ({"instruction,input": "as named", "instruction": "Add."}, "as named"),
        ],
    )
    def test_a_prompt_may_be_made_of_several_fields(self, record, prompt):
        """tloen/alpaca-lora#362: the input was dropped"""
        options = RecordOptions(kind="instruction", prompt_field="instruction,input", completion_field="output")
        assert instruction(record | {"output": "3"}, options) == (prompt, "3")

    def test_a_prompt_of_which_no_field_is_there_is_named(self):
        options = RecordOptions(kind="instruction", prompt_field="instruction,input", completion_field="output")
        with pytest.raises(SourceError, match="no field 'instruction,input', only 'output'"):
            instruction({"output": "3"}, options)

    def test_fields_of_a_prompt_are_texts(self):
        options = RecordOptions(kind="instruction", prompt_field="instruction,input", completion_field="output")
        with pytest.raises(SourceError, match="field 'input' is a list"):
            instruction({"instruction": "Add.", "input": [1], "output": "3"}, options)


class TestUnreadFields:
    """Fields that look as if they mattered."""

    def counts(self, record: dict, options: RecordOptions = CHAT) -> dict[str, int]:
        fields = UnreadFields()
        made = (chat_conversation if options.kind == "chat" else instruction)(record, options)
        fields.note(record, used_fields(record, options, made), record.get("messages", ()))
        return fields.take()

    def test_what_is_read_is_not_counted(self):
        record = {
            "messages": [ASK, REPLY | {"loss": True, "weight": 1}],
            "tools": [{"name": "x"}],
            "system": "Be brief.",
        }
        assert self.counts(record) == {}

    @pytest.mark.parametrize("name", ["input", "images", "loss_mask", "system_prompt", "sample_weight", "context"])
    def test_a_field_that_may_change_the_meaning_is_counted(self, name):
        assert self.counts({"messages": [ASK, REPLY], name: "x"}) == {name: 1}

    @pytest.mark.parametrize("name", ["id", "source", "date", "lang", "meta"])
    def test_others_are_passed_over(self, name):
        assert self.counts({"messages": [ASK, REPLY], name: "x"}) == {}

    @pytest.mark.parametrize("value", [None, "", [], {}])
    def test_a_field_without_a_value_is_none(self, value):
        assert self.counts({"messages": [ASK, REPLY], "images": value}) == {}

    def test_the_input_of_an_instruction_is_counted_unless_it_is_part_of_the_prompt(self):
        record = {"instruction": "Add.", "input": "1, 2", "output": "3"}
        options = RecordOptions(kind="instruction", prompt_field="instruction", completion_field="output")
        assert self.counts(record, options) == {"input": 1}
        options = RecordOptions(kind="instruction", prompt_field="instruction, input", completion_field="output")
        assert self.counts(record, options) == {}

    def test_a_system_prompt_beside_other_messages_of_its_kind_is_counted(self):
        own = {"role": "system", "content": "Mine."}
        assert self.counts({"system": "Other.", "messages": [own, ASK]}) == {"system": 1}
        assert self.counts({"system": "Mine.", "messages": [own, ASK]}) == {}

    def test_a_key_of_messages_counts_once_for_a_record(self):
        assert self.counts({"messages": [ASK | {"mask": 1}, REPLY | {"mask": 0}]}) == {"message.mask": 1}

    def test_strict_refuses_the_record_by_name(self):
        with pytest.raises(SourceError, match=r"holds 'message\.mask', which no option reads"):
            UnreadFields(strict=True).note({"messages": []}, {"messages"}, [ASK | {"mask": 1}])
