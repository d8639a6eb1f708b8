"""Time the whole model against transformers' LlamaForCausalLM and against what the machine gives, on a CPU.

Both have the same weights and run in turn, ours, theirs, ours, theirs, so that a drift of the machine meets both. A
ratio is theirs over ours of the calls of one turn, in time or in bytes: above 1, ours is faster or smaller.
Beside the medians stand the quartiles. Decoding is batch 1 and greedy, and its first token isn't counted; transformers
does it twice, with generate() and with a bare loop over its forward, which is the model without what generate() adds.

The machine is measured in the same run: the bandwidth of reading 256 MB, and the rate of a matrix product. A token of a
decode reads every weight once, so its share of the bandwidth is how near it is to the end of what can be had.

Without --ckpt the model has the shape of SmolLM2-135M and random weights, and lies in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from kernels import USAGE, InputError, load_backend
from model.cli import Parser, names_in, positive, run, say, whole_numbers

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from model.llama import Llama

PARTS = ["prefill", "decode", "context", "cache", "train", "load", "start"]
DTYPES = ["float32", "bfloat16"]
SMOLLM2_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRAINED = SMOLLM2_135M | {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
BATCH = (16, 256)  # sequences and tokens of a training step
PROMPT = 16  # tokens before the decoded ones
MORE = 16  # tokens decoded at each context
ALONE = "transformers is not installed (pip install transformers): ours alone, without ratios"


class Row(NamedTuple):
    """One line of the table: what was measured in `unit`, a number a repeat. Of all of them less is better."""

    what: str
    dtype: str
    unit: str  # "s", "ms" or "MB"
    ours: list[float]
    theirs: list[float]  # empty without transformers
    note: str = ""


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ckpt", type=Path, help="checkpoint directory (default: random weights in the shape of SmolLM2-135M)")
    add("--parts", default=",".join(PARTS), help="what to measure, comma-separated")
    add("--dtypes", default=",".join(DTYPES), help="comma-separated; training has the second as autocast")
    add("--norm", default="auto", help=f"what computes our RMSNorm: {USAGE}")
    add("--compile", action="store_true", help="our compiled decoder, and torch.compile of both models in training")
    add("--prefill", type=positive(int), default=512, help="tokens of the prefill")
    add("--tokens", type=positive(int), default=64, help="tokens to decode")
    add(
        "--contexts",
        type=whole_numbers,
        default=[128, 512, 2048],
        help="where the cost of a token is measured: 128,512,...",
    )
    add("--repeats", type=positive(int), default=5, help="pairs of ours and theirs")
    add("--threads", type=positive(int), help="of PyTorch (default: PyTorch's own choice)")
    args = parser.parse_args()
    for flag, names, known in (("--parts", args.parts, PARTS), ("--dtypes", args.dtypes, DTYPES)):
        if not names_in(names) or set(names_in(names)) - set(known):
            raise InputError(f"{flag} is '{names}'; expected some of {','.join(known)}")
    if args.tokens < 2:
        raise InputError("--tokens is 1, and the first isn't counted; expected 2 or more")
    args.parts, args.dtypes = names_in(args.parts), names_in(args.dtypes)
    return args


# What is timed: ours, and theirs.


def prefill_ours(model: Llama, ids: Tensor) -> Tensor:
    return model(ids, model.new_cache(1, ids.size(1)), logits_to_keep=1)


def prefill_theirs(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=True, logits_to_keep=1).logits


def eager_step(model: Llama) -> Callable[[Tensor, Any], Tensor]:
    """A function of tokens (1, T) and our cache that returns the last logits (1, 1, vocab_size)."""
    return lambda tokens, caches: model(tokens, caches, logits_to_keep=1)


def compiled_step(model: Llama) -> Callable[[Tensor, Any], Tensor]:
    """The same, compiled where one token comes in."""
    from model.compiled_step import compile_step

    eager, compiled = eager_step(model), compile_step(model)
    return lambda tokens, caches: (compiled if tokens.size(1) == 1 else eager)(tokens, caches)


def decode_ours(model: Llama, ids: Tensor, n: int, step: Callable[[Tensor, Any], Tensor]) -> tuple[list[int], float]:
    """n greedy tokens after ids (1, T), and the seconds that all but the first took."""
    caches, new = model.new_cache(1, ids.size(1) + n), []
    for i in range(n):
        ids = step(ids, caches)[:, -1].argmax(-1, keepdim=True)
        new.append(ids.item())
        if i == 0:
            first = time.perf_counter()
    return new, time.perf_counter() - first


def decode_theirs(model: Any, ids: Tensor, n: int) -> tuple[list[int], float]:
    """decode_ours with transformers' forward and its own cache."""
    cache, new = None, []
    for i in range(n):
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        new.append(ids.item())
        if i == 0:
            first = time.perf_counter()
    return new, time.perf_counter() - first


