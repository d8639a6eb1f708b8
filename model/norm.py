"""RMSNorm as a module: the weight, the eps, and the backend that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kernels import Backend
from kernels.layer_norm import is_layer_norm


class RMSNorm(nn.Module):
    """Scale rows to a root mean square of 1, then multiply by a learned weight.

    A row is the last axis, of `normalized_shape` elements, or several trailing axes together, as in nn.RMSNorm.
    The formula and its precision are the contract in kernels/reference.py. The weight starts where it scales by 1 in
    the backend's form. Each sub-layer owns one norm, and the residual stream passes through it, so that a backend can
    add and normalise in one kernel. `bias` is None but for LayerNorm, whose backend has one; it starts at 0.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]  # nn.Module's own declaration says Any

    def __init__(self, normalized_shape: int | Sequence[int], eps: float, backend: Backend) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(normalized_shape))
        self.bias = nn.Parameter(torch.empty(normalized_shape)) if backend.has_bias else None
        self.eps = eps
        self.backend = backend
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to scale by 1, and the bias to 0."""
        nn.init.constant_(self.weight, 1 - self.backend.form.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and residual (..., *normalized_shape) -> (norm of x + residual, x + residual); None counts as zero."""
        if self.weight.dim() != 1:
            return self._over_axes(x, residual)
        bias = {} if self.bias is None else {"bias": self.bias}  # RMSNorm's functions take none
        if residual is None:
            return self.backend.rms_norm(x, self.weight, self.eps, **bias), x
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps, **bias)

    def _over_axes(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        shape, weight = self.weight.shape, self.weight.flatten()  # a backend sees one axis
        if x.shape[-len(shape) :] != shape:
            raise ValueError(f"x is {tuple(x.shape)}; expected its last axes to be {tuple(shape)}")
        rows = x.flatten(-len(shape))
        bias = {} if self.bias is None else {"bias": self.bias.flatten()}
        if residual is None:
            return self.backend.rms_norm(rows, weight, self.eps, **bias).view(x.shape), x
        y, h = self.backend.add_rms_norm(rows, residual.flatten(-len(shape)), weight, self.eps, **bias)
        return y.view(x.shape), h.view(x.shape)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.weight.shape))}, eps={self.eps}, backend={self.backend.description}"


class Add(nn.Module):
    """The place of a norm that a family does not have: the addition alone, with RMSNorm's arguments and results.

    `multiplier` scales x beforehand; Granite has one on the output of each sub-layer.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, multiplier: float | None = None) -> None:
        super().__init__()
        self.multiplier = multiplier

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if self.multiplier is None else x * self.multiplier
        h = x if residual is None else x + residual
        return h, h


def norm_names(model: nn.Module) -> list[str]:
    """Names of a model's norms in the order in which they are applied: 0.attention_norm, 0.ffn_norm, ..., norm."""
    return [name.removeprefix("layers.") for name, module in model.named_modules() if isinstance(module, RMSNorm)]


@contextmanager
def watched_inputs(model: nn.Module, look: Callable[[RMSNorm, Tensor], None]) -> Iterator[None]:
    """Within it, a forward of `model` calls look(norm, squares) for each norm, in the order in which they are applied.

    `squares` are the mean squares of the rows of its input, x + residual, in float32, of any shape: what eps is added
    to. Where one is not above the norm's eps, eps makes more of the row's divisor than the row does. LayerNorm adds eps
    to the variance, so for one that is what they are.
    """

    def hook(norm: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        assert isinstance(norm, RMSNorm)
        rows = output[1].detach().float()
        look(norm, rows.var(-1, correction=0) if is_layer_norm(norm.backend.rms_norm) else rows.square().mean(-1))

    hooks = [module.register_forward_hook(hook) for module in model.modules() if isinstance(module, RMSNorm)]
    try:
        with torch.compiler.set_stance("force_eager"):  # hooks would make a compiled model compile again
            yield
    finally:
        for each in hooks:
            each.remove()


@torch.no_grad()
def input_mean_squares(model: nn.Module, tokens: Tensor) -> Tensor:
    """What each norm sees of tokens (B, T), over the mean squares of its rows: (4, n_norms), float32.

    Their mean, the least, the largest, and the share of rows whose mean square is not above eps. Of a LayerNorm they
    are the variances.
    """
    found = []

    def summarise(norm: RMSNorm, squares: Tensor) -> None:
        reached = (squares <= norm.eps).float().mean()
        found.append(torch.stack([squares.mean(), squares.min(), squares.max(), reached]))

    with watched_inputs(model, summarise):
        model(tokens)
    return torch.stack(found, dim=1)
