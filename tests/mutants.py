"""Pairs of traces for `verify`: legal rewrites that it must accept, and broken ones, each with the one rule that catches it.

A broken trace is a good one with a line changed, so the fault is seen at a glance. `single_faults` makes such changes on any Graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_fusionfix.effects import ATTENTION, ATTENTION_BACKWARD, FLASH, FLASH_BACKWARD, short_name
from thunder_fusionfix.model import Arg, Graph, Op, Ref, Value
from thunder_fusionfix.parse import parse
from thunder_fusionfix.verify import Allow

NOTHING = Allow()
REORDER = Allow(may_reorder=True)
REWRITE = Allow(may_rewrite_regions=True)
SPLIT = Allow(may_split_regions=True)
OWN_COTANGENTS = Allow(may_own_cotangents=True)
EXPAND_COTANGENTS = Allow(may_expand_cotangents=True)
MASK = Allow(may_rewrite_regions=True, may_add=frozenset({"full", "where"}))


@dataclass(frozen=True)
class Pair:
    """A trace before and after a pass, as text."""

    name: str
    before_text: str
    after_text: str
    allow: Allow = NOTHING

    @cached_property
    def before(self) -> Graph:
        return parse(self.before_text)

    @cached_property
    def after(self) -> Graph:
        return parse(self.after_text)


@dataclass(frozen=True)
class Mutant(Pair):
    """A pair that `verify` must reject by ``rule``, and would accept without it."""

    rule: str = ""


def edited(text: str, *changes: tuple[str, str]) -> str:
    """``text`` with each change made; every one must find its place, once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    return text


# ---------------------------------------------------------------- traces

# The causal-LM loss as Thunder 0.2.6 prints it after nvFuser's fusion pass, with the sizes of Qwen2.5-7B.
LOSS_FORWARD = """
def computation(logits, labels):
  # logits: "cuda:0 bf16[1, 4096, 152064]"
  # labels: "cuda:0 i64[1, 4096]"
  [t53, t56, t54, t55] = nvFusion0(logits, labels)
    # t42 = prims.convert_element_type(logits, dtypes.float32)  # t42: "cuda:0 f32[1, 4096, 152064]"
    # t45 = prims.slice_prim(t42, [0, 0, 0], [1, 4095, 152064], [1, 1, 1])  # t45: "cuda:0 f32[1, 4095, 152064]"
    # getitem_1 = prims.slice_prim(labels, [0, 1], [1, 4096], [1, 1])  # getitem_1: "cuda:0 i64[1, 4095]"
    # t48 = prims.stride_order(t45, (2, 1, 0))  # t48: "cuda:0 f32[1, 4095, 152064]"
    # shift_labels = prims.stride_order(getitem_1, (1, 0))  # shift_labels: "cuda:0 i64[1, 4095]"
    # t50 = prims.reshape(t48, (4095, 152064))  # t50: "cuda:0 f32[4095, 152064]"
    # shift_labels_1 = prims.reshape(shift_labels, (4095,))  # shift_labels_1: "cuda:0 i64[4095]"
    # shift_labels_2 = prims.shallow_copy(shift_labels_1)  # shift_labels_2: "cuda:0 i64[4095]"
    # (t53, t56, t54, t55) = thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd(t50, shift_labels_2, None, None, -100, None, 'mean', 0.0)
    # t53: "cuda:0 f32[]"
    # t56: "cuda:0 f32[4095]"
    # t54: "cuda:0 f32[4095]"
    # t55: "cuda:0 f32[]"
  return {'output': (t53,), 'flat_args': [logits, labels], 'flat_output': (t53,)}, ((labels, logits, t56, t54, t55), ())
"""

LOSS_FORWARD_FIXED = """
def computation(logits, labels):
  # logits: "cuda:0 bf16[1, 4096, 152064]"
  # labels: "cuda:0 i64[1, 4096]"
  t60 = torch_slice_prim_impl(logits, (0, 0, 0), (1, 4095, 152064), (1, 1, 1))  # t60: "cuda:0 bf16[1, 4095, 152064]"
  t61 = torch_prims_reshape_impl(t60, (4095, 152064))  # t61: "cuda:0 bf16[4095, 152064]"
  del t60
  t63 = torch_slice_prim_impl(labels, (0, 1), (1, 4096), (1, 1))  # t63: "cuda:0 i64[1, 4095]"
  shift_labels_2 = torch_prims_reshape_impl(t63, (4095,))  # shift_labels_2: "cuda:0 i64[4095]"
  del t63
  [t53, t56, t54, t55] = nvFusion0(t61, shift_labels_2)
    # t50 = prims.convert_element_type(t61, dtypes.float32)  # t50: "cuda:0 f32[4095, 152064]"
    # (t53, t56, t54, t55) = thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd(t50, shift_labels_2, None, None, -100, None, 'mean', 0.0)
    # t53: "cuda:0 f32[]"
    # t56: "cuda:0 f32[4095]"
    # t54: "cuda:0 f32[4095]"
    # t55: "cuda:0 f32[]"
  del t61, shift_labels_2
  return {'output': (t53,), 'flat_args': [logits, labels], 'flat_output': (t53,)}, ((labels, logits, t56, t54, t55), ())
"""

LOSS_BACKWARD = """
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, C1, = saved_for_backward
  # C0: "Collection"
  # C1: "Collection"
  clear_mutable_collection(saved_for_backward)
  clear_mutable_collection(C1)
  del C1, saved_for_backward
  t57, = cotangents
  # t57: "cuda:0 f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  labels, logits, t56, t54, t55, = C0
  # labels: "cuda:0 i64[1, 4096]"
  # logits: "cuda:0 bf16[1, 4096, 152064]"
  # t56: "cuda:0 f32[4095]"
  # t54: "cuda:0 f32[4095]"
  # t55: "cuda:0 f32[]"
  clear_mutable_collection(C0)
  del C0
  [t44] = nvFusion1(labels, logits, t57, t56, t54, t55)
    # getitem_1 = prims.slice_prim(labels, [0, 1], [1, 4096], [1, 1])  # getitem_1: "cuda:0 i64[1, 4095]"
    # t42 = prims.convert_element_type(logits, dtypes.float32)  # t42: "cuda:0 f32[1, 4096, 152064]"
    # shift_labels = prims.stride_order(getitem_1, (1, 0))  # shift_labels: "cuda:0 i64[1, 4095]"
    # t45 = prims.slice_prim(t42, [0, 0, 0], [1, 4095, 152064], [1, 1, 1])  # t45: "cuda:0 f32[1, 4095, 152064]"
    # shift_labels_1 = prims.reshape(shift_labels, (4095,))  # shift_labels_1: "cuda:0 i64[4095]"
    # t48 = prims.stride_order(t45, (2, 1, 0))  # t48: "cuda:0 f32[1, 4095, 152064]"
    # shift_labels_2 = prims.shallow_copy(shift_labels_1)  # shift_labels_2: "cuda:0 i64[4095]"
    # t50 = prims.reshape(t48, (4095, 152064))  # t50: "cuda:0 f32[4095, 152064]"
    # t58 = thunder.executors.nvfuserex_impl.nv_cross_entropy_bwd(t57, t50, target=shift_labels_2, a_max=t56, max_log_sum_exp=t54, valid_indices=t55, ignore_index=-100, label_smoothing=0.0)  # t58: "cuda:0 f32[4095, 152064]"
    # t52 = prims.reshape(t58, (1, 4095, 152064))  # t52: "cuda:0 f32[1, 4095, 152064]"
    # t47 = prims.pad(t52, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t47: "cuda:0 f32[1, 4096, 152064]"
    # t44 = prims.convert_element_type(t47, dtypes.bfloat16)  # t44: "cuda:0 bf16[1, 4096, 152064]"
  del labels, logits, t57, t56, t54, t55
  return (t44, None)
"""

