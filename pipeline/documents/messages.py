"""Records as people write them -> one shape of conversation.

Accepted: role/content and from/value, content as text or as a list of text parts, messages, tools and tool-call
arguments as JSON text or objects, the older `function_call`, a system prompt beside the messages, reasoning under each
of its names, `train`, `trainable`, `loss` or `weight` per message. Everything else is refused by name: a field that is
guessed wrong trains on the wrong text.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import orjson

from pipeline.config import RecordOptions
from pipeline.sources.parsing import fields_of, name_of, usual_flags
from shards.errors import SourceError

Message = dict[str, Any]
Weight = float | tuple[float, ...]

SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
MIN_WEIGHT, MAX_WEIGHT = 2.0**-14, 65_504.0  # of float16, in which weights are stored
RANGE = "0, or a number from 2^-14 to 65,504"
TRAIN_FIELDS = ("train", "trainable", "loss")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages in one shape.

    Every message has `role` and `content` (text); where the record has them also `reasoning_content` (text),
    `tool_calls` (a list of {"id", "type", "function": {"name", "arguments"}}, arguments an object wherever they parse
    to one), `name` and `tool_call_id`.
    """

    messages: list[Message]
    "One dict per message."
    train: list[bool | None]
    "Per message: True and False override the choice by role, None leaves it."
    weights: list[Weight | None]
    "Per message: its own weight, or one for each token of its content; None where it has none."
    tools: list[Any] | None = None
    "Tool schemas."
    completion_from: int = 0
    "Instruction records: the first message of the completion."
    has_system_field: bool = False
    "Whether the first message is the system prompt that stood beside the messages."


def chat_conversation(record: dict[str, Any], options: RecordOptions) -> Conversation:
    """Read the conversation of a chat record.

    Raises:
        SourceError: A field is missing or has a form that is not understood.
    """
    raw = lookup(record, options.messages_field)
    if raw is None and options.messages_field not in record:
        raise _absent(options.messages_field, record, "a list of messages", "--messages-field")
    made = _conversation(raw, options.messages_field, lookup(record, options.tools_field), options.message_weights)
    return _with_system(made, record, options)


def instruction(record: dict[str, Any], options: RecordOptions) -> tuple[str, str] | Conversation:
    """Read prompt and completion: as two texts, or as one conversation where either is a list of messages.

    Raises:
        SourceError: A field is missing or has a form that is not understood.
    """
    prompt, completion = _prompt(record, options.prompt_field), lookup(record, options.completion_field)
    fields = (
        ("--prompt-field", options.prompt_field, prompt),
        ("--completion-field", options.completion_field, completion),
    )
    for flag, name, value in fields:
        if value is None and name not in record:
            raise _absent(name, record, "text or a list of messages", flag)
        if not isinstance(value, str | list):
            raise SourceError(
                f"field {name!r} is {name_of(value)}; expected text or a list of messages. Fix it, or use {flag}."
            )
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    head = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tail = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    tools = lookup(record, options.tools_field)
    both = _conversation([*head, *tail], options.prompt_field, tools, options.message_weights)
    return _with_system(replace(both, completion_from=len(head)), record, options)


def used_fields(record: dict[str, Any], options: RecordOptions, made: tuple[str, str] | Conversation) -> set[str]:
    """Return the top-level fields of a record that its conversation, or its prompt and completion, were made of."""
    paths = [options.messages_field]
    if options.kind == "instruction":
        names = [options.prompt_field] if options.prompt_field in record else options.prompt_field.split(",")
        paths = [*(name.strip() for name in names), options.completion_field]
    paths += [] if options.weights_field is None else [options.weights_field]
    if isinstance(made, Conversation):
        paths.append(options.tools_field)
        if made.has_system_field or lookup(record, options.system_field) == _first_system(made):
            paths.append(options.system_field)
    return {path if path in record else path.partition(".")[0] for path in paths}


def _with_system(made: Conversation, record: dict[str, Any], options: RecordOptions) -> Conversation:
    """Put the system prompt that stands beside the messages before them, unless they begin with one."""
    system = lookup(record, options.system_field)
    if not isinstance(system, str) or not system.strip() or not made.messages or _first_system(made) is not None:
        return made
    return replace(
        made,
        messages=[{"role": "system", "content": system}, *made.messages],
        train=[None, *made.train],
        weights=[None, *made.weights],
        completion_from=made.completion_from + bool(made.completion_from),
        has_system_field=True,
    )


def _first_system(made: Conversation) -> str | None:
    first = made.messages[0] if made.messages else {}
    return first["content"] if first.get("role") in ("system", "developer") else None


def _prompt(record: dict[str, Any], field: str) -> Any:
    """Return the prompt; where several fields are named, their texts with a blank line between, empty ones left out.

    `instruction,input` of `{"instruction": "Add.", "input": "1, 2"}` gives "Add.", a blank line, "1, 2".
    """
    if "," not in field or field in record:
        return lookup(record, field)
    texts = []
    for name in (part.strip() for part in field.split(",")):
        value = lookup(record, name)
        if value is not None and not isinstance(value, str):
            raise SourceError(f"field {name!r} is {name_of(value)}; expected text, as of all fields of --prompt-field.")
        texts.append(value or "")
    if not any(name.strip().partition(".")[0] in record for name in field.split(",")):
        return None
    return "\n\n".join(text for text in texts if text.strip())


