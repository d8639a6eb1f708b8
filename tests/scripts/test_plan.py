"""scripts/plan.py: bytes counted on fake tensors are those of real ones; the table and the command."""

import gc
import json
import resource
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels.torch_version import TORCH_2_13
from model.config import LlamaConfig
from model.llama import Llama, checkpoint_layers, summed_loss
from model.training.flops import forward_flops
from model.training.traffic import bytes_sent
from scripts.plan import Figures, amount, count, duration, fake_forward, main, saved_bytes, table
from tests.helpers import CPU, ROOT, needs_triton

CONFIGS = ROOT / "configs"
RUN = {
    "dtype": "bfloat16", "batch_size": 10, "block_size": 32, "grad_accum": 2, "steps": 1000, "processes": 4,
    "tp": 1, "fsdp": False, "checkpoint_activations": False,
}  # fmt: skip


def plan(config, norm, **settings):
    args = Namespace(**RUN | settings)
    return table(count(config, norm, args), args)


def real_loss(model, dtype):
    batch = torch.zeros(3, 33, dtype=torch.long)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return summed_loss(model, batch)


def rows_of(text):
    """Label -> (value, note)."""
    return {line[:32].strip(): (line[32:50].strip(), line[52:]) for line in text.splitlines()}


class Storages(TorchDispatchMode):
    """The storages that operations return, held by nobody here."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self):
        gc.collect()
        return {address: size for address, (storage, size) in self.made.items() if not storage.expired()}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 2_491_648),
        ("stories15m", 15_191_712),
        ("stories110m", 109_529_856),
        ("llama3.2-1b", 1_235_814_400),
        ("llama2-7b", 6_738_415_616),
    ],
)
def test_the_configs_have_the_parameters_of_the_models_they_name(name, count):
    path, their_class = CONFIGS / f"{name}.json", transformers.LlamaForCausalLM  # which is imported here, on the CPU
    with torch.device("meta"):
        ours = Llama(LlamaConfig.load(path), kernels.load_backend("torch", CPU))
        theirs = their_class(transformers.LlamaConfig(**json.loads(path.read_text())))
    assert [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)] == [count, count]


def measure(model, dtype):
    """Bytes that autograd keeps of a real forward, and of the storages that are left after it."""
    losses = []
    with Storages() as storages:
        saved = saved_bytes(lambda: losses.append(real_loss(model, dtype)), model.parameters())
    alive = storages.alive()
    for parameter in model.parameters():
        alive.pop(parameter.untyped_storage()._cdata, None)
    return saved, sum(alive.values()) - losses[0].nbytes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["torch", "reference", pytest.param("triton", marks=needs_triton)])
def test_what_is_planned_is_what_a_real_model_keeps_and_what_is_left_after_its_forward(
    config, norm, dtype, checkpointed
):
    config, backend = replace(config, num_hidden_layers=2), kernels.load_backend(norm, CPU)
    model = Llama(config, backend)
    if checkpointed:
        checkpoint_layers(model)
    saved, left = measure(model, dtype)
    span = 32 * (2 * 6 * 4 + 8)  # cos and sin in float32, and the slots
    assert left == saved + (span if checkpointed else 0)
    assert fake_forward(config, backend, dtype, 3, 32, checkpointed, False)[1] == saved


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True, "attention_bias": True},
        {"model_type": "mistral", "sliding_window": 7},
        {"model_type": "olmo2"},  # norms on the output, and q and k turned in float32
        {"model_type": "gemma2", "sliding_window": 7, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"model_type": "gemma3_text", "sliding_window": 7, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
        {"model_type": "granite", "embedding_multiplier": 2.7, "residual_multiplier": 0.61, "logits_scaling": 1.3},
    ],
)
def test_the_plan_of_other_shapes_is_what_a_real_model_keeps(config, change):
    config, backend = replace(config, num_hidden_layers=1, **change), kernels.load_backend("torch", CPU)
    real = Llama(config, backend)
    saved, left = measure(real, torch.bfloat16)
    planned, kept = fake_forward(config, backend, torch.bfloat16, 3, 32, False, False)
    assert kept == saved == left
    assert [p.shape for p in planned.parameters()] == [p.shape for p in real.parameters()]


def test_the_plan_of_fsdp_is_what_a_model_in_its_dtype_keeps(config):
    backend = kernels.load_backend("torch", CPU)
    saved, left = measure(Llama(config, backend).to(torch.bfloat16), torch.float32)
    assert fake_forward(config, backend, torch.bfloat16, 3, 32, False, True)[1] == saved == left


def test_saved_storages_are_counted_once_and_parameters_not_at_all():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    # the product keeps x and the weight, the sigmoid its result (2, 4), and the cosine a view of x
    assert saved_bytes(lambda: F.linear(x, weight).sigmoid().sum() + x[1].cos().sum(), [weight]) == 4 * (2 * 3 + 2 * 4)


@pytest.mark.parametrize("norm", ["torch", pytest.param("triton", marks=needs_triton)])
def test_checkpointed_layers_give_the_same_gradients(config, make_model, norm):
    gradients = []
    for checkpointed in (False, True):
        model = make_model(config, norm)
        if checkpointed:
            checkpoint_layers(model)
        real_loss(model, torch.bfloat16).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_the_plan_of_a_model_that_fits_no_memory_here_takes_none():
    """Llama 2 was trained on 2 T tokens in 184 320 hours of an A100 (https://arxiv.org/abs/2307.09288, table 2)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config, run = LlamaConfig.load(CONFIGS / "llama2-7b.json"), {"batch_size": 1024, "block_size": 4096}
    run |= {"grad_accum": 128, "steps": 480_000, "processes": 8, "fsdp": True}
    rows = rows_of(plan(config, kernels.load_backend("torch", CPU), **run))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in kB, on a Mac in bytes
    assert grown * (1 if sys.platform == "darwin" else 1024) < 1e9  # the weights would be 27e9
    assert rows["parameters"] == ("6,738,415,616", "262,144,000 of them in the embedding and the head")
    assert rows["weights"][0] == rows["gradients"][0] == "3.37 GB"  # 4 * 6738415616 / 8
    assert rows["Adam's two moments"][0] == "6.74 GB"
    kept = float(rows["activations"][0].removesuffix(" GB"))
    assert float(rows["together"][0].removesuffix(" GB")) == pytest.approx(kept + 13.477, abs=0.02)
    assert rows["tokens of the run"][0] == "2,013,265,920,000"
    # 6 for each parameter but the embedding's, and 12 * width for each of the (4096 + 1) / 2 positions seen, a layer
    expected = 6 * (6_738_415_616 - 32_000 * 4096 - 65 * 4096) + 32 * 12 * 4096 * 4097 / 2
    assert rows["FLOPs of a token"][0] == f"{expected / 1e9:.2f} GFLOP"
    assert float(rows["A100"][0].removesuffix(" days").replace(",", "")) * 24 * 8 == pytest.approx(184_320, rel=0.1)


def test_the_plan_follows_from_the_settings(config):
    norm = kernels.load_backend("torch", CPU)
    rows = rows_of(plan(config, norm))
    n_parameters = 2 * 61 * 48 + 3 * (48 * (48 + 24 + 24 + 48) + 3 * 48 * 80 + 2 * 48) + 48
    assert rows["parameters"] == (f"{n_parameters:,}", f"{2 * 61 * 48:,} of them in the embedding and the head")
    kept = "kept for the backward of 2 x 32 tokens at once, with bfloat16 copies of the weights"
    assert rows["activations"][1] == kept
    model, kept = fake_forward(config, norm, torch.bfloat16, 2, 32, False, False)
    assert rows["activations"][0] == f"{kept / 1e6:.2f} MB"
    assert rows["tokens of the run"] == ("320,000", "1,000 steps of 10 x 32")
    seconds = 1000 * 10 * 3 * forward_flops(model, 32, 1, 32) / (0.4 * 4 * 121e12)
    assert rows["L4"][0] == f"{seconds:.3g} seconds"
    assert rows["H100, H200"][1] == "989 TFLOP/s"
    assert rows["FLOPs of a token"][0] == f"{3 * forward_flops(model, 32, 1, 32) / 32 / 1e6:.2f} MFLOP"


@pytest.mark.parametrize(
    ("tied", "fsdp", "dtype"), [(False, False, "bfloat16"), (True, True, "bfloat16"), (False, True, "float32")]
)
def test_every_figure_is_counted_once(config, tied, fsdp, dtype):
    config, norm = replace(config, tie_word_embeddings=tied), kernels.load_backend("torch", CPU)
    model, kept = fake_forward(config, norm, getattr(torch, dtype), 2, 32, False, fsdp)
    layer, tables = 48 * (48 + 24 + 24 + 48) + 3 * 48 * 80 + 2 * 48, 61 * 48 * (1 if tied else 2)
    n_parameters = tables + 3 * layer + 48
    assert count(config, norm, Namespace(**RUN | {"fsdp": fsdp, "dtype": dtype})) == Figures(
        n_parameters=n_parameters,
        n_in_tables=tables,
        n_in_layers=3 * layer,
        tied=tied,
        n_sequences=2,  # 10 over 4 processes are at most 3 each, which in 2 parts are at most 2
        weight_bytes=4 * n_parameters / (4 if fsdp else 1),
        saved_bytes=kept,
        gathered_bytes=(2 if dtype == "bfloat16" else 4) * (tables + layer),
        flops_per_token=3 * forward_flops(model, 32, 1, 32) / 32,
        sent_bytes=bytes_sent(model, 4, 1, fsdp, 2 if dtype == "bfloat16" else 4, 3 * 32, 2, False),
    )


@pytest.mark.parametrize(
    ("settings", "kept", "temporaries"),
    [
        ({}, "once, with bfloat16 copies of the weights", "top"),
        ({"checkpoint_activations": True}, "once", "bfloat16 copies of the layers' weights: 4.00 GB"),
        ({"fsdp": True}, "once", "whole weights in bfloat16: 7.00 GB"),
        ({"fsdp": True, "dtype": "float32", "checkpoint_activations": True}, "once", "weights in float32: 7.00 GB"),
        ({"dtype": "float32"}, "once", "top"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_table_adds_up(settings, kept, temporaries, tied):
    figures = Figures(
        3 * 10**9, 10**9, 2 * 10**9, tied, 2, 12e9, 5 * 10**9, 7e9, 6.05e9, {"all-reduce of gradients": 8e9}
    )
    rows = rows_of(table(figures, Namespace(**RUN | settings)))
    tables = "the embedding" if tied else "the embedding and the head"
    assert rows["parameters"] == ("3,000,000,000", f"1,000,000,000 of them in {tables}")
    labels = ["weights", "gradients", "Adam's two moments", "activations", "together"]
    assert [rows[label][0] for label in labels] == ["12.00 GB", "12.00 GB", "24.00 GB", "5.00 GB", "53.00 GB"]
    assert rows["all-reduce of gradients"][0] == "8.00 GB"
    assert rows["activations"][1].endswith(kept)
    assert rows["together"][1].endswith(temporaries)
    if settings.get("dtype") == "float32":
        assert rows["time"][0] == "unknown"
    else:  # 320,000 tokens on 4 GPUs at 40 % of 121e12
        assert rows["L4"][0] == "10 seconds"


def test_amounts_and_times_are_in_the_largest_unit_that_fits():
    assert [amount(n, "B") for n in (1e4, 999_990_000, 1e9, 2.5e12)] == [
        "0.01 MB",
        "999.99 MB",
        "1.00 GB",
        "2,500.00 GB",
    ]
    times = {0.0123: "0.0123 seconds", 119: "119 seconds", 120: "2.0 minutes", 7199: "120.0 minutes", 7200: "2.0 hours"}
    times |= {172_799: "48.0 hours", 172_800: "2.0 days", 86_400 * 1500: "1,500.0 days"}
    assert {seconds: duration(seconds) for seconds in times} == times


def numpy_norm(x, weight, eps):
    return torch.from_numpy(x.detach().numpy()) * weight


def bare_launch(x, weight, eps):
    from kernels.triton_rms_norm import launch_forward

    return launch_forward(x, None, weight, eps, False, False)[0]


@pytest.mark.parametrize("norm", [numpy_norm, bare_launch])
def test_a_norm_that_reads_memory_is_refused(config, norm):
    with pytest.raises(kernels.InputError, match=r"my:norm cannot be planned.*plan with --norm torch"):
        plan(config, kernels.Backend("my:norm", norm, kernels.add_then(norm)))


PLAN = ["--config", "config.json", "--block-size", 16, "--batch-size", 4]


def test_a_plan_writes_nothing(workplace, command):
    before = sorted(workplace.rglob("*"))
    code, stdout, stderr = command(main, *PLAN, "--processes", 2, "--vocab-size", 1000)
    assert (code, stderr) == (0, "")
    n_parameters = 2 * 1000 * 32 + 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32) + 32
    assert stdout.splitlines()[0].split()[:2] == ["parameters", f"{n_parameters:,}"]
    assert "2 in all, each with all of the weights" in stdout
    assert "of 2 x 16 tokens at once, with bfloat16 copies" in stdout
    assert "time at 40% MFU" in stdout
    assert "time              " in command(main, *PLAN, "--dtype", "float32")[1]
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.skipif(not TORCH_2_13, reason="torch 2.6 sends no fake tensors")
def test_a_divided_model_is_planned_by_its_share(workplace, command):
    whole = rows_of(command(main, *PLAN, "--processes", 2, "--vocab-size", 1000)[1])
    code, stdout, stderr = command(main, *PLAN, "--processes", 2, "--vocab-size", 1000, "--tp", 2)
    assert (code, stderr) == (0, "")
    rows = rows_of(stdout)
    norms = 5 * 32
    n_parameters = int(whole["parameters"][0].replace(",", ""))
    assert rows["parameters"] == whole["parameters"]
    assert rows["weights"][0] == f"{4 * ((n_parameters - norms) / 2 + norms) / 1e6:.2f} MB"
    assert rows["all-reduce of gradients"][0] == "0.00 MB"  # of norms alone
    assert "all-gather of activations" in rows
    assert "all-gather of activations" not in whole
    code, _, stderr = command(main, *PLAN, "--processes", 3, "--tp", 2)
    assert code == 2
    assert "--tp 2 divides each matrix among 2 processes, and 3 run" in stderr


@pytest.mark.parametrize("flags", [["--processes", 2, "--tp", 2], ["--growth", "--tp", 2]])
def test_a_norm_over_all_heads_is_not_counted(flags, command):
    code, stdout, stderr = command(main, "--config", ROOT / "configs/tiny-olmo2.json", *flags)
    assert (code, stdout) == (2, "")
    assert "tiny-olmo2.json has a norm over all heads, whose sums over processes are not counted here" in stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--growth", "--tp", 2, "--block-size", 33], "--tp 2 does not divide --block-size 33"),
        (["--growth", "--block-size", 4096], "--block-size is 4096 and "),
        (["--processes", 2, "--tp", 2, "--fsdp"], "use --processes 4 or more"),
    ],
)
def test_what_cannot_run_is_not_planned(flags, words, command):
    code, stdout, stderr = command(main, "--config", ROOT / "configs/tiny.json", *flags)
    assert (code, stdout) == (2, "")
    assert words in stderr


@pytest.mark.skipif(not TORCH_2_13, reason="torch 2.6 sends no fake tensors")
def test_growth_has_no_cell_for_a_grid_that_cannot_be(command, tmp_path):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96, "vocab_size": 300}
    shape = json.loads((ROOT / "configs/tiny.json").read_text()) | sizes | {"num_hidden_layers": 1, "head_dim": 32}
    (tmp_path / "six.json").write_text(json.dumps(shape))
    arguments = ["--config", tmp_path / "six.json", "--growth", "--tp", 3, "--block-size", 33]
    code, stdout, stderr = command(main, *arguments)
    assert (code, stderr) == (0, "")
    rows = [line for line in stdout.splitlines() if line.startswith("| --tp 3")]
    assert len(rows) == 2
    assert not any(cell.strip() for row in rows for cell in row.split("|")[2:-1])


