"""A trained model, SmolLM2-135M-Instruct, against transformers: pytest -m real (what it needs: tests/real_model.py).

Random weights forgive what trained ones don't: here the residual stream has outliers, and a wrong eps or angle writes
other text.
"""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

import kernels
from model.checkpoint.load import load_checkpoint
from model.compiled_step import compile_step
from model.generation import generate
from tests.helpers import CPU
from tests.real_model import FOLDER, make_real_model

pytestmark = pytest.mark.real
NORMS = ["reference", "torch", "compile", "triton"]

PROSE = "The lighthouse keeper climbed the stairs every evening at six, and every evening he counted them. "
PROMPTS = {
    "prose": PROSE,
    "code": "def merge(a: list[int], b: list[int]) -> list[int]:\n    ",
    "Cyrillic": "Жили-были старик со старухой у самого синего моря",
    "digits": "3.14159265358979 + 2.71828 = 17 * 23",
    "one token": "The",
    "long": "".join(f"{n}. {PROSE}" for n in range(11)),  # a few hundred tokens
}

# Distance of float32 logits, relative to their norm. 30 layers of 7 products and 2 norms round some 270 times one after
# another by up to 2^-24 each, at random: sqrt(270) * 2^-24 = 1e-6. Measured: transformers is 0.4e-6 to 1.2e-6 from its
# own float64, and the backends are 0 to 1.5e-6 from transformers. A wrong eps is 1.4e-4 or more away (see below).
FLOAT32_BOUND = 10 * 270**0.5 * 2**-24
# How much further than transformers another backend may be from exact arithmetic, in half precision. Measured: 0.97 to
# 1.02 times its distance.
HALF_FACTOR = 1.25


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    """Unlike the tiny models of the other tests, this one gains from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder():
    make_real_model(FOLDER)
    return FOLDER


@pytest.fixture(scope="module")
def prompts(folder):
    """Ids (1, T) by kind, from transformers' tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {kind: tokenizer(text, return_tensors="pt").input_ids for kind, text in PROMPTS.items()}
    assert ids["one token"].shape == (1, 1)
    assert 200 < ids["long"].shape[1] < 500
    return ids


