"""The training script: its parts, whole runs on a small text, and what it refuses."""

import json
import math
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
import transformers

import generate
import kernels
import model.training.curves
import model.training.flops
import model.training.run_log
import train
from model.checkpoint.load import load_checkpoint
from model.config import LlamaConfig
from model.generation import generate as generate_rows
from model.llama import Llama
from model.norm import RMSNorm, input_mean_squares, norm_names
from model.tokenizer import load_tokenizer
from model.training.data import batch_starts, windows
from tests.helpers import (
    CPU,
    ROOT,
    TRAINED,
    greedy,
    likeliest,
    losses,
    metrics_of,
    needs_compiler,
    needs_triton,
    texts,
    train_dtype,
)


def test_the_checkpoint_is_saved_before_the_state(trained, workplace, monkeypatch):
    """A crash between the two then repeats steps; the other way around --resume would leave an older checkpoint."""
    seen, usual = [], train.save_state

    def watched(*arguments):
        seen.append((workplace / "out/model/model.safetensors").exists())
        usual(*arguments)

    monkeypatch.setattr(train, "save_state", watched)
    trained("--steps", 1)
    assert seen == [True]


def test_learning_rate_warms_up_and_ends_at_the_minimum():
    args = Namespace(lr=1.0, min_lr=0.1, warmup=4, steps=14)
    rates = [train.learning_rate(step, args) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[13] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 6 / 9)) / 2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2])
def test_learning_rate_of_a_run_shorter_than_its_warmup(steps):
    args = Namespace(lr=1.0, min_lr=0.1, warmup=2, steps=steps)
    assert [train.learning_rate(step, args) for step in range(steps)] == [0.5, 1.0][:steps]


@pytest.mark.parametrize(("min_lr", "last"), [(0.0, 0.0), (None, 0.05)])
def test_a_minimum_of_0_is_not_one_left_out(min_lr, last):
    args = Namespace(lr=1.0, min_lr=min_lr, warmup=1, steps=5)
    assert train.learning_rate(4, args) == pytest.approx(last)


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (10, 2), (99, 19), (100, 20), (1000, 20)])
def test_the_default_warm_up_fits_the_run_and_is_said(steps, warmup, workplace, command, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda args, config, device: seen.append(args.warmup) or 0)
    _, _, stderr = command(train.main, "--steps", steps)
    assert seen == [warmup]
    said = f"the learning rate warms up for {warmup} steps, a fifth of --steps {steps}\n"
    assert stderr == ("" if warmup == 20 else said)


