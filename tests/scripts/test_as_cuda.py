"""Tensors of the CPU that say they are on the emulated GPU, and what a package that believes them gets."""

import pytest
import torch

from kernels.emulated.gpus import GPUS
from scripts import as_cuda

CALLED = []


class Norm(torch.autograd.Function):
    """As packages write one: it names the GPU where it allocates, and asks for its size, in both directions."""

    @staticmethod
    def forward(ctx, x, weight):
        assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda", 0) and x.get_device() == 0  # noqa: PT018
        with torch.cuda.device(x.device):
            y = torch.empty(x.shape, device="cuda")
        y.copy_(x * weight)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        CALLED.append((torch.cuda.get_device_properties(dy.device).multi_processor_count, ctx.needs_input_grad[1]))
        dx = torch.empty_like(x, device="cuda:0").copy_(dy * weight)
        return dx, (dy * x).sum(0) if ctx.needs_input_grad[1] else None


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(as_cuda, "emulated_gpu", lambda: GPUS["sm_80"])
    CALLED.clear()


def tensors(*, trains=True):
    torch.manual_seed(0)
    return torch.randn(5, 3).requires_grad_(), torch.randn(3).requires_grad_(trains)


def test_tensors_are_on_the_gpu_inside_and_nowhere_else():
    x, available = torch.ones(2), torch.cuda.is_available()
    with as_cuda.as_cuda():
        assert x.is_cuda
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 0)
        made = [torch.zeros(3, device="cuda"), torch.zeros(3, device=x.device), x.to("cuda:0"), x.to(device=x.device)]
    assert {tensor.device.type for tensor in [x, *made]} == {"cpu"}
    assert torch.cuda.is_available() == available


def test_both_directions_of_a_function_are_as_on_a_gpu():
    x, weight = tensors()
    dy = torch.randn(5, 3)
    y = as_cuda.call_as_cuda(Norm.apply, x, weight)
    torch.testing.assert_close(y, x * weight)
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), dy)
    for found in (first, second):
        torch.testing.assert_close(found, (dy * weight, (dy * x).sum(0)))
    assert CALLED == [(108, True)] * 2
    assert x.grad is None


def test_a_frozen_weight_gets_no_gradient():
    x, weight = tensors(trains=False)
    as_cuda.call_as_cuda(Norm.apply, x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.expand(5, 3))
    assert CALLED == [(108, False)]


def test_several_results_each_carry_gradient():
    x, weight = tensors()
    y, h = as_cuda.call_as_cuda(lambda x, weight: (x * weight, x + 1), x, weight)
    (h.sum() * 2).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.full((5, 3), 2.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().expand(5, 3) + 2)


def test_a_result_without_a_gradient_of_its_own_has_none():
    x, weight = tensors()
    y = as_cuda.call_as_cuda(lambda x, weight: x.detach() * weight.detach(), x, weight)
    assert not y.requires_grad
    y, h = as_cuda.call_as_cuda(lambda x, weight: (x.detach() * weight.detach(), x + 1), x, weight)
    assert (y.requires_grad, h.requires_grad) == (False, True)
