"""The small files beside a tokenizer: added tokens, the names of special ones, the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import decode_text, parse_object, read_file, show

NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class AddedToken:
    """A token beside the trained pieces. A control token prints nothing and isn't found in ordinary text."""

    id: int
    text: str
    control: bool
    lstrip: bool = False  # takes the white space before it along, or after it
    rstrip: bool = False
    single_word: bool = False  # not inside a longer word
    normalized: bool = False  # looked for in the text as tokenizer.json's normalizer leaves it


@dataclass(frozen=True)
class TokenizerConfig:
    """What the small files say. `names` maps bos_token, eos_token and the like to their text, or to None."""

    files: dict[str, bytes]
    added: list[AddedToken]
    names: dict[str, str | None]
    add_bos: bool | None
    legacy: bool
    chat_template: str | None

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read those of the files that are there. Raises InputError naming the file and what is wrong in it."""
        files = {name: read_file(folder / name) for name in NAMES if (folder / name).exists()}
        objects = {name: parse_object(folder / name, files.get(name, b"{}")) for name in NAMES[:3]}
        config, special_map, plainly_added = objects.values()
        path = folder / NAMES[0]
        decoder = _typed(path, config, "added_tokens_decoder", dict)
        names = _token_names(path, config)
        if decoder is None:  # as transformers reads them: the list with all attributes replaces the two older files
            names |= _token_names(folder / NAMES[1], special_map)
            special = set(names.values()) | set(_extra_special(path, config) + _extra_special(path, special_map))
            added = [
                AddedToken(_id(folder / NAMES[2], text, id), text, text in special, normalized=text not in special)
                for text, id in plainly_added.items()
            ]
        else:
            added = [_added_token(path, id, token) for id, token in decoder.items()]
        template = _chat_template(path, config)
        if NAMES[3] in files:  # transformers, too, prefers the file
            template = decode_text(folder / NAMES[3], files[NAMES[3]])
        return cls(
            files,
            sorted(added, key=lambda token: token.id),
            names,
            _typed(path, config, "add_bos_token", bool),
            bool(_typed(path, config, "legacy", bool)),
            template,
        )


def _typed(path: Path, values: dict[str, Any], key: str, kind: type) -> Any:
    found = values.get(key)
    if found is not None and not isinstance(found, kind):
        expected = {bool: "true or false", dict: "an object", list: "a list", str: "a text"}[kind]
        raise InputError(f"{path}: {key} is {show(found)}; expected {expected}")
    return found


def _id(path: Path, name: str, id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**32:
        raise InputError(f"{path}: {show(name)} has the id {show(id)}; expected a whole number from 0 on")
    return id


def _token_text(path: Path, key: str, value: Any) -> str:
    """A token is written as its text, or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InputError(f"{path}: {key} is {show(value)}; expected a text, or an object with the text as its content")
    return text


def _token_names(path: Path, values: dict[str, Any]) -> dict[str, str | None]:
    # add_bos_token and add_eos_token end like names, and are none.
    keys = [key for key in values if key.endswith("_token") and not key.startswith("add_")]
    return {key: None if values[key] is None else _token_text(path, key, values[key]) for key in keys}


def _extra_special(path: Path, values: dict[str, Any]) -> list[str]:
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        found = values.get(key) or []
        if not isinstance(found, (list, dict)):
            raise InputError(f"{path}: {key} is {show(found)}; expected a list of tokens")
        texts += [_token_text(path, key, token) for token in (found.values() if isinstance(found, dict) else found)]
    return texts


def _added_token(path: Path, id: str, token: Any) -> AddedToken:
    key = f"added_tokens_decoder {show(id)}"
    if not isinstance(token, dict):
        raise InputError(f"{path}: {key} is {show(token)}; expected an object with content and special")
    control = bool(_typed(path, token, "special", bool))
    flags = {name: bool(_typed(path, token, name, bool)) for name in ("lstrip", "rstrip", "single_word")}
    flags["normalized"] = bool(_typed(path, {"normalized": not control, **token}, "normalized", bool))
    text = _token_text(path, key, token)
    # JSON's keys are text; isdecimal, not isdigit, which takes superscripts for numbers
    number = int(id) if id.isdecimal() and len(id) < 12 else id
    return AddedToken(_id(path, text, number), text, control, **flags)


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template, or of several under names the one called default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        for named in found:
            if not isinstance(named, dict) or not isinstance(named.get("template"), str):
                raise InputError(f"{path}: chat_template holds {show(named)}; expected a name and a template")
        found = next((named["template"] for named in found if named.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise InputError(f"{path}: chat_template is {show(found)}; expected a text, or a list of named templates")
    return found