def test_only_matrices_are_decayed(config, make_model):
    model = make_model(config)
    groups = train.parameter_groups(model, 0.1)
    in_groups = [id(p) for group in groups for p in group["params"]]
    assert sorted(in_groups) == sorted(id(p) for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(groups, lr=0.01).step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if name.endswith("norm.weight") else 1 - 0.01 * 0.1
        assert torch.equal(parameter, before[name] * factor), name


def test_a_run_learns_and_leaves_a_checkpoint_that_transformers_loads(trained, workplace, command):
    metrics, stdout, stderr = trained("--steps", 60, "--lr", "1e-2", "--norm", "torch")
    unigram_loss = float(stderr.split("the unigram distribution has ")[1].split()[0])
    assert metrics[-1]["val_loss"] < unigram_loss / 2
    assert len(stdout) > 20
    folder = next(workplace.glob("out/data/*"))
    n_train = json.loads((folder / "meta.json").read_text())["n_train"]
    held_out = np.fromfile(folder / "tokens.bin", np.uint16)[n_train:]
    assert stdout.startswith(load_tokenizer(folder).decode(held_out[:16].tolist()))
    assert (workplace / "out/model/loss.png").read_bytes().startswith(b"\x89PNG")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(workplace / "out/model")
    tokenizer = load_tokenizer(workplace / "out/model")
    saved = (theirs.config.rms_norm_eps, theirs.config.bos_token_id, theirs.config.eos_token_id)
    assert saved == (3e-3, tokenizer.bos_id, tokenizer.eos_id)
    tokens = windows(np.fromfile(next(workplace.glob("out/data/*/tokens.bin")), np.uint16), np.array([0, 50]), 32)
    # The validation text is repetitive, so theirs must predict it as well as the metrics say ours does.
    with torch.no_grad():
        their_loss = theirs(input_ids=tokens, labels=tokens).loss.item()
    assert their_loss == pytest.approx(metrics[-1]["val_loss"], rel=0.3)

    code, text, _ = command(generate.main, "--ckpt", "out/model", "--prompt", "def ", "--max-new-tokens", 8)
    assert code == 0
    assert text.startswith("def ")


@needs_triton
def test_a_run_on_an_emulated_gpu_is_the_references(trained, workplace, monkeypatch):
    """The kernels as an A100 would run them, in a process of its own."""
    shape = "--config config.json --data text.txt --block-size 16 --batch-size 4 --steps 2 --norm triton"
    command = [sys.executable, ROOT / "train.py", *shape.split(), "--dtype", train_dtype(), "--out", "out/emulated"]
    done = subprocess.run([*command, "--emulate", "sm_80"], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = "Triton's kernels are compiled for sm_80 and run on an emulated one; their times say nothing\n"
    assert done.stderr.startswith(said)
    assert "\nnorm triton, compiled for sm_80, on an emulated one: no measure of speed, eps 0.003, " in done.stderr
    expected, _, _ = trained("--steps", 2, "--norm", "reference")
    # A step of two roundings of a loss near 5.7 in float32; bfloat16 autocast flips some roundings behind the norms.
    near = pytest.approx(losses(expected), abs=2e-6 if train_dtype() == "float32" else 2e-3)
    assert losses(metrics_of(workplace / "out/emulated")) == near

    asked = []  # a resumed run emulates as it did, unless told otherwise
    monkeypatch.setattr("kernels.emulated.emulate", asked.append)
    for more in ([], ["--emulate", "none"], ["--emulate", "sm_90"]):
        monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "--out", "out/emulated", *more])
        train.parse_args()
    assert asked == ["sm_80", "sm_90"]


@pytest.mark.parametrize("name", ["scripts.peers:layer_norm", "tests.norms:centered"])
def test_a_norm_that_is_not_rmsnorm_is_said_and_saved_as_what_it_is(name, trained, workplace, command):
    _, _, stderr = trained("--norm", name, "--steps", 2)
    assert f"\n{name} is not the RMSNorm of a llama" in stderr
    assert f"`python generate.py --ckpt out/model --norm {name}`" in stderr
    for their_class in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with pytest.raises(Exception, match=r"rmsllama|rms_norm_eps"):
            their_class.from_pretrained(workplace / "out/model")
    write = ["--ckpt", "out/model", "--prompt", "def ", "--max-new-tokens", 2]
    code, stdout, stderr = command(generate.main, *write)
    assert (code, stdout) == (2, "")
    assert f"--norm is auto; expected {name}" in stderr.splitlines()[-1]
    assert command(generate.main, *write, "--norm", name)[0] == 0
    assert len(trained("--resume", "--steps", 4)[0]) == 4
    # A run that was begun before the norm was named resumes too, but another model's folder is still refused.
    plain = json.loads((workplace / "out/model/config.json").read_text())
    plain |= {"model_type": "llama", "rms_norm_eps": plain.pop("norm_eps")}
    del plain["norm"]
    (workplace / "out/model/config.json").write_text(json.dumps(plain))
    assert len(trained("--resume", "--steps", 5)[0]) == 5
    _, _, stderr = command(generate.main, *write, "--norm", "tests.norms:noisy")
    assert "expected" in stderr


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_bias"])
def test_a_model_on_layer_norm_learns_and_writes_and_is_refused_elsewhere(name, trained, workplace, command):
    metrics, _, stderr = trained("--norm", name, "--steps", 10, "--lr", "1e-2", "--weight-decay", 10)
    assert f"\n{name} is not the RMSNorm of a llama" in stderr
    assert losses(metrics)[-1] < losses(metrics)[0] - 0.3
    config = json.loads((workplace / "out/model/config.json").read_text())
    assert (config["model_type"], config["norm"], config["rms_norm_eps"]) == ("rmsllama", name, None)
    model = load_checkpoint(workplace / "out/model", kernels.load_backend(name, CPU), CPU)
    own = [parameter for norm in model.modules() if isinstance(norm, RMSNorm) for parameter in norm.parameters()]
    assert len(own) == 5 * (2 if name == "layer_norm_bias" else 1)
    if name == "layer_norm_bias":
        assert all(norm.bias.any() for norm in model.modules() if isinstance(norm, RMSNorm))
        assert all((norm.weight > 0.9).all() for norm in model.modules() if isinstance(norm, RMSNorm))  # no decay
    rows = generate_rows(model, [[1, 30, 40]], 8, set(), likeliest)
    assert texts(rows) == [greedy(model, [1, 30, 40], 8)]  # with a cache, and without
    write = ["--ckpt", "out/model", "--prompt", "def ", "--max-new-tokens", 2]
    code, stdout, stderr = command(generate.main, *write)
    assert (code, stdout) == (2, "")
    assert f"expected {name}, the norm of out/model" in stderr.splitlines()[-1]
    assert command(generate.main, *write, "--norm", name)[0] == 0
    with pytest.raises(Exception, match="rmsllama"):
        transformers.AutoModelForCausalLM.from_pretrained(workplace / "out/model")