OWNED_BACKWARD = edited(LOSS_BACKWARD, ("  t57, = cotangents", "  own_cotangents(cotangents)\n  t57, = cotangents"))

# Logits beside a loss: their gradient t7 is added to what the loss sends.
BESIDE_BACKWARD = """
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  w, y, = saved_for_backward
  # w: "cuda:0 f32[8, 8]"
  # y: "cuda:0 f32[4, 8]"
  clear_mutable_collection(saved_for_backward)
  del saved_for_backward
  t6, t7, = cotangents
  # t6: "cuda:0 f32[]"
  # t7: "cuda:0 f32[4, 8]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8 = torch.mul(y, t6)  # t8: "cuda:0 f32[4, 8]"
  del t6, y
  t9 = torch.add(t8, t7)  # t9: "cuda:0 f32[4, 8]"
  del t7, t8
  t10 = torch.matmul(t9, w)  # t10: "cuda:0 f32[4, 8]"
  del t9, w
  return (t10,)
"""

EXPANDED_BACKWARD = edited(
    BESIDE_BACKWARD, ("  t6, t7, = cotangents", "  expand_zero_cotangents(cotangents, (1,))\n  t6, t7, = cotangents")
)


def _expanded(*changes: tuple[str, str]) -> tuple[str, str]:
    """`BESIDE_BACKWARD` with ``changes``, without the statement and with it."""
    statement = ("  t6, t7, = cotangents", "  expand_zero_cotangents(cotangents, (1,))\n  t6, t7, = cotangents")
    return edited(BESIDE_BACKWARD, *changes), edited(BESIDE_BACKWARD, statement, *changes)


LOSS_BACKWARD_FIXED = edited(
    LOSS_BACKWARD[: LOSS_BACKWARD.index("  [t44] = ")]
    + """
  t59 = torch_slice_prim_impl(labels, (0, 1), (1, 4096), (1, 1))  # t59: "cuda:0 i64[1, 4095]"
  del labels
  shift_labels_2 = torch_prims_reshape_impl(t59, (4095,))  # shift_labels_2: "cuda:0 i64[4095]"
  del t59
  t63 = torch_slice_prim_impl(logits, (0, 0, 0), (1, 4095, 152064), (1, 1, 1))  # t63: "cuda:0 bf16[1, 4095, 152064]"
  del logits
  t65 = torch_prims_reshape_impl(t63, (4095, 152064))  # t65: "cuda:0 bf16[4095, 152064]"
  del t63
  [t69] = nvFusion1(t57, t56, t54, t55, t65, shift_labels_2)
    # t50 = prims.convert_element_type(t65, dtypes.float32)  # t50: "cuda:0 f32[4095, 152064]"
    # t58 = thunder.executors.nvfuserex_impl.nv_cross_entropy_bwd(t57, t50, target=shift_labels_2, a_max=t56, max_log_sum_exp=t54, valid_indices=t55, ignore_index=-100, label_smoothing=0.0)  # t58: "cuda:0 f32[4095, 152064]"
    # t68 = prims.convert_element_type(t58, dtypes.bfloat16)  # t68: "cuda:0 bf16[4095, 152064]"
    # t69 = prims.pad(t68, 0.0, ((0, 1, 0), (0, 0, 0)))  # t69: "cuda:0 bf16[4096, 152064]"
  del t57, t56, t54, t55, t65, shift_labels_2
  t44 = torch_prims_reshape_impl(t69, (1, 4096, 152064))  # t44: "cuda:0 bf16[1, 4096, 152064]"
  del t69
  return (t44, None)
"""
)

# A loss over sequences of six that drops the last row of each, and the same with all rows, two of them ignored.
CUT_ROWS_FORWARD = """
def computation(logits, labels):
  # logits: "cuda:0 bf16[2, 6, 500]"
  # labels: "cuda:0 i64[2, 6]"
  [t48, t51, t49, t50] = nvFusion0(logits, labels)
    # t39 = prims.convert_element_type(logits, dtypes.float32)  # t39: "cuda:0 f32[2, 6, 500]"
    # t42 = prims.slice_prim(t39, [0, 0, 0], [2, 5, 500], [1, 1, 1])  # t42: "cuda:0 f32[2, 5, 500]"
    # t45 = prims.reshape(t42, (10, 500))  # t45: "cuda:0 f32[10, 500]"
    # t3 = prims.slice_prim(labels, [0, 1], [2, 6], [1, 1])  # t3: "cuda:0 i64[2, 5]"
    # t4 = prims.reshape(t3, (10,))  # t4: "cuda:0 i64[10]"
    # (t48, t51, t49, t50) = thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd(t45, t4, None, None, -100, None, 'mean', 0.0)
  return {'output': (t48,), 'flat_args': [logits, labels], 'flat_output': (t48,)}, ((logits, labels, t51, t49, t50), ())
"""

IGNORED_ROWS_FORWARD = """
def computation(logits, labels):
  # logits: "cuda:0 bf16[2, 6, 500]"
  # labels: "cuda:0 i64[2, 6]"
  t54 = torch_slice_prim_impl(labels, (0, 1), (2, 6), (1, 1))  # t54: "cuda:0 i64[2, 5]"
  t56 = torch_prims_reshape_impl(logits, (12, 500))  # t56: "cuda:0 bf16[12, 500]"
  t58 = torch_pad_prim_impl(t54, -100, ((0, 0, 0), (0, 1, 0)))  # t58: "cuda:0 i64[2, 6]"
  del t54
  t60 = torch_prims_reshape_impl(t58, (12,))  # t60: "cuda:0 i64[12]"
  del t58
  [t48, t66, t64, t50] = nvFusion0(t56, t60)
    # t62 = prims.convert_element_type(t56, dtypes.float32)  # t62: "cuda:0 f32[12, 500]"
    # (t48, t66, t64, t50) = thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd(t62, t60, None, None, -100, None, 'mean', 0.0)
  del t56, t60
  t67 = torch_prims_reshape_impl(t66, (2, 6))  # t67: "cuda:0 f32[2, 6]"
  del t66
  t69 = torch_slice_prim_impl(t67, (0, 0), (2, 5), (1, 1))  # t69: "cuda:0 f32[2, 5]"
  del t67
  t51 = torch_prims_reshape_impl(t69, (10,))  # t51: "cuda:0 f32[10]"
  del t69
  t73 = torch_prims_reshape_impl(t64, (2, 6))  # t73: "cuda:0 f32[2, 6]"
  del t64
  t75 = torch_slice_prim_impl(t73, (0, 0), (2, 5), (1, 1))  # t75: "cuda:0 f32[2, 5]"
  del t73
  t49 = torch_prims_reshape_impl(t75, (10,))  # t49: "cuda:0 f32[10]"
  del t75
  return {'output': (t48,), 'flat_args': [logits, labels], 'flat_output': (t48,)}, ((logits, labels, t51, t49, t50), ())
"""

