"""The statement ``own_cotangents(cotangents)`` of a backward trace: it takes the cotangents over from autograd's engine.

The trap. Where Thunder's autograd function is not split in two (ThunderFX), the engine keeps the gradients that it hands to a
backward until that backward returns. The trace's own ``del`` of one frees nothing. Where a program is cut behind its logits, as ThunderFX
cuts a causal LM before the loss, their gradient is such a cotangent, of the size of the logits, and is kept through the backward of all
layers although it is last used by the first product.

The cure. A new tensor gets the memory of each cotangent, and the engine's tensor is left with none: the trace is then the one owner,
and its ``del`` frees. Nobody else may see that, so it is done only where nobody else has the tensor or its memory: not a user who
passed it to ``backward``, not a hook or ``retain_grad`` that kept it, not ``torch.autograd.grad`` that returns it, not a hook of the
node that will be given it, not a view. All of them count as references; what the engine itself holds was counted once, by a backward of our
own that nobody looks at (`engine_references`). Any other count, and the cotangent stays the engine's.

PyTorch's pull request 177837 lets AOTAutograd's backward take its tangents over too, by another way: the engine hands them out in a list.

What is counted of the engine's own call depends on who calls: Dynamo, while any thread runs a frame of its own, has Python hold
arguments longer, and a user can call a node without the engine. So both stand in the count: where they differ, nothing is taken.
A debugger that stops in Thunder's autograd function finds the engine's arguments there empty.

Invariants: values, shapes, dtypes and strides are what they were; no device is read; without references to count nothing is taken.
What is done here is no part of the user's program: no saved-tensor hook, checkpoint or function mode gets to see it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder_fusionfix._thunder import (
    OperatorExecutor,
    connect_to_autograd,
    get_compile_data,
    prims,
    real_tensors,
)
from thunder_fusionfix.model import OWN


class References(NamedTuple):
    """Who has one cotangent of a collection, in numbers."""

    python: int  # to its Python object
    native: int  # to the tensor: the engine's, and that of the Python object
    memory: int  # to its storage
    weak: int
    base: tuple[int, int] | None  # of a view: the first two of the tensor that it is a view of
    given_on: int  # to an object that two Python calls give on as the engine's call gives the cotangents
    node: type | None  # of the autograd graph, that the engine runs; None without the engine


def references(collection: list[torch.Tensor], at: int) -> References:
    """Counted without a name for the tensor, which would be one more."""
    return References(
        sys.getrefcount(collection[at]),
        collection[at]._use_count(),
        torch._C._storage_Use_Count(collection[at].untyped_storage()._cdata),
        weakref.getweakrefcount(collection[at]),
        None
        if collection[at]._base is None
        else (sys.getrefcount(collection[at]._base), collection[at]._base._use_count()),
        _give_on(None, object()),
        type(torch._C._current_autograd_node()),
    )


def _give_on(context: None, *values: object) -> int:
    return _given_on(context, *values)


def _given_on(context: None, *values: object) -> int:
    return sys.getrefcount(values[0])


@torch.compiler.disable  # a backward that runs in a frame of Dynamo's would have it compiled
def own(collection: object) -> None:
    """Puts tensors of the trace's own in place of those cotangents that autograd's engine alone has.

    Args:
        collection: the list that Thunder hands to a backward, before anything was taken from it. Anything else is left alone.
    """
    alone = _alone.get(_give_on(None, object()))
    if alone is None or type(collection) is not list:
        return
    with torch._C.DisableTorchFunction():
        for at in range(len(collection)):
            if _may_be_owned(collection[at]) and references(collection, at) in alone:
                _take(collection, at)


def _may_be_owned(value: Any) -> bool:
    """True for a tensor of the plain kind, none of `torch.vmap`'s; no name is given to it that would outlive the call."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and torch._C._has_storage(value)
        and not value.requires_grad
        and not value.is_inference()
        and not vars(value)  # what a hook notes on it would be lost where the trace returns it
    )


def _take(collection: list[torch.Tensor], at: int) -> None:
    mine = collection[at].detach()
    if collection[at]._base is not None:
        collection[at]._base.data = mine.new_empty(0)
    collection[at].data = mine.new_empty(0)  # what the engine goes on holding
    collection[at] = mine


_alone: dict[int, tuple[References, ...]] = {}  # what was counted in this process, by `References.given_on`


def engine_references() -> tuple[References, ...] | None:
    """What is counted of a cotangent that the engine alone has; None where this torch or Python does not tell now.

    One count for a tensor, and one for a view of a tensor that only the view has, as a backward gives that ends in a reshape.

    Asked when a backward is compiled; `own` asks nothing in a user's backward. An answer is kept for the process, None is not.
    """
    caller = _give_on(None, object())
    if caller not in _alone and (found := _measured()) is not None:
        _alone[found[0].given_on] = found
    return _alone.get(caller)