def test_a_norm_that_is_not_the_checkpoints_rmsnorm_is_said_when_it_writes(trained, command):
    trained("--steps", 1)
    write = ["--ckpt", "out/model", "--prompt", "def ", "--max-new-tokens", 2]
    for norm, said in (("tests.norms:centered", True), ("tests.norms:noisy", False), ("layer_norm", True)):
        code, _, stderr = command(generate.main, *write, "--norm", norm)
        assert code == 0
        assert (f"{norm} is not the RMSNorm of out/model" in stderr) == said


@pytest.mark.parametrize("norm", ["torch", "torch@float16", "tests.norms:noisy"])
def test_a_norm_that_rounds_is_still_rmsnorm(norm, trained, workplace):
    _, _, stderr = trained("--norm", norm, "--steps", 1)
    assert "is not the RMSNorm" not in stderr
    assert LlamaConfig.load(workplace / "out/model/config.json").norm is None


def test_metrics_have_a_line_a_step(trained):
    metrics, _, stderr = trained("--steps", 5, "--eval-interval", 2)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in metrics if "val_loss" in line] == [1, 3, 4]
    assert all(line["tokens_per_s"] > 0 and line["lr"] > 0 for line in metrics)
    assert "norm torch, eps 0.003, " in stderr
    assert "compiled" not in stderr  # on a CPU by request alone
    said = [line for line in stderr.splitlines() if line.startswith("step ")]
    assert said == [
        f"step {m['step'] + 1}: loss {m['loss']:.3f}, validation loss {m['val_loss']:.3f}, "
        f"{m['tokens_per_s']:,.0f} tokens/s"
        for m in metrics
        if "val_loss" in m
    ]


def test_first_loss_is_that_of_a_uniform_guess(trained):
    metrics, _, _ = trained("--steps", 1)
    # Logits of a fresh model are close to 0, so every token costs about ln(vocabulary).
    assert losses(metrics)[0] == pytest.approx(math.log(290), rel=0.02)


def test_a_seed_repeats_a_run_to_the_bit(trained):
    first, again, other = (losses(trained("--seed", seed, out=f"out/{i}")[0]) for i, seed in enumerate([5, 5, 6]))
    assert first == again
    assert first != other


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_accumulation_in_parts_of_any_size_is_the_whole_batch(trained, parts):
    whole, _, _ = trained(out="out/whole")
    accumulated, _, _ = trained("--grad-accum", parts, out="out/parts")
    # The same sum in another order: float32 rounding of 64 terms, carried through five steps. Under bfloat16 autocast a
    # weight's last bit now and then rounds a product the other way: of the default model a loss then differs by up to
    # 4e-4, with PyTorch's attention and with short_attention alike. A part that weighs wrong differs by more than 1e-3.
    rel = 1e-5 if train_dtype() == "float32" else 1e-4
    assert losses(accumulated)[0] == pytest.approx(losses(whole)[0], rel=1e-5)  # before any weight differs
    assert losses(accumulated) == pytest.approx(losses(whole), rel=rel)


