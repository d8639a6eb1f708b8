"""Write text with a checkpoint directory, as in: python generate.py --ckpt out/tiny --prompt "import ".

The text goes to stdout as it comes, everything else to stderr. Without --prompt it continues standard input if that is
a pipe or a file, and begins a text of its own otherwise. With --chat it answers; at a terminal Ctrl-C stops an answer
and Ctrl-D ends the conversation.
"""

from __future__ import annotations

import os
import random
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING

from kernels import InputError
from model.cli import Parser, choose_device, not_negative, positive, run, say

if TYPE_CHECKING:
    import argparse

    import torch

    from model.llama import Llama
    from model.tokenizer.base import Tokenizer


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ckpt", default="out/tiny", help="directory with config.json, safetensors and a tokenizer")
    add("--prompt", action="append", help="text to continue; several of them are one batch; default: standard input")
    add("--num-samples", type=positive(int), default=1, help="texts for each prompt, drawn with seeds of their own")
    add("--chat", action="store_true", help="answer in the checkpoint's chat format; without --prompt a conversation")
    add("--system", help="with --chat: the system message")
    add("--max-new-tokens", type=not_negative(int), default=200, help="stop after so many tokens")
    add("--temperature", type=not_negative(float), default=0.8, help="0 takes the likeliest token every time")
    add("--top-k", type=not_negative(int), default=0, help="sample among the k likeliest tokens; 0 is off")
    add("--top-p", type=positive(float), default=1.0, help="sample among the likeliest that hold this probability")
    add("--seed", type=not_negative(int), help="repeats a run; drawn and printed if left out")
    parser.add_backend_arguments(["float32", "bfloat16", "float16"])
    add("--compile", action="store_true", help="compile the step for a token: seconds at first, then faster")
    add("--norm-eps", type=positive(float), help="use this rms_norm_eps and not the checkpoint's")
    args = parser.parse_args()
    if args.top_p > 1:
        raise InputError(f"--top-p is {args.top_p}; expected a probability above 0, up to 1")
    if args.seed is not None and args.seed >= 2**63:
        raise InputError(f"--seed is {args.seed}; expected a number below 2^63")
    if args.system is not None and not args.chat:
        raise InputError("--system is a message of a chat; give --chat too")
    if args.chat and args.num_samples > 1:
        raise InputError(
            f"--num-samples is {args.num_samples}, and a chat goes on from one answer; leave one of them out"
        )
    return args


