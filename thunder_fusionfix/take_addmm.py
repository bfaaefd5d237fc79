"""``torch.addmm`` of a bias, which GPT-2's `Conv1D` calls, is a linear layer to Thunder.

The trap. Thunder has no operator for it but an automatic call of torch, so ThunderFX leaves each one to torch.compile and splits the
program there: two layers of GPT-2 are 17 functions. Each call of one costs the host, gradients between two of them live until the
backward of the one before returns, and nothing is fused across.

    t7 = torch.addmm(bias, x, w)        # bias[N], x[M, K], w[K, N]

    t7 = torch.nn.functional.linear(x, w.mT, bias)        # the same call of cuBLAS: linear takes a transposed view of w.mT

In the backward the gradient of ``w`` is made as ``x.mT @ dy``, in the layout of ``w``; what linear's own rule gives is the transposed of
that, and autograd copies a gradient that lies otherwise than its parameter.

Stage: the executor entry, before a program is traced. Takes: the function, with two matrices, a bias of one dim, floating-point numbers,
``beta`` and ``alpha`` of 1. All else, the method, and what a checkpoint runs, stay Thunder's. Changes: under autocast nothing but the
split; it casts what linear casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thunder_fusionfix._thunder import (
    Symbol,
    TensorProxy,
    _torch_to_thunder_function_map,
    dtypes,
    get_compile_data,
    get_grad,
    is_functorch_wrapped_tensor,
    ltorch,
    prims,
    put_grad,
    register_grad,
    try_execute_thunder_symbol,
)
from thunder_fusionfix.config import PREFIX, check_option
from thunder_fusionfix.errors import UnsupportedTraceError

NAME = "take_addmm"


def linear_of(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> TensorProxy:
    """``beta * input + alpha * (mat1 @ mat2)`` as a linear layer; arguments as those of ``torch.addmm``.

    Args:
        input: ``[N]``
        mat1: ``[M, K]``
        mat2: ``[K, N]``
        beta: 1
        alpha: 1

    Raises:
        UnsupportedTraceError: it is none.
    """
    if not (
        all(type(tensor) is TensorProxy for tensor in (input, mat1, mat2))
        and (input.ndim, mat1.ndim, mat2.ndim) == (1, 2, 2)
        and input.shape[0] == mat2.shape[1]
        # complex gradients are conjugates
        and all(tensor.dtype in dtypes.float_dtypes for tensor in (input, mat1, mat2))
        and all(type(scale) in (int, float) and scale == 1 for scale in (beta, alpha))
    ):
        raise UnsupportedTraceError(
            f"{NAME}: addmm of other than a bias, two matrices of floating-point numbers and factors of 1"
        )
    compile_data = get_compile_data()
    if compile_data is not None and not compile_data.autocast_stack.is_empty():
        # casts come between, each with its own gradient
        return ltorch.linear(mat1, ltorch.transpose(mat2, 0, 1), input)
    return _linear(input, mat1, mat2)


def _linear_meta(bias: TensorProxy, x: TensorProxy, w: TensorProxy) -> TensorProxy:
    return prims.linear(x, prims.transpose(w, (1, 0)), bias)


def _linear_grad(bias: TensorProxy, x: TensorProxy, w: TensorProxy) -> TensorProxy:
    out = _linear_meta(bias, x, w)
    gradient = get_grad(out)
    put_grad(x, ltorch.matmul(gradient, ltorch.transpose(w, 0, 1)))
    put_grad(w, ltorch.matmul(ltorch.transpose(x, 0, 1), gradient))
    put_grad(bias, ltorch.sum(gradient, 0))
    return out


_linear = Symbol("linear_of_addmm", _linear_meta, id="fusionfix.linear_of_addmm")
register_grad(_linear, _linear_grad)


def traced(wanted: bool, *args: Any, **kwargs: Any) -> TensorProxy:
    """What Thunder traces for ``torch.addmm``: a linear layer where it is one and ``wanted``, else what it would trace."""
    if wanted:
        try:
            return linear_of(*args, **kwargs)
        except (UnsupportedTraceError, TypeError):  # other arguments than those of a linear layer
            pass
    return _torch_to_thunder_function_map[torch.addmm](*args, **kwargs)


def is_linear(node: torch.fx.Node, thunder_options: Mapping[str, Any]) -> bool:
    """True for a node of an FX graph that ThunderFX, with these options, may give to Thunder as a linear layer."""
    if node.target is not torch.addmm or not _is_wanted(thunder_options):
        return False
    made = node.meta.get("example_value")
    if isinstance(made, torch.Tensor) and is_functorch_wrapped_tensor(made):
        return False  # under torch.func's transforms, which Thunder's functions cannot be
    # Thunder makes proxies of defaults that it finds in a signature
    return try_execute_thunder_symbol(lambda *args, **kwargs: linear_of(*args, **kwargs), node, thunder_options)[0]


def _is_wanted(options: Mapping[str, Any]) -> bool:
    """True where ThunderFX's options have the entry, and nothing switches this off; the transform's argument wins."""
    if not any(getattr(executor, "name", executor) == "fusionfix" for executor in options.get("executors") or ()):
        return False
    asked = options.get(PREFIX + NAME)
    for transform in options.get("transforms") or ():
        asked = getattr(transform, "options", {}).get(NAME, asked)
    if asked is not None:
        check_option(NAME, asked)
    return asked is not False
