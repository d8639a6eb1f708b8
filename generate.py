"""Write text with a checkpoint directory: python generate.py --ckpt out/tiny --prompt "import "

The text goes to stdout as it comes, everything else to stderr. Without --prompt the command continues what it reads
from standard input; at a terminal, or where that is empty, it begins a text of its own. With --chat it answers; at a
terminal Ctrl-C stops an answer and Ctrl-D ends the conversation.

    torchrun --nproc-per-node 2 generate.py --prompt "import "      two processes hold half of each matrix (--tp)
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout, suppress

from kernels import InputError
from model.cli import Parser, emulate_as_asked, not_negative, positive, rank, run, say, seed, world_size


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ckpt", default="out/tiny", help="directory with config.json, safetensors and a tokenizer")
    prompt_help = "text to continue; give several for a batch (default: standard input)"
    add("--prompt", type=utf8_text, action="append", help=prompt_help)
    add("--num-samples", type=positive(int), default=1, help="texts for each prompt, each with a seed of its own")
    add("--chat", action="store_true", help="answer in the checkpoint's chat format; without --prompt a conversation")
    add("--system", type=utf8_text, help="with --chat: the system message")
    add("--max-new-tokens", type=not_negative(int), default=200, help="stop after this many tokens")
    add("--temperature", type=not_negative(float), default=0.8, help="0 always takes the likeliest token")
    add("--top-k", type=not_negative(int), default=0, help="sample among the k likeliest tokens; 0 turns it off")
    add(
        "--top-p",
        type=positive(float),
        default=1.0,
        help="sample among the likeliest tokens that together hold this probability",
    )
    add("--seed", type=seed, help="repeats a run (default: drawn and printed)")
    parser.add_backend_arguments(["float32", "bfloat16", "float16"])
    add("--compile", action="store_true", help="compile the step for a token: seconds at first, then faster")
    tp_help = "divide each matrix over the N processes that torchrun starts (default: all of them)"
    add("--tp", type=positive(int), metavar="N", help=tp_help)
    add("--norm-eps", type=positive(float), help="override the checkpoint's rms_norm_eps")
    args = parser.parse_args()
    if args.top_p > 1:
        raise InputError(f"--top-p is {args.top_p}; expected a probability above 0, up to 1")
    if args.system is not None and not args.chat:
        raise InputError("--system is a message of a chat; give --chat too")
    if args.chat and args.num_samples > 1:
        raise InputError(
            f"--num-samples is {args.num_samples}, and a chat continues from one answer; leave out one of the two"
        )
    args.tp = args.tp or world_size()
    if args.tp != world_size():
        raise InputError(
            f"--tp is {args.tp}, and {world_size()} of them run; expected as many processes: "
            f"torchrun --nproc-per-node {args.tp} generate.py ..."
        )
    if args.tp > 1 and args.compile:
        raise InputError(f"--compile and --tp {args.tp}: the compiled step is for a whole model; leave one of them out")
    emulate_as_asked(args)
    return args


def utf8_text(given: str) -> str:
    """An argparse type: the text without a byte-order mark, whatever Python took its bytes for."""
    try:
        return os.fsencode(given).decode("utf-8-sig")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError("this is not UTF-8 text; check the encoding of the terminal") from error


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import torch
from torch import Tensor
from tqdm import tqdm

from kernels import layer_norm_in, load_backend
from kernels.probe import is_the_formula
from model.checkpoint.load import check_norm, load_checkpoint, load_end_ids
from model.cli import check_compilable, choose_device
from model.generation import generate, most_new, sample
from model.llama import Llama
from model.tokenizer import load_tokenizer
from model.tokenizer.base import Tokenizer, TokenStream
from model.tokenizer.chat import encode_chat


def main() -> None:
    args = parse_args()
    if args.tp == 1:
        write(args)
        return
    from model.training import distributed  # a second that a single process need not wait

    device = distributed.own_device(args.device)
    args.device = str(device)
    with (
        distributed.process_group(device, "then start again"),
        redirect_stdout(sys.stdout if rank() == 0 else open(os.devnull, "w")),
    ):
        # One process reads the prompt and draws the seed, so all of them draw the same tokens.
        args.prompt, args.seed = distributed.from_first(lambda: (read_prompts(args.prompt), seed_of(args)))
        if args.chat and not args.prompt:
            raise InputError("--chat in several processes has no terminal to read from; give the messages by --prompt")
        write(args)
        distributed.wait_for_all()  # torch 2.6 can hang in leaving the group while a collective's tensors are freed


def write(args: argparse.Namespace) -> None:
    """Load the model and write the texts."""
    started = time.perf_counter()
    args.seed = seed_of(args)
    prompts = read_prompts(args.prompt)
    model, tokenizer, end_ids = load(args)
    say(f"loaded in {time.perf_counter() - started:.1f} s")
    if args.chat:
        chat(args, prompts, model, tokenizer, end_ids)
    else:
        complete(args, prompts or [""], model, tokenizer, end_ids)


def seed_of(args: argparse.Namespace) -> int:
    """The seed of --seed, or one that is drawn."""
    return random.randrange(2**32) if args.seed is None else args.seed


def read_prompts(given: list[str] | None) -> list[str]:
    """Prompts of the command line, or else what standard input holds; nothing is read from a terminal.

    Raises InputError if standard input cannot be read, or is not UTF-8.
    """
    if given is not None:
        return given
    try:
        if sys.stdin.isatty():
            return []
        with suppress(AttributeError, OSError):  # absent on Windows before Python 3.12; or without a descriptor
            os.set_blocking(sys.stdin.fileno(), True)  # or a slow writer's text would be cut where it pauses
        content = sys.stdin.buffer.read()
    except (AttributeError, ValueError):  # standard input is absent, as under some supervisors, or closed
        return []
    except OSError as error:
        raise InputError(f"standard input cannot be read ({error.strerror}); give a --prompt, or a file") from error
    try:
        prompt = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text ({error}); convert it") from error
    return [prompt] if prompt else []


def load(args: argparse.Namespace) -> tuple[Llama, Tokenizer, set[int]]:
    """Model, tokenizer, and the ids that end a text, from every file of the checkpoint that names some."""
    device = choose_device(args.device)
    norm = load_backend(args.norm, device)
    if args.compile:
        check_compilable(args.norm, norm, device)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    first = torch.device("cpu") if args.tp > 1 else device  # which gets its share of the model alone
    model = load_checkpoint(args.ckpt, norm, first, dtype, args.norm_eps)
    config, bound = model.config, model.norm.backend  # in the form of the model's family
    check_norm(args.ckpt, config, args.norm)
    own = (":" in args.norm or layer_norm_in(args.norm)) and config.norm is None
    if own and not is_the_formula(bound, config.hidden_size, config.rms_norm_eps, device, config.family.form):
        say(f"{args.norm} is not the RMSNorm of {args.ckpt}, so this is another model's text")
    tokenizer = load_tokenizer(args.ckpt)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{args.ckpt}: the tokenizer has {tokenizer.vocab_size} pieces and the model {config.vocab_size} "
            "rows; they belong to different models"
        )
    if args.tp > 1:
        from torch.distributed.device_mesh import init_device_mesh

        from model.tensor_parallel import parallelize

        parallelize(model, init_device_mesh(device.type, (args.tp,)), divide_sequence=False)
        model.to(device)
        say(f"{args.tp} processes divide each matrix (tensor parallel)")
    weight_dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    say(f"norm {bound.description}, eps {config.rms_norm_eps:g}, {weight_dtype} on {device}, seed {args.seed}")
    end_ids = load_end_ids(args.ckpt, config)
    return model, tokenizer, end_ids if tokenizer.eos_id is None else end_ids | {tokenizer.eos_id}


def complete(
    args: argparse.Namespace, prompts: list[str], model: Llama, tokenizer: Tokenizer, end_ids: set[int]
) -> None:
    """Continue the prompts: stream a single text, and print those of a batch when all are done."""
    encoded = []
    for prompt in prompts:
        if not prompt and tokenizer.bos_id is None:
            raise InputError(f"{args.ckpt}: its tokenizer has no beginning-of-text token; give a --prompt")
        encoded.append(tokenizer.encode(prompt, bos=tokenizer.adds_bos or not prompt))
    for prompt_ids in encoded:
        check_room(model, "the prompt", prompt_ids)
    lengths = set(map(len, encoded))
    n_new = max(most_new(model, prompt_ids, args.max_new_tokens) for prompt_ids in encoded)
    n_texts, capacity = len(encoded) * args.num_samples, max(lengths) + n_new
    check_memory(model, n_texts, capacity)
    encoded = [prompt_ids for prompt_ids in encoded for _ in range(args.num_samples)]
    step = compiled_step(model, n_texts, capacity, len(lengths) > 1) if args.compile and n_new > 1 else None
    draw = drawing(args, tokenizer, n_texts, model.embed_tokens.weight.device)
    started = time.perf_counter()
    rows = generate(model, encoded, args.max_new_tokens, end_ids, draw, step)
    if n_texts == 1:
        _, count, reason = answer(args, model, tokenizer, encoded[0], rows, echo=True)
        counts, reasons = [count], [reason]
    else:
        texts = collect(rows, n_texts, n_new)
        for i, (prompt_ids, text) in enumerate(zip(encoded, texts, strict=True), 1):
            print(f"--- {i} of {n_texts} ---", tokenizer.decode(prompt_ids + text), sep="\n")
        counts = [len(text) for text in texts]
        reasons = [why_it_ended(args, model, ids, n) for ids, n in zip(encoded, counts, strict=True)]
    took = time.perf_counter() - started
    counted = [why if n == len(counts) else f"{why} ({n} of {len(counts)})" for why, n in Counter(reasons).items()]
    say(f"{sum(counts)} tokens at {sum(counts) / took:.1f} tokens/s; stopped at {', '.join(counted)}")


def chat(args: argparse.Namespace, prompts: list[str], model: Llama, tokenizer: Tokenizer, end_ids: set[int]) -> None:
    """Answer the prompts as one conversation, or what is typed; Ctrl-C ends an answer, Ctrl-D the conversation."""
    step = None
    if args.compile and args.max_new_tokens > 1:
        step = compiled_step(model, 1, model.config.context_length, padded=False)
    draw = drawing(args, tokenizer, 1, model.embed_tokens.weight.device)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    for text in prompts or typed():
        messages.append({"role": "user", "content": text})
        try:
            prompt_ids = encode_chat(tokenizer, messages)
            check_room(model, "the conversation", prompt_ids)
            rows = generate(model, [prompt_ids], args.max_new_tokens, end_ids, draw, step)
            reply, n_new, reason = answer(args, model, tokenizer, prompt_ids, rows, stoppable=not prompts)
        except InputError as error:
            if prompts:
                raise
            say(f"{error}; the last message is taken back")
            messages.pop()
            continue
        say(f"{n_new} tokens; stopped at {reason}")
        messages.append({"role": "assistant", "content": reply})


def answer(
    args: argparse.Namespace, model: Llama, tokenizer: Tokenizer, prompt_ids: list[int],
    rows: Iterator[list[int | None]], echo: bool = False, stoppable: bool = False,
) -> tuple[str, int, str]:  # fmt: skip
    """Print the text of one sequence as it comes, never a part of a character; with `echo` the prompt's text first.

    Returns the new text, the number of its tokens, and why it ended. If `stoppable`, Ctrl-C ends the text alone.
    """
    pieces = TokenStream(tokenizer)
    prompt = "".join([pieces.push(id) for id in prompt_ids])  # also without echo: the stream has to know it
    shown = prompt if echo else ""
    text, n_new, reason = "", 0, ""
    try:
        print(shown, end="", flush=True)
        for [id] in rows:
            piece = "" if id is None else pieces.push(id)
            print(piece, end="", flush=True)
            text, n_new = text + piece, n_new + 1
        rest = pieces.finish()
        print(rest, end="")
        text += rest
        reason = why_it_ended(args, model, prompt_ids, n_new)
    except KeyboardInterrupt:
        if not stoppable:
            raise
        reason = "Ctrl-C"
    finally:
        if reason or (shown + text)[-1:] not in ("", "\n"):  # an error's message gets a line of its own
            print(flush=True)
    return text, n_new, reason


def collect(rows: Iterator[list[int | None]], n_texts: int, n_new: int) -> list[list[int]]:
    """Up to `n_new` new ids of each text of a batch, behind a progress bar."""
    texts: list[list[int]] = [[] for _ in range(n_texts)]
    for new in tqdm(rows, total=n_new, unit="token", leave=False, disable=True if rank() else None):
        for text, id in zip(texts, new, strict=True):
            if id is not None:
                text.append(id)
    return texts


def drawing(
    args: argparse.Namespace, tokenizer: Tokenizer, n_texts: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Function that draws the ids of `n_texts` texts, (n_texts,), from logits (n_texts, vocab_size) on `device`.

    Each text has a generator of its own, so that its draws do not depend on the others.
    """
    generators = [torch.Generator().manual_seed(args.seed + i) for i in range(n_texts)]
    unused = torch.tensor(tokenizer.unused_ids, dtype=torch.long, device=device)

    def draw(logits: Tensor) -> Tensor:
        # A padded vocabulary has ids that the tokenizer does not know, at its end and before added tokens.
        logits = logits[:, : tokenizer.vocab_size].index_fill(1, unused, -torch.inf)
        if args.temperature == 0:
            return sample(logits, 0, 0, 1.0, None)
        rows = zip(logits.cpu(), generators, strict=True)
        return torch.cat([sample(row[None], args.temperature, args.top_k, args.top_p, each) for row, each in rows])

    return draw


