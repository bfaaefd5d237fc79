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
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from thunder_fusionfix._thunder import TensorProxy, dtypes, get_compile_data, ltorch, nvfuser_impl

NAME = "widen_losses"
NARROW = (dtypes.bfloat16, dtypes.float16)
_SIGNATURE = inspect.signature(F.cross_entropy)


def traced(wanted: bool, *args: Any, **kwargs: Any) -> TensorProxy:
    """What Thunder traces for ``torch.nn.functional.cross_entropy``: in float32 where that pays and ``wanted``, else as it is."""
    if wanted:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        if _is_taken(**given) and _nvfuser_runs(given["input"]):
            logits, target = given.pop("input"), given.pop("target")
            loss = ltorch.cross_entropy(ltorch.to(logits, torch.float32), target, **given)
            return ltorch.to(loss, dtypes.to_torch_dtype(logits.dtype))
    return ltorch.cross_entropy(*args, **kwargs)


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
        and weight is size_average is reduce is None
        and reduction == "mean"
        and type(ignore_index) is int
        and ignore_index < 0
        and type(label_smoothing) in (int, float)
        and label_smoothing == 0
    )