CUT_ROWS_BACKWARD = """
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, C1, = saved_for_backward
  # C0: "Collection"
  # C1: "Collection"
  clear_mutable_collection(saved_for_backward)
  clear_mutable_collection(C1)
  del C1, saved_for_backward
  t52, = cotangents
  # t52: "cuda:0 f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  logits, labels, t51, t49, t50, = C0
  # logits: "cuda:0 bf16[2, 6, 500]"
  # labels: "cuda:0 i64[2, 6]"
  # t51: "cuda:0 f32[10]"
  # t49: "cuda:0 f32[10]"
  # t50: "cuda:0 f32[]"
  clear_mutable_collection(C0)
  del C0
  [t41] = nvFusion1(logits, labels, t52, t51, t49, t50)
    # t39 = prims.convert_element_type(logits, dtypes.float32)  # t39: "cuda:0 f32[2, 6, 500]"
    # t3 = prims.slice_prim(labels, [0, 1], [2, 6], [1, 1])  # t3: "cuda:0 i64[2, 5]"
    # t42 = prims.slice_prim(t39, [0, 0, 0], [2, 5, 500], [1, 1, 1])  # t42: "cuda:0 f32[2, 5, 500]"
    # t4 = prims.reshape(t3, (10,))  # t4: "cuda:0 i64[10]"
    # t45 = prims.reshape(t42, (10, 500))  # t45: "cuda:0 f32[10, 500]"
    # t53 = thunder.executors.nvfuserex_impl.nv_cross_entropy_bwd(t52, t45, target=t4, a_max=t51, max_log_sum_exp=t49, valid_indices=t50, ignore_index=-100, label_smoothing=0.0)  # t53: "cuda:0 f32[10, 500]"
    # t47 = prims.reshape(t53, (2, 5, 500))  # t47: "cuda:0 f32[2, 5, 500]"
    # t44 = prims.pad(t47, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t44: "cuda:0 f32[2, 6, 500]"
    # t41 = prims.convert_element_type(t44, dtypes.bfloat16)  # t41: "cuda:0 bf16[2, 6, 500]"
  del logits, labels, t52, t51, t49, t50
  return (t41, None)
"""

IGNORED_ROWS_BACKWARD = (
    CUT_ROWS_BACKWARD[: CUT_ROWS_BACKWARD.index("  [t41] = ")]
    + """\
  t54 = torch_slice_prim_impl(labels, (0, 1), (2, 6), (1, 1))  # t54: "cuda:0 i64[2, 5]"
  del labels
  t56 = torch_pad_prim_impl(t54, -100, ((0, 0, 0), (0, 1, 0)))  # t56: "cuda:0 i64[2, 6]"
  del t54
  t58 = torch_prims_reshape_impl(t56, (12,))  # t58: "cuda:0 i64[12]"
  del t56
  t60 = torch_prims_reshape_impl(t51, (2, 5))  # t60: "cuda:0 f32[2, 5]"
  del t51
  t62 = torch_pad_prim_impl(t60, 0.0, ((0, 0, 0), (0, 1, 0)))  # t62: "cuda:0 f32[2, 6]"
  del t60
  t64 = torch_prims_reshape_impl(t62, (12,))  # t64: "cuda:0 f32[12]"
  del t62
  t66 = torch_prims_reshape_impl(t49, (2, 5))  # t66: "cuda:0 f32[2, 5]"
  del t49
  t68 = torch_pad_prim_impl(t66, 0.0, ((0, 0, 0), (0, 1, 0)))  # t68: "cuda:0 f32[2, 6]"
  del t66
  t70 = torch_prims_reshape_impl(t68, (12,))  # t70: "cuda:0 f32[12]"
  del t68
  t72 = torch.full((2, 5), True, device=torch.device("cuda:0"), dtype=torch.bool)  # t72: "cuda:0 b8[2, 5]"
    # t72 = prims.full((2, 5), True, device=devices.Device("cuda:0"), dtype=dtypes.bool8)  # t72: "cuda:0 b8[2, 5]"
  t74 = torch_pad_prim_impl(t72, False, ((0, 0, 0), (0, 1, 0)))  # t74: "cuda:0 b8[2, 6]"
  del t72
  t76 = torch_prims_reshape_impl(t74, (12,))  # t76: "cuda:0 b8[12]"
  del t74
  [t41] = nvFusion1(logits, t52, t50, t64, t70, t58, t76)
    # t78 = prims.convert_element_type(logits, dtypes.float32)  # t78: "cuda:0 f32[2, 6, 500]"
    # t79 = prims.reshape(t78, (12, 500))  # t79: "cuda:0 f32[12, 500]"
    # t80 = thunder.executors.nvfuserex_impl.nv_cross_entropy_bwd(t52, t79, target=t58, a_max=t64, max_log_sum_exp=t70, valid_indices=t50, ignore_index=-100, label_smoothing=0.0)  # t80: "cuda:0 f32[12, 500]"
    # t81 = prims.broadcast_in_dim(t76, (12, 500), (0,))  # t81: "cuda:0 b8[12, 500]"
    # t82 = prims.where(t81, t80, 0.0)  # t82: "cuda:0 f32[12, 500]"
    # t44 = prims.reshape(t82, (2, 6, 500))  # t44: "cuda:0 f32[2, 6, 500]"
    # t41 = prims.convert_element_type(t44, dtypes.bfloat16)  # t41: "cuda:0 bf16[2, 6, 500]"
  del logits, t52, t50, t64, t70, t58, t76
  return (t41, None)
"""
)

# Two regions and a product between them; small, so that it can be run.
SMALL = """
def computation(x, w):
  # x: "cuda:0 f32[2, 3, 3]"
  # w: "cuda:0 f32[3, 3]"
  [t1, t2] = nvFusion0(x, w)
    # t0 = prims.transpose(x, (0, 2, 1))  # t0: "cuda:0 f32[2, 3, 3]"
    # t1 = prims.reshape(t0, (6, 3))  # t1: "cuda:0 f32[6, 3]"
    # t2 = prims.exp(w)  # t2: "cuda:0 f32[3, 3]"
  t3 = torch.matmul(t1, t2)  # t3: "cuda:0 f32[6, 3]"
  del t1
  [t5] = nvFusion1(t3, t2)
    # t4 = prims.sum(t3, (0,))  # t4: "cuda:0 f32[3]"
    # t6 = prims.broadcast_in_dim(t4, (3, 3), (1,))  # t6: "cuda:0 f32[3, 3]"
    # t5 = prims.mul(t6, t2)  # t5: "cuda:0 f32[3, 3]"
  del t2, t3
  return (t5, w)
"""

# A cheap op of one region computed once more in the other, so that its first output dies earlier.
CLONED = edited(
    SMALL,
    (
        "  [t5] = nvFusion1(t3, t2)\n",
        '  del t2\n  [t5] = nvFusion1(t3, w)\n    # t12 = prims.exp(w)  # t12: "cuda:0 f32[3, 3]"\n',
    ),
    ("prims.mul(t6, t2)", "prims.mul(t6, t12)"),
    ("  del t2, t3\n", "  del t3\n"),
)

# Everything that has an effect besides its outputs.
EFFECTS = """
def computation(x, y):
  # x: "cuda:0 f32[4, 4]"
  # y: "cuda:0 f32[4, 4]"
  t0 = prims.exp(x)  # t0: "cuda:0 f32[4, 4]"
  t1 = uniform_like(t0)  # t1: "cuda:0 f32[4, 4]"
  t2 = uniform((4, 4), 0.0, 1.0, device=devices.Device("cuda:0"), dtype=dtypes.float32)  # t2: "cuda:0 f32[4, 4]"
  t3 = torch_all_reduce_prim_impl(t0, 'sum', 'world', True)  # t3: "cuda:0 f32[4, 4]"
  t4 = torch_all_reduce_prim_impl(t2, 'sum', 'world', True)  # t4: "cuda:0 f32[4, 4]"
  t5 = torch_wait_prim_impl(t3)  # t5: "cuda:0 f32[4, 4]"
  t6 = torch_wait_prim_impl(t4)  # t6: "cuda:0 f32[4, 4]"
  t7 = prims.add(t5, t6)  # t7: "cuda:0 f32[4, 4]"
  return (t7, t1)
"""