def theirs_in(folder, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def theirs(folder):
    return theirs_in(folder, torch.float32)


@torch.inference_mode()
def logits_of(model, prompts):
    found = {kind: model(ids) for kind, ids in prompts.items()}
    return {kind: getattr(output, "logits", output).double() for kind, output in found.items()}


@pytest.fixture(scope="module")
def wanted(theirs, prompts):
    return logits_of(theirs, prompts)


def distances(logits, wanted):
    """By kind of prompt, the norm of the difference over that of the logits."""
    return {kind: ((logits[kind] - wanted[kind]).norm() / wanted[kind].norm()).item() for kind in wanted}


def ours_in(folder, norm, dtype=None, eps=None):
    return load_checkpoint(folder, kernels.load_backend(norm, CPU), CPU, dtype, eps)


@pytest.mark.parametrize("norm", NORMS)
def test_logits_are_those_of_transformers(folder, prompts, wanted, norm):
    if norm == "triton":  # some seconds a prompt on the emulated GPU
        wanted = {kind: wanted[kind] for kind in ("prose", "one token")}
    elif norm != "torch":
        wanted = {kind: wanted[kind] for kind in wanted if kind != "long"}
    found = distances(logits_of(ours_in(folder, norm), {kind: prompts[kind] for kind in wanted}), wanted)
    assert max(found.values()) < FLOAT32_BOUND, found


@pytest.fixture
def edited(folder):
    """The model with other values in its config.json: a function of them that returns the directory."""
    with tempfile.TemporaryDirectory(dir=folder) as name:

        def edit(**values):
            config = json.loads((folder / "config.json").read_text()) | values
            (Path(name) / "config.json").write_text(json.dumps(config))
            os.link(folder / "model.safetensors", Path(name) / "model.safetensors")
            return Path(name)

        yield edit


@pytest.mark.parametrize(
    "wrong", [{"rms_norm_eps": 1e-6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}], ids=str
)
def test_a_wrong_config_would_be_seen(edited, prompts, wanted, wrong):
    some = {kind: wanted[kind] for kind in ("prose", "code", "digits")}  # position 0 alone would have no angle
    found = distances(logits_of(ours_in(edited(**wrong), "torch"), {kind: prompts[kind] for kind in some}), some)
    assert min(found.values()) > 3 * FLOAT32_BOUND, found


@pytest.mark.parametrize(
    ("dtype", "norms", "kind"),
    # Triton's in one dtype alone, since the emulated GPU takes its time. A bit in a thousand differs there, and after
    # 30 layers all roundings are another draw: over the few tokens of "digits" 1.38 times as far, over "prose" 0.92.
    [(torch.bfloat16, ["reference", "torch", "compile"], "digits"), (torch.float16, ["triton"], "prose")],
    ids=str,
)
def test_half_precision_is_as_exact_as_transformers(folder, prompts, dtype, norms, kind):
    """Distances from the rounded weights' logits in float32."""
    prompts = {name: prompts[name] for name in (kind, "one token")}
    model = theirs_in(folder, dtype)
    rounded = logits_of(model, prompts)
    exact = logits_of(model.float(), prompts)
    theirs = distances(rounded, exact)
    for norm in norms:
        ours = distances(logits_of(ours_in(folder, norm, dtype), prompts), exact)
        assert all(ours[name] < HALF_FACTOR * theirs[name] for name in prompts), (norm, ours, theirs)


@pytest.fixture(scope="module")
def greedy(theirs, prompts):
    """By kind of prompt, transformers' greedy tokens and the smallest lead that one of them had, in logits."""
    result = {}
    for kind, n_new in (("prose", 100), ("code", 30)):
        options = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=n_new, return_dict_in_generate=True, output_logits=True, pad_token_id=0
        )
        output = theirs.generate(prompts[kind], generation_config=options)
        best = torch.cat(output.logits).topk(2).values
        result[kind] = output.sequences[0, prompts[kind].shape[1] :].tolist(), (best[:, 0] - best[:, 1]).min().item()
    return result


@pytest.mark.parametrize(
    ("norm", "compiled", "kinds"),
    # The others differ from the first in rounding alone: one text is enough.
    [("torch", False, ["prose", "code"]), ("torch", True, ["prose"]), ("reference", False, ["prose"]),
     ("compile", False, ["prose"]), ("triton", False, ["prose"])],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(folder, prompts, wanted, greedy, norm, compiled, kinds):
    model = ours_in(folder, norm)
    step = compile_step(model) if compiled else None
    for kind in kinds:
        tokens, lead = greedy[kind]
        # Rounding moves a logit by up to the bound times their rms; one of 49152 moves up to 5 times as far.
        rms = wanted[kind][:, -1].square().mean().sqrt().item()
        assert lead > 2 * 5 * FLOAT32_BOUND * rms, f"{kind}: a near tie, by {lead:.1e}; choose another prompt"
        n_new = len(tokens) if norm != "triton" else 8  # the emulated GPU takes a second for a token
        rows = generate(model, [prompts[kind][0].tolist()], n_new, set(), lambda logits: logits.argmax(-1), step)
        assert [id for [id] in rows] == tokens[:n_new], kind


def test_a_batch_of_prompts_gets_the_tokens_of_each(folder, prompts, greedy):
    batch = [prompts[kind][0].tolist() for kind in greedy]
    rows = generate(ours_in(folder, "torch"), batch, 30, set(), lambda logits: logits.argmax(-1))
    assert [list(column) for column in zip(*rows, strict=True)] == [tokens[:30] for tokens, _ in greedy.values()]
