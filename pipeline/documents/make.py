"""Records -> documents: flat tokens, and which of them are targets.

Text gets what its tokenizer puts around a text and one EOS. For conversations the template is the authority: no BOS is
added, and an EOS only where the last turn does not end in EOS or an end-of-turn mark already. Instruction records are
prompt and completion, as two texts or as messages. Documents without targets are returned like all others: the window
counts and drops them, so that their tokens stand in the balance.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.config import RecordOptions
from pipeline.documents.added_tokens import AddedTokens
from pipeline.documents.chat import Rendering, Target, TokenWeights
from pipeline.documents.conversations import ConversationRenderer
from pipeline.documents.encoder import Encoder
from pipeline.documents.engines import running_sum
from pipeline.documents.masked_encoding import ChunkEncoder, encode_renderings
from pipeline.documents.messages import Conversation, Weight, chat_conversation, instruction, lookup, used_fields
from pipeline.documents.token_weights import check_number, text_weights
from pipeline.documents.tokenized import tokenized_documents, with_eos
from pipeline.documents.tokenizer import TokenizerSpec
from pipeline.documents.tokenizer_files import CONFIG, TEMPLATE
from pipeline.documents.unread_fields import UnreadFields
from pipeline.documents.weights import record_weight, role_weights, with_record_weights
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents
from shards.errors import PackError, SourceError


def check_options(options: RecordOptions, spec: TokenizerSpec) -> None:
    """Refuse what no record of this kind could be made with, before anything is read or written.

    Raises:
        PackError: The options do not fit the tokenizer or the kind.
    """
    role_weights(options.train_on)
    if options.kind in ("text", "tokens"):
        if options.train_on not in ("auto", "all"):
            what = "plain text has" if options.kind == "text" else "token ids have"
            raise PackError(f"--train-on {options.train_on}: {what} no roles. Use all, or records with messages.")
        if options.kind == "text":
            _text_suffix(spec, options)
    elif options.kind == "chat":
        if options.train_on == "completion":
            raise PackError(
                "--train-on completion: a conversation has no completion. Use assistant, last-assistant, or roles."
            )
        _template_text(spec, options)


def with_trained_template(files: dict[str, bytes], options: Sequence[RecordOptions]) -> dict[str, bytes]:
    """Return tokenizer files that name the template which renders the conversations of all sources.

    Who trains on the rows and exports the model must talk to it with that template. Where sources differ in it, the
    files stay as they are.
    """
    chosen = {one.chat_template for one in options if one.kind in ("chat", "instruction")}
    if len(chosen) != 1 or (text := chosen.pop()) is None:
        return files
    config = orjson.loads(files.get(CONFIG, b"{}"))
    config.pop("chat_template", None)
    return {**files, CONFIG: orjson.dumps(config, option=orjson.OPT_INDENT_2), TEMPLATE: text.encode()}


def explain_no_targets(options: RecordOptions) -> str:
    """Return the likely cause when most documents of a source have no target, and what to do; two sentences."""
    wanted = options.train_on
    if options.kind == "text":
        return "Texts of a single token have nothing to predict. Check --text-field."
    if options.kind == "tokens":
        return "The labels are -100 or the mask is 0 everywhere. Check --labels-field and --mask-field."
    if options.kind == "instruction" and wanted in ("auto", "completion"):
        return f"The completions are empty. Check --completion-field, now {options.completion_field!r}."
    if wanted in ("auto", "assistant", "last-assistant"):
        return (
            "No message has the role assistant, train or weight fields turn them off, or the {% generation %} blocks "
            "of the chat template hold none. Check the roles, --train-on and --chat-template."
        )
    return f"No message has a role of --train-on {wanted}, or train and weight fields turn them off. Check the roles."


def _text_suffix(spec: TokenizerSpec, options: RecordOptions) -> list[int]:
    """Return what ends a text: the tokenizer's own suffix, and EOS once where it is wanted."""
    if not options.add_eos:
        return [token for token in spec.suffix_ids if token != spec.eos_id]
    ends = spec.suffix_ids and (spec.eos_id is None or spec.eos_id in spec.suffix_ids)
    return [*spec.suffix_ids] if ends else [*spec.suffix_ids, _eos(spec)]


