"""Renderings -> flat tokens and masks.

Each text is cut at its control tokens, and the chunks of a whole batch are encoded in one call, as plain text: the ids
are those of the whole text, because tokenizers cut there too, but nothing a user wrote can become a control token.
Masks are exact to the token: where a target begins or ends inside a chunk, token offsets come from the byte length of
each id where that is exact (byte-level and byte-fallback BPE: any engine, no second encoding), else from the reference
engine's offsets. A token across the seam is a target.
"""

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.documents.chat import Rendering, Target, TokenWeights
from pipeline.documents.encoder import Encoder
from pipeline.documents.engines import REFERENCE, running_sum
from pipeline.documents.token_weights import spread
from pipeline.documents.tokenizer import BYTE_TOKEN
from pipeline.tokens import Documents

Array = npt.NDArray[Any]
PLAIN = -1


class ChunkEncoder:
    """Encodes text between control tokens.

    Args:
        encoder: Encodes plain text.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        parsed = orjson.loads(encoder.content)
        self._inner = _without_first_prefix(parsed)
        self._widths = token_bytes(parsed)
        self._composed = "NFC" in _types(parsed.get("normalizer"))

    def encode(self, texts: list[str], first: list[bool]) -> tuple[Array, Array]:
        """Encode chunks; `first` says which of them begin their document.

        Returns:
            `ids`: int32 (num_tokens,), end to end; `offsets`: int64 (num_texts + 1,).
        """
        if self._inner is None or all(first):
            return self.encoder.encode(texts)
        parts: list[Array] = [np.empty(0, np.int32)] * len(texts)
        for encoder, wanted in ((self.encoder, True), (self._inner, False)):
            chosen = [index for index, begins in enumerate(first) if begins is wanted]
            ids, offsets = encoder.encode([texts[index] for index in chosen])
            for number, index in enumerate(chosen):
                parts[index] = ids[offsets[number] : offsets[number + 1]]
        return np.concatenate([np.empty(0, np.int32), *parts]), running_sum([len(part) for part in parts])

    def token_offsets(self, text: str, ids: Array, points: list[int], begins: bool) -> tuple[Array, Array, list[int]]:
        """Return where the tokens of a chunk begin and end, and where `points` (characters) lie on the same scale.

        The scale is bytes where the ids alone tell it, characters otherwise.
        """
        if self._widths is not None and (not self._composed or unicodedata.is_normalized("NFC", text)):
            widths = self._widths[ids]
            ends = np.cumsum(widths)
            size = len(text) if text.isascii() else len(text.encode())
            if len(ends) and ends[-1] == size:
                at = points if size == len(text) else [len(text[:point].encode()) for point in points]
                return ends - widths, ends, at
        encoder = self.encoder if begins or self._inner is None else self._inner
        spans = encoder.encode_with_spans(text)[1]
        return spans[:, 0], spans[:, 1], points


def encode_renderings(
    renderings: list[Rendering], chunks: ChunkEncoder, *, with_turns: bool = False, with_weights: bool = False
) -> Documents:
    """Encode a batch of renderings.

    Args:
        renderings: One for each document.
        chunks: Encodes the text between control tokens.
        with_turns: Return where turns end; an EOS that was added belongs to the last.
        with_weights: Return the weights of tokens; one across two targets has the larger weight.

    Returns:
        The documents, numbered from 0.

    Raises:
        TokenizerError: A text has no UTF-8 form.
        SourceError: A text has more or fewer weights than tokens.
    """
    batch = _Batch()
    for rendering in renderings:
        batch.add(rendering)
    return batch.encode(chunks, with_turns, with_weights)


def token_bytes(tokenizer: dict[str, Any]) -> Array | None:
    """Return how many bytes of text each id stands for, int32 (max_id + 1,), or None where ids alone do not tell."""
    model, before = tokenizer["model"], _types(tokenizer.get("pre_tokenizer"))
    byte_level = "ByteLevel" in before
    if "merges" not in model or not (byte_level or model.get("byte_fallback")):
        return None
    for step in _steps(tokenizer.get("normalizer")):
        marks_spaces = step.get("pattern") == {"String": " "} and step.get("content") == "▁"
        if step["type"] not in ("NFC", "Prepend") and not (step["type"] == "Replace" and marks_spaces):
            return None
    widths = np.zeros(max(model["vocab"].values(), default=0) + 1, np.int32)
    for text, index in model["vocab"].items():
        if byte_level:
            widths[index] = len(text)  # one character of the byte alphabet a byte
        else:
            widths[index] = 1 if BYTE_TOKEN.fullmatch(text) else len(text.replace("▁", " ").encode())
    for token in tokenizer.get("added_tokens") or ():  # layout tokens are spelled as they are
        if byte_level and token["id"] < len(widths):
            widths[token["id"]] = len(token["content"].encode())
    return widths


class _Batch:
    """Parts of a batch of documents: control tokens and plain chunks, in order, each with its weight."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # of a control token, or PLAIN
        self.weights: list[float] = []  # 0 where nothing is trained, or where `mixed` says what is
        self.texts: list[str] = []
        self.first: list[bool] = []  # whether a plain chunk begins its document
        self.mixed: list[tuple[int, int, list[Target]]] = []  # part, its text, targets inside it
        self.doc_parts: list[int] = [0]
        self.turns: list[tuple[int, int, int]] = []  # part, its text or PLAIN for its end, characters into it
        self.doc_turns: list[int] = [0]
        self.starts: list[int] = []  # of each part, characters into its document; PLAIN for what is put around it
        self.part_texts: list[int] = []  # of each part, its text, or PLAIN for a control token
        self.weighed: list[tuple[int, TokenWeights]] = []  # document, weights of its tokens

    def add(self, rendering: Rendering) -> None:
        """Cut one rendering into parts: its control tokens, and the chunks of text between them.

        "<user>Hi</s>" with control tokens at [0, 6) and [8, 12) and the target [6, 12) gives the parts `<user>` with
        mask 0, the chunk "Hi" with mask 1, and `</s>` with mask 1.
        """
        text, position = rendering.text, 0
        everything = rendering.targets is None
        targets = [Target(0, len(text))] if rendering.targets is None else rendering.targets
        ends, at, turn = rendering.turn_ends[:-1], 0, 0
        self.weighed += [(len(self.doc_parts) - 1, weights) for weights in rendering.token_weights]
        for token in rendering.prefix:
            self._control(token, float(everything), PLAIN)
        for control in (*rendering.controls, None):
            for start, stop, token in (
                (position, len(text) if control is None else control.start, PLAIN),
                (0, 0, PLAIN) if control is None else control,
            ):
                if start == stop:
                    continue
                while at < len(targets) and targets[at].stop <= start:
                    at += 1
                touched = at < len(targets) and targets[at].start < stop
                if token != PLAIN:
                    self._control(token, targets[at].weight if touched else 0.0, start)
                else:
                    self._plain(text[start:stop], start, stop, targets[at:] if touched else [], start == 0)
                while turn < len(ends) and ends[turn] <= stop:
                    inside = token == PLAIN and ends[turn] < stop
                    self.turns.append((len(self.ids) - 1, len(self.texts) - 1 if inside else PLAIN, ends[turn] - start))
                    turn += 1
            position = len(text) if control is None else control.stop
        if rendering.eos_id is not None:
            self._control(rendering.eos_id, 1.0 if everything else rendering.end_weight, PLAIN)
        if len(self.ids) > self.doc_parts[-1]:
            self.turns.append((len(self.ids) - 1, PLAIN, 0))
        self.doc_parts.append(len(self.ids))
        self.doc_turns.append(len(self.turns))

    def _control(self, token: int, weight: float, start: int) -> None:
        self.ids.append(token)
        self.starts.append(start)
        self.part_texts.append(PLAIN)
        self.weights.append(weight)

    def _plain(self, chunk: str, start: int, stop: int, targets: list[Target], begins: bool) -> None:
        inside = [Target(max(a - start, 0), min(b, stop) - start, weight) for a, b, weight in targets if a < stop]
        whole = len(inside) == 1 and inside[0][:2] == (0, len(chunk))
        self.ids.append(PLAIN)
        self.starts.append(start)
        self.part_texts.append(len(self.texts))
        self.weights.append(inside[0].weight if whole else 0.0)
        if inside and not whole:
            self.mixed.append((len(self.ids) - 1, len(self.texts), inside))
        self.texts.append(chunk)
        self.first.append(begins)

    def encode(self, chunks: ChunkEncoder, with_turns: bool, with_weights: bool) -> Documents:
        """Encode all parts and put them end to end.

        Parts `<user>`, "Hi", `</s>` with "Hi" encoded as [7, 8] have the lengths [1, 2, 1] and begin at [0, 1, 3, 4]:
        the ids of control tokens go to places 0 and 3, those of the chunk to 1 and 2.
        """
        ids, at = chunks.encode(self.texts, self.first)
        part_ids = np.array(self.ids, np.int32)
        plain = part_ids == PLAIN
        lengths = np.ones(len(part_ids), np.int64)
        lengths[plain] = np.diff(at)
        begins = running_sum(lengths)
        input_ids = np.empty(begins[-1], np.int32)
        input_ids[begins[:-1][~plain]] = part_ids[~plain]
        input_ids[np.arange(len(ids)) + np.repeat(begins[:-1][plain] - at[:-1], np.diff(at))] = ids
        offsets = begins[self.doc_parts]
        documents = Documents(input_ids, offsets, np.arange(len(offsets) - 1))
        if with_weights:
            weights = self._token_weights(chunks, ids, at, begins, lengths, np.float16)
            for document, own in self.weighed:
                parts = range(self.doc_parts[document], self.doc_parts[document + 1])
                touched = self._touched(own.spans, parts, chunks, ids, at, begins)
                around = self._touched([(own.start, own.stop)], parts, chunks, ids, at, begins)
                first, last = begins[parts.start], begins[parts.stop]
                spread(weights[first:last], touched, around, own.weights, own.where)
            documents = documents._replace(loss_mask=(weights > 0).astype(np.uint8), loss_weights=weights)
        elif not all(self.weights):
            documents = documents._replace(loss_mask=self._token_weights(chunks, ids, at, begins, lengths, np.uint8))
        if with_turns:
            ends = np.array([self._turn_end(turn, chunks, ids, at, begins) for turn in self.turns], np.int64)
            owner = np.repeat(np.arange(len(offsets) - 1), np.diff(self.doc_turns))
            turn_ends = (ends - offsets[owner]).astype(np.int32)
            documents = documents._replace(turn_ends=turn_ends, turn_offsets=np.array(self.doc_turns, np.int64))
        return documents

    def _token_weights(
        self, chunks: ChunkEncoder, ids: Array, at: Array, begins: Array, lengths: Array, dtype: Any
    ) -> Array:
        """Return weights (or a mask): a whole part's own, those of a chunk with a border inside by its tokens' offsets.

        A target [2, 9) in a chunk whose tokens are [0, 4), [4, 9), [9, 12): the first two touch it, so [1, 1, 0].
        """
        weights = np.repeat(np.array(self.weights, dtype), lengths)
        for part, index, inside in self.mixed:
            points = [point for target in inside for point in target[:2]]
            starts, stops, points = self._token_offsets(chunks, index, ids, at, points)
            tokens = weights[begins[part] : begins[part + 1]]
            for first, last, target in zip(points[::2], points[1::2], inside, strict=True):
                touched = (starts < last) & (stops > first)
                tokens[touched] = np.maximum(tokens[touched], dtype(target.weight))
        return weights

    def _touched(
        self, spans: list[tuple[int, int]], parts: range, chunks: ChunkEncoder, ids: Array, at: Array, begins: Array
    ) -> Array:
        """Return which tokens of a document touch characters of its text, bool."""
        touched = np.zeros(begins[parts.stop] - begins[parts.start], bool)
        for part in parts:
            start, first = self.starts[part], begins[part] - begins[parts.start]
            if start == PLAIN:
                continue
            index = self.part_texts[part]
            if index == PLAIN:
                touched[first] = any(a <= start < b for a, b in spans)
                continue
            size = len(self.texts[index])
            inside = [(max(a - start, 0), min(b - start, size)) for a, b in spans if a < start + size and start < b]
            if inside:
                points = [point for span in inside for point in span]
                starts, stops, points = self._token_offsets(chunks, index, ids, at, points)
                for a, b in zip(points[::2], points[1::2], strict=True):
                    touched[first : first + len(starts)] |= (starts < b) & (stops > a)
        return touched

    def _turn_end(self, turn: tuple[int, int, int], chunks: ChunkEncoder, ids: Array, at: Array, begins: Array) -> int:
        part, index, point = turn
        if index == PLAIN:
            return int(begins[part + 1])
        _, stops, points = self._token_offsets(chunks, index, ids, at, [point])
        return int(begins[part] + np.count_nonzero(stops <= points[0]))  # a token across the seam is the next turn's

    def _token_offsets(
        self, chunks: ChunkEncoder, index: int, ids: Array, at: Array, points: list[int]
    ) -> tuple[Array, Array, list[int]]:
        return chunks.token_offsets(self.texts[index], ids[at[index] : at[index + 1]], points, self.first[index])


def _steps(normalizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, in order."""
    if normalizer is None:
        return []
    return [s for n in normalizer["normalizers"] for s in _steps(n)] if "normalizers" in normalizer else [normalizer]


def _types(component: Any) -> set[str]:
    """Return the type names inside a normalizer or pre-tokenizer."""
    if isinstance(component, dict):
        return {component.get("type", "")} | _types(list(component.values()))
    return set().union(*map(_types, component)) if isinstance(component, list) else set()


def _without_first_prefix(tokenizer: dict[str, Any]) -> Encoder | None:
    """Return an encoder for chunks inside a document where the tokenizer puts a space before a document only."""
    steps = tokenizer.get("pre_tokenizer")
    flat = steps.get("pretokenizers", [steps]) if isinstance(steps, dict) else []
    chosen = [step for step in flat if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"]
    if not chosen:
        return None
    for step in chosen:
        step["prepend_scheme"] = "never"
    return Encoder({"tokenizer.json": orjson.dumps(tokenizer)}, engine=REFERENCE)
