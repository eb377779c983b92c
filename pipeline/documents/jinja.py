"""Chat templates compiled and run as transformers does it, without importing transformers.

Importing it costs each worker more than a second, which is more than a small build takes. The environment has what
`transformers.utils.chat_template_utils` gives a template: its sandbox, trimming of blocks, loop controls, `tojson` that
escapes nothing, `raise_exception`, `strftime_now` and `{% generation %}` blocks; a test compares both. Only the date is
another: a template that prints today's would give other tokens on another day, so it is always the same one.
"""

import json
from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TODAY = date(2024, 7, 26)
Range = tuple[int, int]


class CompiledTemplate:
    """A chat template; raises `jinja2.TemplateSyntaxError` where its text is none.

    Args:
        text: The template.
        variables: What it reads beside the conversation: bos_token, eos_token, …
    """

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self._environment = _environment()
        self._template = self._environment.from_string(text)
        self._variables = {"documents": None, **variables}

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> str:
        """Return the text of a conversation; with `prompt`, and the header of an answer to come."""
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._variables)

    def render_blocks(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[Range]]:
        """Return the text and the ranges of its `{% generation %}` blocks, in the order in which they ended."""
        written: list[str] = []
        ranges: list[Range] = []
        tracker = self._environment.extensions[_Generation.identifier]
        tracker.written, tracker.ranges = written, ranges  # type: ignore[attr-defined]
        try:
            variables = {"messages": messages, "tools": tools, "add_generation_prompt": False, **self._variables}
            for part in self._template.generate(variables):
                written.append(part)  # noqa: PERF402 (each block is placed by what was written before it)
        finally:
            tracker.written = tracker.ranges = None  # type: ignore[attr-defined]
        return "".join(written), ranges


class _Generation(Extension):
    """`{% generation %}` blocks: what an assistant says. Where they stand is known while the text is written."""

    tags = {"generation"}  # noqa: RUF012 (the name and form that jinja2 reads)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.written: list[str] | None = None
        self.ranges: list[Range] | None = None

    def parse(self, parser: Parser) -> nodes.Node:
        """Make the block a call of `_note`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Macro) -> str:
        text: str = caller()
        if self.written is not None and self.ranges is not None:
            start = sum(map(len, self.written))
            self.ranges.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """A namespace without underscore names, which would lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace holds no attribute that begins with an underscore, such as {name!r}")


class _Dict:
    """The `dict` of templates: a function, not the class with its ways out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": TODAY.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
