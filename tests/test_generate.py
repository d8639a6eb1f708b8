"""The command as it is typed, against greedy decoding written out."""

import io
import json
import os
import re
import shutil
import socket
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TextIO, cast

import pytest
import torch

import kernels
from generate import check_memory, drawing, main, read_prompts, utf8_text
from kernels import InputError
from model.checkpoint.load import load_checkpoint
from model.checkpoint.save import save_checkpoint
from model.config import LlamaConfig
from model.llama import Llama
from model.tokenizer import load_tokenizer
from model.tokenizer.base import Tokenizer
from model.tokenizer.sentencepiece_model import train_tokenizer
from tests.helpers import CPU, greedy, needs_triton
from tests.model.training import runs

PROMPT = "once\n  upon 🙂"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small model with weights that matter, which never ends a greedy text of its own, and its tokenizer."""
    tokenizer = train_tokenizer(["once upon a time\n  there was a lily\n" * 20], 300)
    config = LlamaConfig(tokenizer.vocab_size, 32, 48, 2, 4, 2, 8, 64, rms_norm_eps=3e-3, eos_token_id=2)
    torch.manual_seed(0)
    model = Llama(config, kernels.load_backend("reference", CPU))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    torch.nn.init.zeros_(model.lm_head.weight[tokenizer.eos_id])  # never the likeliest
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, model, tokenizer)
    return folder


def load(folder: Path, **options) -> tuple[Llama, Tokenizer]:
    model = load_checkpoint(folder, kernels.load_backend("reference", CPU), CPU, **options)
    return model, load_tokenizer(folder)


def text_of(folder: Path, prompt: str, n_new: int, **options) -> str:
    model, tokenizer = load(folder, **options)
    ids = tokenizer.encode(prompt, bos=True)
    return tokenizer.decode(ids + greedy(model, ids, n_new, tokenizer.vocab_size)) + "\n"


@pytest.fixture
def write(command, checkpoint):
    """Run the command: up to 20 tokens from the checkpoint, unless the arguments say otherwise."""
    return lambda *arguments, **given: command(main, "--ckpt", checkpoint, "--max-new-tokens", 20, *arguments, **given)


def changed(checkpoint: Path, folder: Path, **values) -> Path:
    """A copy whose config.json has other values; None leaves a key out."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("norm", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_every_norm_writes_prompt_and_greedy_text_to_stdout_alone(write, checkpoint, prompt, norm):
    code, out, err = write("--prompt", prompt, "--temperature", 0, "--norm", norm)
    # Along these texts the likeliest token leads by 0.003 or more; norms differ by float32 rounding, below 1e-5.
    assert (code, out) == (0, text_of(checkpoint, prompt, 20))
    assert out.startswith(prompt)
    assert f"norm {norm}" in err
    assert re.search(r"20 tokens at [\d.]+ tokens/s", err)
    assert out.strip() not in err


def test_the_flags_of_sampling_reach_it(write):
    likeliest = write("--prompt", "once", "--temperature", 0)[1]
    assert write("--prompt", "once", "--top-k", 1)[1] == write("--prompt", "once", "--top-p", 1e-9)[1] == likeliest
    assert write("--prompt", "once", "--seed", 1)[1] != likeliest


def test_the_weights_are_computed_in_the_dtype_and_on_the_device_asked_for(write):
    assert "bfloat16 on cpu" in write("--dtype", "bfloat16")[2]
    assert "float32 on cpu" in write("--device", "cpu")[2]
    code, _, err = write("--device", "meta")
    assert code == 2
    assert "--device meta" in err


@pytest.mark.parametrize("prompts", [["once"], ["once", "there was a lily"]])
def test_compilation_changes_no_text(write, checkpoint, monkeypatch, prompts):
    from model import compiled_step as decoder

    calls, compile_step = [], decoder.compile_step

    def counted(model):
        step = compile_step(model)
        return lambda *arguments, **options: calls.append(None) or step(*arguments, **options)

    monkeypatch.setattr(decoder, "compile_step", counted)
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    arguments += ["--temperature", 0, "--max-new-tokens", 1000]  # until the context is full
    code, out, err = write(*arguments, "--compile")
    assert (code, out) == write(*arguments)[:2]
    n_once = 65 - len(load_tokenizer(checkpoint).encode("once", bos=True))
    assert len(calls) == 1 + n_once - 1  # one to warm up, and the first token comes from the prefill
    assert re.search(r"compiled in [\d.]+ s", err)


