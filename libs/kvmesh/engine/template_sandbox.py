"""Compiles chat templates as transformers does, but in a sandbox.

Services that serve chats render them; the check of a model folder only compiles them.
Tests: tests/unit/engine/test_chat_template.py, tests/unit/gateway/test_real_templates.py.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvmesh.core.errors import CheckpointError


def compile_chat_template(source: str) -> jinja2.Template:
    """Compiles a template in a sandbox.

    Raises:
        CheckpointError: it is not valid Jinja.
    """
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template cannot be compiled: line {error.lineno}: {error.message}"
        raise CheckpointError(message) from error
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the model's own text for training."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the block's content without the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with transformers' arguments."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
