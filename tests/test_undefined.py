"""expand_zero_cotangents at run time: what a backward is given for gradients that nobody sent, and that all else is as autograd does it."""

from __future__ import annotations

import threading
import types
import warnings

import pytest
import torch
from thunder.executors.torch_autograd import connect_to_autograd
from torch.utils.checkpoint import checkpoint

from thunder_fusionfix import cotangents, undefined
from thunder_fusionfix.model import EXPAND
from thunder_fusionfix.undefined import MAX_PATTERNS, Undefined, expand, install, likes_of, patterns_of

SIZE = 8


@pytest.fixture(autouse=True)
def installed() -> None:
    """As when a trace gets the statement."""
    assert install()
    cotangents.engine_references()


def of_trace(function, holds: bool):
    """``function`` with globals as of a compiled trace, which holds the statement or does not."""
    scope = {**function.__globals__, **({EXPAND: expand} if holds else {})}
    made = types.FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)
    return torch.no_grad()(made)


class Function:
    """x -> 2 x, 3 x, index of its maximum, 5, None, sum of x: a Thunder function whose backward notes what it is given."""

    def __init__(self, holds: bool = True, split: bool = False, positions=(0,), owns: bool = False):
        self.split, self.given = split, []

        def backward(saved, cotangents):
            if owns:
                own(cotangents)
            if holds:
                expand(cotangents, positions)
            self.given.append([(told(value), value) for value in cotangents])
            two, three, _, _, _, total = cotangents
            cotangents.clear()
            saved[0].clear()
            return (2 * two + 3 * three + total,)

        own = cotangents.own
        self.backward = of_trace(backward, holds)

    def __call__(self, x):
        with torch.no_grad():
            outputs = (x * 2, x * 3, x.argmax(), 5, None, x.sum())
        connect_to_autograd(
            backward_fn=self.backward,
            flat_args=(x,),
            flat_output=outputs,
            saved_tensors=(),
            saved_other=(),
            return_none_instead_of_grads=False,
            disable_split_autograd=not self.split,
            is_differentiable_outputs=None,
        )
        return outputs


def told(value):
    return (value.shape, value.dtype, value.device, type(value)) if isinstance(value, torch.Tensor) else value


def strides(function, at=-1):
    """Of what the last backward was given, where it is a tensor."""
    return [value.stride() if isinstance(value, torch.Tensor) else None for _, value in function.given[at]]


def leaf():
    return torch.randn(SIZE, SIZE, requires_grad=True)


def total(outputs):
    return outputs[5] * 2


def first(outputs):
    return outputs[0].square().sum()


def both(outputs):
    return (outputs[0] * outputs[1]).sum()


def first_and_total(outputs):
    return outputs[0].square().sum() + outputs[5]


@pytest.mark.parametrize("split", [False, True], ids=["one-function", "split"])
@pytest.mark.parametrize("loss", [total, first, both, first_and_total], ids=lambda loss: loss.__name__)
def test_backward_is_given_what_autograd_would_fill(loss, split: bool) -> None:
    """Shapes, dtypes, devices, classes and values, also for an output that is an index and for what is no tensor."""
    given, gradients, x = [], [], leaf()
    for holds in (True, False):
        function = Function(holds, split)
        (gradient,) = torch.autograd.grad(loss(function(x)), x)
        given.append(function.given[0])
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert [what for what, _ in given[0]] == [what for what, _ in given[1]]
    for (_, got), (_, want) in zip(*given, strict=True):
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got is want


@pytest.mark.parametrize("split", [False, True], ids=["one-function", "split"])
def test_zeros_are_repeated_at_the_positions_alone(split: bool) -> None:
    """The first output's is; the second's is dense."""
    function = Function(split=split)
    total(function(leaf())).backward()
    assert strides(function)[:3] == [(0, 0), (SIZE, 1), ()]
    function = Function(split=split, positions=(1, 0))
    total(function(leaf())).backward()
    assert strides(function)[:2] == [(0, 0), (0, 0)]
    assert function.given[0][0][1].untyped_storage().nbytes() == 4
    assert function.given[0][0][1].data_ptr() == function.given[0][1][1].data_ptr(), "one scalar, one kernel"