@pytest.mark.parametrize("norm", ["reference", pytest.param("triton", marks=needs_triton)])
def test_norm_backends_give_the_same_losses(trained, norm):
    expected, _, _ = trained("--norm", "torch", out="out/torch")
    got, _, _ = trained("--norm", norm, out="out/other")
    assert losses(got) == pytest.approx(losses(expected), rel=1e-5)


def test_bfloat16_autocast_stays_near_float32_and_saves_float32(trained, workplace):
    expected, _, _ = trained("--dtype", "float32", out="out/float32")
    got, _, stderr = trained("--dtype", "bfloat16", out="out/bfloat16")
    assert "bfloat16 on cpu" in stderr
    assert losses(got) != losses(expected)
    assert losses(got) == pytest.approx(losses(expected), rel=1e-2)  # 8 bits of mantissa
    size = (workplace / "out/float32/model.safetensors").stat().st_size
    assert (workplace / "out/bfloat16/model.safetensors").stat().st_size == size


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_cpu_computes_and_says_so(native, dtype, trained, monkeypatch):
    monkeypatch.setattr("model.cli._cpu_computes_bfloat16", lambda: native)
    by_name, _, _ = trained("--dtype", dtype, out="out/named")
    auto, _, stderr = trained("--dtype", "auto", out="out/auto")
    assert f", {dtype} on cpu" in stderr
    assert losses(auto) == losses(by_name)


GEMMA2 = {"model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12,
          "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("family", [{}, pytest.param(GEMMA2, marks=pytest.mark.long)], ids=["llama", "gemma2"])
def test_compiled_model_gives_the_same_losses(family, trained, workplace):
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1, **family}  # layer, which is compiled sooner
    (workplace / "one.json").write_text(json.dumps(TRAINED | one))
    # Adam's first steps go by the sign of a gradient, also where that is rounding alone: a small step keeps it small.
    run = ["--config", "one.json", "--steps", 2, "--lr", "1e-4", "--min-lr", "1e-5"]
    expected, _, _ = trained(*run, out="out/eager")
    got, _, stderr = trained(*run, "--compile", out="out/compiled")
    assert ", compiled\n" in stderr
    assert json.loads((workplace / "out/compiled/run.json").read_text())["compiled"] is True
    # In bfloat16 a compiler rounds fewer intermediate results. A last place is 2^-8 of a logit of about 1, and the
    # errors of a step's 64 tokens average in a loss of 5.6.
    rel = 1e-5 if train_dtype() == "float32" else 2**-8 / 64**0.5 / 5.6
    assert losses(got) == pytest.approx(losses(expected), rel=rel)


def test_a_run_is_a_plain_adamw_loop(trained, workplace):
    metrics, _, _ = trained("--steps", 4, "--norm", "reference", "--grad-clip", 0.5, "--eval-interval", 4)
    folder = next(workplace.glob("out/data/*"))
    tokens, n_train = (
        np.fromfile(folder / "tokens.bin", np.uint16),
        json.loads((folder / "meta.json").read_text())["n_train"],
    )
    config = LlamaConfig.load(workplace / "out/model/config.json")
    torch.manual_seed(1337)
    model = Llama(config, kernels.load_backend("reference", CPU))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0}], 1.0, (0.9, 0.95), 1e-8, 0.1
    )

    def mean_loss(starts, part):
        batch = torch.tensor(np.array([part[s : s + 17] for s in starts]).astype(int))
        with torch.autocast("cpu", torch.bfloat16, enabled=train_dtype() == "bfloat16"):
            logits = model(batch[:, :-1]).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    for step, line in enumerate(metrics):
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        starts = batch_starts(n_train, step, 1337, 4, 16)
        loss = mean_loss(starts, tokens[:n_train])
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)  # before clipping, which it is above
        assert norm > 0.5
        optimizer.step()
    held_out = tokens[n_train:]
    with torch.no_grad():
        val_loss = mean_loss(np.linspace(0, len(held_out) - 17, 32, dtype=int), held_out).item()
    assert metrics[-1]["val_loss"] == pytest.approx(val_loss, rel=1e-5)
    saved = load_checkpoint(workplace / "out/model", kernels.load_backend("reference", CPU), CPU)
    for (name, got), expected in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_training_validation_and_norms_are_computed_under_autocast(trained, monkeypatch):
    seen = []

    def watch(name):
        function = getattr(train, name)

        def watched(*arguments):
            grad = torch.is_grad_enabled()
            seen.append((name, grad, torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None))
            return function(*arguments)

        monkeypatch.setattr(train, name, watched)

    watch("summed_loss")
    watch("input_mean_squares")
    trained("--steps", 1, "--log-norms", 1, "--dtype", "bfloat16")
    expected = {("summed_loss", True), ("summed_loss", False), ("input_mean_squares", False)}
    assert set(seen) == {(*call, torch.bfloat16) for call in expected}


