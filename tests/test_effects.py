"""The table of effects, row by row on real tensors: who shares memory is seen by storage pointer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from thunder_fusionfix.effects import _FROM_TORCH, _TABLE, PURE, Copies, Kind, effect_of, is_layout, short_name
from thunder_fusionfix.model import Op, Ref

torchex = pytest.importorskip("thunder.executors.torchex")


def effect(op_id: str):
    return effect_of(Op(op_id, ()))


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def dense() -> torch.Tensor:
    return torch.rand(2, 1, 3)


def turned() -> torch.Tensor:
    """No shape of fewer dims is a view of it, and it is in no memory order of its own."""
    return torch.rand(3, 1, 2).permute(2, 1, 0)


def implementation(symbol) -> Callable[..., torch.Tensor]:
    """The function that Thunder runs for an operator of its torch executor."""
    bsym = SimpleNamespace()
    symbol._bind_postprocess(bsym)
    return bsym._call_ctx[symbol.name]


# What torch, or Thunder's torch executor, runs for each layout row.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: torch.permute(x, (2, 1, 0)),
    "slice_prim": lambda x: torchex._slice_prim_impl(x, (0, 0, 1), (2, 1, 3), (1, 1, 1)),
    "squeeze": lambda x: torch.squeeze(x, 1),
    "unsqueeze": lambda x: torch.unsqueeze(x, 0),
    "broadcast_in_dim": lambda x: x.unsqueeze(0).expand(4, 2, 1, 3),
    "expand": lambda x: x.expand(2, 5, 3),
    "shallow_copy": lambda x: implementation(torchex.shallow_copy)(x),
    "view_as_real": torch.view_as_real,
    "detach": lambda x: x.detach(),
    "t": lambda x: x[:, 0].t(),
    "mT": lambda x: x.mT,
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "swapdims": lambda x: torch.swapdims(x, 0, 2),
    "moveaxis": lambda x: x.moveaxis(0, 1),
    "movedim": lambda x: torch.movedim(x, 0, 1),
    "select": lambda x: x.select(0, 1),
    "narrow": lambda x: x.narrow(2, 0, 2),
    "diagonal": lambda x: x.diagonal(0, 0, 2),
    "alias": lambda x: torch.ops.aten.alias(x),
    "reshape": lambda x: torch.reshape(x, (6,)),
    "view": lambda x: x.view(6) if x.is_contiguous() else x.view(2, 3),
    "flatten": lambda x: torch.flatten(x),
    "ravel": lambda x: torch.ravel(x),
    "reshape_as": lambda x: x.reshape_as(torch.empty(6)),
    "view_as": lambda x: x.view_as(torch.empty(6)) if x.is_contiguous() else x.view_as(torch.empty(2, 3)),
    "unflatten": lambda x: torch.unflatten(x, 2, (3, 1)),
    "contiguous": lambda x: x.contiguous(),
    "stride_order": lambda x: torchex._stride_order_prim_impl(x, (2, 1, 0)),
}
# Rows of our own operators; each is tested where it is made.
OWN = {"fusionfix_after"}

# For rows that may copy: whether the output of `dense` and of `turned` has the memory of the input.
MAYBE = {
    "reshape": (True, False),
    "view": (True, True),
    "flatten": (True, False),
    "ravel": (True, False),
    "reshape_as": (True, False),
    "view_as": (True, True),
    "unflatten": (True, True),
    "contiguous": (True, False),
    "stride_order": (False, False),
}


def rows(*kinds: Kind) -> list[str]:
    return [name for name, row in _TABLE.items() if row.kind in kinds]


def test_every_layout_row_is_tested_here() -> None:
    """A new layout row needs a real tensor to show for it."""
    assert set(rows(Kind.LAYOUT)) == set(LAYOUTS) | OWN


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in MAYBE])
def test_layout_row_that_never_copies_has_the_memory_of_its_input(name) -> None:
    """Whatever the strides, the output is a view."""
    assert effect(f"torch.{name}").copies is Copies.NEVER
    for x in (dense(), turned()):
        x = x.to(torch.complex64) if name == "view_as_real" else x
        assert shares(LAYOUTS[name](x), x)


@pytest.mark.parametrize("name", MAYBE)
def test_layout_row_that_may_copy_does_as_strides_allow(name) -> None:
    """A view of a row-major tensor, for most a copy of a transposed one."""
    assert effect(f"torch.{name}").copies is Copies.MAYBE
    x, y = dense(), turned()
    assert (shares(LAYOUTS[name](x), x), shares(LAYOUTS[name](y), y)) == MAYBE[name]


# ---------------------------------------------------------------- writes


def test_copy_row_writes_its_second_argument_and_gives_it_back() -> None:
    """Thunder's ``copy_(source, destination)``."""
    source, destination = torch.ones(3), torch.zeros(3)
    result = torchex._copy__impl(source, destination, False)
    assert effect("copy_").writes == (1,)
    assert shares(result, destination)
    assert torch.equal(destination, torch.ones(3))
    assert not shares(result, source)


