"""How cost grows, for bench_model.py: a function a question, which measures ours and transformers' point by point.

Each point has beside it what it must cost at the least:

    a decoded token     the bytes of the weights and of the keys and values that it reads, over the memory's bandwidth
    a training step     its FLOPs, over the rate of a matrix product
    memory of a step    the gradients, or what the formulas' backward needs of the forward, whichever is more

The weights are random, one draw repeated, and in decoding both models look at the same memory, until --compile moves
ours. The caches are filled
with random keys and values, since a prefill of 32768 tokens would take minutes and no time depends on the values. A
model is given positions for the longest context. Memory is what PyTorch allocates in a step beyond weights and
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import Backend
from model.checkpoint.names import to_file_name
from model.compiled_step import compile_step
from model.config import LlamaConfig
from model.llama import Llama
from model.training.flops import training_flops
from scripts.bench import model_parts
from scripts.bench.measuring import UNITS, Row
from scripts.bench.model_parts import CPU, TRAINED, Ours, Setup, Theirs
from scripts.bench_memory import peak_bytes

SIZES = [  # vocab_size, hidden_size, intermediate_size, layers, heads, key and value heads
    (32000, 288, 768, 6, 6, 6),  # 15M and 110M as in configs/
    (32000, 512, 1376, 8, 8, 8),  # 42M
    (32000, 768, 2048, 12, 12, 12),
    (49152, 960, 2560, 32, 15, 5),  # 360M, SmolLM2's
    (128256, 2048, 8192, 16, 32, 8),  # 1.2B, Llama 3.2's
]
TOKENS = [512, 1024, 2048, 4096, 8192, 16384]  # of a training step
LAYERS = [2, 4, 8, 16, 32]
TRAINED_VOCABULARY = 8192  # the logits must be seen in the memory of a step
BLOCK = 256  # tokens of a sequence in training
STEP = 2048  # tokens of a step, for the layers
AFTER = 16  # tokens in the cache, for the size
MORE = 8  # tokens decoded at each point


class Point(NamedTuple):
    """The cost of one size."""

    panel: str  # a key of PANELS
    n: int  # tokens, parameters or layers
    dtype: str
    found: dict[str, list[float]]  # as in Row
    least: float  # seconds or bytes

    def row(self, before: Point | None) -> Row:
        """A row of the table. Its slopes say as which powers of n the costs have grown since the point `before`."""
        what, unit = PANELS[self.panel]
        note = f"{median(self.found['ours']) / self.least:.1f} times the least, {self.least / UNITS[unit]:.4g} {unit}"
        if before:
            apart = math.log(self.n / before.n)
            slopes = [
                f"{side} {math.log(cost / cost_before) / apart:.2f}"
                for (side, cost), cost_before in zip(self.costs().items(), before.costs().values(), strict=True)
            ]
            note += f"; slopes: {', '.join(slopes)}"
        return Row(what.format(self.n), self.dtype, unit, self.found, note)

    def costs(self) -> dict[str, float]:
        """Medians of ours and theirs, and the least."""
        return {side: median(costs) for side, costs in self.found.items()} | {"least": self.least}


PANELS = {  # what is measured of which n, and its unit
    "context": ("decode, a token at {}", "ms"),
    "size": ("decode, {} parameters", "ms"),
    "tokens": ("training step, {} tokens", "ms"),
    "tokens_memory": ("peak of a step, {} tokens", "MB"),
    "layers": ("training step, {} layers", "ms"),
    "layers_memory": ("peak of a step, {} layers", "MB"),
}


def measure(question: str, setup: Setup) -> Iterator[Point]:
    """Points of one question of QUESTIONS, from the smallest on."""
    torch.manual_seed(0)
    yield from QUESTIONS[question](setup)


# The questions.


def context(setup: Setup) -> Iterator[Point]:
    room = max(setup.args.contexts) + MORE + 1
    longest = max(setup.config.max_position_embeddings, room)
    models = random_models(replace(setup.config, max_position_embeddings=longest), setup.norm, setup.dtype)
    one_token = compile_step(models[0]) if setup.args.compile else models[0]
    for n in setup.args.contexts:
        yield Point("context", n, setup.dtype, *decoding(setup, *models, one_token, n))


def size(setup: Setup) -> Iterator[Point]:
    for vocabulary, width, inner, layers, heads, kv_heads in SIZES:
        shape = TRAINED | {
            "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width // heads,
            "tie_word_embeddings": True,
        }  # fmt: skip
        ours, theirs = random_models(LlamaConfig.from_dict(setup.config.to_dict() | shape), setup.norm, setup.dtype)
        torch._dynamo.reset()  # which compiles a function for a few models, and leaves it to Python for others
        one_token = compile_step(ours) if setup.args.compile else ours
        n = sum(p.numel() for p in ours.parameters())
        yield Point("size", n, setup.dtype, *decoding(setup, ours, theirs, one_token, AFTER))


def tokens(setup: Setup) -> Iterator[Point]:
    for n in TOKENS:
        yield from training(setup, "tokens", n, TRAINED["num_hidden_layers"], n)


def layers(setup: Setup) -> Iterator[Point]:
    for n in LAYERS:
        yield from training(setup, "layers", n, n, STEP)


QUESTIONS = {"context": context, "size": size, "tokens": tokens, "layers": layers}


# What they measure.


@torch.inference_mode()
def decoding(
    setup: Setup, ours: Llama, theirs: Any, one_token: Callable[..., Tensor], n: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of a token after n others, whose keys and values are random, and the least. `one_token` as in Ours."""
    # One row is left over, or the compiled step's last token would have another layout (model/compiled_step.py).
    texts = {"ours": Ours(ours, one_token, n + MORE + 1)} | ({"theirs": Theirs(theirs)} if theirs else {})
    fill(texts, n)
    ids = torch.randint(ours.config.vocab_size, (1, MORE))
    times = setup.in_turn(**{side: partial(model_parts.time_steps, text, ids) for side, text in texts.items()})
    return times, (model_parts.bytes_per_token(ours) + cache_bytes(ours, n)) / setup.bandwidth