def test_gradients_are_reduced_once_a_step(trained, monkeypatch):
    wanted = []

    def gradient_sync(module, *, wanted, seen=wanted, usual=train.distributed.gradient_sync):
        seen.append(wanted)
        return usual(module, wanted)

    monkeypatch.setattr(train.distributed, "gradient_sync", gradient_sync)
    trained("--steps", 2, "--grad-accum", 3)
    assert wanted == [False, False, True] * 2


def test_dropout_that_is_not_computed_is_said(trained, workplace):
    (workplace / "dropout.json").write_text(json.dumps({**TRAINED, "attention_dropout": 0.1}))
    said = "has attention_dropout 0.1, which is not computed"
    assert f"dropout.json {said}\n" in trained("--steps", 1, "--config", "dropout.json")[2]
    assert "dropout" not in trained("--steps", 1, out="out/without")[2]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(trained, workplace, command, monkeypatch):
    trained("--steps", 2)
    saved = (workplace / "out/model/model.safetensors").read_bytes()
    monkeypatch.setattr(train, "summed_loss", lambda model, batch: model(batch[:, :-1]).sum() * math.inf)
    defaults = "--config config.json --data text.txt --block-size 16 --batch-size 4 --steps 2 --out out/model"
    defaults += f" --dtype {train_dtype()}"
    code, _, stderr = command(train.main, *defaults.split())
    assert code == 2
    assert "error: step 1: the loss is " in stderr
    assert (workplace / "out/model/model.safetensors").read_bytes() == saved


def test_a_run_of_the_same_model_may_be_repeated_in_its_folder(trained):
    trained()
    _, _, stderr = trained()
    assert "holds an earlier run of this model" in stderr


@pytest.fixture
def calls(monkeypatch):
    """Watch a function that train() imports: the list of what its calls were given, which grows with each."""

    def watch(module, name):
        seen, function = [], getattr(module, name)

        def watched(*arguments, **keywords):
            seen.append(arguments)
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, watched)
        return seen

    return watch


@pytest.mark.parametrize(("steps", "expected"), [(5, [2, 4, 5]), (4, [2, 4]), (1, [1])])
def test_a_run_saves_every_so_many_steps_and_at_its_end(trained, calls, steps, expected):
    states, checkpoints = calls(train, "save_state"), calls(train, "save_checkpoint")
    trained("--steps", steps, "--save-interval", 2)
    assert [step for _, step, *_ in states] == expected
    assert len(checkpoints) == len(expected)


def test_the_curve_is_redrawn_at_each_evaluation(trained, calls):
    drawn = calls(model.training.run_log, "plot_losses")
    files = calls(model.training.curves, "replace_file")
    trained("--steps", 5, "--eval-interval", 2)
    assert [path.name for path, _ in files] == ["loss.png"] * 3
    metrics = drawn[0][0]  # one list, which has grown meanwhile
    assert [line["step"] + 1 for line in metrics if "val_loss" in line] == [2, 4, 5]


def test_norms_of_a_block_as_long_as_the_context_are_logged(trained):
    metrics, _, _ = trained("--steps", 1, "--log-norms", 1, "--block-size", 64)
    assert "norm_mean_square" in metrics[0]