def test_the_reasons_of_several_texts_are_counted(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    once, lily = (greedy(model, tokenizer.encode(text, bos=True), 20) for text in ("once", "there was a lily"))
    ends = next(id for id in once if id not in lily)
    folder = changed(checkpoint, tmp_path, eos_token_id=[ends])
    prompts = ["--prompt", "once", "--prompt", "there was a lily", "--temperature", 0]
    _, _, err = write("--ckpt", folder, *prompts)
    assert "stopped at the end token (1 of 2), --max-new-tokens (1 of 2)" in err


@pytest.mark.parametrize("seed", [0, 1337])
def test_a_seed_repeats_the_text(write, seed):
    first, again, other = (write("--seed", s)[:2] for s in (seed, seed, seed + 1))
    assert first == again
    assert first != other


def test_the_printed_seed_repeats_a_run_without_one(write):
    code, out, err = write()
    assert write("--seed", re.search(r"seed (\d+)", err)[1])[:2] == (code, out)
    assert write()[1] != out


def test_no_new_tokens_leave_the_prompt(write):
    for prompt in (PROMPT, PROMPT + "\n"):
        assert write("--prompt", prompt, "--max-new-tokens", 0)[:2] == (0, prompt + "\n")


def test_the_configs_end_ids_stop_the_text_and_are_not_shown(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    new = greedy(model, [tokenizer.bos_id], 20)
    n_new = new.index(new[5])
    folder = changed(checkpoint, tmp_path, eos_token_id=[2, new[n_new]])
    _, out, err = write("--ckpt", folder, "--temperature", 0)
    assert out == tokenizer.decode(new[:n_new]) + "\n"
    assert f"{n_new} tokens" in err


def test_norm_eps_takes_the_place_of_the_checkpoints(write, checkpoint, tmp_path):
    arguments = ["--ckpt", changed(checkpoint, tmp_path, rms_norm_eps=None), "--temperature", 0]
    code, _, err = write(*arguments)
    assert code == 2
    assert "rms_norm_eps is missing" in err
    assert "--norm-eps" in err
    texts = [write(*arguments, "--norm-eps", eps)[1] for eps in (3e-3, 1.0)]
    assert texts == [text_of(checkpoint, "", 20, rms_norm_eps=eps) for eps in (3e-3, 1.0)]
    assert texts[0] == text_of(checkpoint, "", 20) != texts[1]
    assert "rms_norm_eps 0.7 overrides 0.003 of" in write("--norm-eps", 0.7)[2]


def test_ids_beyond_the_tokenizer_are_never_drawn(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    padded = Llama(replace(model.config, vocab_size=tokenizer.vocab_size + 50), kernels.load_backend("reference", CPU))
    state, generator = model.state_dict(), torch.Generator().manual_seed(0)
    for name in ("embed_tokens.weight", "lm_head.weight"):  # with rows that make the new ids by far the likeliest
        state[name] = torch.cat([state[name], 10 * torch.randn(50, 32, generator=generator)])
    padded.load_state_dict(state)
    save_checkpoint(tmp_path, padded, tokenizer)
    assert write("--ckpt", tmp_path, "--seed", 5)[:2] == write("--seed", 5)[:2]
    # Three ids without a piece, then an added token.
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<added>": tokenizer.vocab_size + 3}))
    for temperature in (0, 1.5):
        code, out, _ = write("--ckpt", tmp_path, "--temperature", temperature, "--seed", 5)
        assert (code, "<added>" in out, "\u2047" in out) == (0, True, False)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    small = Llama(replace(model.config, vocab_size=tokenizer.vocab_size - 1), kernels.load_backend("reference", CPU))
    save_checkpoint(tmp_path, small, tokenizer)
    code, _, err = write("--ckpt", tmp_path)
    assert code == 2
    assert f"{tokenizer.vocab_size} pieces" in err
    assert f"{tokenizer.vocab_size - 1} rows" in err


def test_the_context_is_filled_and_not_passed(write, checkpoint):
    """The last position is 63, and the token drawn there is not fed back."""
    n_prompt = len(load_tokenizer(checkpoint).encode(PROMPT, bos=True))
    arguments = ["--prompt", PROMPT, "--temperature", 0, "--max-new-tokens"]
    code, out, err = write(*arguments, 1000)
    assert (code, out) == (0, text_of(checkpoint, PROMPT, 65 - n_prompt))
    assert "stopped at the full context (64 tokens)" in err
    assert "stopped at --max-new-tokens" in write(*arguments, 65 - n_prompt)[2]


def test_each_text_of_a_batch_is_said_to_end_for_its_own_reason(write, checkpoint, tmp_path):
    """64 and 65 tokens reach the end together; an end id as the last token that fits is an end."""
    model, tokenizer = load(checkpoint)
    full = PROMPT + "x" * (64 - len(tokenizer.encode(PROMPT, bos=True)))
    ids = tokenizer.encode(full, bos=True)
    assert len(ids) == 64
    arguments = ["--temperature", 0, "--max-new-tokens", 1000]
    code, out, err = write("--prompt", full, *arguments)
    assert (code, out) == (0, text_of(checkpoint, full, 1))
    assert "1 tokens at" in err
    assert "stopped at the full context (64 tokens)" in err
    code, out, err = write("--prompt", full, "--prompt", "once", *arguments)
    n_once = 65 - len(tokenizer.encode("once", bos=True))
    assert parts(out) == [text_of(checkpoint, full, 1), text_of(checkpoint, "once", n_once)]
    assert f"{1 + n_once} tokens at" in err
    assert "stopped at the full context (64 tokens)\n" in err
    folder = changed(checkpoint, tmp_path, eos_token_id=greedy(model, ids, 1))
    assert "stopped at the end token" in write("--ckpt", folder, "--prompt", full, *arguments)[2]
    code, _, err = write("--prompt", full + "x", *arguments)
    assert (code, "the prompt has 65 tokens and the model's context 64" in err) == (2, True)


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(write, chat_checkpoint, flags):
    code, out, err = write("--ckpt", chat_checkpoint, "--prompt", "once upon a time " * 30, *flags)
    assert (code, out) == (2, "")
    assert "the model's context 64" in err
    assert re.search(rf"the {'conversation' if flags else 'prompt'} has \d+ tokens", err)


def test_standard_input_is_a_prompt(write, checkpoint):
    expected = text_of(checkpoint, PROMPT + "\n", 20)
    assert write("--temperature", 0, stdin=(PROMPT + "\n").encode())[:2] == (0, expected)
    assert write("--temperature", 0, "--prompt", PROMPT, stdin=b"not read")[1] == text_of(checkpoint, PROMPT, 20)
    code, _, err = write(stdin=b"\xff\xfe")
    assert code == 2
    assert "standard input is not UTF-8" in err


def standard_input(kind: str) -> TextIO:
    """Standard input of a kind. Whoever writes to it pauses in the middle of the text."""
    if kind == "socket":
        ours, theirs = socket.socketpair()
        reading, writing = ours.detach(), theirs.detach()
    else:
        reading, writing = os.openpty() if kind == "terminal" else os.pipe()
        os.set_blocking(reading, kind != "pipe that does not block")
    if kind == "terminal":
        return os.fdopen(reading)

    def write():
        for part in (PROMPT[:5], PROMPT[5:]):
            time.sleep(0.05)
            os.write(writing, part.encode())
        os.close(writing)

    Thread(target=write).start()
    return os.fdopen(reading)


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [("socket", [PROMPT]), ("pipe", [PROMPT]), ("pipe that does not block", [PROMPT]), ("terminal", [])],
)
def test_standard_input_is_read_whatever_it_is_but_a_terminal(monkeypatch, kind, prompts):
    monkeypatch.setattr("sys.stdin", standard_input(kind))
    assert read_prompts(None) == prompts


def test_without_standard_input_a_text_begins_by_itself(monkeypatch):
    with open(os.devnull) as empty:
        monkeypatch.setattr("sys.stdin", empty)
        assert read_prompts(None) == []
    for absent in (empty, None, io.StringIO("a notebook's")):  # `empty` is closed now
        monkeypatch.setattr("sys.stdin", absent)
        assert read_prompts(None) == []


def test_a_byte_order_mark_is_dropped_at_the_start_alone(write, checkpoint, chat_checkpoint, monkeypatch):
    mark, greedily = "\ufeff", ["--temperature", 0]
    plain = write("--prompt", PROMPT, *greedily)
    assert write("--prompt", mark + PROMPT, *greedily)[:2] == plain[:2]
    assert write(*greedily, stdin=(mark + PROMPT).encode())[:2] == plain[:2]
    assert write(*greedily, "--prompt", "a" + mark)[1] == text_of(checkpoint, "a" + mark, 20)
    chat = ["--ckpt", chat_checkpoint, "--chat", *greedily, "--system"]
    spoken = write(*chat, "b", "--prompt", "a")[:2]
    assert write(*chat, mark + "b", "--prompt", mark + "a")[:2] == spoken
    lines = iter([mark + "a"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or raise_(EOFError))
    assert write(*chat, "b")[:2] == spoken


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (61, 1.0), (0, 0.99)])
def test_ids_without_a_piece_are_never_drawn(temperature, top_k, top_p):
    """60 pieces, an added token at 63, and a model with 70 rows."""
    tokenizer = cast(Tokenizer, SimpleNamespace(vocab_size=64, unused_ids=[60, 61, 62]))
    args = Namespace(temperature=temperature, top_k=top_k, top_p=top_p, seed=0)
    logits = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    known = torch.tensor([*range(60), 63])
    logits[:, known] -= 20  # the others are by far the likeliest
    drawn = drawing(args, tokenizer, 50, CPU)(logits).tolist()
    assert set(drawn) <= set(known.tolist())
    assert 63 in drawn
    if temperature == 0:
        assert drawn == known[logits[:, known].argmax(-1)].tolist()


def test_the_bytes_of_caches_that_do_not_fit_are_named(write, checkpoint, tmp_path):
    longest = 2**30
    model, tokenizer = load(checkpoint)
    spread = len(tokenizer.encode("once")) - len(
        tokenizer.encode("a")
    )  # "a" is padded so far, and may fill the context
    per_token = sum(cache.k.nbytes + cache.v.nbytes for cache in model.new_cache(1, 1))
    folder = changed(checkpoint, tmp_path, max_position_embeddings=longest)
    large = ["--ckpt", folder, "--num-samples", 10**6, "--max-new-tokens", 2 * 10**9]
    code, out, err = write(*large, "--prompt", "once", "--prompt", "a")
    assert (code, out) == (2, "")
    tokens = longest + 1 + spread
    assert f"2000000 x {tokens} tokens take {2 * 10**6 * tokens * per_token:,} bytes" in err
    assert "lower --num-samples" in err.splitlines()[-1]
    with pytest.raises(InputError, match="take 1,180,591,620,717,411,303,424 bytes"):  # 2^70: more than torch can count
        check_memory(model, 2**31, 2**39 // per_token)


@pytest.mark.parametrize("kind", [InputError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("arguments", "n_new", "out"),
    [
        (["--prompt", "once"], 2, "once\n"),
        (["--prompt", "on\n"], 0, "on\n"),
        (["--prompt", ""], 0, ""),
        (["--chat", "--prompt", "a"], 0, ""),
    ],
)
def test_an_error_in_the_middle_of_a_text_begins_a_line(
    write, chat_checkpoint, monkeypatch, kind, arguments, n_new, out
):
    def generate(*_):
        yield from [[None]] * n_new
        raise kind("the end")

    monkeypatch.setattr("generate.generate", generate)
    assert write("--ckpt", chat_checkpoint, *arguments)[1] == out


def parts(out: str) -> list[str]:
    return [part.split(" ---\n")[1] for part in out.split("--- ")[1:] if " ---\n" in part]


def test_several_prompts_are_one_batch_that_writes_what_each_writes_alone(write, checkpoint):
    prompts = [PROMPT, "a", "there was a lily, once"]
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    code, out, _ = write(*given, "--temperature", 0)
    assert code == 0
    assert out == "".join(f"--- {i} of 3 ---\n{text_of(checkpoint, p, 20)}" for i, p in enumerate(prompts, 1))


def test_samples_differ_and_each_is_the_run_of_its_own_seed(write):
    code, out, _ = write("--prompt", "once", "--num-samples", 3, "--seed", 11)
    alone = [write("--prompt", "once", "--seed", seed)[1] for seed in (11, 12, 13)]
    assert code == 0
    assert out == "".join(f"--- {i} of 3 ---\n{text}" for i, text in enumerate(alone, 1))
    assert len(set(alone)) == 3


@pytest.mark.parametrize("ids", [5, [2, 5], [5, None], None])
def test_generation_config_may_name_more_end_ids(write, checkpoint, tmp_path, ids):
    """The union of both files and the tokenizer; here the sixth greedy token takes the place of 5."""
    model, tokenizer = load(checkpoint)
    new = greedy(model, [tokenizer.bos_id], 20)
    ids = new[5] if ids == 5 else [new[5] if id == 5 else id for id in ids] if ids else ids
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    _, out, err = write("--ckpt", tmp_path, "--temperature", 0)
    n_new = new.index(new[5]) if ids else 20
    assert out == tokenizer.decode(new[:n_new]) + "\n"
    assert ("stopped at the end token" in err) == bool(ids)


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"eos_token_id": "2"}', b'{"eos_token_id": [-1]}', b"\xff"])
def test_a_damaged_generation_config_is_refused_with_its_path(write, checkpoint, tmp_path, damage):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_bytes(damage)
    code, _, err = write("--ckpt", tmp_path)
    assert (code, err.count("\n")) == (2, 2)  # the line on the run's settings comes first
    assert str(tmp_path / "generation_config.json") in err


def test_damaged_weights_are_named_at_the_first_token(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    model.norm.weight.data[3] = float("nan")
    save_checkpoint(tmp_path, model, tokenizer)
    code, _, err = write("--ckpt", tmp_path)
    assert code == 2
    assert "logits of new token 1 hold NaN" in err


@pytest.fixture
def chat_checkpoint(checkpoint, tmp_path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}lily:{% endif %}"
    )
    return folder


def chat_text(folder: Path, conversation: str, n_new: int) -> tuple[str, list[int]]:
    """The greedy answer to a conversation written out, with BOS once."""
    model, tokenizer = load(folder)
    ids = tokenizer.encode(conversation, bos=True)
    new = greedy(model, ids, n_new, tokenizer.vocab_size)
    return tokenizer.decode(ids + new).removeprefix(conversation), ids


@pytest.mark.parametrize("how", ["--prompt", "stdin"])
def test_a_chat_answers_in_the_checkpoints_own_format(write, chat_checkpoint, how):
    arguments = ["--ckpt", chat_checkpoint, "--chat", "--temperature", 0, "--max-new-tokens", 6, "--system", "upon"]
    given = {"stdin": b"a"} if how == "stdin" else {}
    code, out, err = write(*arguments, *([] if given else ["--prompt", "a"]), **given)
    assert (code, out) == (0, chat_text(chat_checkpoint, "system: upon\nuser: a\nlily:", 6)[0] + "\n")
    assert "6 tokens; stopped at --max-new-tokens" in err


def test_a_conversation_holds_what_was_said(write, chat_checkpoint):
    first, _ = chat_text(chat_checkpoint, "user: a\nlily:", 3)
    second, _ = chat_text(chat_checkpoint, f"user: a\nassistant: {first}\nuser: b\nlily:", 3)
    arguments = ["--ckpt", chat_checkpoint, "--chat", "--temperature", 0, "--max-new-tokens", 3]
    assert write(*arguments, "--prompt", "a", "--prompt", "b")[:2] == (0, f"{first}\n{second}\n")


def test_a_chat_without_a_template_is_refused(write):
    code, out, err = write("--chat", "--prompt", "a")
    assert (code, out) == (2, "")
    assert "chat template" in err


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_program(write, chat_checkpoint, monkeypatch):
    """Ctrl-C at the prompt clears the line; empty lines, too long ones, and bytes that are not text are skipped."""
    typed = iter([KeyboardInterrupt, "a", "  ", "\udcff", "once upon a time " * 30, "b", EOFError])

    def type_next(_):
        line = next(typed)
        return line if isinstance(line, str) else raise_(line)

    monkeypatch.setattr("builtins.input", type_next)
    calls = []
    forward = Llama.forward

    def interrupted(*arguments, **options):
        calls.append(None)
        if len(calls) == 3:  # the first answer's third token
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Llama, "forward", interrupted)
    arguments = ["--ckpt", chat_checkpoint, "--chat", "--temperature", 0, "--max-new-tokens", 3]
    code, out, err = write(*arguments)
    monkeypatch.setattr(Llama, "forward", forward)
    first, _ = chat_text(chat_checkpoint, "user: a\nlily:", 2)
    second, _ = chat_text(chat_checkpoint, f"user: a\nassistant: {first}\nuser: b\nlily:", 3)
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert "this is not UTF-8 text" in err
    assert re.search(r"the conversation has \d+ tokens and the model's context 64.*taken back", err)
    assert "2 tokens; stopped at Ctrl-C" in err
    assert "3 tokens; stopped at --max-new-tokens" in err


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--temperature", "-1"], "argument --temperature: '-1'"),
        (["--temperature", "nan"], "argument --temperature: 'nan'"),
        (["--top-k", "-5"], "argument --top-k: '-5'"),
        (["--top-p", "0"], "argument --top-p: '0'"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--max-new-tokens", "-1"], "argument --max-new-tokens: '-1'"),
        (["--norm-eps", "0"], "argument --norm-eps: '0'"),
        (["--norm", "layer"], "'layer'; use one of: reference, torch, compile, triton, auto"),
        (["--ckpt", "no/such/folder"], "no/such/folder"),
        (["--num-samples", "0"], "argument --num-samples: '0'"),
        (["--seed", str(2**63)], "argument --seed: '9223372036854775808' is above 9223372036854775807"),
        (["--max-new-tokens", str(2**31)], "argument --max-new-tokens: '2147483648' is above"),
        (["--num-samples", "999999999999"], "argument --num-samples: '999999999999' is above"),
        (["--top-p", "1e-400"], "argument --top-p: '1e-400'"),
        (["--system", "be kind"], "--chat"),
        (["--chat", "--num-samples", "3"], "--num-samples is 3"),
        (["--prompt", "\udcff"], "argument --prompt: this is not UTF-8 text"),  # so Python hands on such an argument
        (["--chat", "--system", "\udcff"], "argument --system: this is not UTF-8 text"),
    ],
)
def test_what_cant_be_done_is_refused_in_one_line(write, arguments, found):
    code, out, err = write(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert found in err


def test_standard_input_that_fails_is_no_empty_prompt(monkeypatch):
    class Reset(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, into):
            raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Reset())))
    with pytest.raises(InputError, match="standard input cannot be read"):
        read_prompts(None)


