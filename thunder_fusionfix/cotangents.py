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

Invariants: values, shapes, dtypes and strides are what they were; no device is read; without references to count nothing is taken.
"""

from __future__ import annotations

import functools
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


def references(collection: list[torch.Tensor], at: int) -> References:
    """Counted without a name for the tensor, which would be one more."""
    return References(
        sys.getrefcount(collection[at]),
        collection[at]._use_count(),
        torch._C._storage_Use_Count(collection[at].untyped_storage()._cdata),
        weakref.getweakrefcount(collection[at]),
    )


def own(collection: object) -> None:
    """Puts tensors of the trace's own in place of those cotangents that autograd's engine alone has.

    Args:
        collection: the list that Thunder hands to a backward, before anything was taken from it. Anything else is left alone.
    """
    alone = engine_references()
    if alone is None or type(collection) is not list:
        return
    for at in range(len(collection)):
        if _may_be_owned(collection[at]) and references(collection, at) == alone:
            _take(collection, at)


def _may_be_owned(value: Any) -> bool:
    """True for a tensor of the plain kind; no name is given to it that would outlive the call."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_inference()
    )


def _take(collection: list[torch.Tensor], at: int) -> None:
    mine = collection[at].detach()
    collection[at].data = mine.new_empty(0)  # what the engine goes on holding
    collection[at] = mine


@functools.cache
def engine_references() -> References | None:
    """What is counted of a cotangent that the engine alone has; None where this torch or Python does not tell.

    Asks a backward whose cotangent nobody else has, and then backwards whose cotangent a hook keeps, the caller has, or a hook of the node
    will be given: where one of those counts the same, counting tells nothing.
    """
    try:
        with real_tensors(), torch.inference_mode(False), torch.enable_grad():
            alone, again, *others = map(_counted, (_nobody_else, _nobody_else, *_OTHER_OWNERS))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # a private function of torch's is gone
        return None
    return alone if alone == again and alone not in others else None


def _counted(share: Callable[[torch.Tensor, list[Any]], None]) -> References:
    """The references of the cotangent of a small Thunder function, in a backward where ``share`` gives it a second owner."""
    found: list[References] = []

    def backward(saved: list[list[torch.Tensor]], cotangents: list[torch.Tensor]) -> tuple[torch.Tensor]:
        found.append(references(cotangents, 0))
        saved[0].clear()
        cotangents.clear()
        return (torch.ones(2),)

    argument, output = torch.ones(2, requires_grad=True), torch.ones(2)
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


def _nobody_else(output: torch.Tensor, kept: list[Any]) -> None:
    (output * output).sum().backward()


def _kept_by_hook(output: torch.Tensor, kept: list[Any]) -> None:
    output.register_hook(kept.append)
    (output * output).sum().backward()


def _given_by_caller(output: torch.Tensor, kept: list[Any]) -> None:
    output.backward(torch.ones(2))


def _asked_for(output: torch.Tensor, kept: list[Any]) -> None:
    edge = output.grad_fn.next_functions
    leaf = next(function.variable for function, _ in edge if hasattr(function, "variable"))
    torch.autograd.grad((output * output).sum(), (output, leaf))


def _given_to_hook(output: torch.Tensor, kept: list[Any]) -> None:
    output.grad_fn.register_hook(lambda gradients, cotangents: kept.append(cotangents))
    (output * output).sum().backward()


def _viewed(output: torch.Tensor, kept: list[Any]) -> None:
    output.register_hook(lambda cotangent: kept.append(cotangent.view(-1)))
    (output * output).sum().backward()


_OTHER_OWNERS = (_kept_by_hook, _given_by_caller, _asked_for, _given_to_hook, _viewed)


def why_not() -> str | None:
    """Why no trace of the compile that runs now may take cotangents over; None where it may."""
    if engine_references() is None:
        return "this torch does not tell who else has a cotangent"
    transforms = getattr(get_compile_data(), "transforms", None) or ()
    if any(cls.__name__ == "CUDAGraphTransform" for transform in transforms for cls in type(transform).__mro__):
        return "CUDA graphs are recorded: they read cotangents from memory of their own"
    return None


own_cotangents = OperatorExecutor("fusionfix_statements").register_operator(
    OWN, meta=lambda collection: None, fn=own, tags=(prims.OpTags.DONT_DCE,)
)