def _eos(spec: TokenizerSpec) -> int:
    """Return the id of EOS; without one, documents would not end, and a model would not learn to stop."""
    if spec.eos_id is None:
        raise PackError(
            "the tokenizer names no EOS to end documents with; expected eos_token in its tokenizer_config.json. "
            "Name it there, or pass --no-eos."
        )
    return spec.eos_id


def _template_text(spec: TokenizerSpec, options: RecordOptions, with_tools: bool = False) -> str:
    """Return the chat template: the user's, else the tokenizer's own; with tools, that for tools."""
    if options.chat_template is not None:
        return options.chat_template
    text = spec.named_templates.get("tool_use", spec.chat_template) if with_tools else spec.chat_template
    if text is None and spec.named_templates:
        names = ", ".join(spec.named_templates)
        raise PackError(
            f"the tokenizer names the chat templates {names}, and none of them is the default; expected one for every "
            "conversation. Give the one you want as --chat-template FILE."
        )
    if text is None:
        raise PackError(
            "the tokenizer has no chat template; expected one for conversations. "
            "Give --chat-template FILE, or prompt and completion as text."
        )
    return text


class DocumentMaker:
    """Makes documents of the records of one source; a worker holds one for each set of options.

    Args:
        encoder: The tokenizer, made with the `parse_special` of the options.
        options: How a record becomes a document.

    Raises:
        PackError: The options do not fit the tokenizer or the kind.
    """

    def __init__(self, encoder: Encoder, options: RecordOptions) -> None:
        check_options(options, encoder.spec)
        spec = encoder.spec
        self.encoder, self.spec, self.options, self.trust = encoder, spec, options, encoder.parse_special
        self.added = AddedTokens(spec.added, spec.flags)
        self.unread_fields = UnreadFields(strict=options.strict_fields)
        self.renderers: dict[str, ConversationRenderer] = {}
        self.closing = {token for text, token in spec.added.items() if "special" in spec.flags.get(text, ())}

    def make(self, batch: RecordBatch) -> tuple[Documents, dict[str, int]]:
        """Turn records into documents.

        Args:
            batch: Texts (kind text), whole records (chat and instruction) or ids (tokens). Its `reject` is called for
                a record of the wrong form, or that its template cannot render.

        Returns:
            The documents, numbered as the batch numbers its records, and how many records gave none, by reason (empty).
        """
        if self.options.kind == "tokens":
            documents, rejected = tokenized_documents(batch, self.options, self.spec.max_id, self.unread_fields)
            if self.options.append_eos:
                eos_id = self.options.eos_id
                documents = with_eos(documents, _eos(self.spec) if eos_id is None else eos_id)
        elif self.options.kind == "text":
            documents, rejected = self._texts(batch)
        else:
            documents, rejected = self._renderings(batch)
        empty = len(batch.values) - len(np.unique(documents.doc_ids)) - rejected
        return documents, {"empty": empty} if empty else {}

    def trained_ends(self, documents: Documents) -> list[int]:
        """Return the end marks (EOS, end of turn) that the last token of an answer or document is trained to be."""
        return [int(token) for token in np.unique(documents.input_ids[self._answer_ends(documents)])]

    def unrolled(self, documents: Documents) -> dict[str, int]:
        """Return what became of the records that gave several documents; empty where none did.

        Returns:
            Such `conversations`; the answers that are trained in them, `turns`; their `documents` and `tokens`; and
            `tokens_once`, those of their last documents alone: how many there would be, did nothing come again.
        """
        if documents.doc_parts is None:
            return {}
        many = np.isin(documents.doc_ids, documents.doc_ids[documents.doc_parts > 0])
        last = many & np.append(np.diff(documents.doc_ids) != 0, True)
        ends = np.searchsorted(documents.offsets, self._answer_ends(documents), side="right") - 1
        return {
            "conversations": int(last.sum()),
            "turns": int(many[ends].sum()),
            "documents": int(many.sum()),
            "tokens": int(documents.lengths[many].sum()),
            "tokens_once": int(documents.lengths[last].sum()),
        }

    def _answer_ends(self, documents: Documents) -> npt.NDArray[np.int64]:
        """Return the places of the end marks that are the last target of an answer or document."""
        mask, last = documents.loss_mask, np.zeros(len(documents.input_ids), bool)
        if mask is not None:
            last[:-1] = mask[1:] == 0
        last[documents.offsets[1:][documents.lengths > 0] - 1] = True
        places = np.flatnonzero(last if mask is None else last & (mask > 0))
        marks = [*self.closing, *(() if self.spec.eos_id is None else (self.spec.eos_id,))]
        return places[np.isin(documents.input_ids[places], marks)]

    @cached_property
    def chunks(self) -> ChunkEncoder:
        """Encodes the text between control tokens."""
        return ChunkEncoder(self.encoder)

    def conversations(self, with_tools: bool) -> ConversationRenderer:
        """Return what renders conversations with or without tools, made when the first one comes."""
        text = _template_text(self.spec, self.options, with_tools)
        if text not in self.renderers:
            from pipeline.documents.template import ChatTemplate

            template = ChatTemplate(text, self.spec.special_tokens, self.added, trust=self.trust)
            self.closing |= {control.id for control in self.added.find(template.trial.end)[:1]}
            self.renderers[text] = ConversationRenderer(template, self.options)
        return self.renderers[text]

    def _texts(self, batch: RecordBatch) -> tuple[Documents, int]:
        spec = self.spec
        ids, begins = self.encoder.encode(batch.values)
        lengths = np.diff(begins)
        kept = lengths > 0
        fit, given = self._text_fields(batch, lengths)
        if not fit.all():
            ids, kept = ids[np.repeat(fit, lengths)], kept[fit]
            lengths = lengths[fit]
            begins = running_sum(lengths)
            batch = replace(batch, indices=batch.indices[fit])
        firsts, lasts = ids[begins[:-1][kept]], ids[begins[1:][kept] - 1]
        prefix, suffix = list(spec.prefix_ids), _text_suffix(spec, self.options)
        before = np.where(firsts == prefix[0], 0, len(prefix)) if prefix else np.zeros(len(firsts), np.int64)
        after = np.where(lasts == suffix[-1], 0, len(suffix)) if suffix else np.zeros(len(lasts), np.int64)
        offsets = running_sum(lengths[kept] + before + after)
        rejected = int(np.count_nonzero(~fit))
        weighed: dict[str, Any] = {}
        if self.options.weighted:
            chosen = [weight for weight, is_kept in zip(given, kept.tolist(), strict=True) if is_kept]
            weights = text_weights(chosen, lengths[kept], before, after)
            weighed = {"loss_mask": (weights > 0).astype(np.uint8), "loss_weights": weights}
        if not before.any() and not after.any():
            return Documents(ids, offsets, batch.indices[kept], **weighed), rejected
        input_ids = np.empty(offsets[-1], np.int32)
        shift = offsets[:-1] + before - begins[:-1][kept]
        input_ids[np.arange(len(ids)) + np.repeat(shift, lengths[kept])] = ids
        for place, token in enumerate(prefix):
            input_ids[offsets[:-1][before > 0] + place] = token
        for place, token in enumerate(reversed(suffix)):
            input_ids[offsets[1:][after > 0] - 1 - place] = token
        return Documents(input_ids, offsets, batch.indices[kept], **weighed), rejected

    def _text_fields(
        self, batch: RecordBatch, lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], list[Weight]]:
        """Look at the fields beside texts; return which records are good, and the weights of those."""
        fit, given = np.ones(len(batch.values), bool), list[Weight]()
        if batch.records is None:
            return fit, [1.0] * len(fit)
        read = frozenset(p.partition(".")[0] for p in (self.options.text_field, self.options.weights_field) if p)
        read |= {self.options.text_field, self.options.weights_field or self.options.text_field}
        for place, (record, length) in enumerate(zip(batch.records, lengths.tolist(), strict=True)):
            try:
                self.unread_fields.note(record, read)
                weight = record_weight(record, self.options)
                if isinstance(weight, tuple):
                    check_number(len(weight), length, f"field {self.options.weights_field!r}")
                given.append(weight)
            except SourceError as error:
                batch.reject(int(batch.indices[place]), str(error))
                fit[place] = False
        return fit, given

    def _renderings(self, batch: RecordBatch) -> tuple[Documents, int]:
        """Return the documents, and how many records were rejected."""
        renderings: list[Rendering] = []
        indices: list[int] = []
        rejected = 0
        for record, index in zip(batch.values, batch.indices.tolist(), strict=True):
            try:
                documents = self._rendered(record)
                if any(document.token_weights for document in documents):  # another number than tokens is its fault
                    encode_renderings(documents, self.chunks, with_weights=True)
            except SourceError as error:
                batch.reject(index, str(error))
                rejected += 1
                continue
            renderings += documents
            indices += [index] * len(documents)
        with_turns = self.options.overlong_policy == "truncate-turns"
        made = encode_renderings(renderings, self.chunks, with_turns=with_turns, with_weights=self.options.weighted)
        turns = np.array([rendering.turn for rendering in renderings], np.int32)
        parts = turns if turns.any() else None
        return made._replace(doc_ids=np.array(indices, np.int64), doc_parts=parts), rejected

    def _rendered(self, record: dict[str, Any]) -> list[Rendering]:
        """Return the documents of a record; none for an empty one."""
        read = instruction if self.options.kind == "instruction" else chat_conversation
        made = read(record, self.options)
        raw = lookup(record, self.options.messages_field) if self.options.kind == "chat" else None
        messages = raw if isinstance(raw, list) else ()  # of JSON text the messages alone are read
        self.unread_fields.note(record, used_fields(record, self.options, made), messages)
        if isinstance(made, Conversation):
            if not made.messages:
                return []
            made = with_record_weights(made, record, self.options)
            return [self._closed(one) for one in self.conversations(bool(made.tools)).render(made)]
        prompt, completion = made
        if not prompt and not completion:
            return []
        text = prompt + completion
        controls = self.added.find(text) if self.trust else []
        weight = record_weight(record, self.options)
        everything = self._trains_prompt()
        start = 0 if everything else len(prompt)
        single: tuple[TokenWeights, ...] = ()
        largest, last = (max(weight), weight[-1]) if isinstance(weight, tuple) else (weight, weight)
        if isinstance(weight, tuple):
            where = f"field {self.options.weights_field!r}"
            single = (TokenWeights([(start, len(text))], start, len(text), weight, where),)
        targets = [Target(start, len(text), largest)] if largest else []
        prefix = self.spec.prefix_ids
        if prefix and controls and controls[0].start == 0 and controls[0].id == prefix[0]:
            prefix = ()
        # A completion without its prompt is no document, so from the left both are one turn.
        ends = [len(text)] if self.options.truncate_side == "left" else [len(prompt), len(text)]
        trained = None if everything and largest == 1 else targets
        rendering = Rendering(text, controls, trained, ends, end_weight=last, prefix=prefix, token_weights=single)
        return [self._closed(rendering)]

    def _closed(self, rendering: Rendering) -> Rendering:
        """Append EOS, unless the text ends in an end mark already or nobody wants it."""
        last = rendering.controls[-1] if rendering.controls else None
        ends = (
            last is not None
            and last.id in {*self.closing, self.spec.eos_id}
            and not rendering.text[last.stop :].strip()
        )
        return rendering if ends or not self.options.add_eos else replace(rendering, eos_id=_eos(self.spec))

    def _trains_prompt(self) -> bool:
        train_on = self.options.train_on
        if train_on not in ("auto", "all", "completion", "assistant", "last-assistant"):
            raise PackError(f"--train-on {train_on}: prompts and completions have no roles. Use completion or all.")
        return train_on == "all"