def fill(texts: dict[str, Any], n: int) -> None:
    """Put n random keys and values into the caches of each layer, as if n tokens had been computed."""
    config, weight = texts["ours"].model.config, texts["ours"].model.embed_tokens.weight
    k, v = torch.randn(2, 1, config.num_key_value_heads, n, config.head_dim).to(weight.dtype)
    for i, cache in enumerate(texts["ours"].caches):
        cache.k[:, :, :n], cache.v[:, :, :n], cache.length = k, v, n
        if "theirs" in texts:
            texts["theirs"].cache.update(k, v, i)


def cache_bytes(model: Llama, n: int) -> int:
    """Bytes of keys and values that a token after n others reads: all, or those in the window."""
    config, itemsize = model.config, model.embed_tokens.weight.itemsize
    rows = sum(min(n, model.configs[kind].sliding_window or n) for kind in model.kinds)
    return 2 * rows * config.num_key_value_heads * config.head_dim * itemsize


def training(setup: Setup, panel: str, n: int, n_layers: int, n_tokens: int) -> Iterator[Point]:
    """Time and peak of memory of a training step: n of what the panel asks for."""
    shape = TRAINED | {"vocab_size": TRAINED_VOCABULARY, "num_hidden_layers": n_layers}
    config = LlamaConfig.from_dict(setup.config.to_dict() | shape)
    batch = torch.randint(config.vocab_size, (n_tokens // BLOCK, BLOCK + 1))
    ours, calls = model_parts.training_calls(setup, config, batch)
    times = setup.in_turn(**calls)  # the first step makes the optimizer's state, which isn't counted below
    yield Point(panel, n, setup.dtype, times, training_flops(ours, BLOCK) * n_tokens / setup.products[setup.dtype])
    peaks: dict[str, list[float]] = {side: [peak_bytes(call, CPU)] for side, call in calls.items()}
    yield Point(f"{panel}_memory", n, setup.dtype, peaks, step_bytes(ours, n_tokens, setup.dtype))


def step_bytes(model: Llama, n_tokens: int, dtype: str) -> float:
    """Bytes that a training step takes at the least, without recomputing: gradients, or what its backward needs.

    That is, of each layer, both norms' inputs and outputs, q, k, v and attention's output, and gate, up and their
    product; and the logits. All are counted in the dtype of the matrix products.
    """
    config = model.config
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = 4 * config.hidden_size + heads * config.head_dim + 3 * config.intermediate_size
    kept = n_tokens * (config.num_hidden_layers * layer + config.vocab_size) * getattr(torch, dtype).itemsize
    return max(kept, sum(p.nbytes for p in model.parameters()))


def random_models(config: LlamaConfig, norm: Backend, dtype: str) -> tuple[Llama, Any]:
    """Ours, and transformers' or None, on the same weights in memory. They are one draw, repeated: that is quick."""
    with torch.device("meta"):
        ours = Llama(config, norm).to(getattr(torch, dtype))
    ours = ours.to_empty(device=CPU).eval()
    draw = torch.randn(1_000_003) * config.initializer_range  # a prime, so that no two rows of a weight are alike
    for weight in ours.parameters():
        weight.data.copy_(draw.repeat(math.ceil(weight.numel() / draw.numel()))[: weight.numel()].view_as(weight))
    if not model_parts.transformers:
        return ours, None
    with torch.device("meta"):
        theirs = model_parts.fresh_theirs(config)
    names: dict[str, Tensor] = {to_file_name(name, config.family.norms): w for name, w in ours.state_dict().items()}
    options: dict[str, Any] = {"config": theirs.config, "state_dict": names, "dtype": getattr(torch, dtype)}
    return ours, type(theirs).from_pretrained(None, **options, **model_parts.attention_of(config))
