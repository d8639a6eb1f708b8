"""The parts of bench_model.py: each measures our model and transformers' in turn, and returns rows of the table."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from copy import copy
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from kernels import Backend, InputError, load_backend
from model.checkpoint.load import load_checkpoint
from model.compiled_step import compile_step
from model.config import LlamaConfig
from model.llama import Llama, summed_loss
from model.training.flops import forward_flops, training_flops
from scripts.bench.measuring import Result, Row, in_turn, seconds
from train import parameter_groups

transformers: Any = importlib.import_module("transformers") if importlib.util.find_spec("transformers") else None

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
TRAINED = {  # the model of the training step: what differs from the checkpoint's shape
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "rope_scaling": None, "layer_types": None,
}  # fmt: skip
BATCH = (16, 256)  # sequences and tokens of a training step
PROMPT = 16  # tokens before the decoded ones
MORE = 16  # tokens decoded after each context


class Setup(NamedTuple):
    """Everything with which a part is measured."""

    args: Namespace
    folder: Path  # of the checkpoint
    config: LlamaConfig
    norm: Backend  # of our model
    bandwidth: float  # of reading memory, in bytes per second
    products: dict[str, float]  # FLOP/s of a matrix product, by dtype
    dtype: str

    def in_turn(self, **calls: Callable[[], Result]) -> dict[str, list[Result]]:
        """Results of each call, one per repeat; without transformers only those of "ours"."""
        return in_turn(calls if transformers else {"ours": calls["ours"]}, self.args.repeats)

    def flop_rate(self, rate: float) -> str:
        return f"{rate / 1e9:.0f} GFLOP/s, {rate / self.products[self.dtype]:.0%} of a matrix product's"


@lru_cache(maxsize=1)  # for all parts in one dtype
def load_models(folder: Path, norm: Backend, dtype: str) -> tuple[Llama, Any]:
    """Ours, and transformers' or None: the same weights in one dtype."""
    ours, theirs = load_checkpoint(folder, norm, CPU, getattr(torch, dtype)), None
    if transformers:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **attention_of(ours.config))
    return ours, theirs


def attention_of(config: LlamaConfig) -> dict[str, str]:
    """transformers' options for its attention: SDPA, but for Gemma 2, whose soft cap that does not compute."""
    return {"attn_implementation": "eager" if config.model_type == "gemma2" else "sdpa"}


def random_ids(model: Llama, n: int) -> Tensor:
    """Token ids (1, n), the same each time. Raises InputError if the model has no room for them."""
    room = model.config.max_position_embeddings
    if n > room:
        raise InputError(f"{n} positions are asked for and the model has {room}; lower --prefill or --contexts")
    return torch.randint(model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))


class Ours:
    """Our model with its caches. `one_token` takes what follows the prompt: the model itself, or its compiled step."""

    def __init__(self, model: Llama, one_token: Callable[..., Tensor], capacity: int) -> None:
        self.model, self.one_token, self.caches = model, one_token, model.new_cache(1, capacity)

    def step(self, tokens: Tensor) -> Tensor:
        """Tokens (1, T) to the logits after them, (1, 1, vocab_size)."""
        forward = self.one_token if tokens.size(1) == 1 else self.model
        return forward(tokens, self.caches, logits_to_keep=1)

    def mark(self) -> Callable[[], None]:
        """A function that drops the tokens of later steps."""
        length = self.caches[0].length

        def forget() -> None:
            for cache in self.caches:
                cache.length = length

        return forget