@pytest.mark.parametrize("split", [False, True], ids=["one-function", "split"])
def test_function_without_the_statement_is_left_to_autograd(split: bool, monkeypatch) -> None:
    """Plain Thunder: nothing of ours is made, and autograd's own zeros come."""
    monkeypatch.setattr(undefined, "Filled", None)
    function, x = Function(holds=False, split=split), leaf()
    outputs = function(x)
    assert not isinstance(outputs[0].grad_fn, undefined.Filled or ())
    total(outputs).backward()
    assert strides(function)[:2] == [(SIZE, 1), (SIZE, 1)]
    torch.testing.assert_close(x.grad, torch.full((SIZE, SIZE), 2.0))


def test_gradient_that_came_is_not_touched() -> None:
    """The tensor that the caller gave is the one that the backward gets."""
    function, x = Function(), leaf()
    given = torch.ones(SIZE, SIZE)
    function(x)[0].backward(given)
    assert function.given[0][0][1].data_ptr() == given.data_ptr()
    torch.testing.assert_close(x.grad, torch.full((SIZE, SIZE), 2.0))


def test_outputs_change_from_step_to_step() -> None:
    """Each step gets what it asks for; a set of outputs that is new once there were some gets dense zeros, a known one does not."""
    function, x = Function(positions=(0, 1)), leaf()
    losses = [total, first, both, first_and_total, lambda outputs: outputs[1].sum(), total]
    for loss in losses:
        (got,) = torch.autograd.grad(loss(function(x)), x)
        (want,) = torch.autograd.grad(loss(Function(holds=False)(x)), x)
        assert torch.equal(got, want)
    assert len(patterns_of(function.backward).seen) == MAX_PATTERNS == 4
    assert strides(function, 4)[0] == (SIZE, 1), "the fifth set"
    assert strides(function, 5)[:2] == [(0, 0), (0, 0)], "the first set again"


