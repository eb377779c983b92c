"""Templates run as transformers runs them."""

from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.documents.jinja import CompiledTemplate

TEMPLATES = sorted((Path(__file__).parents[3] / "templates").glob("*.jinja"))
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é> & two"}}}
TALK = [
    {"role": "user", "content": "one <b> & 'two'"},
    {"role": "assistant", "content": "three\n"},
    {"role": "user", "content": "  four"},
    {"role": "assistant", "content": "five"},
]


def theirs(text: str, messages: list, prompt: bool = False, markers: bool = False) -> tuple[str, list]:
    texts, ranges = render_jinja_template(
        [messages],
        chat_template=text,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=markers,
        **VARIABLES,
    )
    return texts[0], ranges[0] if markers else []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_writes_what_it_writes_in_transformers(path, prompt):
    text = path.read_text(encoding="utf-8").replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    messages = TALK
    if path.stem == "parts":
        messages = [talk | {"content": [{"type": "text", "text": talk["content"]}]} for talk in TALK]
    ours = CompiledTemplate(path.read_text(encoding="utf-8"), VARIABLES).render(messages, None, prompt)
    assert ours == theirs(text, messages, prompt)[0]


@pytest.mark.parametrize("name", ["marked", "misplaced"])
def test_generation_blocks_stand_where_transformers_sees_them(name):
    text = next(path for path in TEMPLATES if path.stem == name).read_text(encoding="utf-8")
    template = CompiledTemplate(text, VARIABLES)
    assert template.render_blocks(TALK, None) == theirs(text, TALK, markers=True)
    assert template.render(TALK, None, False) == theirs(text, TALK)[0]  # nothing of the tracking stays


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, ensure_ascii=true) }}",
        "{%- set n = namespace(x=1) %}{%- for m in messages %}{%- set n.x = n.x + 1 %}{%- if n.x > 3 %}{%- break %}"
        "{%- endif %}{%- endfor %}{{ n.x }}",
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- continue %}{%- endif %}{{ m.content }}{%- endfor %}",
        "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ messages[0].nothing is defined }}{{ tools is none }}",
        "  {% if true %}\n  x\n  {% endif %}\n",
    ],
)
def test_filters_loops_and_white_space_are_those_of_transformers(text):
    assert CompiledTemplate(text, VARIABLES).render(TALK, None, False) == theirs(text, TALK)[0]


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__[-1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}{{ cycler.__init__.__globals__ }}",
        "{%- set n = namespace(_a=1) %}",
        "{%- set _ = messages.append(1) %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_ways_out_of_the_sandbox_are_closed_as_there(text):
    with pytest.raises(TemplateError):
        theirs(text, TALK)
    with pytest.raises(TemplateError):
        CompiledTemplate(text, VARIABLES).render(TALK, None, False)