def test_a_prompt_is_utf8_whatever_the_locale(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    assert utf8_text("héllo 漢".encode().decode("ascii", "surrogateescape")) == "héllo 漢"


def in_two(folder, *arguments):
    """Exit codes of generate.py in two processes, and what each has written."""
    codes = runs.finish_connected(folder, arguments, 2, main=main)
    return codes, [(folder / f"{i}.log").read_text() for i in range(2)]


@pytest.mark.parametrize(
    "arguments",
    [["--temperature", "0", "--prompt", "once", "--prompt", PROMPT], ["--top-p", "0.9", "--prompt", "once"]],
)
def test_two_processes_write_the_text_of_one_and_once(arguments, checkpoint, command, tmp_path):
    arguments = ["--ckpt", checkpoint, "--dtype", "float32", "--max-new-tokens", "6", "--norm", "reference", *arguments]
    codes, written = in_two(tmp_path, *arguments)
    assert codes == [0, 0], written
    assert written[1] == ""
    assert "2 processes divide each matrix (tensor parallel)\n" in written[0]
    drawn = re.search(r"seed (\d+)\n", written[0])  # by one of them, for both
    assert drawn
    assert command(main, *arguments, "--seed", drawn[1]).out in written[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "4"], "--tp is 4, and 2 of them run; expected as many processes: torchrun --nproc-per-node 4"),
        (["--compile"], "--compile and --tp 2: the compiled step is for a whole model"),
        (["--chat"], "--chat in several processes has no terminal to read from"),
    ],
)
def test_what_several_processes_cannot_write_is_refused(arguments, message, checkpoint, tmp_path):
    codes, written = in_two(tmp_path, "--ckpt", checkpoint, *arguments)
    assert codes == [2, 2]
    assert message in written[0].splitlines()[-1]
    assert "Traceback" not in written[0] + written[1]


def test_one_process_cannot_divide_a_model(checkpoint, command):
    code, out, err = command(main, "--ckpt", checkpoint, "--tp", "2")
    assert (code, out) == (2, "")
    assert "--tp is 2, and 1 of them run; expected as many processes" in err