class Theirs:
    """The same calls of transformers' model."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, transformers.DynamicCache(config=model.config)

    def step(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def mark(self) -> Callable[[], None]:
        layers = [copy(layer) for layer in self.cache.layers]  # a step makes new tensors and leaves these as they are

        def forget() -> None:  # crop() would not go back beyond a window
            self.cache.layers = layers

        return forget


def decode_greedily(text: Ours | Theirs, ids: Tensor, n: int) -> tuple[list[int], float]:
    """n tokens after ids (1, T), and the seconds that all but the first took."""
    new, times = [], []
    for _ in range(n):
        ids = text.step(ids)[:, -1].argmax(-1, keepdim=True)
        new.append(ids.item())
        times.append(time.perf_counter())
    return new, times[-1] - times[0]


def generate(model: Any, ids: Tensor, n: int) -> tuple[list[int], float]:
    """decode_greedily by transformers' generate()."""
    times = []  # of the prompt, and of each token
    clock = SimpleNamespace(put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)
    limits = {"do_sample": False, "max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0}
    result = model.generate(ids, attention_mask=ids.new_ones(ids.shape), streamer=clock, **limits)
    return result[0, ids.size(1) :].tolist(), times[-1] - times[1]


# The parts.


@torch.inference_mode()
def prefill(setup: Setup) -> list[Row]:
    ours, theirs = load_models(setup.folder, setup.norm, setup.dtype)
    n = setup.args.prefill
    ids = random_ids(ours, n)
    times = setup.in_turn(
        ours=lambda: seconds(lambda: Ours(ours, ours, n).step(ids)),
        theirs=lambda: seconds(lambda: Theirs(theirs).step(ids)),
    )
    middle = median(times["ours"])
    note = f"{n / middle:.0f} tokens/s, {setup.flop_rate(forward_flops(ours, n, 1, 1) / middle)}"
    return [Row(f"prefill, {n} tokens", setup.dtype, "ms", times, note)]


@torch.inference_mode()
def decode(setup: Setup) -> list[Row]:
    ours, theirs = load_models(setup.folder, setup.norm, setup.dtype)
    n = setup.args.tokens
    ids = random_ids(ours, PROMPT + n)[:, :PROMPT]
    one_token = compile_step(ours) if setup.args.compile else ours
    results = setup.in_turn(
        ours=lambda: decode_greedily(Ours(ours, one_token, PROMPT + n), ids, n),
        theirs=lambda: decode_greedily(Theirs(theirs), ids, n),
        generate=lambda: generate(theirs, ids, n),
    )
    times = {name: [took / (n - 1) for _, took in result] for name, result in results.items()}
    middle = median(times["ours"])
    rate = bytes_per_token(ours) / middle
    share = f"{rate / 1e9:.1f} GB/s of weights, {rate / setup.bandwidth:.0%} of the bandwidth"
    rows = [Row("decode, a token", setup.dtype, "ms", times, f"{1 / middle:.1f} tokens/s, {share}")]
    if theirs:
        (tokens, _), (their_tokens, _) = results["ours"][-1], results["generate"][-1]
        note = f"{sum(a == b for a, b in zip(tokens, their_tokens, strict=True))} of {n} tokens are the same"
        times = {"ours": times["ours"], "theirs": times["generate"]}
        rows.append(Row("decode, theirs by generate()", setup.dtype, "ms", times, note))
    return rows


def bytes_per_token(model: Llama) -> int:
    """The weights that a decoded token reads: all of them, but one row of an embedding that isn't the head as well."""
    total = sum(p.nbytes for p in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.embed_tokens.weight.nbytes


@torch.inference_mode()
def context(setup: Setup) -> list[Row]:
    """The time of a token after so many others."""
    ours, theirs = load_models(setup.folder, setup.norm, setup.dtype)
    rows, before = [], None
    for n in setup.args.contexts:
        ids = random_ids(ours, n + MORE)
        texts = {"ours": Ours(ours, ours, n + MORE)} | ({"theirs": Theirs(theirs)} if theirs else {})
        for text in texts.values():
            text.step(ids[:, :n])
        times = setup.in_turn(**{side: partial(time_steps, text, ids[:, n:]) for side, text in texts.items()})
        note, middle = "", median(times["ours"])
        if before:
            note = f"{(middle - before[1]) / (n - before[0]) * 1e6:+.2f} ms for 1000 more positions"
        before = n, middle
        rows.append(Row(f"decode, a token at {n}", setup.dtype, "ms", times, note))
    return rows


def time_steps(text: Ours | Theirs, ids: Tensor) -> float:
    """The seconds that one of the tokens ids (1, T) takes; the text forgets them again."""
    tokens, forget = ids.split(1, dim=1), text.mark()
    took = seconds(lambda: [text.step(token) for token in tokens])
    forget()
    return took / len(tokens)


@torch.inference_mode()
def cache(setup: Setup) -> list[Row]:
    ours, theirs = load_models(setup.folder, setup.norm, setup.dtype)
    n, config = setup.args.prefill, ours.config
    found = {"ours": [held_bytes(ours.new_cache(1, n))]}
    if theirs:
        text = Theirs(theirs)
        text.step(random_ids(ours, n))
        found["theirs"] = [held_bytes(text.cache.layers)]
    shape = (2, config.num_hidden_layers, config.num_key_value_heads, n, config.head_dim)  # 2: keys and values
    expected = math.prod(shape) * ours.embed_tokens.weight.itemsize
    note = f"{expected / 1e6:.4g} MB by the shapes"
    if found["ours"] != [expected]:
        note += ", WHICH IS NOT WHAT OURS HOLDS"
    return [Row(f"KV cache, {n} positions", setup.dtype, "MB", found, note)]


def held_bytes(layers: list[Any]) -> float:
    """The memory behind the tensors of a cache, whatever part of it they show."""
    tensors = [value for layer in layers for value in vars(layer).values() if torch.is_tensor(value)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def train(setup: Setup) -> list[Row]:
    """A training step, with train.py's own loss and parameter groups, on random weights and tokens."""
    torch.manual_seed(0)
    config = LlamaConfig.from_dict(setup.config.to_dict() | TRAINED)
    batch = torch.randint(config.vocab_size, (BATCH[0], BATCH[1] + 1))
    ours, calls = training_calls(setup, config, batch)
    times = setup.in_turn(**calls)
    speed = BATCH[0] * BATCH[1] / median(times["ours"])
    note = f"{speed:.0f} tokens/s, {setup.flop_rate(training_flops(ours, BATCH[1]) * speed)}"
    return [Row(f"training step, {BATCH[0]} x {BATCH[1]}", setup.dtype, "ms", times, note)]


def training_calls(setup: Setup, config: LlamaConfig, batch: Tensor) -> tuple[Llama, dict[str, Callable[[], float]]]:
    """Our model with random weights, and the training step of ours and, with transformers, theirs."""
    step_of = partial(training_step, batch, setup.dtype)
    ours = Llama(config, setup.norm)
    calls = {"ours": step_of(ours, torch.compile(ours) if setup.args.compile else ours)}
    if transformers:
        theirs = fresh_theirs(config)
        their_forward: Any = torch.compile(theirs) if setup.args.compile else theirs
        calls["theirs"] = step_of(theirs, lambda tokens: their_forward(tokens, use_cache=False).logits)
    return ours, calls


def training_step(batch: Tensor, dtype: str, model: Any, forward: Any) -> Callable[[], float]:
    """A function that trains `model` on the tokens (B, T + 1) for a step of train.py's, and returns its seconds."""
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()

    def step() -> None:
        with autocast:
            loss = summed_loss(forward, batch) / batch[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: seconds(step)


def fresh_theirs(config: LlamaConfig) -> Any:
    """transformers' model of a config, with random weights."""
    their_config = transformers.AutoConfig.for_model(**config.to_dict())
    return transformers.AutoModelForCausalLM.from_config(their_config, **attention_of(config))


def load(setup: Setup) -> list[Row]:
    """Time and memory of loading, each time in a process of its own, with the file in the system's cache."""

    def loading(side: str) -> dict[str, float]:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(load_once, side, setup.folder, setup.config, setup.args.norm).result()

    results = setup.in_turn(ours=partial(loading, "ours"), theirs=partial(loading, "theirs"))
    size, rows = sum(path.stat().st_size for path in setup.folder.glob("*.safetensors")), []
    for what in results["ours"][0]:
        found = {side: [result[what] for result in results[side]] for side in results}
        times_file = f"{median(found['ours']) / size:.2f} times the file of {size / 1e6:.0f} MB"
        unit, note = ("MB", times_file) if "memory" in what else ("ms", "")
        rows.append(Row(what, stored_dtype(setup.folder), unit, found, note))
    return rows


def load_once(side: str, folder: Path, config: LlamaConfig, norm: str) -> dict[str, float]:
    """Seconds, and bytes at the peak beyond those of the imports, until a model is loaded and has computed a token."""
    if side == "ours":
        load = partial(load_checkpoint, folder, load_backend(norm, CPU), CPU)
    else:
        with torch.device("meta"):
            kind = type(fresh_theirs(config))  # imports it
        load = partial(kind.from_pretrained, folder, dtype="auto", **attention_of(config))
    before = memory("VmRSS")
    # Reset the peak VmHWM; ru_maxrss would start from that of the process which started this one.
    Path("/proc/self/clear_refs").write_text("5")
    with torch.inference_mode():
        start = time.perf_counter()
        model = load()
        loaded, peak = time.perf_counter() - start, memory("VmHWM") - before
        model(torch.tensor([[1]]))
        first, peak_with_token = time.perf_counter() - start, memory("VmHWM") - before
    times = {"loading": loaded, "loading and a first token": first}
    return times | {"peak memory of loading": peak, "peak memory with a first token": peak_with_token}


def memory(key: str) -> int:
    """A size in bytes out of Linux's /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def start(setup: Setup) -> list[Row]:
    """generate.py from the command to its end with one token, which is a little more than to the token."""
    command = [sys.executable, ROOT / "generate.py", "--ckpt", setup.folder, "--norm", setup.args.norm]
    command += ["--device", "cpu", "--prompt", "The", "--temperature", "0", "--max-new-tokens", "1"]

    def generate_once() -> None:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise InputError(f"generate.py failed: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")

    times = setup.in_turn(ours=lambda: seconds(generate_once))
    return [Row("generate.py, one token", stored_dtype(setup.folder), "s", times)]


def stored_dtype(folder: Path) -> str:
    """The dtype in a checkpoint's files, as safetensors names it: "file's F32"."""
    with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
        return f"file's {file.get_slice(min(file.keys())).get_dtype()}"