def test_all_reduce_writes_its_argument_where_it_skips_the_clone(monkeypatch) -> None:
    """Thunder's ``all_reduce(tensor, op, group, do_async, skip_clone)`` then sums in the memory of the tensor."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, *args: tensor.mul_(2))
    monkeypatch.setattr(torchex.ltorch, "to_torch_distributed_reduce_op", lambda op: op)
    for skip_clone in (False, True):
        x = torch.ones(3)
        result = torchex._all_reduce_prim_impl(x, "sum", "world", False, skip_clone)
        row = effect_of(Op("torch_all_reduce_prim_impl", (Ref("x"), "sum", "world", False, skip_clone)))
        assert row.kind is Kind.COLLECTIVE
        assert bool(row.writes) == shares(result, x) == (not torch.equal(x, torch.ones(3))) == skip_clone
    by_name = Op("thunder.distributed.prims.all_reduce", (Ref("x"), "sum", "world"), kwargs=(("skip_clone", True),))
    assert effect_of(by_name).writes == (0,)


def test_every_write_row_writes_an_argument_that_the_operator_has() -> None:
    """``writes`` are positions in the operator's own signature."""
    assert set(rows(Kind.WRITE)) == {"copy_", "copy_to_out_"}
    names = list(inspect.signature(torchex._copy__impl).parameters)
    assert names[effect("copy_").writes[0]] == "copy_to"


# ---------------------------------------------------------------- casts and other rows that may give their argument


def test_cast_rows_give_their_argument_where_nothing_changes() -> None:
    """``to`` and its kin: the tensor itself for its own dtype, new memory for another."""
    x = torch.rand(3)
    by_dtype = {
        "to": lambda dtype: x.to(dtype),
        "convert_element_type": lambda dtype: torch.Tensor.to(x, dtype),
        "type_as": lambda dtype: x.type_as(torch.empty(1, dtype=dtype)),
    }
    by_name = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    rows = {name for name, row in _TABLE.items() if row.kind is Kind.POINTWISE and row.copies is Copies.MAYBE}
    assert rows == {*by_dtype, *by_name}
    for cast in by_dtype.values():
        assert shares(cast(torch.float32), x)
        assert not shares(cast(torch.bfloat16), x)
    for name, dtype in by_name.items():
        same, other = x.to(dtype), x.to(torch.int64)
        assert shares(getattr(same, name)(), same)
        assert not shares(getattr(other, name)(), other)


def test_same_bits_rows_have_the_memory_of_their_argument() -> None:
    """``bitcast``, ``real``, ``imag`` and ``positive`` never copy."""
    x, z = torch.rand(4), torch.rand(4, dtype=torch.complex64)
    pairs = {
        "bitcast": (x, torchex._bitcast_impl(x, _thunder_dtype("int32"))),
        "real": (z, torch.real(z)),
        "imag": (z, torch.imag(z)),
        "positive": (x, torch.positive(x)),
    }
    assert {name for name, row in _TABLE.items() if row.kind is Kind.POINTWISE and row.copies is Copies.NEVER} == set(
        pairs
    )
    assert all(shares(source, result) for source, result in pairs.values())