def _measured() -> tuple[References, ...] | None:
    """Asks a backward whose cotangent nobody else has, and then backwards whose cotangent has a second owner.

    A hook keeps it, the caller has it, or a hook of the node will be given it: where one of those counts the same, counting tells nothing.
    It may be asked within a forward that is checkpointed, where tensors that are saved for a backward are counted: these programs save none.
    """
    try:
        with real_tensors(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
            first, again = ([_counted(share) for share in (_nobody_else, _view_of_nobody_elses)] for _ in range(2))
            others = [_counted(share) for share in _OTHER_OWNERS]
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):
        # a private function of torch's is gone, or the engine does not call the backward
        return None
    return tuple(first) if first == again and not set(first).intersection(others) else None


def _counted(share: Callable[[torch.Tensor, list[Any]], None]) -> References:
    """The references of the cotangent of a small Thunder function, in a backward where ``share`` gives it a second owner."""
    found: list[References] = []

    def backward(saved: list[list[torch.Tensor]], cotangents: list[torch.Tensor]) -> tuple[torch.Tensor]:
        found.append(references(cotangents, 0))
        saved[0].clear()
        cotangents.clear()
        return (_ones(),)

    argument, output = _ones().requires_grad_(), _ones()
    connect_to_autograd(
        backward_fn=backward,
        flat_args=(argument,),
        flat_output=(output,),
        saved_tensors=(),
        saved_other=(),
        return_none_instead_of_grads=False,
        disable_split_autograd=True,
        is_differentiable_outputs=None,
    )
    kept: list[Any] = []
    share(output, kept)
    return found[0]


def _ones() -> torch.Tensor:
    return torch.ones(2, device="cpu")


def _nobody_else(output: torch.Tensor, kept: list[Any]) -> None:
    output.neg().sum().backward()


def _kept_by_hook(output: torch.Tensor, kept: list[Any]) -> None:
    output.register_hook(kept.append)
    output.neg().sum().backward()


def _given_by_caller(output: torch.Tensor, kept: list[Any]) -> None:
    output.backward(_ones())


def _given_without_engine(output: torch.Tensor, kept: list[Any]) -> None:
    leaf = _ones().requires_grad_()
    leaf.grad = _ones()
    output.grad_fn.apply(*[leaf.grad])


def _asked_for(output: torch.Tensor, kept: list[Any]) -> None:
    edge = output.grad_fn.next_functions
    leaf = next(function.variable for function, _ in edge if hasattr(function, "variable"))
    torch.autograd.grad(output.neg().sum(), (output, leaf))


def _given_to_hook(output: torch.Tensor, kept: list[Any]) -> None:
    output.grad_fn.register_hook(lambda gradients, cotangents: kept.append(cotangents))
    output.neg().sum().backward()


def _viewed(output: torch.Tensor, kept: list[Any]) -> None:
    output.register_hook(lambda cotangent: kept.append(cotangent.view(-1)))
    output.neg().sum().backward()


class _Viewing(torch.autograd.Function):
    """Its backward gives a view of a new tensor; ``keep`` says whether the tensor or another view of it is kept."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, kept: list[Any], keep: str) -> torch.Tensor:
        context.kept, context.keep = kept, keep
        return x.neg()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        base = gradient.neg()
        if context.keep:
            context.kept.append(base if context.keep == "base" else base.view(1, 2))
        return base.view(1, 2).view(2), None, None


def _view_of_nobody_elses(output: torch.Tensor, kept: list[Any]) -> None:
    _Viewing.apply(output, kept, "").sum().backward()


def _view_of_kept(output: torch.Tensor, kept: list[Any]) -> None:
    _Viewing.apply(output, kept, "base").sum().backward()


def _view_beside_a_kept_one(output: torch.Tensor, kept: list[Any]) -> None:
    _Viewing.apply(output, kept, "view").sum().backward()


def _view_kept_by_hook(output: torch.Tensor, kept: list[Any]) -> None:
    output.register_hook(kept.append)
    _view_of_nobody_elses(output, kept)


_OTHER_OWNERS = (
    _kept_by_hook,
    _given_by_caller,
    _given_without_engine,
    _asked_for,
    _given_to_hook,
    _viewed,
    _view_of_kept,
    _view_beside_a_kept_one,
    _view_kept_by_hook,
)


def why_not() -> str | None:
    """Why no trace of the compile that runs now may take cotangents over; None where it may."""
    if engine_references() is None:
        return "this torch does not tell who else has a cotangent"
    if records_cuda_graphs():
        return "CUDA graphs are recorded: they read cotangents from memory of their own"
    return None


def records_cuda_graphs() -> bool:
    """True where the compile that runs now records its traces as CUDA graphs."""
    transforms = getattr(get_compile_data(), "transforms", None) or ()
    return any(cls.__name__ == "CUDAGraphTransform" for transform in transforms for cls in type(transform).__mro__)


statements = OperatorExecutor("fusionfix_statements")  # of this project, in backward traces
own_cotangents = statements.register_operator(OWN, meta=lambda collection: None, fn=own, tags=(prims.OpTags.DONT_DCE,))
