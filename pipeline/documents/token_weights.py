"""Weights of single tokens: a list in place of one number, with an entry for each token of a text or content.

Weights come from where the text was tokenized before (token losses, advantages, somebody's marks), so they are checked
against this tokenizer by their number. A token beside them that is trained too weighs as the one before it: with
[0.5, 2] for the two tokens of "Yo yo", the end mark of the answer weighs 2. Those before the first weigh as the first.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.documents.chat import DocumentRenderer, Rendering, TokenWeights
from shards.errors import SourceError


def with_token_weights(document: DocumentRenderer, weights: dict[int, tuple[float, ...]]) -> Rendering:
    """Return the rendering of a document with the weights of the tokens of its trained messages.

    Args:
        document: The document.
        weights: By message of the conversation.

    Raises:
        SourceError: Which tokens are those of the content cannot be told.
    """
    rendering, found = document.rendering, list[TokenWeights]()
    for index, values in weights.items():
        if index >= len(document.messages) or not document.weights[index]:
            continue
        where = f"message {index}"
        message, spans = document.messages[index], document.content.spans or []
        own = [(span.start, span.stop) for span in spans if span.message == index and span.part == 0]
        if document.options.train_on == "all" or "tool_calls" in message or "reasoning_content" in message or not own:
            raise SourceError(
                f"{where} has a weight for each token; expected an answer of content alone, in a template that shows "
                "where it stands, and trained roles. Give one number, or name roles in --train-on."
            )
        around = [t for t in rendering.targets or () if t.start < own[-1][1] and own[0][0] < t.stop]
        start = min([own[0][0], *(target.start for target in around)])
        stop = max([own[-1][1], *(target.stop for target in around)])
        found.append(TokenWeights(own, start, stop, values, where))
        if index == len(document.messages) - 1:
            rendering = replace(rendering, end_weight=values[-1])
    return replace(rendering, token_weights=tuple(found))


def spread(
    weights: npt.NDArray[np.float16],
    own: npt.NDArray[np.bool_],
    around: npt.NDArray[np.bool_],
    given: tuple[float, ...],
    where: str,
) -> None:
    """Put weights on the tokens of one document.

    Args:
        weights: float16 (num_tokens,), above 0 where a token is trained; changed in place.
        own: bool (num_tokens,): the tokens that have the weights.
        around: bool (num_tokens,): these, and what weighs like them.
        given: The weights, one for each of their own tokens.
        where: Whose they are.

    Raises:
        SourceError: There are more or fewer of them.
    """
    places = np.flatnonzero(own)
    check_number(len(given), len(places), where)
    chosen = np.flatnonzero((own | around) & (weights > 0))
    before = np.maximum(np.searchsorted(places, chosen, side="right") - 1, 0)
    weights[chosen] = np.array(given, np.float16)[before]


def check_number(given: int, tokens: int, where: str) -> None:
    """Check that there is one weight for each token.

    Raises:
        SourceError: There are more or fewer.
    """
    if given != tokens:
        raise SourceError(
            f"{where} has {given} weights for {tokens} tokens; expected one for each, as this tokenizer reads it. "
            "Fix the record, or give one number."
        )


def text_weights(
    given: list[float | tuple[float, ...]], lengths: Any, before: Any, after: Any
) -> npt.NDArray[np.float16]:
    """Return the weights of texts with what was put around them, float16.

    Args:
        given: Of each text, one number or one for each of its tokens.
        lengths: int64 (num_texts,), tokens of each.
        before: int64 (num_texts,), tokens put before each.
        after: int64 (num_texts,), tokens put after each.

    Example:
        [0.5, (1, 2)] for 2 tokens each, with one before the first and one after both: [0.5, 0.5, 0.5, 0.5, 1, 2, 2].
    """
    parts = [np.empty(0, np.float16)]
    for weight, length, head, tail in zip(given, lengths.tolist(), before.tolist(), after.tolist(), strict=True):
        values = np.array(weight if isinstance(weight, tuple) else [weight] * length, np.float16)
        parts.append(np.pad(values, (head, tail), mode="edge"))
    return np.concatenate(parts)
