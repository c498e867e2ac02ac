"""Chat templates: compiled in a sandbox, because they are programs that come with downloaded weights."""

from __future__ import annotations

import functools
import json
import re
import traceback
from datetime import datetime
from importlib import metadata

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollgraph.tokenizer.files import TokenizerError


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's output, for training masks. We only render its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the filters and functions that transformers provides."""
    _check_sandbox(metadata.version("jinja2"))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's filter escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # Not the type itself: with `dict.update`, a template could change the caller's messages.
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    return environment.from_string(source)


def _check_sandbox(installed: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    if numbers < _SAFE_JINJA2:
        minimum = ".".join(map(str, _SAFE_JINJA2))
        raise TokenizerError(
            f"chat templates are not run with jinja2 {installed}, because they can leave its sandbox; "
            f"pip install 'jinja2>={minimum}'"
        )


def template_error(error: Exception) -> TokenizerError:
    """An error that a template raised, with its line."""
    if isinstance(error, TokenizerError):
        return error
    message = error.message if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return TokenizerError(f"chat template, line {_failing_line(error)}: {message}")


def _failing_line(error: Exception) -> int | str:
    """The template's line that raised an error, the innermost if there are several."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line: int | str = "unknown"
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            line = number
    return line


_SAFE_JINJA2 = (3, 1, 6)  # the first version of jinja2 without a known sandbox escape
