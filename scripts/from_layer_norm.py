"""Turn a model on LayerNorm into the same function on RMSNorm, and show what copying the weights alone does.

    python scripts/from_layer_norm.py          a GPT-2 with random weights and biases, from transformers
    python scripts/from_layer_norm.py --norm triton --emulate sm_90

LayerNorm removes the mean of a row, and RMSNorm does not. In a pre-norm model nothing else reads the residual stream,
so what writes into it can leave the mean out beforehand: the mean over the outputs is taken from each writer's weight
and bias. Then the variance is the mean square, and eps stands in the same place. LayerNorm's own bias moves into the
linear layer behind it: W (n + b) = W n + W b. Neither is an approximation, so only rounding differs.

It can't be done for a post-norm model (the sum is normalised, and the stream is what the norm wrote), nor where what
reads a norm is not linear or can't take a bias.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import RMS_USAGE, InputError
from model.cli import Parser, emulate_as_asked, positive, run, seed


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=positive(int), default=4, help="of the GPT-2")
    parser.add_argument("--hidden-size", type=positive(int), default=96, help="a multiple of 4, the number of heads")
    parser.add_argument("--seed", type=seed, default=0, help="of the weights and the tokens")
    parser.add_argument("--norm", default="auto", help=f"what computes RMSNorm: {RMS_USAGE}")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    parser.add_emulation()
    args = parser.parse_args()
    if args.hidden_size % 4:
        raise InputError(f"--hidden-size is {args.hidden_size}; expected a multiple of 4, the number of heads")
    emulate_as_asked(args)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import torch
from torch import Tensor, nn

from kernels import Backend, load_backend
from kernels.layer_norm import is_layer_norm
from model.cli import choose_device
from model.norm import RMSNorm

EPS = 3e-4  # of the random GPT-2: large enough to show, were it in another place


class Normed(nn.Module):
    """An RMSNorm with LayerNorm's signature: rows in, rows out."""

    def __init__(self, norm: nn.LayerNorm, backend: Backend) -> None:
        super().__init__()
        self.norm = RMSNorm(norm.normalized_shape, norm.eps, backend)
        self.norm.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)[0]


@torch.no_grad()
def centre(writer: Any) -> None:
    """Remove the mean, over a row, of what `writer` adds to the residual stream: an Embedding, a Linear or a Conv1D."""
    weight, bias = writer.weight, getattr(writer, "bias", None)
    outputs = 0 if isinstance(writer, nn.Linear) else -1  # the axis of the weight that runs over them
    weight -= weight.double().mean(outputs, keepdim=True)
    if bias is not None:
        bias -= bias.double().mean()


@torch.no_grad()
def fold_bias(norm: nn.LayerNorm, reader: Any) -> None:
    """Add to `reader`, the one linear layer that reads `norm`, what the norm's bias becomes behind it."""
    weight = reader.weight.double()
    moved = norm.bias.double() @ (weight.T if isinstance(reader, nn.Linear) else weight)
    before = 0 if reader.bias is None else reader.bias.double()
    reader.bias = nn.Parameter((before + moved).to(reader.weight.dtype))


def to_rms_norm(model: Any, backend: Backend) -> None:
    """Turn a GPT2LMHeadModel, in place, into the same function (in eval mode) on `backend`'s RMSNorm.

    The embedding is centred and the head is not, so they are no longer tied; the head gets a bias. The result can't be
    saved as a GPT-2: what save_pretrained writes is loaded as a GPT2LMHeadModel with new LayerNorms.
    Raises InputError for any other model, one with cross attention, and one whose norms are not all nn.LayerNorm.
    """
    refuse_others(model)
    network = model.transformer
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for block in network.h:
        fold_bias(block.ln_1, block.attn.c_attn)
        fold_bias(block.ln_2, block.mlp.c_fc)
    fold_bias(network.ln_f, model.lm_head)
    for writer in writers(model):
        centre(writer)
    replace_norms(model, backend)


def refuse_others(model: Any) -> None:
    """Raise InputError for a model that to_rms_norm would change into another function."""
    from transformers import GPT2LMHeadModel

    wanted = "expected a GPT2LMHeadModel without cross attention, on LayerNorm"
    if not isinstance(model, GPT2LMHeadModel):
        raise InputError(f"the model is of type {type(model).__name__}; {wanted}")
    if model.config.add_cross_attention:
        raise InputError(f"the model has cross attention, which reads and writes the stream too; {wanted}")
    network = model.transformer
    for norm in (*(norm for block in network.h for norm in (block.ln_1, block.ln_2)), network.ln_f):
        if not isinstance(norm, nn.LayerNorm):
            raise InputError(f"the model has a norm of type {type(norm).__name__}; {wanted}")


def writers(model: Any) -> Iterable[nn.Module]:
    """All that adds to the residual stream of transformers' GPT2LMHeadModel."""
    network = model.transformer
    yield from (network.wte, network.wpe)
    for block in network.h:
        yield from (block.attn.c_proj, block.mlp.c_proj)


def replace_norms(model: Any, backend: Backend) -> None:
    """Put RMSNorms in the places of the LayerNorms, with their weights and without their biases."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, nn.LayerNorm):
                setattr(module, name, Normed(norm, backend))


def random_gpt2(layers: int, hidden_size: int) -> Any:
    """A GPT-2 in eval mode whose weights, biases and norms are random, as a trained one's are. Raises InputError."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise InputError(f'transformers can\'t be imported ({error}); pip install -e ".[test]"') from error
    config = GPT2Config(
        vocab_size=512, n_positions=128, n_embd=hidden_size, n_layer=layers, n_head=4, layer_norm_epsilon=EPS,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            parameter.copy_(mean + torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model


@torch.no_grad()
def compare(model: Any, backend: Backend, tokens: Tensor) -> list[tuple[str, float]]:
    """What is done, and the largest difference of its logits from the model's, over the largest logit."""
    expected = model(tokens).logits
    converted, copied = deepcopy(model), deepcopy(model)
    to_rms_norm(converted, backend)
    replace_norms(copied, backend)
    cases = {"centred, with the bias folded": converted, "weights copied": copied}
    return [
        (what, float((other(tokens).logits - expected).abs().max() / expected.abs().max()))
        for what, other in cases.items()
    ]


def main() -> None:
    args = parse_args()
    device = choose_device(args.device)
    backend = load_backend(args.norm, device)
    if is_layer_norm(backend.rms_norm):
        raise InputError(f"--norm is {args.norm}, which is LayerNorm; expected an RMSNorm to convert to: {RMS_USAGE}")
    torch.manual_seed(args.seed)
    model = random_gpt2(args.layers, args.hidden_size).to(device)
    tokens = torch.randint(512, (4, 128), device=device)
    print(
        f"GPT-2 of {args.layers} layers on {backend.description}: largest difference of a logit, over the largest logit"
    )
    for dtype in (torch.float64, torch.float32):
        for what, difference in compare(model.to(dtype), backend, tokens):
            print(f"{str(dtype).removeprefix('torch.')}, {what}: {difference:.1e}")


if __name__ == "__main__":
    run(main)
