"""The statement ``expand_zero_cotangents(cotangents, positions)`` of a backward trace: gradients that nobody sent are no dense zeros.

The trap. `torch.autograd.Function` hands its backward a tensor of zeros for every output that got no gradient. Logits beside a loss are
such an output: the zeros have their size, a kernel fills them, and the engine holds them until the backward returns.

The cure. A function whose backward trace holds the statement tells autograd not to (`set_materialize_grads`), notes what its outputs are,
and puts an `Undefined` for each gradient that did not come; the statement makes them tensors. At its positions that is a scalar zero,
expanded: the same shape, dtype, device and values, with strides of 0. All others are filled as autograd fills them, whatever they are.

Where that is put in: around the ``forward`` of Thunder's two autograd functions, when the first trace of a process gets the statement. They
do what they did for every function whose backward does not hold it. A function with an output that is no dense tensor of the plain kind
(a sparse or nested one, a subclass, a fake) has its gradients materialised by autograd, as before.

A fusion compiles anew for tensors with other strides. So a function takes repeated zeros for at most `MAX_PATTERNS` different sets of
outputs; a program that leaves out others in every step gets dense zeros for the rest.

Invariants: shapes, dtypes, devices and values are those of autograd's own zeros; a gradient that came is not touched.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from thunder_fusionfix._thunder import autograd_functions, prims
from thunder_fusionfix.cotangents import records_cuda_graphs, statements
from thunder_fusionfix.model import EXPAND

MAX_PATTERNS = 4


class Undefined(NamedTuple):
    """What stands in a collection of cotangents for a gradient that did not come: what autograd would fill."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@torch.compiler.disable  # as `cotangents.own`
def expand(collection: object, positions: Sequence[int]) -> None:
    """Puts zeros in place of every `Undefined`.

    Args:
        collection: the list that Thunder hands to a backward, before anything was taken from it. Anything else is left alone.
        positions: where the zero may be one that is repeated; elsewhere zeros are dense.
    """
    if type(collection) is not list:
        return
    scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for at, value in enumerate(collection):
        if type(value) is not Undefined:
            continue
        with torch._C.DisableTorchFunction():
            if at not in positions:
                collection[at] = _zeros(value)
                continue
            kind = value.dtype, value.device
            if kind not in scalars:
                scalars[kind] = torch.zeros((), dtype=value.dtype, device=value.device)
            collection[at] = scalars[kind].expand(value.shape)


def _zeros(like: Undefined) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


expand_zero_cotangents = statements.register_operator(
    EXPAND, meta=lambda collection, positions: None, fn=expand, tags=(prims.OpTags.DONT_DCE,)
)


# ---------------------------------------------------------------- around Thunder's autograd functions


class Patterns:
    """The sets of outputs of one function that got no gradient and came as repeated zeros."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def admits(self, missing: tuple[int, ...]) -> bool:
        """True where the zeros at ``missing`` may be repeated; of new sets only the first few."""
        if missing in self.seen:
            return True
        if len(self.seen) >= MAX_PATTERNS:
            return False
        self.seen.add(missing)
        return True


class Filled:
    """A compiled backward that takes None for a gradient that did not come."""

    __slots__ = ("backward", "likes", "patterns")

    def __init__(self, backward: Callable, likes: Sequence[Undefined | None], patterns: Patterns) -> None:
        """``likes``: by output, what autograd would fill for it; None for what is no tensor."""
        self.backward, self.likes, self.patterns = backward, likes, patterns

    def __call__(self, saved: list[Any], cotangents: list[Any]) -> Any:
        missing = tuple([at for at, value in enumerate(cotangents) if value is None and self.likes[at] is not None])
        if missing:
            may_repeat = self.patterns.admits(missing)
            with torch._C.DisableTorchFunction():
                for at in missing:
                    like = self.likes[at]
                    assert like is not None
                    cotangents[at] = like if may_repeat else _zeros(like)
        return self.backward(saved, cotangents)


def likes_of(outputs: Sequence[Any]) -> list[Undefined | None] | None:
    """What autograd would fill for each of ``outputs``; None where one of them is left to autograd."""
    found: list[Undefined | None] = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            found.append(None)
        elif type(output) in _PLAIN and output.layout is torch.strided and not output.is_nested:
            found.append(Undefined(output.shape, output.dtype, output.device))
        else:
            return None
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_patterns: WeakKeyDictionary[Callable, Patterns | None] = WeakKeyDictionary()  # of backwards that were asked about


def patterns_of(backward: Callable) -> Patterns | None:
    """Those of a compiled backward whose trace holds the statement; None for any other function."""
    try:
        return _patterns[backward]
    except KeyError:
        inner = inspect.unwrap(backward)
        holds = getattr(inner, "__globals__", {}).get(EXPAND) is expand
        return _patterns.setdefault(backward, Patterns() if holds else None)
    except TypeError:  # it cannot be a key: none of Thunder's
        return None


_NOTE = "thunder_fusionfix.undefined"  # on the side channel between the two functions of a split autograd
_installing = threading.Lock()
_is_installed = False


def install() -> bool:
    """Puts `Filled` in where Thunder connects a function to autograd; False where this Thunder or torch is another one."""
    global _is_installed
    with _installing:
        functions = autograd_functions()
        if functions is None or not hasattr(torch.autograd.function.FunctionCtx, "set_materialize_grads"):
            return False
        if not _is_installed:
            whole, outputs = functions
            whole.forward = staticmethod(_around(whole.forward))
            outputs.forward = staticmethod(_around_outputs(outputs.forward))
            _is_installed = True
        return True


def _around(forward: Callable) -> Callable:
    """Of `ThunderFunction`: the whole function, or the part of a split one that computes gradients."""

    def filling(context: Any, give_none: Any, backward: Any, channel: Any, *rest: Any) -> Any:
        patterns = None if torch.compiler.is_compiling() else patterns_of(backward)
        likes = None if patterns is None else likes_of(rest[3])  # tensors, others, differentiable, outputs, arguments
        if patterns is None or likes is None:
            return forward(context, give_none, backward, channel, *rest)
        result = forward(context, give_none, Filled(backward, likes, patterns), channel, *rest)
        if channel is None:
            context.set_materialize_grads(False)
        else:
            channel[_NOTE] = True
        return result

    filling.__wrapped__ = forward  # type: ignore[attr-defined]
    return filling


def _around_outputs(forward: Callable) -> Callable:
    """Of `ThunderOutputFunction`: the part of a split function that gets the gradients of outputs."""

    def filling(context: Any, dummy: Any, channel: dict[str, Any], *args: Any) -> Any:
        is_filled = channel.pop(_NOTE, False)
        result = forward(context, dummy, channel, *args)
        if is_filled:
            context.set_materialize_grads(False)
        return result

    filling.__wrapped__ = forward  # type: ignore[attr-defined]
    return filling


def why_not() -> str | None:
    """Why no trace of the compile that runs now may hold the statement; None where it may."""
    if records_cuda_graphs():
        return "CUDA graphs are recorded: they copy cotangents to dense memory of their own"
    return None if install() else "this Thunder connects functions to autograd in another way"