# A running mean that is read, written and read again.
WRITES = """
def computation(x, mean):
  # x: "cuda:0 f32[4]"
  # mean: "cuda:0 f32[4]"
  t0 = prims.exp(x)  # t0: "cuda:0 f32[4]"
  t1 = prims.add(t0, mean)  # t1: "cuda:0 f32[4]"
  t2 = copy_(t0, mean)  # t2: "cuda:0 f32[4]"
  t3 = prims.neg(mean)  # t3: "cuda:0 f32[4]"
  return (t1, t2, t3)
"""

# A sum over ranks in the memory of its argument, as tensor parallel layers do it; read before, and again after the wait.
IN_PLACE_SUM = """
def computation(x):
  # x: "cuda:0 f32[4]"
  t0 = prims.exp(x)  # t0: "cuda:0 f32[4]"
  t1 = prims.sin(t0)  # t1: "cuda:0 f32[4]"
  t2 = torch_all_reduce_prim_impl(t0, 'sum', 'world', True, True)  # t2: "cuda:0 f32[4]"
  t3 = prims.cos(x)  # t3: "cuda:0 f32[4]"
  t4 = torch_wait_prim_impl(t2)  # t4: "cuda:0 f32[4]"
  t5 = prims.neg(t0)  # t5: "cuda:0 f32[4]"
  return (t1, t3, t4, t5)
"""
_SUM_BEFORE = '  t1 = prims.sin(t0)  # t1: "cuda:0 f32[4]"\n'
_SUM_AFTER = '  t5 = prims.neg(t0)  # t5: "cuda:0 f32[4]"\n'

# A region that gives a transposed input as it is, and an in-place write to the input before that is used.
WRITTEN_PASSENGER = """
def computation(x, y):
  # x: "cuda:0 f32[2, 4]"
  # y: "cuda:0 f32[2, 4]"
  [t0, t1] = nvFusion0(x, y)
    # t0 = prims.transpose(x, (1, 0))  # t0: "cuda:0 f32[4, 2]"
    # t1 = prims.exp(y)  # t1: "cuda:0 f32[2, 4]"
  t2 = copy_(t1, x)  # t2: "cuda:0 f32[2, 4]"
  t3 = torch.matmul(t0, t1)  # t3: "cuda:0 f32[4, 4]"
  return (t3, t2)
"""

PASSENGER_OUTSIDE = (
    """  [t1] = nvFusion0(y)
    # t1 = prims.exp(y)  # t1: "cuda:0 f32[2, 4]"
""",
    """  t0 = torch.permute(x, (1, 0))  # t0: "cuda:0 f32[4, 2]"
""",
)
_PASSENGER_REGION = WRITTEN_PASSENGER[WRITTEN_PASSENGER.index("  [t0, t1]") : WRITTEN_PASSENGER.index("  t2 = ")]


def region(*lines: str, x: str = "f32[2, 3, 4]", y: str = "f32[2, 3, 4]", gives: str = "t9") -> str:
    """A trace with one region over ``x`` and ``y`` that gives one value; types that follow are left out."""
    body = "\n".join(f"    # {line}" for line in lines)
    head = f'def computation(x, y):\n  # x: "cpu {x}"\n  # y: "cpu {y}"\n'
    return f"{head}  [{gives}] = nvFusion0(x, y)\n{body}\n  return {gives}\n"


def outside(before: tuple[str, ...], inside: tuple[str, ...], after: tuple[str, ...] = (), **types: str) -> str:
    """A trace with ops before and after its region; its last line gives the result."""
    text = region(*inside, **types)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "nvFusion0" in line)
    given = {"x", "y", *(line.split(" = ")[0] for line in before)}
    taken = dict.fromkeys(name for line in inside for name in re.findall(r"\w+", line.split(" = ")[1]) if name in given)
    gives = inside[-1].split(" = ")[0]
    lines[at] = f"  [{gives}] = nvFusion0({', '.join(taken)})"
    lines[at:at] = [f"  {line}" for line in before]
    lines[-1:-1] = [f"  {line}" for line in after]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- rewrites that must be accepted