def read_prompts(given: list[str] | None) -> list[str]:
    """The prompts of the command line, or standard input if it is a pipe or a file. Raises InputError if not UTF-8."""
    if given is None:
        try:
            kind = os.fstat(sys.stdin.fileno()).st_mode
        except (AttributeError, OSError, ValueError):  # there is none, as under some supervisors, or it is closed
            return []
        if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
            return []
        try:
            return [sys.stdin.buffer.read().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text ({error}); convert it") from error
    if not all(map(is_text, given)):
        raise InputError("--prompt is not UTF-8 text; check the encoding of the terminal")
    return given


def is_text(given: str) -> bool:
    """False for bytes that were no UTF-8, which Python hands on as halves of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


def load(args: argparse.Namespace) -> tuple[Llama, Tokenizer, set[int]]:
    """The model, its tokenizer, and the ids that end a text: those that any file of the checkpoint names."""
    import torch

    from kernels import load_backend
    from model.checkpoint.load import load_checkpoint, load_end_ids
    from model.tokenizer import load_tokenizer

    device = choose_device(args.device)
    norm = load_backend(args.norm, device)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model = load_checkpoint(args.ckpt, norm, device, dtype, args.norm_eps)
    tokenizer = load_tokenizer(args.ckpt)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"{args.ckpt}: the tokenizer has {tokenizer.vocab_size} pieces and the model {model.config.vocab_size} "
            "rows; they belong to different models"
        )
    weight_dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    say(f"norm {norm.description}, eps {model.config.rms_norm_eps:g}, {weight_dtype} on {device}, seed {args.seed}")
    return model, tokenizer, load_end_ids(args.ckpt, model.config) | ({tokenizer.eos_id} - {None})


def drawing(args: argparse.Namespace, n_ids: int, n_texts: int, device: torch.device) -> Callable:
    """What draws the ids of `n_texts` texts, each from a generator of its own: its draws don't depend on the others."""
    import torch

    from model.generation import sample

    generators = [torch.Generator(device).manual_seed(args.seed + i) for i in range(n_texts)]

    def draw(logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, :n_ids]  # a padded vocabulary has ids that the tokenizer doesn't know
        if args.temperature == 0:
            return sample(logits, 0, 0, 1.0, None)
        rows = zip(logits, generators, strict=True)
        return torch.cat([sample(row[None], args.temperature, args.top_k, args.top_p, each) for row, each in rows])

    return draw


def why_it_ended(model: Llama, prompt_ids: list[int], n_new: int, max_new_tokens: int) -> str:
    if n_new == max_new_tokens:
        return "--max-new-tokens"
    context = model.config.context_length
    return f"the full context ({context} tokens)" if len(prompt_ids) + n_new == context else "the end token"


def check_room(model: Llama, what: str, prompt_ids: list[int], max_new_tokens: int) -> None:
    context = model.config.context_length
    if len(prompt_ids) + min(1, max_new_tokens) > context:
        raise InputError(f"{what} has {len(prompt_ids)} tokens and the model's context {context}; make it shorter")


def compiled(model: Llama, n_texts: int, capacity: int, padded: bool) -> Callable:
    """The step for a token, compiled before it is needed: it takes a while, and the text shouldn't stand still."""
    from model.compiled_step import compile_step, warm_up

    started = time.perf_counter()
    say("compiling the step for a token, about ten seconds")
    step = compile_step(model)
    warm_up(model, step, n_texts, capacity, padded)
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    return step


def stream(tokenizer: Tokenizer, prompt_ids: list[int], new_ids: Iterator[int], echo: bool) -> Iterator[str]:
    """Text as it comes, never a part of a character; with the prompt's first, if it is to be echoed."""
    from model.tokenizer.base import TokenStream

    pieces = TokenStream(tokenizer)
    shown = [pieces.push(id) for id in prompt_ids]
    if echo:
        yield "".join(shown)
    for id in new_ids:
        yield pieces.push(id)
    yield pieces.finish()


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    if args.seed is None:
        args.seed = random.randrange(2**32)
    prompts = read_prompts(args.prompt)
    model, tokenizer, end_ids = load(args)
    say(f"loaded in {time.perf_counter() - started:.1f} s")
    (chat if args.chat else complete)(args, prompts, model, tokenizer, end_ids)


def complete(
    args: argparse.Namespace, prompts: list[str], model: Llama, tokenizer: Tokenizer, end_ids: set[int]
) -> None:
    """Continue the prompts: one text is shown as it comes, several one after the other once they are done."""
    from tqdm import tqdm

    from model.generation import generate

    encoded = []
    for prompt in prompts or [""]:
        if not prompt and tokenizer.bos_id is None:
            raise InputError(f"{args.ckpt}: its tokenizer has no beginning-of-text token; give a --prompt")
        encoded += [tokenizer.encode(prompt, bos=tokenizer.adds_bos or not prompt)] * args.num_samples
    for prompt_ids in encoded:
        check_room(model, "the prompt", prompt_ids, args.max_new_tokens)
    step, lengths = None, set(map(len, encoded))
    if args.compile and args.max_new_tokens > 1:
        step = compiled(model, len(encoded), max(lengths) + args.max_new_tokens, len(lengths) > 1)
    started = time.perf_counter()
    draw = drawing(args, tokenizer.vocab_size, len(encoded), model.embed_tokens.weight.device)
    rows = generate(model, encoded, args.max_new_tokens, end_ids, draw, step)
    texts: list[list[int]] = [[] for _ in encoded]

    if len(encoded) == 1:
        new_ids = (texts[0].append(id) or id for [id] in rows)
        for piece in stream(tokenizer, encoded[0], new_ids, echo=True):
            print(piece, end="", flush=True)
        print()
    else:
        for new in tqdm(rows, total=args.max_new_tokens, unit="token", leave=False, disable=None):
            for text, id in zip(texts, new, strict=True):
                text += [] if id is None else [id]
        for i, (prompt_ids, text) in enumerate(zip(encoded, texts, strict=True), 1):
            print(f"--- {i} of {len(encoded)} ---", "".join(stream(tokenizer, prompt_ids, iter(text), True)), sep="\n")
    took, n_new = time.perf_counter() - started, sum(map(len, texts))
    reasons = Counter(
        why_it_ended(model, prompt_ids, len(text), args.max_new_tokens)
        for prompt_ids, text in zip(encoded, texts, strict=True)
    )
    counted = [reason if n == len(texts) else f"{reason} ({n} of {len(texts)})" for reason, n in reasons.items()]
    say(f"{n_new} tokens at {n_new / took:.1f} tokens/s; stopped at {', '.join(counted)}")


def chat(args: argparse.Namespace, prompts: list[str], model: Llama, tokenizer: Tokenizer, end_ids: set[int]) -> None:
    """Answer the prompts as one conversation, or what is typed; Ctrl-C ends an answer, Ctrl-D the conversation."""
    from model.generation import generate
    from model.tokenizer.chat import encode_chat

    step = None
    if args.compile and args.max_new_tokens > 1:
        step = compiled(model, 1, model.config.context_length, False)
    draw = drawing(args, tokenizer.vocab_size, 1, model.embed_tokens.weight.device)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    for text in iter(prompts) if prompts else typed():
        messages.append({"role": "user", "content": text})
        new_ids, answer = [], ""
        try:
            prompt_ids = encode_chat(tokenizer, messages)
            check_room(model, "the conversation", prompt_ids, args.max_new_tokens)
            rows = generate(model, [prompt_ids], args.max_new_tokens, end_ids, draw, step)
            for piece in stream(tokenizer, prompt_ids, (new_ids.append(id) or id for [id] in rows), echo=False):
                print(piece, end="", flush=True)
                answer += piece
            reason = why_it_ended(model, prompt_ids, len(new_ids), args.max_new_tokens)
        except KeyboardInterrupt:
            if prompts:
                raise
            reason = "Ctrl-C"
        except InputError as error:
            if prompts:
                raise
            say(f"{error}; the last message is taken back")
            messages.pop()
            continue
        print(flush=True)
        say(f"{len(new_ids)} tokens; stopped at {reason}")
        messages.append({"role": "assistant", "content": answer})


def typed() -> Iterator[str]:
    """Lines from the terminal, until Ctrl-D; empty ones are passed over, and Ctrl-C clears one that is begun."""
    with suppress(ImportError):  # not everywhere; with it, lines can be edited and may be long
        import readline  # noqa: F401

    say("type a message; Ctrl-C stops an answer, Ctrl-D ends the conversation")
    while True:
        try:
            # The prompt is no part of a text that goes to a file. At a terminal readline itself writes it.
            with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
                line = input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")
            continue
        if not is_text(line):
            say("that was not UTF-8 text; check the encoding of the terminal")
        elif line.strip():
            yield line


if __name__ == "__main__":
    run(main)
