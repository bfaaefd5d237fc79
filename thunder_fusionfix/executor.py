"""The executor-list entry "fusionfix": the adapter by which Thunder calls the joint passes and its own matmuls.

    executors=("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")

Importing this module registers `fusionfix_ex` under the name "fusionfix". It is two things to Thunder. As an operator executor it
runs linear layers and matmuls of an N-D tensor with a 2-D one (`passes.fold_matmuls`), and those that may be faster with padded
operands (`passes.pad_matmuls`). As a fusion executor it sees the joint
trace before every fusion executor that stands after it, claims no region, and hands on a trace that saves less
(`passes.recompute_cheap`), holds better candidates for fusion (`passes.claim_layouts`) and, where that is asked for, chooses the kernel
of attention at run time (`passes.cudnn_attention`).

Options are Thunder compile options with the prefix ``fusionfix_``. ``FUSIONFIX_OPTIMIZATION_FUEL`` in the environment, the option
``fusionfix_entry_fuel`` or `set_fuel` bounds the rewrites of joint traces, so that a wrong result can be bisected.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from thunder_fusionfix._thunder import (
    FUEL_LEVEL,
    BoundSymbol,
    FusionExecutor,
    OperatorExecutor,
    PrimIDs,
    TensorProxy,
    TraceCtx,
    dtypes,
    get_compile_data,
    given_options,
    ltorch,
    prims,
    register_executor,
    sdpaex,
    untested_versions,
)
from thunder_fusionfix.config import PREFIX, FusionFixConfig, option_names
from thunder_fusionfix.effects import ATTENTION, ATTENTION_BACKWARD
from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.joint import JointReport
from thunder_fusionfix.matmul_copies import LINEAR, MATMUL
from thunder_fusionfix.padding import FRUGAL_LIMIT, PAD_LIMIT
from thunder_fusionfix.passes import fold_matmuls, pad_matmuls
from thunder_fusionfix.passes.cudnn_attention import fusionfix_attention, fusionfix_attention_backward
from thunder_fusionfix.passes.fold_matmuls import fusionfix_linear, fusionfix_matmul

if TYPE_CHECKING:
    from thunder_fusionfix.transform import FusionFixTransform

NAME = "fusionfix"
FUEL_VARIABLE = "FUSIONFIX_OPTIMIZATION_FUEL"


class FusionFixExecutor(OperatorExecutor, FusionExecutor):
    """Claims matmuls one by one, and rewrites joint traces; see the module."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.reports: list[JointReport] = []  # one for each trace that was looked at, in the order of compilation
        self._fuel: int | FUEL_LEVEL = FUEL_LEVEL.UNLIMITED
        if fuel := os.getenv(FUEL_VARIABLE):
            self.set_fuel(int(fuel))

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """False: no region is ever ours. (The base class would claim what consists of claimed ops.)"""
        return False

    def get_fuel(self, amount: int = 1, /) -> bool:
        """True where ``amount`` more rewrites may be made; takes them."""
        if isinstance(self._fuel, FUEL_LEVEL):
            return True
        if self._fuel < amount:
            return False
        self._fuel -= amount
        return True

    def set_fuel(self, value: int | FUEL_LEVEL) -> None:
        """Bounds the rewrites of joint traces from now on.

        Raises:
            ValueError: for a negative number.
        """
        if not isinstance(value, FUEL_LEVEL) and value < 0:
            raise ValueError(f"{NAME}: optimization fuel must be >= 0, not {value}")
        self._fuel = value

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        # here, because this module is imported on joining Thunder, which may happen while `read` is being imported
        from thunder_fusionfix.joint_pipeline import Entry, fix_joint

        config = current_config()
        executors = _executors()
        _warn_of_order(executors)
        entry = Entry(
            config,
            _later(executors),
            after,
            self._rewrites(config),
            is_fixed_later=bool(_transforms()),
            operators=self.opmap,
        )
        fixed, report = fix_joint(trace, entry)
        operators = (fold_matmuls.NAME, pad_matmuls.NAME)  # claims are no rewrites
        self.get_fuel(sum(decision.applied for decision in report.decisions if decision.pass_name not in operators))
        self.reports.append(report)
        for transform in _transforms():
            transform.entry_reports.append(report)
        return fixed

    def _rewrites(self, config: FusionFixConfig) -> int | None:
        bounds = [fuel for fuel in (config.entry_fuel, self._fuel) if isinstance(fuel, int)]
        return min(bounds) if bounds else None


