"""RMSNorm as a module: the weight, the eps, and the backend that computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels import Backend


class RMSNorm(nn.Module):
    """Scale rows of hidden_size elements to a root mean square of 1, then multiply by a learned weight.

    The formula and its precision are the contract in kernels/reference.py. Each sub-layer owns one norm, and the
    residual stream passes through it, so that a backend can add and normalise in one kernel.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]  # nn.Module's own declaration says Any

    def __init__(self, hidden_size: int, eps: float, backend: Backend) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.backend = backend

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and residual (..., hidden_size) -> (norm of x + residual, x + residual); residual None counts as zero."""
        if residual is None:
            return self.backend.rms_norm(x, self.weight, self.eps), x
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, backend={self.backend.description}"


class Add(nn.Module):
    """The place of a norm that a family does not have: the addition alone, with RMSNorm's arguments and results."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x if residual is None else x + residual
        return h, h


def norm_names(model: nn.Module) -> list[str]:
    """Names of a model's norms in the order in which they are applied: 0.attention_norm, 0.ffn_norm, ..., norm."""
    return [name.removeprefix("layers.") for name, module in model.named_modules() if isinstance(module, RMSNorm)]


@torch.no_grad()
def input_mean_squares(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean and minimum, over rows, of each norm's input mean square for tokens (B, T): (2, n_norms), float32.

    The norms come in the order in which they are applied. A row whose mean square is not above eps is changed by eps.
    """
    found = []

    def look(norm: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        rows = output[1].float().square().mean(-1)  # of x + residual, (B, T)
        found.append(torch.stack([rows.mean(), rows.min()]))

    hooks = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, RMSNorm)]
    try:
        with torch.compiler.set_stance("force_eager"):  # hooks would make a compiled model compile again
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found, dim=1)