def test_norms_are_logged_every_so_many_steps_and_change_nothing(trained, workplace):
    plain, _, _ = trained("--steps", 6, "--dtype", "float32", out="out/plain")
    assert not (workplace / "out/plain/norms.png").exists()
    metrics, _, _ = trained("--steps", 6, "--dtype", "float32", "--log-norms", 2)
    assert losses(metrics) == losses(plain)
    assert [line["step"] for line in metrics if "norm_mean_square" in line] == [0, 2, 4, 5]
    assert (workplace / "out/model/norms.png").read_bytes().startswith(b"\x89PNG")
    # The last are those of the model that the run leaves, on four windows from the whole of the held-out text.
    folder = next(workplace.glob("out/data/*"))
    meta = json.loads((folder / "meta.json").read_text())
    held_out = np.fromfile(folder / "tokens.bin", np.uint16)[meta["n_train"] :]
    starts = np.linspace(0, len(held_out) - 17, 32, dtype=int)[:4]
    saved = load_checkpoint(workplace / "out/model", kernels.load_backend("torch", CPU), CPU)
    names = ("norm_mean_square", "norm_least_square", "norm_largest_square", "norm_share_below_eps")
    seen = windows(held_out, starts, 16)[:, :-1]  # what is only a target is not seen
    for name, expected in zip(names, input_mean_squares(saved, seen).tolist(), strict=True):
        assert metrics[-1][name] == pytest.approx(expected, rel=1e-5), name
    assert json.loads((workplace / "out/model/run.json").read_text())["norm_names"] == norm_names(saved)


def test_a_resumed_run_may_log_its_first_norm_after_an_evaluation(trained, workplace):
    trained("--steps", 3)
    path = workplace / "out/model/run.json"
    run = json.loads(path.read_text())
    expected = run.pop("norm_names")
    path.write_text(json.dumps(run))  # as earlier versions left it
    metrics, _, _ = trained("--resume", "--steps", 5, "--log-norms", 10, "--eval-interval", 4)
    assert [line["step"] for line in metrics if "norm_mean_square" in line] == [4]
    assert len(expected) == len(metrics[4]["norm_mean_square"]) == 5
    assert json.loads(path.read_text())["norm_names"] == expected
    assert (workplace / "out/model/norms.png").exists()


def test_run_json_says_how_the_run_was_made(trained, workplace):
    trained("--steps", 2, "--dtype", "bfloat16", "--norm", "reference", "--seed", 5, "--grad-accum", 2)
    run = json.loads((workplace / "out/model/run.json").read_text())
    given = {"steps": 2, "dtype": "bfloat16", "norm": "reference", "seed": 5, "grad_accum": 2, "data": "text.txt"}
    given |= {"config": "config.json", "block_size": 16, "batch_size": 4, "warmup": 0}
    left_out = {"lr": 2e-3, "min_lr": None, "weight_decay": 0.1, "grad_clip": 1.0, "log_norms": None, "fsdp": False}
    assert run["arguments"].items() >= {**given, **left_out}.items()
    computed = {"norm": "reference", "dtype": "bfloat16", "device": "cpu", "device_name": "CPU", "compiled": False}
    assert run.items() >= {**computed, "processes": 1, "begins_after_step": 0}.items()
    assert run["versions"].items() >= {"torch": torch.__version__, "numpy": np.__version__}.items()
    assert run["data"]["source"] == "text.txt"


def test_layers_computed_again_for_the_backward_give_the_same_losses_to_the_bit(trained, calls):
    checkpointed = calls(train, "checkpoint_layers")
    expected, _, _ = trained("--dtype", "float32", out="out/kept")
    assert not checkpointed
    got, _, _ = trained("--dtype", "float32", "--checkpoint-activations", out="out/again")
    assert checkpointed
    assert losses(got) == losses(expected)