@pytest.mark.skipif(not TORCH_2_13, reason="torch 2.6 sends no fake tensors")
def test_the_table_of_growth_is_that_of_single_plans(workplace, command):
    code, stdout, stderr = command(main, *PLAN, "--tp", 2, "--growth")
    assert (code, stderr) == (0, "")
    table = {cells[1].strip(): cells[2:-1] for cells in (line.split("|") for line in stdout.splitlines())}
    assert list(table) == ["processes", "---", "data", "--fsdp", "--tp 2", "--tp 2 --fsdp"]
    assert [cell.strip() for cell in table["processes"]] == ["1", "8", "16", "64", "256", "1024"]
    assert table["--fsdp"][0].strip() == table["--tp 2"][0].strip() == ""  # one process has nothing to divide


def test_what_can_not_be_planned_is_refused_in_one_line(workplace, command, monkeypatch):
    monkeypatch.syspath_prepend(workplace)
    source = "import torch\ndef norm(x, weight, eps):\n    return torch.from_numpy(x.detach().numpy()) * weight\n"
    (workplace / "norm_in_numpy.py").write_text(source)
    code, stdout, stderr = command(main, *PLAN, "--norm", "norm_in_numpy:norm")
    assert (code, stdout) == (2, "")
    [line] = stderr.splitlines()
    assert line.startswith("error: the norm norm_in_numpy:norm cannot be planned")
    assert line.endswith("plan with --norm torch, reference or triton")
    code, _, stderr = command(main, *PLAN, "--processes", 5)
    assert code == 2
    assert "too few sequences for --grad-accum 1 parts in each of 5 processes" in stderr
