"""The module around the norm: what it owns, how the residual passes through it, and what a model's norms see."""

from dataclasses import replace

import pytest
import torch
import transformers

import kernels
from kernels.form import Form
from model.checkpoint.load import to_file_name
from model.config import LlamaConfig
from model.llama import Llama, checkpoint_layers
from model.norm import RMSNorm, input_mean_squares, watched_inputs
from tests.helpers import CPU, needs_triton
from tests.kernels import contract


@pytest.fixture
def norm():
    torch.manual_seed(0)
    norm = RMSNorm(48, 3e-3, kernels.load_backend("reference", CPU))
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def test_weight_starts_at_one():
    norm = RMSNorm(48, 3e-3, kernels.load_backend("reference", CPU))
    assert torch.equal(norm.weight, torch.ones(48))


@pytest.mark.parametrize("axes", [(48,), (6, 8)])
@pytest.mark.parametrize(("backend", "n_vectors"), [("layer_norm", 1), ("layer_norm_bias", 2)])
def test_only_a_layer_norm_with_a_bias_owns_one(backend, n_vectors, axes):
    norm = RMSNorm(axes, 3e-3, kernels.load_backend(backend, CPU))
    assert [tuple(parameter.shape) for parameter in norm.parameters()] == n_vectors * [axes]
    assert norm.bias is None or not norm.bias.any()
    norm.requires_grad_(False)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, residual = strided((2, 5, *axes), torch.float32, 0), strided((2, 5, *axes), torch.float32, 1)
    expected = torch.nn.functional.layer_norm(x + residual, axes, norm.weight, norm.bias, 3e-3)
    # one row of 48 elements or of 6 times 8: the sums differ in their order
    torch.testing.assert_close(norm(x, residual), (expected, x + residual), rtol=0, atol=1e-5)
    torch.testing.assert_close(norm(x + residual)[0], expected, rtol=0, atol=1e-5)
    norm.reset_parameters()
    assert (norm.weight == 1).all()
    assert norm.bias is None or not norm.bias.any()


def test_without_a_residual_the_input_becomes_it(norm):
    x = torch.randn(2, 5, 48)
    y, residual = norm(x)
    assert residual is x
    assert torch.equal(y, norm.backend.rms_norm(x, norm.weight, 3e-3))


def test_residual_is_added_before_the_norm(norm):
    x, residual = torch.randn(2, 5, 48), torch.randn(2, 5, 48)
    y, h = norm(x, residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, norm.backend.rms_norm(x + residual, norm.weight, 3e-3))


def test_a_float32_residual_stays_float32_beside_a_bfloat16_activation(norm):
    # What autocast hands over: the sub-layer's output in bfloat16, the stream in float32.
    y, h = norm(torch.randn(5, 48, dtype=torch.bfloat16), torch.randn(5, 48))
    assert (y.dtype, h.dtype) == (torch.float32, torch.float32)


def test_module_prints_what_it_computes(norm):
    assert repr(norm) == "RMSNorm(48, eps=0.003, backend=reference)"


AXES = [(6, 8), (2, 3, 8)]  # 48 elements, as several trailing axes


def strided(shape, dtype, seed):
    """Random numbers whose last two axes lie transposed in memory."""
    drawn = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).mT.requires_grad_()


def gradients_of(function, weight, *inputs):
    """Results of a function, and the gradients of their weighted sum by its weight and inputs."""
    results = function(*inputs)
    sums = [result.flatten() @ torch.linspace(-1, 2, result.numel()).to(result) for result in results]
    total = torch.stack(sums).sum()
    return [*results, *torch.autograd.grad(total, [weight, *inputs])]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