def _thunder_dtype(name: str):
    from thunder.core import dtypes

    return getattr(dtypes, name)


def test_unfold_row_is_a_view_as_a_method_and_a_copy_as_a_function() -> None:
    """One name for two operators: may be a view."""
    x = torch.rand(1, 1, 4, 4)
    assert effect("torch.Tensor.unfold").copies is Copies.MAYBE
    assert shares(x.unfold(3, 2, 1), x)
    assert not shares(torch.nn.functional.unfold(x, 2), x)


# ---------------------------------------------------------------- new memory


def attempts(name: str) -> Iterator[Callable[[], object]]:
    """Calls of torch's function ``name`` with one, two and three tensors, and with what some need besides."""
    x, y, z = torch.rand(3, 3), torch.rand(3, 3), torch.rand(3, 3)
    index = torch.tensor([[0, 1, 2]] * 3)
    for home in (torch, torch.nn.functional, torch.Tensor, torch.special):
        fn = getattr(home, name, None)
        if fn is None:
            continue
        if takes_inplace(fn):
            yield lambda fn=fn: [(fn(x), (x,))]
            continue
        for args in (
            (x,),
            (x, y),
            (x, y, z),
            (x > 0.5, x, y),
            (x, 0),
            (x, 2.0, 3.0),
            (x, (0,)),
            (x, (0, 0)),
            ((x, y),),
        ):
            yield lambda fn=fn, args=args: [(fn(*args), args)]
        for args in ((x, 0, index), (x, index, 0), (index, x), (x, x > 0.5, 0.0), (x, 0, index[0]), (x, (1, 1))):
            yield lambda fn=fn, args=args: [(fn(*args), args)]
        yield lambda fn=fn: [(fn(index), (index,))]


def takes_inplace(fn: Callable) -> bool:
    """True for torch's functions with an ``inplace`` flag, which Thunder's traces never set."""
    try:
        return "inplace" in inspect.signature(fn).parameters
    except ValueError:  # a builtin
        return False


@pytest.mark.filterwarnings("ignore")
def test_rows_that_make_new_memory_do_so_in_torch() -> None:
    """No call of a function whose row says ALWAYS gives a tensor with the memory of an argument."""
    names = [
        name
        for name, row in _TABLE.items()
        if row.kind in (Kind.POINTWISE, Kind.REDUCTION, Kind.MATMUL, Kind.MOVE) and row.copies is Copies.ALWAYS
    ]
    seen = set()
    for name in names:
        for attempt in attempts(name):
            with contextlib.suppress(TypeError, RuntimeError, ValueError, IndexError, AttributeError):
                ((result, args),) = attempt()
                seen.add(name)
                assert not gives_an_argument(result, args), f"{name} gives its argument"
    assert len(seen) > 100, f"{len(seen)} of {len(names)} rows were tried"


def gives_an_argument(result: object, args: tuple) -> bool:
    """True where a tensor of ``result`` has the memory of one of ``args``."""
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
    tensors = [a for arg in args for a in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(a, torch.Tensor)]
    return any(shares(one, other) for one in results for other in tensors if one.numel())


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("op_id", "kind"),
    [
        ("prims.reshape", Kind.LAYOUT),
        ("torch_prims_reshape_impl", Kind.LAYOUT),
        ("torch_stride_order_prim_impl", Kind.LAYOUT),
        ("Tensor.contiguous", Kind.LAYOUT),
        ("torch.nn.functional.linear", Kind.MATMUL),
        ("ltorch.softmax", Kind.COMPUTE),
        ("nvFusion12", Kind.REGION),
        ("TorchCompile0", Kind.REGION),
        ("CUDAGraph1", Kind.REGION),
        ("clear_mutable_collection", Kind.BOOKKEEPING),
        ("return", Kind.BOOKKEEPING),
        ("del", Kind.BOOKKEEPING),
        ("unpack", Kind.BOOKKEEPING),
        ("copy_", Kind.WRITE),
        ("my_library.linear", Kind.BARRIER),
        ("nvFusionary", Kind.BARRIER),
        ("something_new", Kind.BARRIER),
        ("torch_unpack_prim_impl", Kind.BARRIER),  # copies a bucket into tensors; no statement
        ("thunder.distributed.prims.unpack", Kind.BARRIER),
        ("torch.spmm", Kind.MATMUL),
        ("torch.swapaxes", Kind.LAYOUT),
        ("torch.torch.linalg.multi_dot", Kind.COMPUTE),
        ("operator.mul", Kind.POINTWISE),
        ("swapaxes_vjp", Kind.COMPUTE),
        ("alpha_dropout_vjp", Kind.RANDOM),
        ("as_strided_vjp", Kind.BARRIER),
    ],
)
def test_effect_of_a_printed_name_is_its_row_and_barrier_for_a_name_without_one(op_id, kind) -> None:
    """Prims, torch, ltorch and executor spellings find one row; another library's op of the same name does not."""
    assert effect(op_id).kind is kind