LEGAL: tuple[Pair, ...] = (
    Pair("nothing", SMALL, SMALL),
    Pair("loss forward: slice and reshape hoisted past the cast", LOSS_FORWARD, LOSS_FORWARD_FIXED, REWRITE),
    Pair("loss backward: reshape sunk past a pad and a cast", LOSS_BACKWARD, LOSS_BACKWARD_FIXED, REWRITE),
    Pair("loss forward: cut rows are ignored by their label", CUT_ROWS_FORWARD, IGNORED_ROWS_FORWARD, MASK),
    Pair("loss backward: cut rows are ignored by their label", CUT_ROWS_BACKWARD, IGNORED_ROWS_BACKWARD, MASK),
    Pair(
        "reordered: an op goes below another that it does not need",
        WRITES,
        edited(
            WRITES,
            ('  t0 = prims.exp(x)  # t0: "cuda:0 f32[4]"\n', ""),
            ('  t1 = prims.add(', '  t0 = prims.exp(x)  # t0: "cuda:0 f32[4]"\n  t1 = prims.add('),
        ),
        REORDER,
    ),
    Pair(
        "split: the two halves of a region become two regions",
        SMALL,
        edited(
            SMALL,
            (
                SMALL[SMALL.index("  [t1, t2]") : SMALL.index("  t3 = ")],
                """  [t1] = nvFusion0(x)
    # t0 = prims.transpose(x, (0, 2, 1))  # t0: "cuda:0 f32[2, 3, 3]"
    # t1 = prims.reshape(t0, (6, 3))  # t1: "cuda:0 f32[6, 3]"
  [t2] = nvFusion2(w)
    # t2 = prims.exp(w)  # t2: "cuda:0 f32[3, 3]"
""",
            ),
        ),
        SPLIT,
    ),
    Pair(
        "clone: a cheap op is computed once more, under a new name, for a later consumer",
        SMALL,
        CLONED,
        Allow(may_rewrite_regions=True, may_clone=frozenset({"t12"})),
    ),
    Pair(
        "replace: an op by another of the same meaning",
        SMALL,
        edited(SMALL, ("torch.matmul(t1, t2)", "fusionfix_matmul(t1, t2)")),
        Allow(may_replace=(("torch.matmul", "fusionfix_matmul"),)),
    ),
    Pair(
        "passenger: a layout of an input is made outside, next to its consumer",
        WRITTEN_PASSENGER.replace("copy_(t1, x)", "torch.matmul(t1, t0)"),
        edited(
            WRITTEN_PASSENGER.replace("copy_(t1, x)", "torch.matmul(t1, t0)"),
            (_PASSENGER_REGION, "".join(PASSENGER_OUTSIDE)),
        ),
        REWRITE,
    ),
    Pair(
        "passenger of memory that is written later, made outside before the write and used before it",
        edited(
            WRITTEN_PASSENGER,
            ('  t2 = copy_(t1, x)  # t2: "cuda:0 f32[2, 4]"\n', ""),
            ("  return (t3, t2)", '  t2 = copy_(t1, x)  # t2: "cuda:0 f32[2, 4]"\n  return (t3, t2)'),
        ),
        edited(
            WRITTEN_PASSENGER,
            (_PASSENGER_REGION, "".join(PASSENGER_OUTSIDE)),
            ('  t2 = copy_(t1, x)  # t2: "cuda:0 f32[2, 4]"\n', ""),
            ("  return (t3, t2)", '  t2 = copy_(t1, x)  # t2: "cuda:0 f32[2, 4]"\n  return (t3, t2)'),
        ),
        REWRITE,
    ),
    Pair("the cotangents are taken over", LOSS_BACKWARD, OWNED_BACKWARD, OWN_COTANGENTS),
    Pair("a gradient that nobody sends may be one zero", BESIDE_BACKWARD, EXPANDED_BACKWARD, EXPAND_COTANGENTS),
    Pair(
        "a region of layouts only is dissolved",
        region("t0 = prims.transpose(x, (0, 2, 1))", "t9 = prims.reshape(t0, (8, 3))"),
        'def computation(x, y):\n  # x: "cpu f32[2, 3, 4]"\n  # y: "cpu f32[2, 3, 4]"\n'
        "  t0 = torch.permute(x, (0, 2, 1))\n  t9 = torch.reshape(t0, (8, 3))\n  return t9\n",
        REWRITE,
    ),
    Pair(
        "layouts of both operands hoisted past an elementwise op",
        region("t0 = prims.add(x, y)", "t1 = prims.transpose(t0, (2, 0, 1))", "t9 = prims.exp(t1)"),
        outside(
            ("t2 = torch.permute(x, (2, 0, 1))", "t3 = torch.permute(y, (2, 0, 1))"), ("t4 = prims.add(t2, t3)", "t9 = prims.exp(t4)")
        ),
        REWRITE,
    ),
    Pair(
        "reshape past a sum over a dim that it does not touch",
        region("t0 = prims.reshape(x, (6, 4))", "t9 = prims.sum(t0, (1,))"),
        outside((), ("t8 = prims.sum(x, (2,))",), ("t9 = torch.reshape(t8, (6,))",)),
        REWRITE,
    ),
    Pair(
        "reshape that merges exactly the dims that a sum runs over",
        region("t0 = prims.reshape(x, (6, 4))", "t9 = prims.sum(t0, (0,))"),
        region("t9 = prims.sum(x, (0, 1))"),
        REWRITE,
    ),
    Pair(
        "transpose and slice past a maximum over another dim",
        region("t0 = prims.transpose(x, (1, 0, 2))", "t1 = prims.slice_prim(t0, (1, 0, 0), (3, 2, 4), (1, 1, 1))", "t9 = prims.amax(t1, (2,))"),
        outside((), ("t7 = prims.amax(x, (2,))",), ("t8 = torch.permute(t7, (1, 0))", "t9 = torch_slice_prim_impl(t8, (1, 0), (3, 2), (1, 1))")),
        REWRITE,
    ),
    Pair(
        "transpose past a pad of another dim, its config transposed",
        region("t0 = prims.transpose(x, (1, 0, 2))", "t9 = prims.pad(t0, 1.5, ((0, 0, 0), (0, 0, 0), (1, 2, 0)))"),
        outside(
            (), ("t8 = prims.pad(x, 1.5, ((0, 0, 0), (0, 0, 0), (1, 2, 0)))",), ("t9 = torch.permute(t8, (1, 0, 2))",)
        ),
        REWRITE,
    ),
    Pair(
        "cast past a pad whose fill both dtypes hold",
        region("t0 = prims.pad(x, 0.5, ((0, 0, 0), (0, 0, 0), (0, 1, 0)))", "t9 = prims.convert_element_type(t0, dtypes.bfloat16)"),
        region("t5 = prims.convert_element_type(x, dtypes.bfloat16)", "t9 = prims.pad(t5, 0.5, ((0, 0, 0), (0, 0, 0), (0, 1, 0)))"),
        REWRITE,
    ),
    Pair(
        "transpose past a concatenation along another dim",
        region("t0 = prims.cat([x, y], 2)", "t9 = prims.transpose(t0, (1, 0, 2))"),
        outside(("t1 = torch.permute(x, (1, 0, 2))", "t2 = torch.permute(y, (1, 0, 2))"), ("t9 = prims.cat([t1, t2], 2)",)),
        REWRITE,
    ),
    Pair(
        "a detour through a wider float is dropped",
        region("t0 = prims.convert_element_type(x, dtypes.float32)", "t9 = prims.convert_element_type(t0, dtypes.bfloat16)", x="bf16[2]", y="bf16[2]"),
        region("t9 = prims.shallow_copy(x)", x="bf16[2]", y="bf16[2]"),
        REWRITE,
    ),
    Pair(
        "a constant is made in its final shape",
        region("t0 = prims.full((3, 2), 2.0, device=devices.Device('cpu'), dtype=dtypes.float32)", "t1 = prims.reshape(t0, (2, 3, 1))",
               "t2 = prims.broadcast_in_dim(t1, (2, 3, 4), (0, 1, 2))", "t9 = prims.add(x, t2)"),
        region("t2 = prims.full((2, 3, 4), 2, device=devices.Device('cpu'), dtype=dtypes.float32)", "t9 = prims.add(x, t2)"),
        Allow(may_rewrite_regions=True),
    ),
    Pair(
        "a copy in another memory order is no other value",
        region("t0 = prims.stride_order(x, (0, 1, 2))", "t9 = prims.exp(t0)"),
        region("t9 = prims.exp(x)"),
        REWRITE,
    ),
)  # fmt: skip


# ---------------------------------------------------------------- broken rewrites


def _wrong_value(name: str, before: str, after: str, allow: Allow = REWRITE) -> Mutant:
    return Mutant(name, before, after, allow, "same-values")


_ROWS = region("t0 = prims.reshape(x, (6, 4))", "t9 = prims.sum(t0, (1,))")
_PAD = "prims.pad({0}, {1}, ((0, 0, 0), (0, 0, 0), (0, 1, 0)))"
_LINE = '  t2 = copy_(t0, mean)  # t2: "cuda:0 f32[4]"\n'

ATTENTION_PAIR = f"""
def computation(q, k, v, g):
  # q: "cuda:0 bf16[1, 2, 64, 16]"
  # k: "cuda:0 bf16[1, 2, 64, 16]"
  # v: "cuda:0 bf16[1, 2, 64, 16]"
  # g: "cuda:0 bf16[1, 2, 64, 16]"
  (t0, t1, t2, t3, _, _, t4, t5, t6) = {FLASH}(q, k, v, 0.0, True, scale=None)
    # t0: "cuda:0 bf16[1, 2, 64, 16]"
    # t1: "cuda:0 f32[1, 2, 64]"
  (t7, t8, t9) = {FLASH_BACKWARD}(g, q, k, v, t0, t1, t2, t3, 64, 64, 0.0, True, t4, t5, scale=None)
    # t7: "cuda:0 bf16[1, 2, 64, 16]"
    # t8: "cuda:0 bf16[1, 2, 64, 16]"
    # t9: "cuda:0 bf16[1, 2, 64, 16]"
  return (t0, t7, t8, t9)
"""

CHOOSE_ATTENTION = Allow(may_replace=((FLASH, ATTENTION), (FLASH_BACKWARD, ATTENTION_BACKWARD)))

