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

from thunder_fusionfix.model import CLEAR, DEL, EXPAND, OWN, RETURN, UNPACK, Op


class Kind(Enum):
    """What an operation is, as far as memory and order go."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and kinds are looked up in sets for each op

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
    writes: tuple[int, ...] = ()  # indices of the arguments that are changed, of which the output is the first
    cheap: bool = False  # worth doing again rather than keeping its output

    @property
    def is_pure(self) -> bool:
        return self.kind in PURE


BARRIER = Effect(Kind.BARRIER)
REGION = Effect(Kind.REGION)

_FUSION = re.compile(r"(nvFusion|TorchCompile|CUDAGraph)\d+$")
# Modules whose names mean what the table says; bare names are those of executors' operators and of Thunder's statements.
_KNOWN_MODULE = re.compile(
    r"((prims|core_prims|ltorch|aten|Tensor|operator|math|thunder(\.\w+)*"
    r"|torch(\.nn\.functional|\.special|\.Tensor|\._refs|\.fft|(\.torch)?(\.linalg|\.ops\.aten))?)\.)?\w+$"
)


def _names(text: str) -> list[str]:
    return text.split()


# Short names: what is left of "prims.reshape", "ltorch.reshape", "torch.reshape", "torch_prims_reshape_impl".
_VIEWS = _names(
    "transpose permute slice_prim squeeze unsqueeze broadcast_in_dim expand shallow_copy view_as_real detach t mT "
    "swapaxes swapdims moveaxis movedim select narrow diagonal alias fusionfix_after"
)
_MAYBE_VIEWS = _names("reshape view flatten unflatten ravel reshape_as view_as contiguous stride_order")
_CASTS = _names("convert_element_type to float double half bfloat16 type_as")
_SAME_BITS = _names("bitcast real imag positive")  # give their argument, or a view of it
_POINTWISE = _names(
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc "
    "erfcinv erfinv exp exp2 expm1 floor isfinite lgamma log log10 log1p log2 ndtri neg reciprocal round rsqrt sign "
    "signbit sin sinh sqrt tan tanh trunc add atan2 bitwise_and bitwise_or bitwise_xor div true_divide eq fmod "
    "ge gt le lt maximum minimum mul ne nextafter pow remainder sub zeta bitwise_left_shift bitwise_right_shift lerp where "
    "sigmoid silu gelu relu relu6 masked_fill clamp square logical_not logical_and logical_or hardswish softplus "
    "silu_backward gelu_backward threshold_backward log_sigmoid_backward logsigmoid selu elu celu leaky_relu prelu mish "
    "addcmul addcdiv isnan isinf copysign floor_divide floordiv mod ldexp logical_xor hardshrink softshrink tanhshrink "
    "hardsigmoid hardtanh softsign threshold polygamma tensor_abs"
)
_REDUCTIONS = _names("amax amin prod sum mean var var_mean std argmax argmin any all cumsum")
_MATMULS = _names("fusionfix_linear fusionfix_matmul linear matmul mm spmm bmm addmm baddbmm _grouped_mm mv dot outer")
_MOVES = _names(
    "cat stack pad take take_along_axis take_along_dim gather index_select flip roll repeat clone embedding"
)
_FACTORIES = _names(
    "full full_like zeros zeros_like ones ones_like iota arange empty tensor tensor_from_sequence new_zeros new_ones tri"
)
_COMPUTE = _names(
    "softmax _softmax log_softmax layer_norm rms_norm group_norm local_response_norm cudnn_layernorm cudnn_layernorm_aug_fwd "
    "cross_entropy triton_crossentropy nll_loss mse_loss convolution conv1d conv2d conv3d topk sort scatter scatter_add "
    "index_add index_copy index_put copy_with_setitem copy_with_setitem_impl embedding_backward one_hot einsum multi_dot "
    "nll_loss_backward log_softmax_backward _log_softmax_backward_data nv_cross_entropy_fwd nv_cross_entropy_bwd tril triu "
    "argsort setitem max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d interpolate frexp "
    "convolution_backward max_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward "
    "max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_avg_pool2d_backward _adaptive_avg_pool2d_backward "
    "scaled_dot_product_flash_attention "
    "scaled_dot_product_efficient_attention uniform_philox sdpaex_scaled_dot_product_efficient_attention_backward cudnn_sdpa_bwd"
)
_RANDOM = _names(
    "uniform randint randn rand multinomial get_and_update_rng_state get_rng_state set_rng_state get_rng_state_prim_impl "
    "set_rng_state_prim_impl unpack_rng_state_prim_impl pack_rng_state_prim_impl unpack_rng_state pack_rng_state dropout "
    "uniform_like bernoulli exponential get_and_update_rng_state_impl multinomial_helper rrelu rand_like randn_like "
    "randint_like scaled_dot_product_attention alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d "
    "dropout3d native_dropout binomial poisson gumbel_softmax gru lstm rnn_relu rnn_tanh fractional_max_pool2d "
    "fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices "
    "multi_head_attention_forward _native_multi_head_attention"
)
# What Thunder takes over from torch as it is (`thunder.torch.default_torch_ops`), of these what neither writes, nor draws, nor has
# an output whose size or values the host has to wait for, nor asks how its input lies in memory, as ``as_strided`` does.
# Some give their input, or views of it; all are taken to.
_FROM_TORCH = _names(
    # elementwise
    "absolute airy_ai angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh bessel_j0 bessel_j1 bessel_y0 bessel_y1 "
    "bool byte cdouble cfloat chalf char chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v "
    "chebyshev_polynomial_w clamp_max clamp_min clip complex conj conj_physical deg2rad divide entr erfcx fix float_power "
    "fmax fmin frac gammainc gammaincc gammaln gcd greater greater_equal heaviside hermite_polynomial_h "
    "hermite_polynomial_he hypot i0 i0e i1 i1e igamma igammac int isclose isneginf isposinf isreal laguerre_polynomial_l lcm "
    "legendre_polynomial_p less less_equal log_ndtr logaddexp logaddexp2 logit modified_bessel_i0 modified_bessel_i1 "
    "modified_bessel_k0 modified_bessel_k1 multigammaln multiply mvlgamma nan_to_num ndtr negative not_equal polar psi rad2deg "
    "resolve_conj resolve_neg rsub scaled_modified_bessel_k0 scaled_modified_bessel_k1 sgn shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w short sinc "
    "spherical_bessel_j0 subtract xlog1py xlogy "
    # reductions and scans
    "aminmax count_nonzero cummax cummin cumprod cumulative_trapezoid diff dist frobenius_norm kthvalue logcumsumexp logsumexp "
    "median min mode msort nanmean nanmedian nanquantile nansum native_norm norm norm_except_dim nuclear_norm "
    "quantile std_mean trace trapezoid trapz vector_norm "
    # pieces, copies and new arrangements
    "adjoint block_diag broadcast_tensors cartesian_prod channel_shuffle column_stack combinations constant_pad_nd detach_copy diag "
    "diag_embed diagflat diagonal_copy diagonal_scatter dsplit dstack expand_copy fftshift fliplr flipud fold hsplit hstack "
    "ifftshift index_fill index_reduce masked_scatter meshgrid narrow_copy native_channel_shuffle permute_copy pixel_shuffle "
    "pixel_unshuffle put renorm rot90 row_stack scatter_reduce select_copy select_scatter slice_copy slice_inverse "
    "slice_scatter split_copy split_with_sizes split_with_sizes_copy squeeze_copy sum_to_size t_copy tile transpose_copy "
    "unbind_copy unfold_copy unravel_index unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_copy vander "
    "view_as_complex view_as_complex_copy view_as_real_copy view_copy vsplit vstack "
    # products and linear algebra
    "addbmm addmv addr cdist chain_matmul corrcoef cosine_similarity cov cross det geqrf ger householder_product inner inv "
    "inv_ex inverse cholesky cholesky_ex cholesky_inverse cholesky_solve eig eigh eigvals eigvalsh kron ldl_factor ldl_factor_ex "
    "ldl_solve logdet lu lu_factor lu_factor_ex lu_solve lu_unpack matrix_exp matrix_norm matrix_power matrix_rank orgqr ormqr "
    "pairwise_distance pdist pinv pinverse qr slogdet solve solve_ex solve_triangular svd svdvals tensordot tensorinv "
    "tensorsolve triangular_solve vdot vecdot fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 "
    "irfftn rfft rfft2 rfftn stft istft "
    # layers and losses
    "adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices affine_grid "
    "affine_grid_generator bilinear binary_cross_entropy binary_cross_entropy_with_logits bucketize conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d cosine_embedding_loss gaussian_nll_loss grid_sample grid_sampler grid_sampler_2d "
    "grid_sampler_3d gru_cell hinge_embedding_loss huber_loss isin kl_div l1_loss lp_pool1d lp_pool2d lp_pool3d lstm_cell "
    "margin_ranking_loss max_pool1d_with_indices max_unpool1d max_unpool2d max_unpool3d multi_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss native_group_norm native_layer_norm poisson_nll_loss rnn_relu_cell "
    "rnn_tanh_cell searchsorted smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss"
)
# Attention of Thunder's executor "sdpa" by torch's flash kernel, which carries the name of the other kernel after its prefix, and
# the entry's own in its place (`passes.cudnn_attention`).
FLASH, FLASH_BACKWARD = (
    "sdpafx_grad_forward_scaled_dot_product_efficient_attention",
    "sdpafx_scaled_dot_product_efficient_attention_backward",
)
ATTENTION, ATTENTION_BACKWARD = "fusionfix_attention", "fusionfix_attention_backward"
# Random where they drop out.
_ATTENTION_FORWARD = (
    *("sdpaex_grad_forward_scaled_dot_product_efficient_attention", "cudnn_sdpa_fwd"),
    *(FLASH, ATTENTION),
)
_COLLECTIVES = _names("all_gather all_reduce broadcast reduce_scatter all_to_all")
_BOOKKEEPING = (
    RETURN,
    DEL,
    UNPACK,
    CLEAR,
    OWN,
    EXPAND,
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
    **{name: Effect(Kind.COMPUTE, Copies.MAYBE) for name in _FROM_TORCH},
    **{name: Effect(Kind.COMPUTE) for name in (*_COMPUTE, FLASH_BACKWARD, ATTENTION_BACKWARD)},
    **{name: Effect(Kind.RANDOM) for name in (*_RANDOM, *_ATTENTION_FORWARD)},
    **{name: Effect(Kind.COLLECTIVE) for name in _COLLECTIVES},
    "getitem": Effect(Kind.MOVE, Copies.MAYBE),  # a view of slices, a copy of what index tensors choose
    "__getitem__": Effect(Kind.MOVE, Copies.MAYBE),
    "unfold": Effect(Kind.MOVE, Copies.MAYBE),  # torch.Tensor.unfold is a view, torch.nn.functional.unfold a copy
    "item": Effect(Kind.SYNC),
    "print": Effect(Kind.SYNC),
    **{name: Effect(Kind.BOOKKEEPING) for name in _BOOKKEEPING},
    "synchronize": Effect(Kind.COLLECTIVE, Copies.MAYBE),  # gathers a shard; a replicated parameter it gives as it is
    "wait": Effect(Kind.WAIT, Copies.NEVER),  # gives the memory of its transfer
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
    if effect.kind is Kind.RANDOM and _has_zero_dropout(op):
        return _COMPUTES
    return _IN_PLACE_COLLECTIVE if effect.kind is Kind.COLLECTIVE and _skips_clone(op) else effect


_COMPUTES = Effect(Kind.COMPUTE)
_IN_PLACE_COLLECTIVE = Effect(Kind.COLLECTIVE, Copies.NEVER, writes=(0,))


def _skips_clone(op: Op) -> bool:
    """True for an ``all_reduce(tensor, op, group, do_async, skip_clone)`` that sums in the memory that it is given."""
    return (
        short_name(op.id) == "all_reduce" and op.kwarg("skip_clone", op.args[4] if len(op.args) > 4 else False) is True
    )


def _has_zero_dropout(op: Op) -> bool:
    """True for an attention forward whose dropout, the one float after query, key and value, is printed as zero."""
    if short_name(op.id) not in _ATTENTION_FORWARD:
        return False
    return [arg for arg in op.args[3:] if isinstance(arg, float)] == [0.0]


@cache
def _effect_of_id(op_id: str) -> Effect:
    if _FUSION.match(op_id):
        return REGION
    name = short_name(op_id)
    if op_id.endswith(_VJP):
        return _vjp_of(_effect_of_id(op_id.removesuffix(_VJP)))
    effect = _TABLE.get(name, BARRIER) if _KNOWN_MODULE.match(op_id) else BARRIER
    is_statement = op_id in (name, f"prims.{name}")  # the distributed `unpack` is another one
    return BARRIER if effect.kind is Kind.BOOKKEEPING and not is_statement else effect


_VJP = "_vjp"


def _vjp_of(effect: Effect) -> Effect:
    """What the gradient of one of torch's functions does: it runs the function again, and may give its cotangent or a view of it."""
    if effect.kind is Kind.RANDOM:
        return effect
    return Effect(Kind.COMPUTE, Copies.MAYBE) if effect.is_pure else BARRIER


def is_layout(op: Op) -> bool:
    """True where the op only changes the index map from elements to memory."""
    return effect_of(op).kind is Kind.LAYOUT