def compiled_step(model: Llama, n_texts: int, capacity: int, padded: bool) -> Callable[..., Tensor]:
    """The step for a token after the first, compiled now, so that no text pauses later."""
    from model.compiled_step import compile_step, warm_up  # imports Inductor: a second that others need not wait

    started = time.perf_counter()
    say("compiling the step for a token, about ten seconds")
    step = compile_step(model)
    warm_up(model, step, n_texts, capacity, padded)
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    return step


def check_room(model: Llama, what: str, prompt_ids: list[int]) -> None:
    context = model.config.context_length
    if len(prompt_ids) > context:
        raise InputError(f"{what} has {len(prompt_ids)} tokens and the model's context {context}; make it shorter")


def check_memory(model: Llama, n_texts: int, capacity: int) -> None:
    """Allocate at once what the texts' caches will need, and free it. Raises InputError where that fails.

    Linux would grant the caches one by one, and then kill the process that fills them.
    """
    config, weight = model.local_config, model.embed_tokens.weight
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * weight.element_size()
    n_bytes = n_texts * capacity * a_token
    try:
        torch.empty(min(n_bytes, 2**62), dtype=torch.uint8, device=weight.device)
    except RuntimeError as error:
        raise InputError(
            f"the keys and values of {n_texts} x {capacity} tokens take {n_bytes:,} bytes, more than {weight.device} "
            "can give; lower --num-samples or --max-new-tokens"
        ) from error


def why_it_ended(args: argparse.Namespace, model: Llama, prompt_ids: list[int], n_new: int) -> str:
    if n_new < most_new(model, prompt_ids, args.max_new_tokens):
        return "the end token"
    if n_new == args.max_new_tokens:
        return "--max-new-tokens"
    return f"the full context ({model.config.context_length} tokens)"


def typed() -> Iterator[str]:
    """Yield lines from the terminal until Ctrl-D; skip empty ones, and let Ctrl-C clear one that is begun."""
    with suppress(ImportError):  # absent on some systems; with it, lines can be edited and may be long
        import readline  # noqa: F401

    say("type a message; Ctrl-C stops an answer, Ctrl-D ends the conversation")
    while True:
        try:
            # The prompt does not belong in a text that goes to a file. At a terminal readline itself writes it.
            with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
                line = utf8_text(input("> "))
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")
            continue
        except argparse.ArgumentTypeError as error:
            say(str(error))
            continue
        if line.strip():
            yield line


if __name__ == "__main__":
    run(main)