BROKEN: tuple[Mutant, ...] = (
    # ---- one trace
    Mutant(
        "a region takes less than it uses", SMALL, edited(SMALL, ("nvFusion0(x, w)", "nvFusion0(x)")), REWRITE, "def-before-use"
    ),
    Mutant(
        "what is deleted was never there", SMALL, edited(SMALL, ("  del t1\n", "  del t1, t77\n")), Allow(), "def-before-use"
    ),
    Mutant(
        "a value is deleted before its last use",
        SMALL,
        edited(SMALL, ("  t3 = torch", "  del t2\n  t3 = torch"), ("  del t2, t3\n", "  del t3\n")),
        Allow(),
        "use-after-del",
    ),
    Mutant(
        "a value is deleted twice", SMALL, edited(SMALL, ("  del t2, t3\n", "  del t2, t3\n  del t3\n")), Allow(), "use-after-del"
    ),
    Mutant(
        "a name is given twice",
        EFFECTS,
        edited(EFFECTS, ("  return (t7, t1)", '  t7 = prims.add(t5, t6)  # t7: "cuda:0 f32[4, 4]"\n  return (t7, t1)')),
        Allow(may_reorder=True, may_clone=frozenset({"t7"})),
        "single-definition",
    ),
    Mutant("two regions of one name", SMALL, edited(SMALL, ("nvFusion1(", "nvFusion0(")), REWRITE, "region-names"),
    Mutant(
        "what is returned was deleted", SMALL, edited(SMALL, ("  del t2, t3\n", "  del t2, t3, t5\n")), Allow(), "returned"
    ),
    # ---- the frame
    Mutant(
        "arguments in another order", SMALL, edited(SMALL, ("def computation(x, w):", "def computation(w, x):")), Allow(), "signature"
    ),
    Mutant("results in another order", SMALL, edited(SMALL, ("return (t5, w)", "return (w, t5)")), REWRITE, "result"),
    Mutant("a result less", EFFECTS, edited(EFFECTS, ("return (t7, t1)", "return (t7,)")), REWRITE, "result"),
    Mutant(
        "a saved tensor less",
        LOSS_FORWARD,
        edited(LOSS_FORWARD_FIXED, ("((labels, logits, t56, t54, t55), ())", "((labels, logits, t56, t54), ())")),
        REWRITE,
        "result",
    ),
    Mutant(
        "saved tensors taken out in another order",
        LOSS_BACKWARD,
        edited(LOSS_BACKWARD, ("labels, logits, t56, t54, t55, = C0", "labels, logits, t54, t56, t55, = C0")),
        REWRITE,
        "unpacking",
    ),
    Mutant(
        "a collection that is not cleared",
        LOSS_BACKWARD,
        edited(LOSS_BACKWARD, ("  clear_mutable_collection(C0)\n", "")),
        Allow(),
        "unpacking",
    ),
    Mutant(
        "a value on another device", SMALL, edited(SMALL, ('# t3: "cuda:0 f32[6, 3]"', '# t3: "cpu f32[6, 3]"')), REWRITE, "metadata"
    ),
    Mutant("a value that is never deleted", SMALL, edited(SMALL, ("  del t1\n", "")), Allow(), "deletes"),
    Mutant(
        "a value that is deleted late", SMALL, edited(SMALL, ("  del t1\n", ""), ("  del t2, t3\n", "  del t1, t2, t3\n")), Allow(), "deletes"
    ),
    Mutant(
        "a new value that is never deleted", LOSS_FORWARD.replace("  return", "  del t53\n  return").replace("(t53,)", "()"),
        edited(LOSS_FORWARD_FIXED, ("  del t60\n", "")).replace("  return", "  del t53\n  return").replace("(t53,)", "()"), REWRITE, "deletes",
    ),
    # ---- attention
    Mutant(
        "the forward's attention may run another kernel, its backward does not",
        ATTENTION_PAIR,
        edited(ATTENTION_PAIR, (f"{FLASH}(", f"{ATTENTION}(")),
        CHOOSE_ATTENTION,
        "attention",
    ),
    # ---- ownership
    Mutant("cotangents taken over unasked", LOSS_BACKWARD, OWNED_BACKWARD, REWRITE, "unpacking"),
    Mutant("cotangents not taken over any more", OWNED_BACKWARD, LOSS_BACKWARD, OWN_COTANGENTS, "unpacking"),
    Mutant(
        "saved tensors taken over, which an earlier part may have saved too",
        LOSS_BACKWARD,
        edited(LOSS_BACKWARD, ("  C0, C1, = saved", "  own_cotangents(saved_for_backward)\n  C0, C1, = saved")),
        OWN_COTANGENTS,
        "ownership",
    ),
    Mutant(
        "cotangents taken over once they are unpacked, so that names still have the engine's",
        LOSS_BACKWARD,
        edited(
            LOSS_BACKWARD,
            ("  clear_mutable_collection(cotangents)", "  own_cotangents(cotangents)\n  clear_mutable_collection(cotangents)"),
        ),
        OWN_COTANGENTS,
        "ownership",
    ),
    Mutant(
        "cotangents taken over twice",
        OWNED_BACKWARD,
        edited(OWNED_BACKWARD, ("  t57, = cotangents", "  own_cotangents(cotangents)\n  t57, = cotangents")),
        OWN_COTANGENTS,
        "ownership",
    ),
    Mutant(
        "a tensor taken over",
        LOSS_BACKWARD,
        edited(LOSS_BACKWARD, ("  [t44] = nvFusion1(", "  own_cotangents(t57)\n  [t44] = nvFusion1(")),
        OWN_COTANGENTS,
        "ownership",
    ),
    # ---- repeated zeros
    Mutant("zeros repeated unasked", BESIDE_BACKWARD, EXPANDED_BACKWARD, OWN_COTANGENTS, "unpacking"),
    Mutant("zeros not filled any more", EXPANDED_BACKWARD, BESIDE_BACKWARD, EXPAND_COTANGENTS, "unpacking"),
    Mutant(
        "one zero for all rows of a cotangent that is written to",
        *_expanded(
            (
                "  del t7, t8\n",
                '  t11 = copy_(t8, t7)  # t11: "cuda:0 f32[4, 8]"\n  del t11, t7, t8\n',
            )
        ),
        EXPAND_COTANGENTS,
        "repeated-zeros",
    ),
    Mutant(
        "one zero for all elements of a gradient that the caller gets",
        *_expanded(
            (
                "  del t7, t8\n",
                '  t11 = torch.transpose(t7, 0, 1)  # t11: "cuda:0 f32[8, 4]"\n  del t7, t8\n',
            ),
            ("  return (t10,)", "  return (t10, t11)"),
        ),
        EXPAND_COTANGENTS,
        "repeated-zeros",
    ),
    Mutant(
        "zeros at a position that is not there",
        BESIDE_BACKWARD,
        edited(EXPANDED_BACKWARD, ("(1,)", "(2,)")),
        EXPAND_COTANGENTS,
        "repeated-zeros",
    ),
    Mutant(
        "zeros made after the cotangents were unpacked",
        BESIDE_BACKWARD,
        edited(
            BESIDE_BACKWARD,
            (
                "  clear_mutable_collection(cotangents)",
                "  expand_zero_cotangents(cotangents, (1,))\n  clear_mutable_collection(cotangents)",
            ),
        ),
        EXPAND_COTANGENTS,
        "repeated-zeros",
    ),
    # ---- effects
    Mutant(
        "a random op less, so that later ones draw other numbers",
        edited(EFFECTS, ("(t7, t1)", "t7")),
        edited(EFFECTS, ("(t7, t1)", "t7"), ('  t1 = uniform_like(t0)  # t1: "cuda:0 f32[4, 4]"\n', "")),
        REORDER,
        "effect-order",
    ),
    Mutant(
        "a random op drawn again",
        EFFECTS,
        edited(EFFECTS, ("  t7 = ", '  t20 = uniform_like(t0)  # t20: "cuda:0 f32[4, 4]"\n  t7 = ')),
        Allow(may_reorder=True, may_clone=frozenset({"t20"})),
        "effect-order",
    ),
    Mutant(
        "two collectives swapped",
        EFFECTS,
        edited(
            EFFECTS,
            ("""  t3 = torch_all_reduce_prim_impl(t0, 'sum', 'world', True)  # t3: "cuda:0 f32[4, 4]"\n""", ""),
            ("  t5 = ", """  t3 = torch_all_reduce_prim_impl(t0, 'sum', 'world', True)  # t3: "cuda:0 f32[4, 4]"\n  t5 = """),
        ),
        REORDER,
        "effect-order",
    ),
    Mutant(
        "a random op and an unknown one swapped",
        edited(EFFECTS, ("  t2 = ", "  t8 = mylib.op(y)\n  t2 = ")),
        edited(EFFECTS, ("  t3 = ", "  t8 = mylib.op(y)\n  t3 = ")),
        REORDER,
        "effect-order",
    ),
    Mutant(
        "another distribution is drawn from", EFFECTS, edited(EFFECTS, ("0.0, 1.0", "0.0, 2.0")), REORDER, "effect-order"
    ),
    Mutant(
        "a write moved above a read",
        WRITES,
        edited(WRITES, (_LINE, ""), ("  t1 = ", f"{_LINE}  t1 = ")),
        REORDER,
        "write-order",
    ),
    Mutant(
        "a write moved below a read", WRITES, edited(WRITES, (_LINE, ""), ("  return", f"{_LINE}  return")), REORDER, "write-order"
    ),
    Mutant(
        "a read moved below the start of a sum in place",
        IN_PLACE_SUM,
        edited(IN_PLACE_SUM, (_SUM_BEFORE, ""), ("  t3 = ", f"{_SUM_BEFORE}  t3 = ")),
        REORDER,
        "write-order",
    ),
    Mutant(
        "a read of a sum in place moved above its wait",
        IN_PLACE_SUM,
        edited(IN_PLACE_SUM, (_SUM_AFTER, ""), ("  t4 = ", f"{_SUM_AFTER}  t4 = ")),
        REORDER,
        "write-order",
    ),
    Mutant(
        "a passenger of written memory made outside after the write",
        WRITTEN_PASSENGER,
        edited(
            WRITTEN_PASSENGER,
            (_PASSENGER_REGION, PASSENGER_OUTSIDE[0]),
            ("  t3 = ", f"{PASSENGER_OUTSIDE[1]}  t3 = "),
        ),
        REWRITE,
        "write-order",
    ),
    Mutant(
        "a passenger of written memory made outside as a view before the write, used after it",
        WRITTEN_PASSENGER,
        edited(WRITTEN_PASSENGER, (_PASSENGER_REGION, "".join(PASSENGER_OUTSIDE))),
        REWRITE,
        "write-order",
    ),
    # ---- ops
    Mutant("an op more", SMALL, edited(SMALL, ("  t3 = ", '  t20 = prims.exp(w)  # t20: "cuda:0 f32[3, 3]"\n  del t20\n  t3 = ')), REORDER, "same-ops"),
    Mutant(
        "a clone that was not announced",
        SMALL,
        CLONED,
        REWRITE,
        "same-ops",
    ),
    Mutant(
        "a clone of an op that is not cheap",
        SMALL,
        edited(SMALL, ("  [t5] = ", '  t20 = torch.matmul(t3, t2)  # t20: "cuda:0 f32[6, 3]"\n  del t20\n  [t5] = ')),
        Allow(may_reorder=True, may_clone=frozenset({"t20"})),
        "same-ops",
    ),
    Mutant(
        "an op moved that may not move",
        edited(EFFECTS, ("  t7 = ", "  t8 = prims.neg(y)\n  t7 = "), ("(t7, t1)", "(t7, t1, t8)")),
        edited(EFFECTS, ("  t0 = ", "  t8 = prims.neg(y)\n  t0 = "), ("(t7, t1)", "(t7, t1, t8)")),
        Allow(),
        "same-ops",
    ),
    # ---- values
    _wrong_value("labels sliced from 0", LOSS_FORWARD, edited(LOSS_FORWARD_FIXED, ("(0, 1), (1, 4096)", "(0, 0), (1, 4095)"))),
    _wrong_value("logits sliced from 1", LOSS_FORWARD, edited(LOSS_FORWARD_FIXED, ("(0, 0, 0), (1, 4095, 152064)", "(0, 1, 0), (1, 4096, 152064)"))),
    _wrong_value("gradient padded in front", LOSS_BACKWARD, edited(LOSS_BACKWARD_FIXED, ("((0, 1, 0), (0, 0, 0))", "((1, 0, 0), (0, 0, 0))"))),
    _wrong_value("gradient padded with 1", LOSS_BACKWARD, edited(LOSS_BACKWARD_FIXED, ("t68, 0.0,", "t68, 1.0,"))),
    _wrong_value("a fused loss with another option", LOSS_FORWARD, edited(LOSS_FORWARD_FIXED, ("-100, None", "-1, None"))),
    _wrong_value("a fused loss takes two of its tensors the other way round", LOSS_BACKWARD,
                 edited(LOSS_BACKWARD_FIXED, ("a_max=t56, max_log_sum_exp=t54", "a_max=t54, max_log_sum_exp=t56"))),
    _wrong_value("another permutation", SMALL, edited(SMALL, ("(0, 2, 1)", "(0, 1, 2)"))),
    _wrong_value("a reshape instead of a transpose", region("t9 = prims.transpose(x, (1, 0, 2))"), region("t9 = prims.reshape(x, (3, 2, 4))")),
    _wrong_value("a broadcast along the other dim", SMALL, edited(SMALL, ("(3, 3), (1,)", "(3, 3), (0,)"))),
    _wrong_value(
        "a dropped cast",
        region("t0 = prims.convert_element_type(x, dtypes.bfloat16)", "t1 = prims.convert_element_type(t0, dtypes.float32)", "t9 = prims.exp(t1)"),
        region("t9 = prims.exp(x)"),
    ),
    _wrong_value(
        "a detour through another narrow float",
        region("t0 = prims.convert_element_type(x, dtypes.bfloat16)", "t9 = prims.convert_element_type(t0, dtypes.float32)"),
        region("t5 = prims.convert_element_type(x, dtypes.float16)", "t9 = prims.convert_element_type(t5, dtypes.float32)"),
    ),
    _wrong_value(
        "a cast moved past an op that rounds",
        region("t0 = prims.exp(x)", "t9 = prims.convert_element_type(t0, dtypes.bfloat16)"),
        region("t5 = prims.convert_element_type(x, dtypes.bfloat16)", "t9 = prims.exp(t5)"),
    ),
    _wrong_value(
        "a cast moved past a pad whose fill it rounds",
        region(f"t0 = {_PAD.format('x', 0.1)}", "t1 = prims.convert_element_type(t0, dtypes.bfloat16)", "t9 = prims.convert_element_type(t1, dtypes.float32)"),
        region("t5 = prims.convert_element_type(x, dtypes.bfloat16)", "t6 = prims.convert_element_type(t5, dtypes.float32)", f"t9 = {_PAD.format('t6', 0.1)}"),
    ),
    _wrong_value("a sum over another dim of the same size", region("t9 = prims.sum(x, (0,))", x="f32[3, 3]", y="f32[3]"),
                 region("t9 = prims.sum(x, (1,))", x="f32[3, 3]", y="f32[3]")),
    _wrong_value("a reshape moved past a sum that runs over a dim that it cuts",
                 region("t0 = prims.reshape(x, (4, 6))", "t9 = prims.sum(t0, (1,))"),
                 outside(("t7 = torch.permute(x, (2, 0, 1))", "t8 = torch.reshape(t7, (4, 6))"), ("t9 = prims.sum(t8, (1,))",))),
    _wrong_value("rows of a sum in another order", _ROWS,
                 outside((), ("t7 = prims.sum(x, (2,))",), ("t8 = torch.permute(t7, (1, 0))", "t9 = torch.reshape(t8, (6,))"))),
    _wrong_value("a concatenation the other way round", region("t9 = prims.cat([x, y], 1)"), region("t9 = prims.cat([y, x], 1)")),
    _wrong_value("operands of a difference swapped", region("t9 = prims.sub(x, y)"), region("t9 = prims.sub(y, x)")),
    _wrong_value("another number", region("t9 = prims.mul(x, 2.0)"), region("t9 = prims.mul(x, 0.5)")),
    _wrong_value("a constant that its dtype does not tell from another",
                 region("t0 = prims.full((2, 3, 4), 1.0, device=0, dtype=dtypes.float32)", "t9 = prims.add(x, t0)"),
                 region("t0 = prims.full((2, 3, 4), 1.5, device=0, dtype=dtypes.float32)", "t9 = prims.add(x, t0)")),
    _wrong_value("layouts of only one operand", region("t0 = prims.add(x, y)", "t9 = prims.transpose(t0, (0, 2, 1))", x="f32[2, 3, 3]", y="f32[2, 3, 3]"),
                 outside(("t2 = torch.permute(x, (0, 2, 1))",), ("t9 = prims.add(t2, y)",), x="f32[2, 3, 3]", y="f32[2, 3, 3]")),
    _wrong_value("a product of the wrong tensors", SMALL, edited(SMALL, ("torch.matmul(t1, t2)", "torch.matmul(t1, w)"))),
    _wrong_value("a replacement that takes other values", SMALL, edited(SMALL, ("torch.matmul(t1, t2)", "fusionfix_matmul(t1, w)")),
                 Allow(may_rewrite_regions=True, may_replace=(("torch.matmul", "fusionfix_matmul"),))),
    _wrong_value("an effect takes another value", EFFECTS, edited(EFFECTS, ("prim_impl(t2, 'sum'", "prim_impl(t1, 'sum'"))),
    # ---- cut rows
    *(
        Mutant(f"cut rows, forward: {what}", CUT_ROWS_FORWARD, edited(IGNORED_ROWS_FORWARD, change), MASK, "same-values")
        for what, change in (
            ("their label is a class", ("(t54, -100,", "(t54, 0,")),
            ("the first label is ignored", ("(t54, -100, ((0, 0, 0), (0, 1, 0)))", "(t54, -100, ((0, 0, 0), (1, 0, 0)))")),
            ("the maxima are those of the rows after", ("(t67, (0, 0), (2, 5),", "(t67, (0, 1), (2, 6),")),
            ("the log-sum-exps are the maxima", ("(t48, t66, t64, t50) = thunder", "(t48, t64, t66, t50) = thunder")),
            ("another label is ignored", ("None, None, -100, None", "None, None, -1, None")),
        )
    ),
    *(
        Mutant(f"cut rows, backward: {what}", CUT_ROWS_BACKWARD, edited(IGNORED_ROWS_BACKWARD, *changes), MASK, "same-values")
        for what, *changes in (
            ("their label is a class and no mask", ("(t54, -100,", "(t54, 0,"), ("(t72, False,", "(t72, True,")),
            ("the gradients of the others are dropped", ("prims.full((2, 5), True,", "prims.full((2, 5), False,")),
            ("the first row is masked", ("(t72, False, ((0, 0, 0), (0, 1, 0)))", "(t72, False, ((0, 0, 0), (1, 0, 0)))")),
            ("their gradient is one", ("(t81, t80, 0.0)", "(t81, t80, 1.0)")),
            ("the maxima are those of the rows before", ("(t60, 0.0, ((0, 0, 0), (0, 1, 0)))", "(t60, 0.0, ((0, 0, 0), (1, 0, 0)))")),
        )
    ),
    Mutant(
        "cut rows: an op that nothing admits is new",
        CUT_ROWS_BACKWARD,
        edited(IGNORED_ROWS_BACKWARD, ("  [t41] = ", '  t90 = torch.exp(t52)  # t90: "cuda:0 f32[]"\n  del t90\n  [t41] = ')),
        MASK,
        "same-ops",
    ),
)  # fmt: skip


