"""A cross entropy of 16-bit logits is computed in float32, so that nvFuser can fuse it and nothing of the logits' size is kept for it.

The trap. nvFuser's own cross entropy takes float32 alone. That of bfloat16 logits, which GPT-2, GPT-NeoX and most models outside of
transformers' newer losses have, is then a log-softmax, which is saved, and a negative log likelihood, whose backward makes a second tensor
of that size before the logits' gradient is a third:

    loss = cross_entropy(logits, target)                       # logits: "cuda:0 bf16[4096, 50257]"

    loss = to(cross_entropy(to(logits, float32), target), bfloat16)

The cast happens in registers, and the backward needs the logits, a maximum and a log-sum-exp for each row. Every row's loss is rounded
once, at the end, where eager rounds each logarithm: results are closer to those in float64.

Stage: the executor entry, before a program is traced. Takes: logits [rows, classes] of bfloat16 or float16 on a GPU, the mean over rows,
no weights, no label smoothing, an ``ignore_index`` below 0: what nvFuser's checker takes in float32. Needs nvFuser behind the entry.

Leaves: rows that are cut out of two sequences or more, as logits[:, :-1], where no pass will put the cut right (`ignore_cut_rows`, from
``cut_rows_min_bytes`` on): nvFuser 0.2.36 cannot compile the backward of such a loss. And transposed logits, which nobody tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from thunder_fusionfix._thunder import (
    BoundSymbol,
    PrimIDs,
    TensorProxy,
    dtypes,
    get_compile_data,
    get_tracectx,
    ltorch,
    nvfuser_impl,
    prims,
)
from thunder_fusionfix.passes.ignore_cut_rows import MAX_ROWS

NAME = "widen_losses"
NARROW = (dtypes.bfloat16, dtypes.float16)
_SIGNATURE = inspect.signature(F.cross_entropy)


def traced(wanted: bool, cuts_from: int | None, *args: Any, **kwargs: Any) -> TensorProxy:
    """What Thunder traces for ``torch.nn.functional.cross_entropy``.

    Args:
        wanted: whether losses are widened; else all are traced as they are.
        cuts_from: bytes of logits from which on a pass of this compile puts cuts right; None where none does.
        args, kwargs: those of the cross entropy.
    """
    if wanted:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        if _is_taken(**given) and _nvfuser_runs(given["input"]) and _compiles(given["input"], cuts_from):
            logits, target = given.pop("input"), given.pop("target")
            loss = ltorch.cross_entropy(ltorch.to(logits, torch.float32), target, **given)
            return ltorch.to(loss, dtypes.to_torch_dtype(logits.dtype))
    return ltorch.cross_entropy(*args, **kwargs)


def _compiles(logits: TensorProxy, cuts_from: int | None) -> bool:
    """True where nvFuser can compile the loss of ``logits`` in float32, by where the trace has them from."""
    made_by = {
        out.name: bsym
        for scope in get_tracectx().scopes  # what is traced stands in scopes until it ends
        for bsym in scope
        for out in bsym.flat_proxy_outs
        if all(out is not arg for arg in bsym.flat_proxy_args)
    }
    source, sequences = logits, 1
    while (bsym := made_by.get(source.name)) is not None and _is_layout(bsym):
        if any(prim.sym.id is PrimIDs.TRANSPOSE for prim in _prims(bsym)):
            return False
        (source,) = bsym.flat_proxy_args
        sequences = max(sequences, prod(source.shape[:-2]))
    if source.numel == logits.numel or sequences == 1:
        return True
    enough = cuts_from is not None and source.numel * source.dtype.bytes >= cuts_from
    return enough and source.numel <= MAX_ROWS * logits.numel and source.shape[-1] == logits.shape[-1]


def _is_layout(bsym: BoundSymbol) -> bool:
    """True for a layout of one tensor into another."""
    tensors = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    return (
        len(tensors) == 2
        and all(type(tensor) is TensorProxy for tensor in tensors)
        and all(prims.OpTags.SHAPE_OP in (prim.sym.tags or ()) for prim in _prims(bsym))
    )


def _prims(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """What gives tensors inside of ``bsym``; not what asks for a shape."""
    if not bsym.subsymbols and any(isinstance(out, TensorProxy) for out in bsym.flat_proxy_outs):
        yield bsym
    for sub in bsym.subsymbols:
        yield from _prims(sub)


def _nvfuser_runs(logits: TensorProxy) -> bool:
    """True where nvFuser is among the executors of the compile that runs now, and takes tensors of the device of ``logits``."""
    compile_data, impl = get_compile_data(), nvfuser_impl()
    if compile_data is None or impl is None or all(one.name != "nvfuser" for one in compile_data.executors_list):
        return False
    return impl.is_supported_device(logits.device)


def _is_taken(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> bool:
    """True for a loss that nvFuser takes but for its dtype; arguments as those of ``torch.nn.functional.cross_entropy``."""
    return (
        type(input) is type(target) is TensorProxy
        and (input.ndim, target.ndim) == (2, 1)
        and input.shape[0] == target.shape[0]
        and input.dtype in NARROW
        and target.dtype is dtypes.int64  # others are refused elsewhere
        and weight is size_average is reduce is None
        and reduction == "mean"
        and type(ignore_index) is int
        and ignore_index < 0
        and type(label_smoothing) in (int, float)
        and label_smoothing == 0
    )