def test_pure_kinds_read_and_change_nothing_but_their_inputs() -> None:
    """Writes, random draws, collectives, host syncs, bookkeeping, regions and unknown ops are not pure."""
    assert set(Kind) - PURE == {
        Kind.RANDOM,
        Kind.WRITE,
        Kind.COLLECTIVE,
        Kind.WAIT,
        Kind.SYNC,
        Kind.BOOKKEEPING,
        Kind.REGION,
        Kind.BARRIER,
    }
    assert is_layout(Op("prims.transpose", ()))
    assert not is_layout(Op("prims.exp", ()))
    assert short_name("torch.nn.functional.linear") == "linear"


# ---------------------------------------------------------------- all that Thunder can print

# Symbols of Thunder's that have no row, and so are barriers, by the reason.
WITHOUT_ROW: dict[str, str] = {
    "its value depends on strides, or it gives a tensor another memory": """
        as_strided as_strided_scatter resize resize_as
    """,
    "writes without saying so: running averages, quantisation state, a renormed weight": """
        batch_norm instance_norm native_batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats
        embedding_bag fused_moving_avg_obs_fake_quant retain_grad module_load
    """,
    "the host waits for a size or a value": """
        argwhere bincount equal is_nonzero lobpcg lstsq masked_select nonzero nonzero_static tolist unique
        unique_consecutive numpy cpu pin_memory device_put ctc_loss histc histogram new_tensor
    """,
    "asks about a tensor; mostly gone before a trace is final": """
        data_ptr dense_dim dim_order element_size get_device has_names is_coalesced is_conj is_contiguous is_distributed
        is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement shape sparse_dim
    """,
    "sparse, quantised and named tensors": """
        align_as align_to ccol_indices choose_qparams_optimized coalesce col_indices crow_indices crow_indices_copy dsmm
        fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight
        fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
        fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix hsmm hspmm indices
        indices_copy int_repr refine_names rename row_indices row_indices_copy saddmm smm sparse_mask sspaddmm to_dense
        to_sparse values values_copy
    """,
    "new and empty of any content, or of a number that is read": "new_empty new_full scalar_tensor",
    "buckets that live from step to step": """
        pack pack_for_fsdp stash_grad_for_fsdp unpack unpack_for_fsdp update_bucket_view
    """,
    "tensors on several devices": """
        dtensor_add_prim dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim dtensor_exp_prim
        dtensor_from_local dtensor_grouped_mm_prim dtensor_linear_prim dtensor_mul_prim dtensor_neg_prim
        dtensor_reciprocal_prim dtensor_redistribute dtensor_reshape_prim dtensor_to_local dtensor_transpose_prim
    """,
    "several views in one op: what they are, their parts say": """
        atleast_1d atleast_2d atleast_3d chunk split tensor_split unbind
    """,
    "the order of writes to memory with several names": "update_aliases",
    "kernels of other libraries": """
        apex_cross_entropy apex_cross_entropy_backward fa3_bwd fa3_fwd te_functional_linear_backward
        te_sync_fp8_meta_bwd philox_rand
    """,
    "Python's own, in prologues": """
        assert_compare assert_tensor_metadata check_bool_conversion check_empty check_instance check_len
        check_literal_like check_number_type_and_value check_python_repr check_slice_value check_string_value
        check_tensor_metadata check_tensor_shape_and_metadata check_type construct_tuple convert_element_type_prim
        exogenous_like numpy_array_to_torch_tensor pack_attr pack_buffer pack_setitem py_abs py_floordiv
        python_dataclass_new python_print python_vars unpack_attr unpack_buffer unpack_cache_info unpack_empty_dict
        unpack_function_obj unpack_getitem unpack_iter unpack_next unpack_parameter unpack_submodule
        unpack_thunder_module
    """,
    "programs in programs": "autograd_function_apply checkpoint cond",
}


