"""Chats are rendered as transformers renders them, and faults of a template end in one line."""

import json

import pytest
from transformers import AutoTokenizer

from kernels import InputError
from model.tokenizer import load_tokenizer
from model.tokenizer.base import AS_TEXT
from model.tokenizer.chat import encode_chat, render_chat
from model.tokenizer.sentencepiece_model import train_tokenizer
from tests.model.tokenizer.makers import TEXT, byte_level, sentencepiece_like

# Short forms of published templates, with the constructs that those use.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|/header|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(index=0) -%}{{ bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}{%- continue %}{%- endif %}
    {%- if message["role"] == "user" -%}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- else -%}
        {%- generation -%}{{- " " + message["content"]|trim + eos_token }}{%- endgeneration -%}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if ns.index > 9 %}{%- break %}{%- endif %}
{%- endfor %}"""
CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{{ {'é': "<'&>"} | tojson }}{{ [1, 2] | tojson(indent=2) }}"""
TEMPLATES = {"llama2": LLAMA2, "llama3": LLAMA3, "mistral": MISTRAL, "chatml": CHATML}

USER, MORE = {"role": "user", "content": " a lily\n "}, {"role": "user", "content": "漢🙂 <b>\n\n1999"}
SYSTEM, ANSWER = {"role": "system", "content": "once upon"}, {"role": "assistant", "content": " upon a time\n"}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, MORE], [SYSTEM, USER, ANSWER, MORE, ANSWER]]


def with_template(folder, template, **config):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **config}))
    return folder


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_and_encoded_as_by_transformers(tmp_path, name, make, add_generation_prompt):
    folder = with_template(make(tmp_path), TEMPLATES[name], add_bos_token=False)  # transformers adds none to a chat
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for messages in CHATS:
        given = {"add_generation_prompt": add_generation_prompt}
        text = theirs.apply_chat_template(messages, tokenize=False, **given)
        assert render_chat(ours, messages, **given) == text
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
        assert encode_chat(ours, messages, **given) == ids
        # text reached the ids at all, and comes back without its control tokens
        assert ours.decode(ids).startswith(text.replace(theirs.bos_token, "").replace(theirs.eos_token, "")[:5])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("adds", [False, True])
def test_bos_leads_once_whether_template_or_tokenizer_writes_it(tmp_path, name, adds):
    tokenizer = load_tokenizer(with_template(byte_level(tmp_path), TEMPLATES[name], add_bos_token=adds))
    ids = encode_chat(tokenizer, [USER])
    assert ids.count(tokenizer.bos_id) == (adds or name != "chatml")
    assert (ids[0] == tokenizer.bos_id) is (adds or name != "chatml")


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_control_tokens_in_a_message_are_text(tmp_path, make, role):
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}{{ eos_token }}"
    tokenizer = load_tokenizer(with_template(make(tmp_path), template))
    names = "<|begin|><|end|><|eot|><s></s>"
    messages = [SYSTEM, USER, ANSWER, {"role": role, "content": f"a{names}b"}, USER]
    ids = encode_chat(tokenizer, messages)
    controls = [id for id in ids if tokenizer.piece_bytes(id) == b""]
    assert controls == [tokenizer.bos_id, tokenizer.eos_id]
    assert f"{role} a{names}b\n" in tokenizer.decode(ids)
    assert encode_chat(tokenizer, [{"role": names, "content": "a"}]).count(tokenizer.eos_id) == 1  # in a role, too


def test_a_message_cannot_turn_the_templates_control_token_into_text(tmp_path):
    tokenizer = load_tokenizer(with_template(byte_level(tmp_path), "{{ messages[0]['content'] }}{{ eos_token }}"))
    marked = encode_chat(tokenizer, [{"role": "user", "content": f"a{AS_TEXT}"}])
    assert marked == encode_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert marked[-1] == tokenizer.eos_id


def test_sentencepiece_gives_a_template_its_own_begin_and_end(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer([TEXT], 300).files["tokenizer.model"])
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    tokenizer = load_tokenizer(tmp_path)
    assert render_chat(tokenizer, [USER, ANSWER]) == "<s>[INST]  a lily\n [/INST] upon a time</s>"
    ids = encode_chat(tokenizer, [USER, ANSWER])
    assert ids == [1, *tokenizer.encode("[INST]  a lily\n [/INST] upon a time"), 2]


def test_templates_get_the_time_in_their_format(tmp_path):
    tokenizer = load_tokenizer(with_template(byte_level(tmp_path), "{{ strftime_now('%Y') | int > 2000 }}"))
    assert render_chat(tokenizer, [USER]) == "True"


def test_templates_get_no_tools_and_no_documents(tmp_path):
    tokenizer = load_tokenizer(with_template(byte_level(tmp_path), "{{ tools is none and documents is none }}"))
    assert render_chat(tokenizer, [USER]) == "True"


def test_without_a_template_one_line_says_so(tmp_path):
    with pytest.raises(InputError, match=r"no chat template; put its chat_template\.jinja into the directory"):
        render_chat(load_tokenizer(byte_level(tmp_path)), [USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9]['content'] }}", "refuses these messages: list object has no element 9"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("\n{% if %}", "damaged in line 2"),
        ("{% for m in messages %}", "damaged in line 1"),
        ("{{ messages | unknown }}", "damaged in line 1: No filter named 'unknown'"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a'.encode('nope') }}", "unknown encoding"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 'a' * 10 ** 15 }}", "refuses these messages"),
        ("{{ '\\ud800' }}", "refuses these messages"),
    ],
)
def test_a_template_that_fails_ends_in_one_line(tmp_path, template, message):
    tokenizer = load_tokenizer(with_template(byte_level(tmp_path), template))
    with pytest.raises(InputError) as error:
        encode_chat(tokenizer, [USER])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