def current_config() -> FusionFixConfig:
    """The options that the user gave to the compile that runs now: to Thunder, or to our transform, whose arguments win.

    Raises:
        UsageError: an option is unknown or has an illegal value.
    """
    arguments = {name: value for transform in _transforms() for name, value in transform.options.items()}
    return FusionFixConfig.from_options({**given_options(PREFIX, option_names()), **arguments})


def _transforms() -> tuple[FusionFixTransform, ...]:
    """Our transforms in the compile that runs now."""
    from thunder_fusionfix.transform import FusionFixTransform  # needs `read`; see `fusion_pass`

    given = getattr(get_compile_data(), "transforms", None) or ()
    return tuple(transform for transform in given if isinstance(transform, FusionFixTransform))


# ---------------------------------------------------------------- the list that we stand in


def _executors() -> tuple[Any, ...]:
    compile_data = get_compile_data()
    return tuple(compile_data.executors_list) if compile_data is not None else ()


def _later(executors: tuple[Any, ...]) -> tuple[FusionExecutor, ...]:
    """Fusion executors after ours."""
    ours = executors.index(fusionfix_ex) if fusionfix_ex in executors else len(executors)
    return tuple(executor for executor in executors[ours + 1 :] if isinstance(executor, FusionExecutor))


_warned: set[str] = set()


def _warn_of_order(executors: tuple[Any, ...]) -> None:
    """Says what is lost where the entry stands in the wrong place of the list."""
    if fusionfix_ex not in executors:
        return
    ours = executors.index(fusionfix_ex)
    for executor in executors[:ours]:
        if executor.name == "nvfuser":
            _warn_once(
                f'"{NAME}" stands after "nvfuser" in the executor list: its layouts are fused already. Matmuls fold all the '
                f'same; put "{NAME}" before "nvfuser" for the rest'
            )
    for executor in executors[ours + 1 :]:
        if any(
            executor.get_grad_transform(symbol) for symbol in (prims.linear, ltorch.linear, prims.matmul, ltorch.matmul)
        ):
            _warn_once(
                f'executor "{executor.name}" has a gradient rule of its own for linear layers and stands after "{NAME}", which '
                f'may take them first: put "{executor.name}" before "{NAME}"'
            )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"thunder_fusionfix: {message}", stacklevel=4)


# ---------------------------------------------------------------- operators


def _linear_meta(
    x: TensorProxy, w: TensorProxy, bias: TensorProxy | None, copy_limit: int | None, pad_limit: int
) -> TensorProxy:
    return TensorProxy(like=x, shape=(*x.shape[:-1], w.shape[0]))


def _matmul_meta(a: TensorProxy, b: TensorProxy, copy_limit: int | None, pad_limit: int) -> TensorProxy:
    return TensorProxy(like=a, shape=(*(a if a.ndim > b.ndim else b).shape[:-2], a.shape[-2], b.shape[-1]))


def _after_meta(tensor: TensorProxy, token: TensorProxy) -> TensorProxy:
    return TensorProxy(like=tensor)