def printed() -> dict[str, str]:
    """The names of all that Thunder's executors run and that its own symbols are, as a trace prints them, and whose they are."""
    import thunder.torch as ltorch
    from thunder.core import prims
    from thunder.core.symbol import Symbol
    from thunder.extend import get_all_executors

    found: dict[str, str] = {}
    for executor in get_all_executors():
        for symbol in getattr(executor, "_opmap", {}).values():
            home = getattr(symbol.module, "__name__", "")
            is_function = home.split(".")[0] in ("torch", "Tensor", "operator", "math")
            found[f"{home}.{symbol.name}" if is_function else symbol.name] = executor.name
    found |= {f"prims.{symbol.name}": "prims" for symbol in vars(prims).values() if isinstance(symbol, Symbol)}
    for symbol in vars(ltorch).values():
        if isinstance(symbol, Symbol) and symbol.is_prim:  # the others show their parts
            found.setdefault(f"ltorch.{symbol.name}" if symbol.module is ltorch else symbol.name, "ltorch")
    return found


def test_every_symbol_of_thunder_has_a_row_or_is_known_to_have_none() -> None:
    """A release of Thunder with a new operator fails here, so that somebody decides what it does."""
    names = printed()
    assert len(names) > 1500
    has_row = {name: effect(name).kind is not Kind.BARRIER for name in names if not name.endswith("_vjp")}
    expected = {name for group in WITHOUT_ROW.values() for name in group.split()}
    assert {short_name(name) for name, known in has_row.items() if not known} - expected == set(), "new symbols"
    assert {short_name(name) for name, known in has_row.items() if known} & expected == set(), "these have a row"


def test_gradients_of_torchs_functions_are_as_pure_as_the_functions() -> None:
    """``*_vjp`` runs the function again: it draws where the function draws, and is unknown where that is."""
    gradients = [name for name in printed() if name.endswith("_vjp")]
    assert len(gradients) > 400
    for name in gradients:
        base, row = effect(f"torch.{name.removesuffix('_vjp')}"), effect(name)
        assert row.kind is (Kind.COMPUTE if base.is_pure else base.kind)
        assert row.copies is Copies.MAYBE or not row.is_pure


def test_gradient_of_a_view_is_a_view_of_the_cotangent() -> None:
    """So a gradient counts as what may have the memory of its arguments."""
    vjp = implementation(next(op for name, op in torchex.ex._opmap.items() if name == "swapaxes_vjp"))
    cotangent = torch.rand(3, 2)
    gradient, *_ = vjp(((torch.rand(2, 3), 0, 1), {}), cotangent)
    assert shares(gradient, cotangent)


def test_rows_taken_from_torch_neither_write_nor_draw_nor_wait() -> None:
    """As torch's own schemas and tags of the operators say."""
    num_schemas = 0
    for name in _FROM_TORCH:
        for prefix in ("", "special_", "linalg_", "fft_"):
            for schema in torch._C._jit_get_schemas_for_operator(f"aten::{prefix}{name}"):
                if any(argument.is_out for argument in schema.arguments):
                    continue
                num_schemas += 1
                assert not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments), name
                packet = getattr(torch.ops.aten, f"{prefix}{name}")
                tags = getattr(packet, schema.overload_name or "default").tags
                assert STATEFUL_TAGS.isdisjoint(tags), name
    assert num_schemas > 300


STATEFUL_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