class Clock:
    """A streamer for generate() that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:  # the prompt too comes here, before the first token
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_theirs(model: Any, ids: Tensor, n: int) -> tuple[list[int], float]:
    """decode_ours with transformers' generate()."""
    clock = Clock()
    limits = {"do_sample": False, "max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0}
    result = model.generate(ids, attention_mask=ids.new_ones(ids.shape), streamer=clock, **limits)
    return result[0, ids.size(1) :].tolist(), clock.times[-1] - clock.times[1]


# Arithmetic.


def weight_bytes(model: Llama) -> int:
    """What one token reads of the weights: all of them, but of an embedding that is no head a single row."""
    total = sum(p.nbytes for p in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.embed_tokens.weight.nbytes


def expected_cache_bytes(config: Any, n_positions: int, itemsize: int) -> int:
    """Keys and values of every layer."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * n_positions * itemsize


def held_bytes(tensors: list[Tensor]) -> int:
    """Of the memory behind the tensors, whatever part of it they show."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def spread(numbers: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    low, _, high = quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    return median(numbers), low, high


def ratio(row: Row) -> tuple[float, float, float] | None:
    """Theirs over ours, of each pair: median and quartiles."""
    return spread([b / a for a, b in zip(row.ours, row.theirs, strict=True)]) if row.theirs else None


HEAD = f"{'':34}{'dtype':12}{'ours':>32}{'theirs':>32}{'theirs/ours':>22}"


def line(row: Row) -> str:
    """A row of the table."""
    cells = []
    for numbers in (row.ours, row.theirs):
        middle, low, high = spread(numbers) if numbers else (0, 0, 0)
        cells.append(f"{middle:.4g} [{low:.4g}, {high:.4g}] {row.unit}" if numbers else "")
    found = ratio(row)
    cells.append(f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]" if found else "")
    return f"{row.what:34}{row.dtype:12}{cells[0]:>32}{cells[1]:>32}{cells[2]:>22}   {row.note}".rstrip()


# Measuring.


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: list[Callable[[], float]], repeats: int) -> list[list[float]]:
    """What each call returns, a number a repeat; each is called once before the first that counts."""
    results = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, numbers in zip(calls, results, strict=True):
            number = call()
            if turn:
                numbers.append(number)
    return results


def measure_machine(dtypes: list[str]) -> tuple[float, dict[str, float]]:
    """Bytes a second of reading, and FLOP a second of a matrix product by dtype: the best of 5, since it is a limit."""
    import torch

    large = torch.ones(2**26)  # of zeros, Linux would show one page of memory again and again
    bandwidth = large.nbytes / min(seconds(large.sum) for _ in range(5))
    rates, n = {}, 1024
    for dtype in dtypes:
        a, b = (torch.ones(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        rates[dtype] = 2 * n**3 / min(seconds(lambda a=a, b=b: a @ b.T) for _ in range(5))  # as a layer has its weight
    return bandwidth, rates


class Bench:
    """A run: the models in one dtype, the machine's limits, and a method for each part that returns rows."""

    def __init__(self, args: argparse.Namespace, folder: Path, bandwidth: float, rates: dict[str, float]) -> None:
        self.args, self.folder, self.bandwidth, self.rates = args, folder, bandwidth, rates
        self.both = find_spec("transformers") is not None
        self.dtype = ""

    def load(self, dtype: str) -> None:
        import torch

        from model.checkpoint.load import load_checkpoint

        device = torch.device("cpu")
        self.dtype, torch_dtype = dtype, getattr(torch, dtype)
        self.ours = load_checkpoint(self.folder, load_backend(self.args.norm, device), device, torch_dtype)
        self.theirs = None
        if self.both:
            from transformers import AutoModelForCausalLM

            load = AutoModelForCausalLM.from_pretrained
            self.theirs = load(self.folder, dtype=torch_dtype, attn_implementation="sdpa").eval()

    def ids(self, n: int) -> Tensor:
        import torch

        room = self.ours.config.max_position_embeddings
        if n > room:
            raise InputError(f"{n} positions are asked for and the model has {room}; lower --prefill or --contexts")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.ours.config.vocab_size, (1, n), generator=generator)

    def row(self, what: str, unit: str, results: list[list[float]], note: str = "") -> Row:
        scale = {"s": 1, "ms": 1e3}[unit]
        ours, theirs = [[number * scale for number in numbers] for numbers in (*results, [])][:2]
        return Row(what, self.dtype, unit, ours, theirs, note)

    def prefill(self) -> list[Row]:
        from model.training.flops import forward_flops

        ids = self.ids(self.args.prefill)
        calls = [lambda: seconds(lambda: prefill_ours(self.ours, ids))]
        if self.theirs:
            calls.append(lambda: seconds(lambda: prefill_theirs(self.theirs, ids)))
        results = in_turn(calls, self.args.repeats)
        rate = forward_flops(self.ours, ids.size(1), 1, 1) / median(results[0])
        note = f"{ids.size(1) / median(results[0]):.0f} tokens/s, {self.of_products(rate)}"
        return [self.row(f"prefill, {ids.size(1)} tokens", "ms", results, note)]

    def of_products(self, rate: float) -> str:
        return f"{rate / 1e9:.0f} GFLOP/s, {rate / self.rates[self.dtype]:.0%} of a matrix product's"

    def decode(self) -> list[Row]:
        ids, n = self.ids(PROMPT), self.args.tokens
        self.ids(PROMPT + n)
        step, tokens = (compiled_step if self.args.compile else eager_step)(self.ours), {}

        def call(name: str, decode: Callable[[], tuple[list[int], float]]) -> Callable[[], float]:
            def timed() -> float:
                tokens[name], took = decode()
                return took / (n - 1)

            return timed

        calls = [call("ours", lambda: decode_ours(self.ours, ids, n, step))]
        if self.theirs:
            calls.append(call("loop", lambda: decode_theirs(self.theirs, ids, n)))
            calls.append(call("generate", lambda: generate_theirs(self.theirs, ids, n)))
        ours, *theirs = in_turn(calls, self.args.repeats)
        rate = weight_bytes(self.ours) / median(ours)
        share = f"{rate / self.bandwidth:.0%} of the bandwidth"
        note = f"{1 / median(ours):.1f} tokens/s, {rate / 1e9:.1f} GB/s of weights, {share}"
        rows = [self.row("decode, a token", "ms", [ours, *theirs[:1]], note)]
        if theirs:
            same = sum(a == b for a, b in zip(tokens["ours"], tokens["generate"], strict=True))
            note = f"{same} of {n} tokens are the same"
            rows.append(self.row("decode, theirs by generate()", "ms", [ours, theirs[1]], note))
        return rows

    def context(self) -> list[Row]:
        """The cost of a token after so many others. Theirs is cut back after each turn, ours only forgets the end."""
        rows, before = [], None
        for context in self.args.contexts:
            ids = self.ids(context + MORE)
            caches = self.ours.new_cache(1, context + MORE)
            self.ours(ids[:, :context], caches, logits_to_keep=1)

            def ours(ids: Tensor = ids, caches: Any = caches, context: int = context) -> float:
                for cache in caches:
                    cache.length = context
                steps = ids[:, context:].split(1, dim=1)
                return seconds(lambda: [self.ours(step, caches, logits_to_keep=1) for step in steps]) / MORE

            calls = [ours]
            if self.theirs:
                cache = self.theirs(ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values

                def theirs(ids: Tensor = ids, cache: Any = cache) -> float:
                    steps = ids[:, -MORE:].split(1, dim=1)
                    took = seconds(lambda: [self.theirs(s, past_key_values=cache, logits_to_keep=1) for s in steps])
                    cache.crop(-MORE)
                    return took / MORE

                calls.append(theirs)
            results = in_turn(calls, self.args.repeats)
            note, now = "", (context, median(results[0]) * 1e3)
            if before:
                note = f"{(now[1] - before[1]) / (now[0] - before[0]) * 1e3:+.2f} ms for 1000 more positions"
            before = now
            rows.append(self.row(f"decode, a token at {context}", "ms", results, note))
        return rows

    def cache(self) -> list[Row]:
        import torch

        n = self.args.prefill
        caches = self.ours.new_cache(1, n)
        ours = held_bytes([value for cache in caches for value in vars(cache).values() if torch.is_tensor(value)])
        expected = expected_cache_bytes(self.ours.config, n, self.ours.embed_tokens.weight.itemsize)
        theirs = []
        if self.theirs:
            cache = self.theirs(self.ids(n), use_cache=True, logits_to_keep=1).past_key_values
            theirs = [held_bytes([part for layer in cache.layers for part in (layer.keys, layer.values)]) / 1e6]
        note = f"the shapes say {expected / 1e6:.4g} MB" + ("" if ours == expected else ", WHICH IT DOESN'T TAKE")
        return [Row(f"KV cache, {n} positions", self.dtype, "MB", [ours / 1e6], theirs, note)]

    def train(self) -> list[Row]:
        import torch

        from model.config import LlamaConfig
        from model.llama import Llama, summed_loss
        from model.training.flops import training_flops
        from train import parameter_groups

        torch.manual_seed(0)
        config = LlamaConfig.from_dict(TRAINED)
        batch = torch.randint(config.vocab_size, (BATCH[0], BATCH[1] + 1))
        models = [Llama(config, load_backend(self.args.norm, torch.device("cpu")))]
        if self.both:
            from transformers import LlamaConfig as TheirConfig
            from transformers import LlamaForCausalLM

            models.append(LlamaForCausalLM(TheirConfig(**config.to_dict(), attn_implementation="sdpa")))
        autocast = torch.autocast("cpu", torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()

        def step_of(model: Any) -> Callable[[], float]:
            optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4)
            forward = torch.compile(model) if self.args.compile else model
            if model is not models[0]:
                forward = logits_alone(forward)

            def step() -> None:
                with autocast:
                    loss = summed_loss(forward, batch) / batch[:, 1:].numel()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return lambda: seconds(step)

        results = in_turn([step_of(model) for model in models], self.args.repeats)
        speed = BATCH[0] * BATCH[1] / median(results[0])
        note = f"{speed:.0f} tokens/s, {self.of_products(training_flops(models[0], BATCH[1]) * speed)}"
        return [self.row(f"training step, {BATCH[0]} x {BATCH[1]}", "ms", results, note)]

    def load_in_a_process(self) -> list[Row]:
        """Time and memory, each in a process of its own, with the file in the system's cache."""
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        sources = [LOAD_OURS, *([LOAD_THEIRS] if self.both else [])]
        found = [[] for _ in sources]
        for turn in range(self.args.repeats + 1):
            for source, results in zip(sources, found, strict=True):
                output = in_a_process([sys.executable, "-c", source + MEASURE_LOAD, str(self.folder), self.args.norm])
                if turn:
                    results.append(json.loads(output.splitlines()[-1]))
        rows = []
        for key, what, unit in (("loaded", "loading", "ms"), ("first", "loading and a first token", "ms")):
            rows.append(self.row(what, unit, [[result[key] for result in results] for results in found]))
        for key, what in (("peak_loading", "peak memory of loading"), ("peak", "peak memory with a first token")):
            ours, theirs = [[result[key] / 1e6 for result in results] for results in (*found, [])][:2]
            note = f"{median(ours) * 1e6 / size:.2f} times the file of {size / 1e6:.0f} MB"
            rows.append(Row(what, "", "MB", ours, theirs, note))
        return [row._replace(dtype="the file's") for row in rows]

    def start(self) -> list[Row]:
        """From the command to its end with one token, which is a little more than to the token."""
        command = [sys.executable, str(REPOSITORY / "generate.py"), "--ckpt", str(self.folder), "--prompt", "The"]
        command += ["--norm", self.args.norm, "--temperature", "0", "--max-new-tokens", "1"]
        results = in_turn([lambda: seconds(lambda: in_a_process(command))], self.args.repeats)
        return [self.row("generate.py, one token", "s", results)._replace(dtype="the file's")]


def logits_alone(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda tokens: forward(tokens, use_cache=False).logits


def in_a_process(command: list[str]) -> str:
    """Its stdout. Raises InputError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise InputError(f"{Path(command[1]).name if command[1] != '-c' else 'loading'} failed: {reason}")
    return done.stdout


LOAD_OURS = """
import sys, torch
from kernels import load_backend
from model.checkpoint.load import load_checkpoint
import safetensors.torch
cpu = torch.device("cpu")
norm = load_backend(sys.argv[2], cpu)
def load(): return load_checkpoint(sys.argv[1], norm, cpu)
"""
LOAD_THEIRS = """
import sys, torch
from transformers import LlamaForCausalLM
import safetensors.torch
def load(): return LlamaForCausalLM.from_pretrained(sys.argv[1], dtype="auto", attn_implementation="sdpa")
"""
# The peak since it was last reset is VmHWM; ru_maxrss would begin with that of the process which started this one.
MEASURE_LOAD = """
import json, time
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
with torch.inference_mode():
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = time.perf_counter()
    model = load()
    loaded, peak_loading = time.perf_counter() - start, status("VmHWM") - before
    model(torch.tensor([[1]]))
    first, peak = time.perf_counter() - start, status("VmHWM") - before
print(json.dumps({"loaded": loaded, "first": first, "peak_loading": peak_loading, "peak": peak}))
"""


def random_checkpoint(folder: Path) -> Path:
    import torch

    from model.checkpoint.save import save_checkpoint
    from model.config import LlamaConfig
    from model.llama import Llama
    from model.tokenizer.sentencepiece_model import train_tokenizer

    torch.manual_seed(0)
    model = Llama(LlamaConfig.from_dict(SMOLLM2_135M), load_backend("reference", torch.device("cpu")))
    save_checkpoint(folder, model, train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 400))
    return folder


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """The rows of all parts, each when it is measured."""
    import torch

    say("machine")
    bandwidth, rates = measure_machine(args.dtypes)
    matrices = ", ".join(f"{rates[dtype] / 1e9:.0f} GFLOP/s in {dtype}" for dtype in args.dtypes)
    print(f"the machine reads {bandwidth / 1e9:.1f} GB/s and multiplies matrices at {matrices}")
    bench = Bench(args, folder, bandwidth, rates)
    if not bench.both:
        print(ALONE)
    print(HEAD, flush=True)
    here = {"prefill": bench.prefill, "decode": bench.decode, "context": bench.context, "cache": bench.cache}
    for dtype in args.dtypes:
        if here.keys() & set(args.parts):
            bench.load(dtype)
        bench.dtype = dtype
        for part, method in (here | {"train": bench.train}).items():
            if part in args.parts:
                say(f"{part}, {dtype}")
                with nullcontext() if part == "train" else torch.inference_mode():
                    rows = method()
                yield from rows
    for part, method in (("load", bench.load_in_a_process), ("start", bench.start)):
        if part in args.parts:
            say(part)
            yield from method()


def main() -> None:
    args = parse_args()
    if "load" in args.parts and not Path("/proc/self/clear_refs").exists():
        raise InputError("--parts load reads Linux's /proc; name the other parts")
    if args.ckpt is not None and not args.ckpt.is_dir():
        raise InputError(f"no checkpoint directory at {args.ckpt}; name one, or leave --ckpt out")
    say("importing")
    import torch

    warnings.filterwarnings("ignore", message=".past_key_values. is deprecated")  # its successor is new in 5.24
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the processes started here
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.ckpt.resolve() if args.ckpt else random_checkpoint(Path(temporary) / "random")
        print(f"{args.ckpt or 'SmolLM2-135M, random weights'}; torch {torch.__version__}, ", end="")
        print(f"{torch.get_num_threads()} threads, {args.repeats} pairs, median [quartiles]")
        for row in measure(args, folder):
            print(line(row), flush=True)


if __name__ == "__main__":
    run(main)
