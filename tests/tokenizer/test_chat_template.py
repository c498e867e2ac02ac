"""Chat templates, compared with transformers; templates that fail, and templates that misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgraph.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
)
from tests.tokenizer.kinds import CHATS, CONFIG, of_kind, peer_of, write

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set state.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > state.last and message.thought is defined %}
            {{- '<think>' + message.thought.strip('\\n') + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.name + ' ' + call.arguments | tojson(indent=2) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ date_string }}

{% if documents %}{% for document in documents %}{{ document.title }}: {{ document.text }}
{% endfor %}{% endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ (message.content or '') | trim }}
        {%- if message.tool_calls %}{{- message.tool_calls[0] | tojson }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + (message["content"] or message.tool_calls | tojson) | trim + eos_token }}
    {%- else %}
        {{- "[" ~ message.role | upper ~ "] " ~ message.content ~ " {{ braces }}" }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Température <b>& more</b> 日本",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}},
]


@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["no tools", "empty tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_equal_transformers(tmp_path: Path, name: str, tools: Any, chat: list[dict[str, Any]]) -> None:
    folder = write(tmp_path, chat_template_jinja=TEMPLATES[name])
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "tools": tools}
        for variables in ({}, {"enable_thinking": False, "date_string": "today", "bos_token": "<bos>"}):
            text = ours.render_chat(chat, **options, **variables)
            assert text == peer.apply_chat_template(chat, tokenize=False, **options, **variables)
            assert chat[0]["content"].strip() in text
            ids = ours.encode_chat(chat, **options, **variables)
            assert ids == peer.apply_chat_template(chat, **options, **variables)["input_ids"]
            assert ids == ours.encode(text, special=False)
    documents = [{"title": "T", "text": "Ü"}]
    expected = peer.apply_chat_template(chat, documents=documents, tokenize=False)
    assert ours.render_chat(chat, documents=documents, add_generation_prompt=False) == expected


def test_a_generation_prompt_is_added_by_default() -> None:
    tokenizer = of_kind("byte_level", chat_template=CHATML)
    text = tokenizer.render_chat(CHATS[0])
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(CHATS[0])
    assert ids.count(tokenizer.vocab["<|im_start|>"]) == 2
    assert tokenizer.bos_id not in ids  # the post-processor would add one, but the template did not


NAMED = [{"name": "default", "template": "plain {{ 1 }}"}, {"name": "tool_use", "template": "tools {{ 2 }}"}]


def test_named_templates_equal_transformers(tmp_path: Path) -> None:
    config = {**CONFIG, "chat_template": [*NAMED, {"name": "rag", "template": "rag {{ 3 }}"}]}
    folder = write(tmp_path / "a", tokenizer_config_json=config)
    Tokenizer.from_folder(folder).save(tmp_path / "b")
    peer_of(folder).save_pretrained(tmp_path / "c")  # as one file for each template
    for name in "abc":
        ours, peer = Tokenizer.from_folder(tmp_path / name), peer_of(tmp_path / name)
        for options in ({}, {"tools": []}, {"tools": TOOLS}):
            assert ours.render_chat(CHATS[0], **options) == peer.apply_chat_template(
                CHATS[0], tokenize=False, **options
            )
        assert ours.render_chat(CHATS[0], template="rag") == "rag 3"
        assert ours.render_chat(CHATS[0], tools=TOOLS, template="default") == "plain 1"
        assert ours.render_chat(CHATS[0], template="own {{ eos_token }}") == "own </s>"
        with pytest.raises(TokenizerError, match=r"no chat template 'rug', only \['default', 'rag', 'tool_use'\]"):
            ours.render_chat(CHATS[0], template="rug")


def test_the_template_file_takes_precedence(tmp_path: Path) -> None:
    config = {**CONFIG, "chat_template": NAMED}
    folder = write(tmp_path, tokenizer_config_json=config, chat_template_jinja="file\r\n{{ 1 }}\n")
    ours = Tokenizer.from_folder(folder)
    assert list(ours.chat_templates) == ["default"]
    assert ours.render_chat(CHATS[0], tools=TOOLS) == "file\n1"


def test_a_missing_template_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="has no chat template 'default', nor any other; pass one as template="):
        of_kind("words").encode_chat(CHATS[0])
    only = of_kind("words", chat_template={"rag": "rag {{ 3 }}"})
    with pytest.raises(TokenizerError, match=r"has no chat template 'default', only \['rag'\]"):
        only.render_chat(CHATS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "line 1: roles must alternate$"),
        ("\n\n{% for m in messages %}\n{{ raise_exception(m.role) }}{% endfor %}", "line 4: user$"),
        ("{{ 1 }}\n{% if %}", "line 2: Expected an expression"),
        ("{% for m in messages %}\n\n", "line 1: Unexpected end of template.*endfor"),
        ("\n{{ nothing.here }}", "line 2: 'nothing' is undefined"),
        ("\n{{ messages[0].content + 5 }}", "line 2: TypeError: can only concatenate str"),
        ("{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "line 2: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "line 1: RecursionError"),
        ("{{ unknown_tag | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        ("{% generation %}\n{{ 1 / 0 }}{% endgeneration %}", "line 2: ZeroDivisionError"),
        ("{{ messages | tojson }}{{ raise_exception | tojson }}", "line 1: TypeError: .*not JSON serializable"),
    ],
)
def test_a_failing_template_says_why_and_where(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match="^chat template, " + message):
        of_kind("words").render_chat(CHATS[0], template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__')).__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_names }}",
        "{{ dict.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('true') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
        "{% set n = namespace() %}{% set n.__call__ = messages.append %}{{ n(1) }}",
        "{% set n = namespace(__call__=raise_exception) %}{{ n('x') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages[0].pop('content') }}",
        "{{ dict.update(messages[0], {'content': 'x'}) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "untouched"}]
    with pytest.raises(TokenizerError, match=r"^chat template, line 1: "):
        of_kind("words").render_chat(messages, template=template)
    assert messages == [{"role": "user", "content": "untouched"}]


def test_templates_may_use_namespaces_dicts_and_generation_blocks(tmp_path: Path) -> None:
    template = (
        "   {% if documents is none %}none\n   {% endif %}"
        "{% set n = namespace({'a': 1}, self=2) %}{% set n.b = dict(x=n.a) %}{{ n.b.x }}{{ n.self }}"
        "{% for i in range(5) %}{% generation %}{% set n.a = i %}{% set leak = i %}{{ i }}{% endgeneration %}"
        "{{ leak }}{% endfor %}{{ n.a }}{{ dict({'y': '<&>'}, z='é') | tojson(sort_keys=true, ensure_ascii=true) }}"
    )
    folder = write(tmp_path, chat_template_jinja=template)
    text = Tokenizer.from_folder(folder).render_chat(CHATS[0])
    assert text == peer_of(folder).apply_chat_template(CHATS[0], tokenize=False)
    assert text == 'none\n12012344{"y": "<&>", "z": "\\u00e9"}'
    # transformers makes the block a function, so `break` is a syntax error there
    loop = "{% for i in range(9) %}{% generation %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endgeneration %}"
    assert of_kind("words").render_chat([], template=loop + "{% endfor %}") == "012"


@pytest.mark.parametrize("version", ["3.1.5", "2.11.3", "3.0"])
def test_templates_do_not_run_in_an_unsafe_jinja2(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    message = rf"jinja2 {version}, because they can leave its sandbox; pip install 'jinja2>=3\.1\.6'"
    with pytest.raises(TokenizerError, match=message):
        ByteTokenizer().render_chat([{"role": "user", "content": "x"}], template="{{ messages }} " + version)


@pytest.mark.parametrize("version", ["3.1.6", "3.1.10", "3.2", "4.0.0rc1"])
def test_templates_run_in_a_safe_jinja2(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert ByteTokenizer().render_chat([], template="{{ 1 + 1 }} " + version) == f"2 {version}"
