"""Write text with a checkpoint directory: python generate.py --ckpt out/tiny --prompt "import "

The text goes to stdout as it comes, everything else to stderr. Without a prompt it begins a text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kernels import InputError
from model.command import Parser, choose_device, not_negative, positive, run, say

if TYPE_CHECKING:
    import argparse

    import torch

    from model.llama import Llama


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.split(":")[0])
    add = parser.add_argument
    add("--ckpt", default="out/tiny", help="directory with config.json, model.safetensors and tokenizer.model")
    add("--prompt", default="", help="text to continue; without it, the beginning-of-text token")
    add("--max-new-tokens", type=not_negative(int), default=200, help="stop after so many tokens")
    add("--temperature", type=not_negative(float), default=0.8, help="0 takes the likeliest token every time")
    add("--top-k", type=not_negative(int), default=0, help="sample among the k likeliest tokens; 0 is off")
    add("--top-p", type=positive(float), default=1.0, help="sample among the likeliest that hold this probability")
    add("--seed", type=not_negative(int), help="repeats a run; drawn and printed if left out")
    parser.add_backend_arguments(["float32", "bfloat16", "float16"])
    add("--norm-eps", type=positive(float), help="use this rms_norm_eps and not the checkpoint's")
    args = parser.parse_args()
    if args.top_p > 1:
        raise InputError(f"--top-p is {args.top_p}; expected a probability above 0, up to 1")
    return args


def sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> torch.Tensor:
    """Token ids (B,) drawn from logits (B, vocab_size); at temperature 0 the likeliest, without a draw."""
    import torch

    if temperature == 0:
        return logits.argmax(-1)
    # In float64, where even temperature 1e-300 scales the distances to the largest logit without an overflow to NaN.
    logits = logits.double()
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # the probability of all likelier tokens
        before[:, 0] = 0
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def generate(
    model: Llama,
    prompt_ids: list[int],
    max_new_tokens: int,
    end_ids: set[int],
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[int]:
    """Yield new ids one by one, as `draw` takes them from logits (1, vocab_size), until max_new_tokens or an end id.

    An end id is not yielded.
    """
    import torch

    # First all of the prompt goes in, then each new token.
    caches = model.new_cache(1, len(prompt_ids) + max_new_tokens)
    tokens = torch.tensor([prompt_ids], device=model.embed_tokens.weight.device)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            tokens = draw(model(tokens, caches, logits_to_keep=1)[:, -1])[None]  # (1, 1)
        id = tokens.item()
        if id in end_ids:
            return
        yield id


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    import torch

    from kernels import load_backend
    from model.checkpoint import load_checkpoint
    from model.tokenizer import TokenStream, load_tokenizer

    device = choose_device(args.device)
    norm = load_backend(args.norm, device)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model = load_checkpoint(args.ckpt, norm, device, dtype, args.norm_eps)
    tokenizer = load_tokenizer(args.ckpt)
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{args.ckpt}: the tokenizer has {tokenizer.vocab_size} pieces and the model {config.vocab_size} rows; "
            "they belong to different models"
        )
    if tokenizer.bos_id is None and not args.prompt:
        raise InputError(f"{args.ckpt}: its tokenizer has no beginning-of-text token; give a --prompt")
    if any("\ud800" <= character <= "\udfff" for character in args.prompt):  # bytes that were no UTF-8
        raise InputError("--prompt is not UTF-8 text; check the encoding of the terminal")
    prompt_ids = tokenizer.encode(args.prompt, bos=tokenizer.adds_bos or not args.prompt)
    room = config.max_position_embeddings - len(prompt_ids)
    if room < args.max_new_tokens:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens and --max-new-tokens is {args.max_new_tokens}; together they "
            f"may be {config.max_position_embeddings}, the model's max_position_embeddings"
        )
    end_ids = config.end_ids() | ({tokenizer.eos_id} - {None})
    seed = random.randrange(2**32) if args.seed is None else args.seed
    weight_dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    say(f"norm {norm.description}, eps {config.rms_norm_eps:g}, {weight_dtype} on {device}, seed {seed}")

    loaded = time.perf_counter()
    generator = torch.Generator(device).manual_seed(seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, : tokenizer.vocab_size]  # a padded vocabulary has ids that the tokenizer doesn't know
        return sample(logits, args.temperature, args.top_k, args.top_p, generator)

    stream, n_new = TokenStream(tokenizer), 0
    for id in prompt_ids:
        print(stream.push(id), end="")
    for id in generate(model, prompt_ids, args.max_new_tokens, end_ids, draw):
        n_new += 1
        print(stream.push(id), end="", flush=True)
    print(stream.finish(), flush=True)
    took = time.perf_counter() - loaded
    reason = "the end token" if n_new < args.max_new_tokens else "--max-new-tokens"
    say(f"loaded in {loaded - started:.1f} s; {n_new} tokens at {n_new / took:.1f} tokens/s; stopped at {reason}")


if __name__ == "__main__":
    run(main)
