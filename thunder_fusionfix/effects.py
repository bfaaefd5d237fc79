"""What each operation does to memory and order: one table, keyed by the callee as traces print it.

Passes, the simulator and the verifier ask this table and nothing else. An operation that is not in it is a `BARRIER`: it is
not moved, merged, cloned or recomputed, nothing moves across it that shares memory with it, and its outputs are taken for
new memory. `tests/test_effects.py` checks each layout and each write row on real tensors by storage pointer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache

from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Op


class Kind(Enum):
    """What an operation is, as far as memory and order go."""

    LAYOUT = "layout"  # the same elements seen through another index map: a view, or a copy where no view exists
    POINTWISE = "pointwise"  # one output element from the elements at the same index
    REDUCTION = "reduction"
    MATMUL = "matmul"
    MOVE = "move"  # copies elements about: cat, pad, take, gather, flip
    FACTORY = "factory"  # from no tensor: full, iota
    COMPUTE = "compute"  # any other pure function of its inputs, with new outputs
    RANDOM = "random"  # draws from or advances generator state
    WRITE = "write"  # changes an input in place
    COLLECTIVE = "collective"  # starts a collective
    WAIT = "wait"  # waits for one
    SYNC = "sync"  # host and device meet: item, print
    BOOKKEEPING = "bookkeeping"  # del, unpack, clear, return, comments
    REGION = "region"  # a compiled fusion: its leaves say what it does
    BARRIER = "barrier"  # unknown


PURE = frozenset({Kind.LAYOUT, Kind.POINTWISE, Kind.REDUCTION, Kind.MATMUL, Kind.MOVE, Kind.FACTORY, Kind.COMPUTE})
"""Kinds whose ops may be moved, cloned or dropped: no state is read or changed but their inputs."""


class Copies(Enum):
    """Whether a layout op makes new memory when torch runs it."""

    NEVER = "never"  # always a view
    MAYBE = "maybe"  # a view where strides allow, else a copy: reshape, contiguous
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of the table."""

    kind: Kind
    copies: Copies = Copies.ALWAYS  # whether the output is new memory; a cast to its own dtype gives its argument
    writes: tuple[int, ...] = ()  # for WRITE: indices of the arguments that are changed
    cheap: bool = False  # worth doing again rather than keeping its output

    @property
    def is_pure(self) -> bool:
        return self.kind in PURE


BARRIER = Effect(Kind.BARRIER)
REGION = Effect(Kind.REGION)

_FUSION = re.compile(r"(nvFusion|TorchCompile|CUDAGraph)\d+$")
# Modules whose names mean what the table says; bare names are those of executors' operators and of Thunder's statements.
_KNOWN_MODULE = re.compile(
    r"((prims|core_prims|ltorch|aten|Tensor|thunder(\.\w+)*|torch(\.nn\.functional|\.special|\.Tensor|(\.torch)?\.ops\.aten)?)\.)?\w+$"
)


def _names(text: str) -> list[str]:
    return text.split()


# Short names: what is left of "prims.reshape", "ltorch.reshape", "torch.reshape", "torch_prims_reshape_impl".
_VIEWS = _names(
    "transpose permute slice_prim squeeze unsqueeze broadcast_in_dim expand shallow_copy view_as_real detach t mT "
    "movedim select narrow diagonal alias fusionfix_after"
)
_MAYBE_VIEWS = _names("reshape view flatten unflatten contiguous stride_order")
_CASTS = _names("convert_element_type to float double half bfloat16 type_as")
_SAME_BITS = _names("bitcast real imag positive")  # give their argument, or a view of it
_POINTWISE = _names(
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc "
    "erfcinv erfinv exp exp2 expm1 floor isfinite lgamma log log10 log1p log2 ndtri neg reciprocal round rsqrt sign "
    "signbit sin sinh sqrt tan tanh trunc add atan2 bitwise_and bitwise_or bitwise_xor div true_divide eq fmod "
    "ge gt le lt maximum minimum mul ne nextafter pow remainder sub zeta bitwise_left_shift bitwise_right_shift lerp where "
    "sigmoid silu gelu relu relu6 masked_fill clamp square logical_not logical_and logical_or hardswish softplus "
    "silu_backward gelu_backward threshold_backward logsigmoid selu elu leaky_relu mish addcmul addcdiv isnan isinf"
)
_REDUCTIONS = _names("amax amin prod sum mean var var_mean std argmax argmin any all cumsum")
_MATMULS = _names("fusionfix_linear fusionfix_matmul linear matmul mm bmm addmm baddbmm _grouped_mm mv dot outer")
_MOVES = _names(
    "cat stack pad take take_along_axis take_along_dim gather index_select flip roll repeat clone embedding"
)
_FACTORIES = _names(
    "full full_like zeros zeros_like ones ones_like iota arange empty tensor_from_sequence new_zeros new_ones tri"
)
_COMPUTE = _names(
    "softmax _softmax log_softmax layer_norm rms_norm batch_norm native_batch_norm group_norm cross_entropy nll_loss convolution conv1d "
    "conv2d conv3d topk sort scatter scatter_add index_add index_copy index_put copy_with_setitem embedding_backward "
    "nll_loss_backward log_softmax_backward nv_cross_entropy_fwd nv_cross_entropy_bwd tril triu argsort setitem "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d interpolate frexp "
    "convolution_backward max_pool2d_backward adaptive_avg_pool2d_backward gelu_vjp scaled_dot_product_flash_attention "
    "scaled_dot_product_efficient_attention uniform_philox sdpaex_scaled_dot_product_efficient_attention_backward "
    "sdpafx_scaled_dot_product_efficient_attention_backward cudnn_sdpa_bwd"
)
_RANDOM = _names(
    "uniform randint randn rand multinomial get_and_update_rng_state get_rng_state set_rng_state get_rng_state_prim_impl "
    "set_rng_state_prim_impl unpack_rng_state_prim_impl pack_rng_state_prim_impl unpack_rng_state pack_rng_state dropout "
    "uniform_like bernoulli exponential"
)
# Thunder's attention executors; the flash one carries the name of the other after its prefix. Random where they drop out.
_ATTENTION_FORWARD = _names(
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention sdpafx_grad_forward_scaled_dot_product_efficient_attention "
    "cudnn_sdpa_fwd"
)
_COLLECTIVES = _names("all_gather all_reduce broadcast reduce_scatter all_to_all synchronize")
_BOOKKEEPING = (
    RETURN,
    DEL,
    UNPACK,
    CLEAR,
    "python_return",
    "python_del",
    "comment",
    "unpack_trivial",
    "unpack_sequence",
    "unpack_list",
    "unpack_tuple",
    "unpack_dict_key",
    "unpack_key",
    "pack_list",
    "check_none",
    "sink",
    "get_grad",
    "put_grad",
)

