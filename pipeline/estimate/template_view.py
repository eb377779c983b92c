"""What `pack check-template` shows on a terminal."""

from rich.console import Group, RenderableType

from pipeline.estimate.template_check import CorpusCheck, TemplateCheck
from pipeline.report.terminal import join_with_blank_lines, label_table, make_table, safe_text
from shards.errors import counted


def template_view(found: TemplateCheck) -> Group:
    """Return what a template does, for people."""
    yes = {True: "yes", False: "no"}
    rows = [
        ["{% generation %} marks", yes[found["marks"]]],
        ["header of an answer", repr(found["header"])],
        ["end of an answer", repr(found["end"])],
        ["EOS after every rendering", yes[found["closes_with_eos"]]],
        [
            "prints a date",
            "yes, always July 26, 2024, so that builds are alike" if found["prints_date"] else "no",
        ],
        ["content", "a list of parts" if found["content_parts"] else "text"],
    ]
    cases = [
        [
            case["name"],
            f"{case['documents']}" if case["documents"] else "-",
            " … ".join(map(repr, case["trained"])) or "-",
            case["note"],
        ]
        for case in found["cases"]
    ]
    parts: list[RenderableType] = [
        label_table(rows),
        make_table(["conversation", "documents", "trained", ""], cases, "What it makes of conversations"),
    ]
    if found["example"]:
        parts.append(safe_text("Several answers, ⟦ ⟧ targets:"))
    for number, text in enumerate(found["example"], 1):
        parts.append(safe_text(f"document {number}: {text!r}", "dim"))
    if found["corpus"] is not None:
        parts.append(label_table(_corpus_rows(found["corpus"])))
    return join_with_blank_lines(parts)


def _corpus_rows(corpus: CorpusCheck) -> list[list[str]]:
    taken = f"{corpus['taken']:,} of {counted(corpus['records'], 'record')}"
    made = f"{counted(corpus['documents'], 'document')}, {corpus['tokens']:,} tokens"
    refused = [[f"refused {number:,}", reason] for reason, number in corpus["refused"].items()]
    return [["corpus", f"{taken} taken: {made}"], *refused]