def lookup(record: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None; a key that itself holds the dots wins."""
    if path in record or "." not in path:
        return record.get(path)
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _absent(name: str, record: dict[str, Any], expected: str, flag: str) -> SourceError:
    remedy = f"Use {flags}." if (flags := usual_flags(record)) else f"Name the field with {flag}."
    return SourceError(f"no field {name!r}, {fields_of(record)}; expected {expected}. {remedy}")


def _conversation(raw: Any, field: str, tools: Any, with_weights: bool) -> Conversation:
    if isinstance(raw, str):
        raw = _parsed(raw)
    if not isinstance(raw, list):
        raise SourceError(f"field {field!r} is {name_of(raw)}; expected a list of messages. Name another field.")
    messages: list[Message] = []
    train: list[bool | None] = []
    weights: list[Weight | None] = []
    for position, item in enumerate(raw):
        try:
            if not isinstance(item, dict):
                raise SourceError(f"{name_of(item)}; expected an object with role and content (or from and value).")
            messages.append(_message(item))
            train.append(_train_flag(item, with_weights))
            weights.append(_weight(item) if with_weights else None)
        except SourceError as error:
            raise SourceError(f"field {field!r}, message {position}: {error}") from None
    if isinstance(tools, str):
        tools = _parsed(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise SourceError(
            f"the tools are {name_of(tools)}; expected a list of objects, or its JSON text. Fix the record."
        )
    return Conversation(messages, train, weights, tools or None)


def _message(item: Message) -> Message:
    role = item.get("role")
    content = item.get("content")
    if role is None and "from" in item:
        role, content = item["from"], item.get("value", content)
        role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role is None and not {"role", "from"} & item.keys():
        raise SourceError(f"no role, {fields_of(item)}; expected role and content (or from and value). Fix it.")
    if not isinstance(role, str) or not role:
        raise SourceError(f"the role is {name_of(role)}; expected a name, such as 'user'. Fix the record.")
    calls = _tool_calls(item)
    if content is None and not calls and "content" not in item and "value" not in item:
        raise SourceError(f"no content, {fields_of(item)}; expected text under content or value. Fix the record.")
    message: Message = {"role": "tool" if role == "function" else role, "content": _text(content)}
    reasoning = next((item[name] for name in REASONING_FIELDS if item.get(name)), None)
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message | {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in texts):
        odd = next((part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)), content)
        kind = f"a part of type {odd['type']!r}" if isinstance(odd, dict) and "type" in odd else name_of(odd)
        raise SourceError(f"content holds {kind}; expected text, or a list of text parts. Convert or remove it.")
    return "".join(str(text) for text in texts)


def _tool_calls(item: Message) -> list[dict[str, Any]]:
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if isinstance(calls, str):
        calls = _parsed(calls)
    if not isinstance(calls, list):
        raise SourceError(f"tool_calls is {name_of(calls)}; expected a list of objects. Fix the record.")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SourceError("a tool call has no name; expected function.name and function.arguments. Fix the record.")
        arguments = function.get("arguments", function.get("parameters"))
        parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
        keep = parsed if isinstance(parsed, dict) else arguments  # text that is no JSON object stays as it was written
        made = {"type": "function", "function": {"name": function["name"], "arguments": {} if keep is None else keep}}
        result.append(made | ({"id": call["id"]} if call.get("id") is not None else {}))
    return result


def _train_flag(item: Message, with_weights: bool) -> bool | None:
    flags = {name: item[name] for name in TRAIN_FIELDS if item.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, bool) and (name == "train" or value not in (0, 1)):
            raise SourceError(f"{name} is {value!r}; expected true or false. Fix the record.")
    if len({bool(value) for value in flags.values()}) > 1:
        raise SourceError(f"{' and '.join(flags)} say different things; expected one of them. Fix the record.")
    weight = None if with_weights else item.get("weight")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise SourceError(f"weight is {weight!r}; expected 0 or 1. Fix the record, or weigh with --message-weights.")
    if flags:
        return bool(next(iter(flags.values())))
    return False if weight == 0 else None  # weight 1 is the default of the role, not a wish to train on a user's words


def check_weight(value: Any, where: str) -> float:
    """Return a weight.

    Raises:
        SourceError: It is no number, or none that can be stored.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (value != 0 and not MIN_WEIGHT <= value <= MAX_WEIGHT):
        raise SourceError(f"{where} is {value!r}; expected {RANGE}. Fix the record.")
    return float(value)


def check_weights(value: Any, where: str) -> Weight:
    """Return one weight, or a list of them for tokens.

    Raises:
        SourceError: There is no weight, or one that cannot be stored.
    """
    if not isinstance(value, list) or not value:
        return check_weight(value, where)
    return tuple(check_weight(weight, f"{where}, token {place}") for place, weight in enumerate(value))


def _weight(item: Message) -> Weight | None:
    return None if item.get("weight") is None else check_weights(item["weight"], "weight")


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)  # unlike json, it takes no lone surrogates, which no tokenizer can encode
    except orjson.JSONDecodeError:
        return text
