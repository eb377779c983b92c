"""How much each message of a conversation is trained: by its role, its own fields and those of its record.

Weights are stored as float16, so each is 0 or from 2^-14 to 65,504; what is smaller would lose digits or vanish.
"""

from dataclasses import replace
from typing import Any

from pipeline.config import RecordOptions
from pipeline.documents.messages import RANGE, Conversation, Weight, check_weight, check_weights, lookup
from shards.errors import PackError, SourceError


def role_weights(train_on: str) -> dict[str, float]:
    """Return the weights of the roles that an option names: `assistant,user:0.1` gives assistant 1, user 0.1.

    Raises:
        PackError: A name is empty, or a weight is none.
    """
    weights = {}
    for entry in train_on.split(","):
        name, number = entry.rsplit(":", 1) if ":" in entry else (entry, "1")
        if not name.strip():
            raise PackError(f"`train_on`: {train_on!r} holds an empty name; expected roles, such as assistant,tool.")
        try:
            weights[name.strip()] = check_weight(float(number), "")
        except (ValueError, SourceError):
            raise PackError(f"`train_on`: {entry.strip()!r} has no weight; expected {RANGE}.") from None
    return weights


def message_weights(conversation: Conversation, options: RecordOptions) -> list[float]:
    """Return how much each message weighs; 0 for one that is not trained.

    Raises:
        SourceError: A weight cannot be stored, or stands on a message of a role that is not trained.
    """
    roles = [message["role"] for message in conversation.messages]
    chosen = _by_role(roles, conversation.completion_from, options.train_on)
    weights = [own if flag is None else float(flag) for own, flag in zip(chosen, conversation.train, strict=True)]
    for index, weight in enumerate(conversation.weights):
        if weight is None:
            continue
        largest = max(weight) if isinstance(weight, tuple) else weight
        if largest and not weights[index] and conversation.train[index] is None:
            raise SourceError(
                f"message {index} has weight {largest:g}, and its role {roles[index]!r} is not trained; expected a "
                "trained role. Name it in --train-on."
            )
        found = _product(weights[index], weight, f"message {index}")
        weights[index] = max(found) if isinstance(found, tuple) else found
    return weights


def token_weights(conversation: Conversation, options: RecordOptions) -> dict[int, tuple[float, ...]]:
    """Return what the tokens of contents weigh, by message, where a message has a weight for each of them."""
    chosen = _by_role(
        [message["role"] for message in conversation.messages], conversation.completion_from, options.train_on
    )
    found = {}
    for index, weight in enumerate(conversation.weights):
        if isinstance(weight, tuple):
            flag = conversation.train[index]
            role = chosen[index] if flag is None else float(flag)
            found[index] = tuple(_product(role, one, f"message {index}") for one in weight)
    return found


def with_record_weights(conversation: Conversation, record: dict[str, Any], options: RecordOptions) -> Conversation:
    """Return the conversation with the weights of `weights_field`: one for all messages, or a list of one for each.

    Raises:
        SourceError: The field holds something else.
    """
    field = options.weights_field
    given = None if field is None else lookup(record, field)
    if given is None:
        return conversation
    first = int(conversation.has_system_field)
    roles = [message["role"] for message in conversation.messages[first:]]
    one_for_all = not isinstance(given, list)
    given = [given] * len(roles) if one_for_all else given
    if len(given) != len(roles):
        raise SourceError(
            f"field {field!r} has {len(given)} weights for {len(roles)} messages; expected one for each. Fix it."
        )
    weights = conversation.weights[:first]
    for place, (weight, trained) in enumerate(zip(given, _by_role(roles, 0, options.train_on), strict=True)):
        weight = check_weights(weight, f"field {field!r}" if one_for_all else f"field {field!r}, weight {place}")
        # one for all means those that are trained, and a list has to say something of every message
        idle = not trained and (one_for_all or _says_nothing(weight))
        own = conversation.weights[first + place]
        weights.append(own if idle else weight if own is None else _product(own, weight, f"message {place}"))
    return replace(conversation, weights=weights)


def record_weight(record: dict[str, Any], options: RecordOptions) -> Weight:
    """Return the weight of a record without messages, or one for each of its tokens.

    Raises:
        SourceError: The field holds something else than numbers.
    """
    given = None if options.weights_field is None else lookup(record, options.weights_field)
    return 1.0 if given is None else check_weights(given, f"field {options.weights_field!r}")


def _product(one: Weight, other: Weight, where: str) -> Any:
    """Multiply weights; several by one each, or by as many."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) != len(other):
        raise SourceError(f"{where} has {len(one)} weights of its own, and {len(other)} in its record. Fix it.")
    if not isinstance(one, tuple) and not isinstance(other, tuple):
        return check_weight(one * other, f"the product of the weights of {where}")
    length = len(one) if isinstance(one, tuple) else len(other) if isinstance(other, tuple) else 0
    ones, others = (weight if isinstance(weight, tuple) else (weight,) * length for weight in (one, other))
    return tuple(_product(a, b, where) for a, b in zip(ones, others, strict=True))


def _says_nothing(weight: Weight) -> bool:
    """Whether a weight of what is not trained is 0 or 1 throughout."""
    return set(weight if isinstance(weight, tuple) else (weight,)) <= {0.0, 1.0}


def _by_role(roles: list[str], completion_from: int, train_on: str) -> list[float]:
    if train_on == "all":
        return [1.0] * len(roles)
    if train_on in ("auto", "completion"):
        return [float(role == "assistant" and index >= completion_from) for index, role in enumerate(roles)]
    if train_on == "last-assistant":
        last = max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)
        return [float(index == last) for index in range(len(roles))]
    weights = role_weights(train_on)
    return [weights.get(role, 0.0) for role in roles]