# ---------------------------------------------------------------- faults in any Graph


def single_faults(graph: Graph) -> Iterator[Graph]:
    """``graph`` with one op changed so that names, shapes and dtypes still fit; most of them compute something else."""
    for pos, op in enumerate(graph.ops):
        for changed in _changed(op, graph.values):
            yield replace(graph, ops=(*graph.ops[:pos], changed, *graph.ops[pos + 1 :]))


def _changed(op: Op, values: dict[str, Value]) -> Iterator[Op]:
    for index, subop in enumerate(op.subops):
        for changed in _changed(subop, values):
            yield replace(op, subops=(*op.subops[:index], changed, *op.subops[index + 1 :]))
    if op.subops or len(op.outputs) != 1 or not op.args:
        return
    first = op.args[0]
    source = values[first.name] if isinstance(first, Ref) else None
    rules = {
        "transpose": _other_permutations,
        "slice_prim": _shifted_slices,
        "pad": _other_pads,
        "sum": _other_dims,
        "amax": _other_dims,
        "broadcast_in_dim": _other_broadcasts,
    }
    rule = rules.get(short_name(op.id))
    if rule is not None and source is not None and source.shape is not None:
        for args in rule(source.shape, op.args[1:]):
            yield replace(op, args=(first, *args))
    for other in values.values():
        same = source is not None and (other.shape, other.dtype) == (source.shape, source.dtype)
        if same and other.name != source.name and other.name in op.inputs[1:]:
            yield replace(op, args=tuple(_swapped(arg, source.name, other.name) for arg in op.args))


