"""Render chat messages with the checkpoint's own template, in jinja2's sandbox, and encode them to token ids."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kernels import InputError
from model.tokenizer.base import Tokenizer

# A template is a program: beside jinja2's own errors, it can raise these of Python's.
PYTHON_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Render a chat as the model was trained on it, with control tokens by name.

    A message is like {"role": "user", "content": "Hello"}. With add_generation_prompt the text ends with the start of
    the answer. Raises InputError if the checkpoint has no template, or if the template fails on these messages.
    """
    if tokenizer.chat_template is None:
        raise InputError("no chat template; put its chat_template.jinja into the directory, or leave out --chat")
    given = {"messages": messages, "add_generation_prompt": add_generation_prompt, **tokenizer.token_names}
    given |= {"tools": None, "documents": None}  # templates ask whether there are any
    try:
        text = _environment().from_string(tokenizer.chat_template).render(given)
        text.encode()
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template is damaged in line {error.lineno}: {_one_line(error)}") from error
    except (jinja2.TemplateError, *PYTHON_ERRORS) as error:
        raise InputError(f"the chat template refuses these messages: {_one_line(error)}") from error
    return text


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a chat. BOS leads at most once, whether the template writes it or the checkpoint adds it.

    Control tokens come from the template alone: their names in a message are text. Raises the errors of render_chat.
    """
    messages = [{key: tokenizer.as_text(value) for key, value in message.items()} for message in messages]
    text = render_chat(tokenizer, messages, add_generation_prompt)
    return tokenizer.encode_with_control_tokens(text, bos=tokenizer.adds_bos)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """The tag {% generation %}, which marks the model's own words for training; in rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """jinja2 with the filters, functions and tags of transformers, for which templates are written."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return jinja


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