def _after(tensor: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return tensor


fusionfix_ex = FusionFixExecutor()
register_executor(fusionfix_ex)

# Without sub-symbols, which nvFuser would look through: a claim must hold against executors that come later.
_linear = fusionfix_ex.register_operator(LINEAR, meta=_linear_meta, fn=fusionfix_linear, tags=prims.linear.tags)
_matmul = fusionfix_ex.register_operator(MATMUL, meta=_matmul_meta, fn=fusionfix_matmul, tags=prims.matmul.tags)
after = fusionfix_ex.register_operator("fusionfix_after", meta=_after_meta, fn=_after)
for _name, _like, _fn in (
    (ATTENTION, sdpaex.sdpfa_gradfwd, fusionfix_attention),
    (ATTENTION_BACKWARD, sdpaex.sdpfa_bwd, fusionfix_attention_backward),
):
    fusionfix_ex.register_operator(_name, meta=_like.meta, fn=_fn, tags=_like.tags)


# ---------------------------------------------------------------- what is traced otherwise


def _addmm(*args: Any, **kwargs: Any) -> TensorProxy:
    from thunder_fusionfix.take_addmm import traced  # late, as in `fusion_pass`

    return traced(current_config().take_addmm, *args, **kwargs)


def _cross_entropy(*args: Any, **kwargs: Any) -> TensorProxy:
    from thunder_fusionfix.widen_losses import traced

    config = current_config()
    acts = _transforms() and (config.untested_versions or not untested_versions())
    cuts_from = config.cut_rows_min_bytes if config.ignore_cut_rows and acts and config.fuel is None else None
    return traced(config.widen_losses, cuts_from, *args, **kwargs)


fusionfix_ex._lookasides.update({torch.addmm: _addmm, torch.nn.functional.cross_entropy: _cross_entropy})


# ---------------------------------------------------------------- what is claimed


def _is_plain(tensor: Any, *ndims: int) -> bool:
    """True for a tensor of an ordinary kind with one of ``ndims`` dims; 3 stands for three or more."""
    return type(tensor) is TensorProxy and min(tensor.ndim, 3) in ndims


def _folds(a: TensorProxy, b: TensorProxy, config: FusionFixConfig) -> bool:
    return config.fold_matmuls and (a.ndim == 2) != (b.ndim == 2)


def _pad_limit(a: TensorProxy, b: TensorProxy, config: FusionFixConfig, *, is_linear: bool) -> int:
    """Bytes that padding ``a @ b``, or ``linear(a, b)``, may copy: none where it cannot pay, few where the user asked for memory."""
    if not config.pad_matmuls or not (_may_pad(a) and _may_pad(b)):
        return 0
    right = tuple(reversed(b.shape)) if is_linear else tuple(b.shape)
    limit = PAD_LIMIT if config.memory_budget is None else FRUGAL_LIMIT
    return limit if pad_matmuls.is_claimed(tuple(a.shape), right, limit) else 0


def _may_pad(tensor: TensorProxy) -> bool:
    """True for 2-byte floats on a GPU, of a size that tracing knows."""
    return (
        tensor.device.type == "cuda"
        and tensor.dtype in (dtypes.bfloat16, dtypes.float16)
        and all(type(size) is int for size in tensor.shape)
    )


def _can_linear(x: Any, w: Any, bias: Any = None) -> bool:
    if not (_is_plain(x, 2, 3) and _is_plain(w, 2) and (bias is None or type(bias) is TensorProxy)):
        return False
    config = current_config()
    return _folds(x, w, config) or _pad_limit(x, w, config, is_linear=True) > 0


def _can_matmul(a: Any, b: Any) -> bool:
    if not (_is_plain(a, 2, 3) and _is_plain(b, 2, 3)):
        return False
    config = current_config()
    return _folds(a, b, config) or _pad_limit(a, b, config, is_linear=False) > 0


def _limits(a: TensorProxy, b: TensorProxy, *, is_linear: bool) -> tuple[int | None, int]:
    """Bytes that a fold and padding may copy.

    A fold copies nothing where the user asked for memory; without the option there is none (None).
    """
    config = current_config()
    copied = None if not config.fold_matmuls else COPY_LIMIT if config.memory_budget is None else 0
    return copied, _pad_limit(a, b, config, is_linear=is_linear)


def _run_linear(x: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    return _linear(x, w, bias, *_limits(x, w, is_linear=True))


def _run_matmul(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    return _matmul(a, b, *_limits(a, b, is_linear=False))


for _id in (PrimIDs.LINEAR, ltorch.linear.id):
    fusionfix_ex.register_implementation(_id, checker=_can_linear, execution_transform=_run_linear)
for _id in (PrimIDs.MATMUL, ltorch.matmul.id, ltorch.bmm.id):
    fusionfix_ex.register_implementation(_id, checker=_can_matmul, execution_transform=_run_matmul)