def test_the_share_of_the_peak_is_that_of_the_operations(trained, monkeypatch):
    monkeypatch.setattr(model.training.flops, "peak_flops", lambda device_name: 1e9)
    metrics, _, stderr = trained("--steps", 2, "--dtype", "bfloat16", "--eval-interval", 1)
    # 6 for each weight of a matrix but the embedding, and 12 * width for each of the (16 + 1) / 2 positions seen
    matrices = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48) + 290 * 32
    flops = 6 * matrices + 2 * 12 * 32 * 17 / 2
    for line in metrics:
        assert line["mfu"] == pytest.approx(flops * line["tokens_per_s"] / 1e9)
        assert f"{line['tokens_per_s']:,.0f} tokens/s, MFU {line['mfu']:.1%}\n" in stderr
    metrics, _, stderr = trained("--steps", 1, "--dtype", "float32")
    assert "mfu" not in metrics[0]
    assert "MFU" not in stderr


REFUSED = {
    "unknown norm": ("--norm torch2", "no norm backend is called 'torch2'"),
    "own norm that isn't there": ("--norm nothing.here:norm", "can't import 'nothing.here'"),
    "missing config": ("--config nothing.json", "nothing.json is missing"),
    "missing corpus": ("--data nothing.txt", "--data nothing.txt does not exist"),
    "empty corpus": ("--data empty.txt", "--data empty.txt holds no text"),
    "undecodable corpus": ("--data latin.txt", "latin.txt is not UTF-8 text"),
    "corpus shorter than a block": ("--data short.txt", "tokens; --block-size 16 needs 17"),
    "block above the config's maximum": ("--block-size 65", "--block-size is 65 and config.json has max_position"),
    "other model type": ("--config gpt2.json", 'model_type is "gpt2"'),
    "no eps": ("--config no_eps.json", "no_eps.json: rms_norm_eps is missing"),
    "heads not divisible": ("--config heads.json", "is not divisible by num_key_value_heads 3"),
    "more parts than sequences": ("--grad-accum 5", "--batch-size 4 has too few sequences for --grad-accum 5 parts"),
    "no steps": ("--steps 0", "'0' is not a positive integer"),
    "warm-up as long as the run": ("--warmup 2", "--warmup 2 leaves none of --steps 2 at the full learning rate"),
    "minimum above the peak": ("--min-lr 1 --lr 1e-3", "--min-lr 1 is above --lr 0.001"),
    "absurd rate": ("--lr 1e308", "--lr is 1e+308; expected at most 1e+06"),
    "absurd decay": ("--weight-decay 1e308", "--weight-decay is 1e+308; expected at most 1e+06"),
    "absurd batch": ("--batch-size 2147483647", "too many for one step; expected at most 268,435,456 tokens"),
    "vocabulary too small": ("--vocab-size 100", "a vocabulary of 100 pieces is too small"),
    "out inside a file": ("--out text.txt/x", "--out text.txt/x cannot be written"),
    "out is a file": ("--out text.txt", "--out text.txt is a file"),
    "out holds another model": ("--out other", "--out other holds another model"),
}
if not torch.cuda.is_available():
    REFUSED["no GPU"] = ("--device cuda", "--device cuda cannot be used")


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(name, workplace, command):
    (workplace / "empty.txt").write_text("")
    (workplace / "latin.txt").write_bytes("für".encode("latin-1"))
    (workplace / "short.txt").write_text("hello there\n" * 3)
    (workplace / "gpt2.json").write_text(json.dumps({**TRAINED, "model_type": "gpt2"}))
    (workplace / "no_eps.json").write_text(json.dumps({k: v for k, v in TRAINED.items() if k != "rms_norm_eps"}))
    (workplace / "heads.json").write_text(json.dumps({**TRAINED, "num_key_value_heads": 3}))
    (workplace / "other").mkdir()
    (workplace / "other/config.json").write_text(json.dumps(TRAINED))

    arguments, message = REFUSED[name]
    defaults = "--config config.json --data text.txt --block-size 16 --batch-size 4 --steps 2 --out out/model"
    defaults += f" --dtype {train_dtype()}"
    code, stdout, stderr = command(train.main, *defaults.split(), *arguments.split())
    assert code == 2
    assert stdout == ""
    assert stderr.splitlines()[-1].startswith("error: ")
    assert message in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert not (workplace / "out/model").exists()
    assert not list(workplace.rglob("*.partial"))
    assert sorted(path.name for path in (workplace / "other").iterdir()) == ["config.json"]
