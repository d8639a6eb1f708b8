"""What one of several processes computes of a divided model, beside the whole one, for test_tensor_parallel.py."""

import json

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import kernels
from model.cli import rank, world_size
from model.config import LlamaConfig
from model.generation import generate
from model.llama import Llama
from model.tensor_parallel import parallelize
from model.training import distributed
from tests.helpers import CPU, ROOT, draw_weights, likeliest, texts

FAMILIES = {
    "llama": ("tiny", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    **{name: (f"tiny-{name}", {}) for name in ("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "olmo2")},
    "llama by 3": ("tiny", {"num_attention_heads": 6, "num_key_value_heads": 3}),
}
# Biases and tied embeddings; norms of heads, and on both sides of a sub-layer; a norm that is divided.
QUICK = ["llama", "gemma3", "olmo2"]
PLAIN = ["tests.norms:plain"]
WRITE = ("llama", "gemma2", "olmo2", "llama by 3")  # of which tokens are compared too, which takes seconds
SIZES = {"hidden_size": 24, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64}
PROMPTS = [[1, 5, 7, 9], [1, 4], [1, 2, 3, 4, 5, 6, 7]]


def config_of(name, more=()):
    """The model of configs/NAME.json in small sizes, and with an eps unlike any default."""
    values = json.loads((ROOT / f"configs/{name}.json").read_text())
    return LlamaConfig.from_dict({**values, **SIZES, "head_dim": 8, "rms_norm_eps": 3e-3, **dict(more)})


def model_of(config, norm, dtype):
    torch.manual_seed(0)
    model = Llama(config, kernels.load_backend(norm, CPU))
    draw_weights(model, std=0.1)
    return model.to(dtype)


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def against_whole(config, norm="reference", dtype=torch.float64, n_new=6):
    """Differences of a divided model from the whole one, each as a share of the whole one's largest number.

    In float64 the order of summation does not show, so that nothing hides behind it.
    """
    batch = torch.randint(config.vocab_size, (3, 13), generator=torch.Generator().manual_seed(1))
    tokens, targets = batch[:, :-1], batch[:, 1:]
    whole, model = model_of(config, norm, dtype), model_of(config, norm, dtype)
    expected_loss = summed(whole(tokens), targets)
    expected_loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in whole.named_parameters()}

    wrapped = distributed.divide(model, CPU, fsdp=False, tp=world_size(), dtype=dtype)
    loss, one_vocabulary = 0, 0
    for part in (slice(0, 1), slice(1, 3)):  # as --grad-accum 2 has it
        with distributed.gradient_sync(wrapped, wanted=part.stop == 3):
            logits = wrapped(tokens[part])
            part_loss = distributed.whole(summed(logits, targets[part]))
            part_loss.backward()
            own_rows = model.norm.weight.grad.to_local().clone()
        loss += part_loss.detach()
        own_logits = logits.detach().to_local()
        one_vocabulary += summed(own_logits, targets[part] % own_logits.size(-1))
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (model, whole)]
    clipped = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    found = {
        "loss": relative(loss, expected_loss.detach()),
        "gradients": {name: relative(gradients[name], expected[name]) for name in expected},
        "gradient norm": relative(distributed.whole(norms[0]), norms[1]),
        "clipped": {name: relative(clipped[name], p.grad) for name, p in whole.named_parameters()},
        "without the sum over rows": relative(own_rows, expected["norm.weight"]),
        "loss of one vocabulary": relative(one_vocabulary, expected_loss.detach()),
        "shares": {name: p.to_local().numel() / p.numel() for name, p in model.named_parameters()},
    }
    if n_new:
        divided = model_of(config, norm, dtype)
        parallelize(divided, init_device_mesh("cpu", (world_size(),)), divide_sequence=False)
        found["tokens"], found["expected tokens"] = (
            texts(generate(m, PROMPTS, n_new, set(), likeliest)) for m in (divided, whole)
        )
        with torch.no_grad():
            found["logits"] = relative(divided(tokens[:, :7]), whole(tokens[:, :7]))
        found["cached heads"] = divided.new_cache(1, 5)[0].k.size(1)
    return found


def mean():
    """Difference of gradients over two parts of a batch, each computed by one process, from their mean."""
    config = config_of("tiny")
    whole, model = model_of(config, "reference", torch.float64), model_of(config, "reference", torch.float64)
    batch = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    summed(whole(batch[:, :-1]), batch[:, 1:]).backward()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    parallelize(model, mesh["tensor"], divide_sequence=True)
    wrapped, own = distributed.TensorParallel(model, mesh["data"]), batch[rank()][None]
    with distributed.gradient_sync(wrapped, wanted=True):
        distributed.whole(summed(wrapped(own[:, :-1]), own[:, 1:])).backward()
    expected = dict(whole.named_parameters())
    return max(relative(2 * p.grad.full_tensor(), expected[name].grad) for name, p in model.named_parameters())


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def cases(names, norms):
    """against_whole of each family in float64 and of each norm in float32."""
    found = {name: against_whole(config_of(*FAMILIES[name]), n_new=6 if name in WRITE else 0) for name in names}
    return found | {norm: against_whole(config_of("tiny"), norm, torch.float32, n_new=0) for norm in norms}


def quick():
    """The cases that every run of the tests has."""
    return cases(QUICK, PLAIN) | {"empty": empty(), "mean": mean()}


def empty():
    """Largest gradient of a batch without sequences."""
    model = model_of(config_of("tiny"), "reference", torch.float32)
    wrapped = distributed.divide(model, CPU, fsdp=False, tp=world_size(), dtype=torch.float32)
    with distributed.gradient_sync(wrapped, wanted=True):
        nothing = torch.zeros(0, 8, dtype=torch.long)
        distributed.whole(summed(wrapped(nothing), nothing)).backward()
    return max(p.grad.full_tensor().abs().max().item() for p in model.parameters())
