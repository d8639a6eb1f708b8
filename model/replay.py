"""Calls of compiled graphs, recorded once and made again with other tensors, as a CUDA graph does it on a GPU.

Before each call torch.compile checks that it compiled for such arguments. On a CPU that takes half as long as the
kernel of a small model's layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from model.one_row import compile_graph


class Call(NamedTuple):
    """A compiled graph and what it was called with, some of which the call before it returned."""

    graph: Callable[..., Any]
    inputs: list[Any]
    taken: list[int]  # places among the inputs of what the call before returns
    given: list[int]  # places among the outputs of what the next one takes


# What compiled graphs were called with since the last look: graph, inputs, outputs.
_seen: list[tuple[Callable[..., Any], list[Any], list[Any]]] = []


def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend for torch.compile, whose graphs note their calls for Replay.record.

    It is one function for all, since torch.compile compiles a function again for each backend, and a few times only.
    """
    compiled = compile_graph(graph, inputs)

    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        _seen.append((compiled, list(inputs), list(outputs)))
        return outputs

    return call


class Replay:
    """A chain of functions compiled with `backend`: each takes what the one before returns, and tensors that stay.

    `calls` is None where repeating them would leave something out: a function became several graphs, with Python
    between them, as a user's norm can make it.
    """

    def __init__(self) -> None:
        self.calls: list[Call] | None = None

    def record(self, moving: tuple[Tensor, ...], function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a compiled function, among whose arguments is `moving`, what the call before it returned."""
        _seen.clear()
        result = function(*arguments)
        results = result if isinstance(result, tuple) else (result,)
        graph, inputs, outputs = _seen[-1] if _seen else (function, [], [])
        taken, given = places(moving, inputs), places(results, outputs)
        if len(_seen) != 1 or len(taken) < len(moving) or len(given) < len(results):
            self.calls = None
        if self.calls is not None:
            self.calls.append(Call(graph, inputs, taken, given))
        _seen.clear()  # or it would keep tensors alive
        return result

    def again(self, *moving: Tensor) -> tuple[Tensor, ...]:
        """Make the recorded calls for what else moves through them; return what the last one does."""
        assert self.calls
        for call in self.calls:
            for place, tensor in zip(call.taken, moving, strict=True):
                call.inputs[place] = tensor
            outputs = call.graph(*call.inputs)
            moving = tuple(outputs[place] for place in call.given)
        return moving


def places(tensors: tuple[Tensor, ...], among: list[Any]) -> list[int]:
    """Index of each tensor, by identity; one that is not among them is left out."""
    found = [[i for i, other in enumerate(among) if other is tensor] for tensor in tensors]
    return [indices[0] for indices in found if indices]
