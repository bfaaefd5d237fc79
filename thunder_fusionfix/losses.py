"""Cross entropies over rows of logits, as data: which argument is what.

Thunder's nvFuser executor has two composite ops for ``torch.nn.functional.cross_entropy`` with the mean over all rows:

    loss, a_max, log_sum_exp, count = nv_cross_entropy_fwd(logits, target, None, None, ignore_index, None, 'mean', 0.0)
    gradient = nv_cross_entropy_bwd(g, logits, target=target, a_max=a_max, max_log_sum_exp=log_sum_exp,
                                    valid_indices=count, ignore_index=ignore_index, label_smoothing=0.0)

for logits [rows, classes], a target, a maximum and a log-sum-exp for each row, and the number of rows whose target is not
``ignore_index``. A row is seen by its own entries alone; a row with the target ``ignore_index`` adds nothing to loss and count.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_fusionfix.effects import short_name
from thunder_fusionfix.model import Arg, Op, Ref


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The values of one cross entropy, by name; the same for its forward and its backward."""

    logits: str  # [rows, classes]
    target: str  # [rows]
    a_max: str  # [rows]: the largest logit
    log_sum_exp: str  # [rows]: log(sum(exp(logits - a_max)))
    count: str  # []: rows that are not ignored
    ignore_index: int
    scalar: str  # []: the mean loss in the forward, its gradient in the backward
    gradient: str | None = None  # [rows, classes], in the backward


def cross_entropy_of(op: Op) -> CrossEntropy | None:
    """What ``op`` is as a cross entropy; None for other ops, and with weights, label smoothing or another reduction.

    >>> names = [Ref(name) for name in ("loss", "a_max", "log_sum_exp", "count")]
    >>> args = (Ref("x"), Ref("y"), None, None, -100, None, "mean", 0.0)
    >>> cross_entropy_of(Op("nv_cross_entropy_fwd", args, tuple(names))).log_sum_exp
    'log_sum_exp'
    """
    name = short_name(op.id)
    if name == "nv_cross_entropy_fwd":
        return _forward(op)
    return _backward(op) if name == "nv_cross_entropy_bwd" else None


def _forward(op: Op) -> CrossEntropy | None:
    if op.kwargs or len(op.args) != 8 or len(op.outputs) != 4 or len(op.inputs) != 2:
        return None
    logits, target, weight, size_average, ignore_index, reduce, reduction, smoothing = op.args
    if (weight, size_average, reduce, reduction, smoothing) != (None, None, None, "mean", 0.0):
        return None
    loss, a_max, log_sum_exp, count = op.outputs
    return _made(logits, target, a_max, log_sum_exp, count, ignore_index, loss, None)


def _backward(op: Op) -> CrossEntropy | None:
    given = dict(op.kwargs)
    if len(op.args) != 2 or len(op.outputs) != 1 or given.get("label_smoothing") != 0.0 or len(given) != 6:
        return None
    named = [given.get(key) for key in ("target", "a_max", "max_log_sum_exp", "valid_indices")]
    target, a_max, log_sum_exp, count, scalar = (
        arg.name if isinstance(arg, Ref) else "" for arg in (*named, op.args[0])
    )
    if not all((target, a_max, log_sum_exp, count, scalar)):
        return None
    (gradient,) = op.outputs
    return _made(op.args[1], Ref(target), a_max, log_sum_exp, count, given.get("ignore_index"), scalar, gradient)


def _made(
    logits: Arg,
    target: Arg,
    a_max: str,
    log_sum_exp: str,
    count: str,
    ignore_index: Arg,
    scalar: str,
    gradient: str | None,
) -> CrossEntropy | None:
    is_known = isinstance(logits, Ref) and isinstance(target, Ref)
    if not is_known or not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        return None
    return CrossEntropy(logits.name, target.name, a_max, log_sum_exp, count, ignore_index, scalar, gradient)  # type: ignore[union-attr]
