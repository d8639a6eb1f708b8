"""New tokens from a model: sampling from its logits, and the loop that feeds them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import InputError
from model.llama import Llama


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Draw token ids (B,) from logits (B, vocab_size); at temperature 0 take the likeliest, without a draw.

    top_k 0 and top_p 1 are off. Together, top_p applies to what top_k leaves. The draw is made on the CPU, with a
    generator of the CPU: a seed gives the same draw on every device, and Apple's GPUs have no float64.
    """
    if temperature == 0:
        return logits.argmax(-1)
    # In float64 even temperature 1e-300 scales the distances to the largest logit without an overflow to NaN.
    logits = logits.cpu().double()
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # the probability of all likelier tokens
        before[:, 0] = 0
        logits = torch.empty_like(logits).scatter(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def most_new(model: Llama, prompt_ids: list[int], max_new_tokens: int) -> int:
    """Number of tokens that may follow a prompt. The last is never fed back, so it may lie just past the context."""
    return min(max_new_tokens, model.config.context_length - len(prompt_ids) + 1)


def generate(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    end_ids: set[int],
    draw: Callable[[Tensor], Tensor],
    step: Callable[..., Tensor] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next id of every prompt, which `draw` takes from logits (B, vocab_size); None once a text has ended.

    A text ends before an end id, which is not yielded, after max_new_tokens, or where the model's context is full.
    Shorter prompts are padded at the left. `step` replaces the model after the prefill (model/compiled_step.py).
    Raises InputError for NaN or infinite logits.
    """
    longest = max(map(len, prompts))
    device = model.embed_tokens.weight.device
    left = [most_new(model, prompt, max_new_tokens) for prompt in prompts]  # ids that each may still get
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)  # (B, T)
    padding = None
    if any(len(prompt) < longest for prompt in prompts):
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    caches = model.new_cache(len(prompts), longest + max(0, *left))
    forward = model  # the prefill; then `step`, for one token at a time
    for i in range(max(left)):
        with torch.inference_mode():
            logits = forward(tokens, caches, logits_to_keep=1, padding=padding)[:, -1]  # (B, vocab_size)
            if not logits.isfinite().all():
                raise InputError(
                    f"the logits of new token {i + 1} hold NaN or infinity; the weights are damaged "
                    "(python -m model.checkpoint DIR --finite), or --dtype holds too small a range for them"
                )
            ids = draw(logits)
        new = [id if left[row] > 0 and id not in end_ids else None for row, id in enumerate(ids.tolist())]
        left = [n - 1 if id is not None else 0 for n, id in zip(left, new, strict=True)]
        if all(id is None for id in new):
            return
        yield new
        tokens, forward = ids.to(device)[:, None], step or model
