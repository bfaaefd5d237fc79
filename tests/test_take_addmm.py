"""Laws of `take_addmm`: what a linear layer computes under another name is one to Thunder, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import thunder
import torch
from runs import distance
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.take_addmm import linear_of
from thunder_fusionfix.transform import FusionFixTransform

ENTRY = ("fusionfix",)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


LAYER = ((5,), (3, 4), (4, 5))  # bias, x, w

TAKEN = {
    "function": (lambda bias, x, w: torch.addmm(bias, x, w), LAYER),
    "factors of 1": (lambda bias, x, w: torch.addmm(bias, x, w, beta=1, alpha=1.0), LAYER),
    "names": (lambda bias, x, w: torch.addmm(bias, mat2=w, mat1=x), LAYER),
    "views": (lambda bias, x, w: torch.addmm(bias[1:], x.transpose(0, 1), w[:, ::2]), ((4,), (4, 3), (4, 6))),
}
LEFT = {
    "method": (lambda bias, x, w: bias.addmm(x, w), LAYER),
    "bias of two dims": (lambda bias, x, w: torch.addmm(bias, x, w), ((3, 5), (3, 4), (4, 5))),
    "bias of one element": (lambda bias, x, w: torch.addmm(bias, x, w), ((1,), (3, 4), (4, 5))),
    "beta": (lambda bias, x, w: torch.addmm(bias, x, w, beta=0.5), LAYER),
    "alpha": (lambda bias, x, w: torch.addmm(bias, x, w, alpha=2), LAYER),
}


def by_jit(fn, executors, **options):
    return thunder.jit(fn, executors=executors, **options)


def by_thunderfx(fn, executors, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend=ThunderCompiler(executors=executors, **options), dynamic=False)


@pytest.mark.parametrize("compiled", [by_jit, by_thunderfx])
@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
@pytest.mark.parametrize("executors", [ENTRY, ()], ids=["entry", "plain"])
def test_results_and_gradients_are_those_of_eager(name, executors, compiled):
    """In float64, with gradients that lie in memory as their parameters do: autograd copies others."""
    fn, shapes = {**TAKEN, **LEFT}[name]
    if (name, executors, compiled) == ("names", (), by_jit):
        pytest.skip("Thunder's automatic operators take no gradient through an argument by name")
    args = tensors(*shapes)
    weight = torch.randn_like(fn(*args))
    got, want = compiled(fn, executors)(*args), fn(*args)
    assert distance(got, want) < 1e-12
    pairs = zip(args, torch.autograd.grad((got * weight).sum(), args), torch.autograd.grad((want * weight).sum(), args))
    for arg, gradient, expected in pairs:
        assert distance(gradient, expected) < 1e-12
        assert name == "views" or executors == () or gradient.stride() == arg.stride()


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_a_layer_is_traced_as_linear_and_nothing_else(name):
    """Its trace says linear; what is none stays the automatic operator that Thunder has for it."""
    fn, shapes = {**TAKEN, **LEFT}[name]
    jitted = by_jit(fn, ENTRY)
    jitted(*tensors(*shapes))
    called = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]
    assert ("linear" in called, "addmm" in called) == (name in TAKEN, name in LEFT)


@pytest.mark.parametrize("compiled", [by_jit, by_thunderfx])
def test_gradients_of_complex_numbers_are_eagers(compiled):
    """They are conjugates, of which the rule of a linear layer knows nothing: such a product stays torch's."""
    args = tensors(*LAYER, dtype=torch.complex128)
    fn = TAKEN["function"][0]
    weight = torch.randn(3, 5, dtype=torch.complex128)
    got, want = (torch.autograd.grad(out, args, weight) for out in (compiled(fn, ENTRY)(*args), fn(*args)))
    for gradient, expected in zip(got, want):
        torch.testing.assert_close(gradient, expected)


def test_a_layer_under_vmap_is_left_to_torch():
    """Thunder's functions take no tensors of torch.func's transforms."""

    def fn(bias, x, w):
        return torch.func.vmap(lambda row: torch.addmm(bias, row, w))(x)

    args = [tensor.detach() for tensor in tensors((5,), (2, 3, 4), (4, 5))]
    assert distance(by_thunderfx(fn, ENTRY)(*args), fn(*args)) < 1e-12


def test_a_layer_runs_without_gradients():
    """Inference traces hold the parts of the composite."""
    args = [tensor.detach() for tensor in tensors(*LAYER)]
    assert distance(by_jit(TAKEN["function"][0], ENTRY)(*args), torch.addmm(*args)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_casts_what_it_casts_of_a_linear_layer(dtype):
    """Gradients come in the parameters' dtype, as eager's do."""
    args = tensors(*LAYER, dtype=torch.float32)

    def fn(bias, x, w):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            return torch.addmm(bias, x, w)

    got, want = by_thunderfx(fn, ENTRY)(*args), fn(*args)
    assert got.dtype is want.dtype
    assert distance(got.double(), want.double()) < 1e-2
    gradients = torch.autograd.grad(got.sum(), args), torch.autograd.grad(want.sum(), args)
    for gradient, expected in zip(*gradients):
        assert gradient.dtype is expected.dtype
        assert distance(gradient.double(), expected.double()) < 1e-2


# ---------------------------------------------------------------- where ThunderFX splits


class Conv1D(torch.nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(num_in, num_out))
        self.bias = torch.nn.Parameter(torch.randn(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def mlp(checkpoint: bool = False) -> torch.nn.Module:
    layers = torch.nn.Sequential(Conv1D(12, 8), torch.nn.GELU(), Conv1D(8, 12))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x):
            if checkpoint:
                return x.sin() + torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
            return x.sin() + self.layers(x)

    return Block()


def num_functions(executors=ENTRY, checkpoint=False, **options) -> int:
    """Functions that Thunder compiles of an MLP with two such layers."""
    backend = ThunderCompiler(executors=executors, **options)
    torch._dynamo.reset()
    model = mlp(checkpoint)
    x = torch.randn(2, 3, 8)
    out = torch.compile(model, backend=backend)(x)
    assert distance(out, model(x)) < 1e-5
    out.sum().backward()
    return sum(len(info.thunder_compiled_fns or ()) for info in backend.subgraph_infos)


def test_thunderfx_does_not_split_at_a_layer():
    """One function with the entry, by name or as an object; three without, or where the user says so."""
    off = {"fusionfix_take_addmm": False}
    assert num_functions() == 1
    assert num_functions((thunder.get_executor("fusionfix"),)) == 1
    assert num_functions(()) == num_functions(transforms=[], **off) == 3
    assert num_functions(transforms=[FusionFixTransform(take_addmm=False)]) == 3
    assert num_functions(transforms=[FusionFixTransform(take_addmm=True)], **off) == 1, "the argument wins"
    assert num_functions((), transforms=[FusionFixTransform()]) == 3, "without the entry nothing would trace it so"


def test_checkpoints_split_as_ever():
    """ThunderFX converts what a checkpoint runs by a table of its own."""
    assert num_functions(checkpoint=True) == num_functions((), checkpoint=True)


def test_a_wrong_value_is_named():
    """As for every option."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="UsageError: .* take_addmm='no'"):
        num_functions(fusionfix_take_addmm="no")


def test_what_is_no_layer_is_refused():
    """Tensors outside of a trace, and numbers."""
    for args in (tensors(*LAYER), [1, 2, 3]):
        with pytest.raises(UnsupportedTraceError, match="take_addmm"):
            linear_of(*args)