def test_no_gradient_at_all_gives_zeros() -> None:
    """A function after ours that sends None to all of its inputs: autograd calls the backward all the same."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.sum()

        @staticmethod
        def backward(context, gradient):
            return None

    function, x = Function(), leaf()
    Nothing.apply(function(x)[0]).backward()
    torch.testing.assert_close(x.grad, torch.zeros(SIZE, SIZE))
    assert strides(function)[:2] == [(0, 0), (SIZE, 1)]


def test_hooks_and_retained_gradients_see_what_they_saw() -> None:
    """They see gradients before autograd would fill: None, or nothing at all, where there is none."""
    seen = []
    for holds in (True, False):
        function, x, mine = Function(holds), leaf(), []
        outputs = function(x)
        outputs[0].register_hook(lambda given, mine=mine: mine.append(given))
        outputs[1].retain_grad()
        node = outputs[0].grad_fn
        node.register_prehook(lambda given, mine=mine: mine.append([told(one) for one in given]))
        node.register_hook(lambda gradients, given, mine=mine: mine.append([told(one) for one in given]))
        total(outputs).backward()
        seen.append((mine, outputs[1].grad))
    assert seen[0] == seen[1]


def test_gradients_asked_for_by_name_are_as_before() -> None:
    """`torch.autograd.grad` with an output that is not used gives None for it."""
    function, x = Function(), leaf()
    outputs = function(x)
    of_unused, of_x = torch.autograd.grad(total(outputs), (outputs[0], x), allow_unused=True)
    assert of_unused is None
    torch.testing.assert_close(of_x, torch.full((SIZE, SIZE), 2.0))


def test_second_derivatives_are_refused_as_before() -> None:
    """Thunder's backward can be differentiated once."""
    for holds in (True, False):
        x = leaf()
        (gradient,) = torch.autograd.grad(first(Function(holds)(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_function_is_right(use_reentrant: bool) -> None:
    """The function runs a second time in the backward."""
    function, x = Function(), leaf()
    checkpoint(lambda x: total(function(x)), x, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(x.grad, torch.full((SIZE, SIZE), 2.0))
    assert strides(function)[0] == (0, 0)


def test_batched_gradients_are_right() -> None:
    """Under `torch.vmap` zeros have no batch, as autograd's."""
    gradients = []
    for holds in (True, False):
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        (gradient,) = torch.autograd.grad(
            Function(holds)(x)[1], x, torch.randn(3, SIZE, SIZE, generator=_seeded()), is_grads_batched=True
        )
        gradients.append(gradient)
    assert torch.equal(*gradients)


def _seeded():
    return torch.Generator().manual_seed(0)


def test_threads_each_get_their_zeros() -> None:
    """One function, several forwards and backwards at once."""
    function, found = Function(positions=(0, 1)), []

    def step(loss, times):
        x = leaf()
        for _ in range(times):
            (gradient,) = torch.autograd.grad(loss(function(x)), x)
            (want,) = torch.autograd.grad(loss(Function(holds=False)(x)), x)
            found.append(torch.equal(gradient, want))

    threads = [threading.Thread(target=step, args=(loss, 20)) for loss in (total, first, both)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 60


def test_cotangents_are_taken_over_beside_those_that_nobody_sent(monkeypatch) -> None:
    """`own` takes what the engine alone has, in its place, and finds no tensor where none came."""
    taken, take = [], cotangents._take
    monkeypatch.setattr(cotangents, "_take", lambda given, at: (taken.append(at), take(given, at)))
    function, x = Function(owns=True), leaf()
    (function(x)[1] * 2).sum().backward()
    function(x)[1].square().sum().backward()
    torch.testing.assert_close(x.grad, 6 + 18 * x.detach())
    assert taken == [1, 1] and strides(function)[:2] == [(0, 0), (SIZE, 1)]


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    ("output", "is_told"),
    [
        (torch.ones(2, 3), True),
        (torch.nn.Parameter(torch.ones(2, 3)), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(0), True),
        (torch.ones(2).as_subclass(Subclass), False),
        (torch.ones(2, 3).to_sparse(), False),
        (nested(), False),
    ],
    ids=["tensor", "parameter", "transposed", "empty", "subclass", "sparse", "nested"],
)
def test_outputs_of_other_kinds_are_left_to_autograd(output, is_told: bool) -> None:
    """Then all outputs of the function are."""
    likes = likes_of((torch.ones(1), output, 5))
    assert (likes is not None) == is_told
    if likes is not None:
        assert likes[1:] == [Undefined(output.shape, output.dtype, output.device), None]


def test_statement_leaves_everything_else_alone() -> None:
    """A list without an `Undefined`, and what is no list."""
    tensor, other = torch.ones(3), (Undefined(torch.Size([2]), torch.float32, torch.device("cpu")),)
    given = [tensor, None, 2.0]
    expand(given, (0, 1))
    assert given == [tensor, None, 2.0] and given[0] is tensor
    expand(other, (0,))
    assert type(other[0]) is Undefined


@pytest.mark.parametrize(("shape", "stride"), [((), ()), ((0, 3), (0, 0)), ((1, 4), (0, 0))])
def test_statement_repeats_zeros_of_every_shape(shape, stride) -> None:
    """Scalars and empty tensors too."""
    given = [Undefined(torch.Size(shape), torch.bfloat16, torch.device("cpu"))]
    with torch.device("meta"):
        expand(given, (0,))
    assert given[0].stride() == stride and torch.equal(given[0], torch.zeros(shape, dtype=torch.bfloat16))


def test_function_that_is_no_trace_holds_nothing() -> None:
    """Callables without globals, and those that cannot be remembered."""
    assert patterns_of(len) is None and patterns_of(torch.no_grad()(lambda saved, given: None)) is None

    class Slotted:
        __slots__ = ()

        def __call__(self, saved, given):
            return ()

    assert patterns_of(Slotted()) is None


def test_another_thunder_is_left_alone(monkeypatch) -> None:
    """A forward that takes something else: no trace gets the statement, and the reason says why."""
    from thunder.executors import torch_autograd

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(context, other):
            return other

    before = torch_autograd.ThunderOutputFunction
    for other in (Other, None):
        monkeypatch.setattr(torch_autograd, "ThunderOutputFunction", other)
        assert undefined.why_not() == "this Thunder connects functions to autograd in another way"
    monkeypatch.setattr(torch_autograd, "ThunderOutputFunction", before)
    assert undefined.why_not() is None