def test_several_axes_are_those_of_nn_rms_norm(backend, axes, dtype, with_residual):
    ours = RMSNorm(axes, 3e-3, kernels.load_backend(backend, CPU, Form(0.0, True))).to(dtype)
    theirs = torch.nn.RMSNorm(axes, 3e-3, dtype=dtype)
    assert ours.weight.shape == axes
    torch.nn.init.uniform_(ours.weight, 0.5, 1.5)
    theirs.load_state_dict(ours.state_dict())
    inputs = [strided((2, 5, *axes), dtype, seed) for seed in range(1 + with_residual)]
    found = gradients_of(ours, ours.weight, *inputs)
    expected = gradients_of(lambda x, r=0: (theirs(x + r), x + r), theirs.weight, *inputs)
    # sums of 48 terms, and the weight's gradient of 10, added up in another order
    torch.testing.assert_close(found, expected, rtol=0, atol={torch.float32: 1e-5, torch.float64: 1e-13}[dtype])


@pytest.mark.parametrize("axes", AXES)
def test_several_axes_round_as_one_does(axes):
    """LLaMA's form in bfloat16, which nn.RMSNorm does not have."""
    several, one = (RMSNorm(shape, 3e-3, kernels.load_backend("reference", CPU)).bfloat16() for shape in (axes, 48))
    torch.nn.init.uniform_(several.weight, 0.5, 1.5)
    one.load_state_dict({"weight": several.weight.flatten()})
    x, residual = (strided((2, 5, *axes), torch.bfloat16, seed) for seed in range(2))
    for inputs in ([x], [x, residual]):
        found = gradients_of(several, several.weight, *inputs)
        expected = gradients_of(one, one.weight, *(each.flatten(-len(axes)) for each in inputs))
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.flatten(), wanted.flatten())


def test_several_axes_stay_in_their_order():
    """(8, 6) has as many elements as (6, 8), and would be scaled by the wrong weights."""
    norm = RMSNorm((6, 8), 3e-3, kernels.load_backend("reference", CPU))
    assert norm(x := torch.randn(2, 6, 8))[1] is x
    for shape in [(2, 8, 6), (2, 48), (48,)]:
        with pytest.raises(ValueError, match=r"\(6, 8\)"):
            norm(torch.randn(shape))
    assert repr(norm) == "RMSNorm(6, 8, eps=0.003, backend=reference)"


def test_every_sub_layer_owns_its_norm(config, make_model):
    contract.every_sub_layer_owns_its_norm(make_model(config))


def test_every_norm_has_the_eps_of_the_config(config, make_model):
    norms = [module for module in make_model(config).modules() if isinstance(module, RMSNorm)]
    assert {norm.eps for norm in norms} == {config.rms_norm_eps}


LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "bos_token_id": 128000}
LLAMA_3_1 = LLAMA_3 | {"max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False}
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip
PUBLISHED = {  # what differs from the first model, and the number of parameters
    "huggyllama/llama-7b": (
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 2048, "max_sequence_length": 2048, "rms_norm_eps": 1e-6,
         "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0},
        6_738_415_616,
    ),
    "meta-llama/Llama-2-7b-hf": (
        {"max_position_embeddings": 4096, "max_sequence_length": None, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        6_738_415_616,
    ),
    "meta-llama/Meta-Llama-3-8B": (
        LLAMA_3 | {"max_position_embeddings": 8192, "intermediate_size": 14336, "rms_norm_eps": 1e-5},
        8_030_261_248,
    ),
    "meta-llama/Llama-3.1-8B": (
        LLAMA_3_1 | {"intermediate_size": 14336, "rope_scaling": SCALING | {"factor": 8.0}, "rms_norm_eps": 1e-5},
        8_030_261_248,
    ),
    "meta-llama/Llama-3.2-1B": (
        LLAMA_3_1 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                     "rope_scaling": SCALING | {"factor": 32.0}, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        1_235_814_400,
    ),
    "mistralai/Mistral-7B-v0.1": (
        {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096,
         "max_position_embeddings": 32768, "max_sequence_length": None, "rms_norm_eps": 1e-5},
        7_241_732_096,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_norms_of_a_published_llama_have_its_eps(name, capsys):
    (first, _), (changed, count) = PUBLISHED["huggyllama/llama-7b"], PUBLISHED[name]
    with torch.device("meta"):
        config = LlamaConfig.from_dict(first | changed, path=name)
        model = Llama(config, kernels.load_backend("reference", CPU))
    assert {module.eps for module in model.modules() if isinstance(module, RMSNorm)} == {changed["rms_norm_eps"]}
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("norm", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
@torch.no_grad()
def test_autocast_and_float32_norms_change_nothing_in_a_bfloat16_model(config, make_model, norm):
    """The norms return what they get, so no product meets another dtype. OLMo 2 has norms of three widths."""
    model, tokens = make_model(replace(config, model_type="olmo2"), norm).bfloat16(), torch.arange(40).view(2, 20)
    expected = model(tokens)
    for mixed in (False, True):
        for module in model.modules():
            if isinstance(module, RMSNorm) and mixed:
                module.float()
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert torch.equal(model(tokens), expected)
    assert expected.dtype == torch.bfloat16


def test_the_compiled_norm_has_a_graph_for_every_width_and_mode_of_a_model(config, make_model, monkeypatch):
    """Training, validation and a sample of a Gemma 3, with norms of two widths and ranks: more than 8 graphs."""
    torch._dynamo.reset()
    graphs = []  # run as they are, since Inductor would take seconds for each
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: (graphs.append(graph), graph.forward)[1]
    )
    config = replace(config, model_type="gemma3_text")
    model, expected, tokens = make_model(config, "compile"), make_model(config), torch.arange(40).view(2, 20)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(tokens), expected(tokens))
    with torch.inference_mode():
        caches, others = model.new_cache(1, 20), expected.new_cache(1, 20)
        for piece in tokens[:1].split([8, 1, 1, 10], 1):
            assert torch.equal(model(piece, caches), expected(piece, others))
    assert len(graphs) > 8, len(graphs)


def summary(rows, eps):
    """Of mean squares (n_norms, n_rows): their mean, least and largest, and the share that is not above eps."""
    return torch.stack([rows.mean(1), rows.amin(1), rows.amax(1), (rows <= eps).double().mean(1)])


def rows_by_hand(model, tokens):
    """Inputs of each norm of a model, in float64, from transformers' hidden states and modules; the eps is its own."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config.to_dict())).double().eval()
    theirs.load_state_dict({to_file_name(name): weight.double() for name, weight in model.state_dict().items()})
    seen = []
    for layer in theirs.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0]))
    theirs.model.norm.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        theirs(tokens)
    return summary(torch.stack(seen).square().mean(-1).flatten(1), model.config.rms_norm_eps)


@pytest.mark.parametrize("norm", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
def test_the_mean_squares_are_those_of_what_each_norm_sees(config, make_model, norm):
    model, tokens = make_model(config, norm), torch.arange(40).view(2, 20)
    expected = rows_by_hand(model, tokens)
    found = input_mean_squares(model, tokens)
    assert found.shape == (4, 2 * config.num_hidden_layers + 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert len(set(found[:3].flatten().tolist())) == found[:3].numel()  # so that none could stand for another


def test_the_share_of_rows_that_eps_reaches(config, make_model):
    """eps at the median of the first norm's rows, one of whose mean squares it is: that one counts."""
    tokens, squares = torch.arange(40).view(2, 20), []
    with watched_inputs(make_model(config), lambda norm, rows: squares.append(rows)), torch.no_grad():
        make_model(config)(tokens)
        assert not squares  # of another model
    with watched_inputs(model := make_model(config), lambda norm, rows: squares.append(rows)), torch.no_grad():
        model(tokens)
    assert [rows.shape for rows in squares] == [(2, 20)] * (2 * config.num_hidden_layers + 1)
    model.layers[0].attention_norm.eps = squares[0].flatten().sort().values[13].item()
    assert input_mean_squares(model, tokens)[3, 0].item() == pytest.approx(14 / 40)


@pytest.mark.parametrize("norm", ["layer_norm", "layer_norm_bias", "layer_norm@bfloat16", "scripts.peers:layer_norm"])
def test_of_a_layer_norm_the_variances_are_looked_at(config, make_model, norm):
    """Those that eps is added to: a mean far above the spread leaves no trace."""
    model, tokens = make_model(config, norm), torch.arange(40).view(2, 20)
    with torch.no_grad():
        model.embed_tokens.weight += 2
    inputs = []
    model.layers[0].attention_norm.register_forward_hook(lambda norm, x, output: inputs.append(output[1].double()))
    found = input_mean_squares(model, tokens)[:, 0]
    centred = inputs[0] - inputs[0].mean(-1, keepdim=True)
    variances = centred.square().mean(-1).flatten()[None]
    torch.testing.assert_close(found.double(), summary(variances, config.rms_norm_eps)[:, 0], rtol=1e-4, atol=0)
    assert found[2] < 0.1 < inputs[0].square().mean(-1).min()


def test_the_mean_squares_leave_nothing_behind(config, make_model):
    model, tokens = make_model(config), torch.arange(20).view(1, 20)
    before = model(tokens)
    squares = input_mean_squares(model, tokens)
    assert not squares.requires_grad
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(tokens), before)
    with pytest.raises(ValueError, match="65 positions"):
        input_mean_squares(model, torch.zeros(1, 65, dtype=torch.long))
    assert not any(module._forward_hooks for module in model.modules())


def test_eps_is_in_none_of_the_mean_squares_of_the_first_norm(config, make_model):
    tokens = torch.arange(20).view(1, 20)
    found = [input_mean_squares(make_model(replace(config, rms_norm_eps=eps)), tokens)[:3] for eps in (3e-3, 3e3)]
    assert torch.equal(found[0][:, 0], found[1][:, 0])
    assert not torch.equal(found[0][:, 1], found[1][:, 1])  # the first sub-layer has felt it


def test_the_mean_squares_of_a_compiled_model_are_those_of_the_model_and_compile_nothing(config, make_model):
    torch._dynamo.reset()
    model, tokens, graphs = make_model(config), torch.arange(40).view(2, 20), []
    compiled = torch.compile(model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    compiled(tokens)
    n_graphs = len(graphs)
    assert n_graphs > 0
    assert torch.equal(input_mean_squares(compiled, tokens), input_mean_squares(model, tokens))
    assert len(graphs) == n_graphs


@pytest.mark.parametrize(
    ("norm", "dtype", "autocast"),
    [
        ("reference", torch.float16, False),
        ("reference", torch.bfloat16, False),
        ("reference", torch.float32, True),
        ("reference@float16", torch.float32, False),
        ("reference@bfloat16", torch.float32, True),
    ],
)
@torch.no_grad()
def test_the_mean_squares_of_half_precision_are_computed_in_float32(config, make_model, norm, dtype, autocast):
    """Rows of about 1000: float16 can't hold their squares, and bfloat16's mean would be off by up to 2^-8."""
    model, tokens = make_model(config, norm).to(dtype), torch.arange(40).view(2, 20)
    model.embed_tokens.weight *= 1000 / 0.06
    streams = []
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_hook(lambda norm, inputs, output: streams.append(output[1].double()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = input_mean_squares(model, tokens)
    expected = summary(torch.stack(streams).square().mean(-1).flatten(1), config.rms_norm_eps)
    assert found.dtype == torch.float32
    assert found[:3].min() > 65504
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_the_mean_squares_under_autocast_and_checkpointing_are_float32(config, make_model):
    model, tokens = make_model(config), torch.arange(40).view(2, 20)
    expected = input_mean_squares(model, tokens)
    checkpoint_layers(model)
    assert torch.equal(input_mean_squares(model, tokens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = input_mean_squares(model, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)  # 8 bits of mantissa in the sub-layers