def _swapped(arg: Arg, one: str, other: str) -> Arg:
    names = {one: other, other: one}
    return Ref(names.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg


def _other_permutations(shape: tuple[int, ...], args: tuple[Arg, ...]) -> Iterator[tuple[Arg, ...]]:
    dims = list(args[0])
    for i in range(len(dims)):
        for j in range(i):
            if shape[dims[i]] == shape[dims[j]] > 1:
                other = list(dims)
                other[i], other[j] = other[j], other[i]
                yield (tuple(other),)


def _shifted_slices(shape: tuple[int, ...], args: tuple[Arg, ...]) -> Iterator[tuple[Arg, ...]]:
    starts, ends = args[0], args[1]
    for dim, size in enumerate(shape):
        for by in (-1, 1):
            if 0 <= starts[dim] + by and ends[dim] + by <= size and starts[dim] < ends[dim]:
                moved = [tuple(n + by * (i == dim) for i, n in enumerate(bound)) for bound in (starts, ends)]
                yield (*moved, *args[2:])


def _other_pads(shape: tuple[int, ...], args: tuple[Arg, ...]) -> Iterator[tuple[Arg, ...]]:
    fill, config = args
    yield fill + 1, config
    for dim, (low, high, dilation) in enumerate(config):
        if low != high:
            yield fill, (*config[:dim], (high, low, dilation), *config[dim + 1 :])


def _other_dims(shape: tuple[int, ...], args: tuple[Arg, ...]) -> Iterator[tuple[Arg, ...]]:
    dims = args[0]
    for other in range(len(shape)):
        kept, kept_now = (shape[:dim] + shape[dim + 1 :] for dim in (dims[0], other))
        if len(dims) == 1 and other not in dims and kept == kept_now and shape[other] > 1:
            yield ((other,),)


def _other_broadcasts(shape: tuple[int, ...], args: tuple[Arg, ...]) -> Iterator[tuple[Arg, ...]]:
    out, dims = args
    for i in range(len(dims)):
        for other in range(len(out)):
            changed = (*dims[:i], other, *dims[i + 1 :])
            if (
                other != dims[i]
                and out[other] == out[dims[i]]
                and changed == tuple(sorted(set(changed)))
                and shape[i] > 1
            ):
                yield out, changed
