"""What a person wants to know when a build has finished: a line for the dataset, and one for each thing to think of."""

from shlex import quote

from pipeline.formatting import balances, describe_unread, format_reasons, format_share, unasked
from shards.counts import SET_ASIDE
from shards.errors import counted
from shards.manifest import Facts, Manifest


def _spelled_controls(facts: Facts) -> list[str]:
    """Say how many texts spell control tokens, as a line or none."""
    spelled = facts.get("spelled_controls", {})
    texts = spelled.get("texts", 0)
    if not texts:
        return []
    verb = "spells a control token" if texts == 1 else "spell control tokens"
    what = f"{counted(texts, 'text')} {verb}, such as {spelled.get('example', '')!r}"
    return [f"control text: {what}; it was kept as text (--parse-special reads it as control tokens)"]


def _unrolled(facts: Facts) -> list[str]:
    """Say which conversations became several documents, and what that costs, as a line or none."""
    unrolled = facts.get("unrolled", {})
    conversations, turns = unrolled.get("conversations", 0), unrolled.get("turns", 0)
    once = unrolled.get("tokens_once", 0)
    if not once:
        return []
    what = f"{counted(conversations, 'conversation')} with {counted(turns, 'trained answer')}"
    documents, factor = counted(unrolled.get("documents", 0), "document"), unrolled.get("tokens", 0) / once
    return [
        f"unrolled: {what} became {documents} of {factor:.2f} times the tokens, since "
        "the chat template rewrites earlier turns (--unroll never refuses them)"
    ]


def summary_lines(manifest: Manifest, path: str) -> list[str]:
    """Return what a person wants to know when a build has finished, in a few lines."""
    totals, seq_len = manifest["totals"], manifest["seq_len"]
    tokens, packs = totals["tokens"]["packed"], totals["packs"]
    full = tokens / (packs * seq_len) if packs else 0.0
    what = [counted(sheet.packed, sheet.thing.removesuffix("s")) for sheet in balances(totals)]
    losses, aside = [], []
    for sheet in balances(totals):
        losses.append((sheet.thing, format_reasons(unasked(sheet.lost))))
        aside.append((sheet.thing, format_reasons({name: sheet.lost.get(name, 0) for name in SET_ASIDE})))
    return [
        f"{path}: {', '.join(what)} in {counted(packs, 'pack')} of {seq_len:,} ({format_share(full)} full)",
        *(f"{thing} lost: {why}" for thing, why in losses if why),
        *(f"{thing} set aside: {why}" for thing, why in aside[:2] if why),  # targets go with their tokens
        *_unrolled(manifest["facts"]),
        *_spelled_controls(manifest["facts"]),
        *(describe_unread(*entry) for entry in manifest["facts"].get("unread_fields", {}).items()),
        f"dataset {manifest['dataset_id'][:16]}; see pack inspect {quote(path)}",
    ]
