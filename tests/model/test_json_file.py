"""model/json_file.py: files with a byte-order mark, as editors on Windows write them."""

import pytest

from kernels import InputError
from model.json_file import decode_text, parse_object, read_object

MARK = "\ufeff"


def test_a_byte_order_mark_is_dropped_at_the_start_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(MARK + '{"a": "' + MARK + 'b"}', encoding="utf-8")
    assert read_object(path) == {"a": MARK + "b"}
    assert decode_text(path, (MARK + "{{ a }}" + MARK).encode()) == "{{ a }}" + MARK
    assert decode_text(path, MARK.encode()) == ""


def test_nothing_but_a_mark_is_not_json(tmp_path):
    with pytest.raises(InputError, match="is not JSON"):
        parse_object(tmp_path / "config.json", MARK.encode())