_TABLE: dict[str, Effect] = {
    **{name: Effect(Kind.LAYOUT, Copies.NEVER, cheap=True) for name in _VIEWS},
    **{name: Effect(Kind.LAYOUT, Copies.MAYBE, cheap=True) for name in _MAYBE_VIEWS},
    **{name: Effect(Kind.POINTWISE, cheap=True) for name in _POINTWISE},
    **{name: Effect(Kind.POINTWISE, Copies.MAYBE, cheap=True) for name in _CASTS},
    **{name: Effect(Kind.POINTWISE, Copies.NEVER, cheap=True) for name in _SAME_BITS},
    **{name: Effect(Kind.REDUCTION) for name in _REDUCTIONS},
    **{name: Effect(Kind.MATMUL) for name in _MATMULS},
    **{name: Effect(Kind.MOVE) for name in _MOVES},
    **{name: Effect(Kind.FACTORY, cheap=True) for name in _FACTORIES},
    **{name: Effect(Kind.COMPUTE) for name in _COMPUTE},
    **{name: Effect(Kind.RANDOM) for name in (*_RANDOM, *_ATTENTION_FORWARD)},
    **{name: Effect(Kind.COLLECTIVE) for name in _COLLECTIVES},
    "getitem": Effect(Kind.MOVE, Copies.MAYBE),  # a view of slices, a copy of what index tensors choose
    "__getitem__": Effect(Kind.MOVE, Copies.MAYBE),
    "unfold": Effect(Kind.MOVE, Copies.MAYBE),  # torch.Tensor.unfold is a view, torch.nn.functional.unfold a copy
    "wait": Effect(Kind.WAIT),
    "item": Effect(Kind.SYNC),
    "print": Effect(Kind.SYNC),
    **{name: Effect(Kind.BOOKKEEPING) for name in _BOOKKEEPING},
    # copy_(source, destination) gives the destination
    "copy_": Effect(Kind.WRITE, writes=(1,)),
    "copy_to_out_": Effect(Kind.WRITE, writes=(1,)),
}


@cache
def short_name(op_id: str) -> str:
    """The operation's name without the module or executor it is printed with.

    >>> [short_name(i) for i in ("prims.reshape", "torch_prims_reshape_impl", "torch.nn.functional.linear", "Tensor.contiguous")]
    ['reshape', 'reshape', 'linear', 'contiguous']
    """
    name = op_id.rsplit(".", 1)[-1]
    if name.startswith("torch_prims_") and name.endswith("_impl"):
        return name.removeprefix("torch_prims_").removesuffix("_impl")
    if name.startswith("torch_") and name.endswith("_impl"):
        name = name.removeprefix("torch_").removesuffix("_impl")
        return name if name in _TABLE else name.removesuffix("_prim")
    return name


def effect_of(op: Op) -> Effect:
    """The row of ``op``; `BARRIER` where the table has none.

    A name counts where Thunder, torch or an executor of Thunder's gives it; another library's ``add`` may do anything.

    >>> [effect_of(Op(i, ())).kind.value for i in ("torch.add", "torch.ops.aten.add", "torch.ops.mylib.add", "mylib.add")]
    ['pointwise', 'pointwise', 'barrier', 'barrier']

    An attention whose dropout is zero draws nothing:

    >>> from thunder_fusionfix.model import Ref
    >>> attention = [Op("cudnn_sdpa_fwd", (Ref("q"), Ref("k"), Ref("v"), None, dropout, True)) for dropout in (0.0, 0.1)]
    >>> [effect_of(op).kind.value for op in attention]
    ['compute', 'random']
    """
    if op.is_fusion:
        return REGION
    effect = _effect_of_id(op.id)
    return _COMPUTES if effect.kind is Kind.RANDOM and _has_zero_dropout(op) else effect


_COMPUTES = Effect(Kind.COMPUTE)


def _has_zero_dropout(op: Op) -> bool:
    """True for an attention forward whose dropout, the one float after query, key and value, is printed as zero."""
    if short_name(op.id) not in _ATTENTION_FORWARD:
        return False
    return [arg for arg in op.args[3:] if isinstance(arg, float)] == [0.0]


@cache
def _effect_of_id(op_id: str) -> Effect:
    if _FUSION.match(op_id):
        return REGION
    return _TABLE.get(short_name(op_id), BARRIER) if _KNOWN_MODULE.match(op_id) else BARRIER


def is_layout(op: Op) -> bool:
    """True where the op only changes the index map from elements to memory."""
    return effect_of(op).kind is Kind.LAYOUT
