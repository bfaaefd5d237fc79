"""own_cotangents at run time: what is taken over from the engine, and that whoever else has a cotangent keeps it."""

from __future__ import annotations

import weakref

import pytest
import torch
from thunder.executors.torch_autograd import connect_to_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from thunder_fusionfix import cotangents
from thunder_fusionfix.cotangents import engine_references, own

SIZE = 64


class Function:
    """x -> 3 x with a backward as ThunderFX's: it owns its cotangent or not, uses it, deletes it, and looks whether it is gone."""

    def __init__(self, owns: bool = True, split: bool = False):
        self.owns, self.split = owns, split
        self.freed: list[bool] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = (x * 3).detach()
        connect_to_autograd(
            backward_fn=self.backward,
            flat_args=(x,),
            flat_output=(output,),
            saved_tensors=(),
            saved_other=(),
            return_none_instead_of_grads=False,
            disable_split_autograd=not self.split,
            is_differentiable_outputs=None,
        )
        return output

    @torch.no_grad()
    def backward(self, saved: list, cotangents: list) -> tuple[torch.Tensor]:
        if self.owns:
            own(cotangents)
        (given,) = cotangents
        cotangents.clear()
        saved[0].clear()
        gradient, memory = given * 3, StorageWeakRef(given.untyped_storage())
        del given
        self.freed.append(memory.expired())
        return (gradient,)


def leaf() -> torch.Tensor:
    return torch.randn(SIZE, requires_grad=True)


def test_engine_references_tell_here() -> None:
    """Counting works with this torch and Python, and every second owner is seen."""
    alone = engine_references()
    assert alone is not None
    assert all(cotangents._counted(share) != alone for share in cotangents._OTHER_OWNERS)


@pytest.mark.parametrize(("owns", "freed"), [(True, True), (False, False)])
def test_own_lets_a_del_free_the_cotangent(owns: bool, freed: bool) -> None:
    """The memory goes with the trace's ``del``; without the statement the engine keeps it."""
    function, x = Function(owns), leaf()
    y = function(x)
    (y * y).sum().backward()
    assert function.freed == [freed]
    torch.testing.assert_close(x.grad, 18 * x.detach())


def test_own_where_autograd_is_split_changes_nothing() -> None:
    """There the engine has let go already; the counts differ and nothing has to be taken."""
    function, x = Function(split=True), leaf()
    y = function(x)
    (y * y).sum().backward()
    assert function.freed == [True]
    torch.testing.assert_close(x.grad, 18 * x.detach())


def kept_by_hook(y, kept):
    y.register_hook(kept.append)
    (y * y).sum().backward()


def looked_at_by_hook(y, kept):
    y.register_hook(lambda given: kept.append(given.clone()))
    (y * y).sum().backward()


def viewed_by_hook(y, kept):
    y.register_hook(lambda given: kept.append(given[: SIZE // 2]))
    (y * y).sum().backward()


def stored_by_hook(y, kept):
    y.register_hook(lambda given: kept.append(given.untyped_storage()))
    (y * y).sum().backward()


def weakly_kept(y, kept):
    y.register_hook(lambda given: kept.append(weakref.ref(given)))
    (y * y).sum().backward()
    kept.clear()  # it is dead by now


def retained(y, kept):
    y.retain_grad()
    (y * y).sum().backward()
    kept.append(y.grad)


def given_by_caller(y, kept):
    kept.append(2 * y.detach())
    y.backward(kept[0])


def given_as_a_view(y, kept):
    whole = torch.cat([2 * y.detach(), y.detach()])
    y.backward(whole[:SIZE])
    kept.append(whole[:SIZE])


def hooked_before(y, kept):
    y.grad_fn.register_prehook(lambda given: kept.append(given[0]))
    (y * y).sum().backward()


def hooked_after(y, kept):
    y.grad_fn.register_hook(lambda gradients, given: kept.append(given[0].clone()))
    (y * y).sum().backward()


def graph_retained(y, kept):
    product = (y * y).sum()
    product.backward(retain_graph=True)
    kept.append(2 * y.detach())


def with_multi_grad_hook(y, kept):
    torch.autograd.graph.register_multi_grad_hook((y,), lambda given: kept.append(given[0]))
    (y * y).sum().backward()


OWNERS = {
    kept_by_hook: False,
    looked_at_by_hook: True,
    viewed_by_hook: False,
    stored_by_hook: False,
    weakly_kept: False,
    retained: True,  # `retain_grad` clones
    given_by_caller: False,
    given_as_a_view: False,
    hooked_before: False,
    hooked_after: False,
    graph_retained: True,
    with_multi_grad_hook: False,
}


@pytest.mark.parametrize("share", OWNERS, ids=lambda share: share.__name__)
def test_whoever_else_has_a_cotangent_keeps_it(share) -> None:
    """Its values are whole after the backward, the gradient is right, and it is freed early only where nobody kept it."""
    function, x, kept = Function(), leaf(), []
    y = function(x)
    share(y, kept)
    torch.testing.assert_close(x.grad, 18 * x.detach())
    want = 2 * y.detach()
    for got in kept:
        if isinstance(got, torch.UntypedStorage):
            got = torch.empty(0).set_(got, 0, (SIZE,), (1,))
        torch.testing.assert_close(got, want[: len(got)])
    assert function.freed == [OWNERS[share]]


def test_gradient_asked_for_by_name_is_whole() -> None:
    """`torch.autograd.grad` gives the caller the very tensor that the engine hands to the backward."""
    function, x = Function(), leaf()
    y = function(x)
    of_y, of_x = torch.autograd.grad((y * y).sum(), (y, x))
    torch.testing.assert_close(of_y, 2 * y.detach())
    torch.testing.assert_close(of_x, 18 * x.detach())
    assert function.freed == [False]


def test_gradient_that_two_functions_get_is_whole_for_both() -> None:
    """The sum of two outputs sends one tensor to both: the first leaves it, the second, which has it alone, may take it."""
    first, second, x = Function(), Function(), leaf()
    (first(x) + second(x)).square().sum().backward()
    torch.testing.assert_close(x.grad, 72 * x.detach())
    assert sorted([*first.freed, *second.freed]) == [False, True]


def test_module_backward_hooks_get_whole_gradients() -> None:
    """A full backward hook of a module around the function is given what the engine had."""

    class Layer(torch.nn.Module):
        def forward(self, x):
            return function(x)

    function, x, layer, seen = Function(), leaf(), Layer(), []
    layer.register_full_backward_hook(lambda module, to, of: seen.extend((to[0].clone(), of[0].clone())))
    y = layer(x)
    (y * y).sum().backward()
    torch.testing.assert_close(seen[0], 18 * x.detach())
    torch.testing.assert_close(seen[1], 2 * y.detach())


def test_backward_under_anomaly_detection_is_right() -> None:
    """It looks at outputs alone."""
    function, x = Function(), leaf()
    with torch.autograd.set_detect_anomaly(True):
        y = function(x)
        (y * y).sum().backward()
    torch.testing.assert_close(x.grad, 18 * x.detach())


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    "value",
    [torch.ones(3).as_subclass(Subclass), torch.ones(3, requires_grad=True), torch.ones(3), None, 2.0],
    ids=["subclass", "requires-grad", "not-the-engine's", "none", "number"],
)
def test_own_leaves_everything_else_alone(value) -> None:
    """The same object stands in the list, and it is whole."""
    given = [value]
    own(given)
    assert given[0] is value
    if isinstance(value, torch.Tensor):
        assert value.numel() == 3


def test_own_leaves_what_is_no_list_alone() -> None:
    """A tuple cannot be given another tensor."""
    values = (torch.ones(3),)
    own(values)
    assert values[0].numel() == 3


def test_nothing_is_taken_where_counting_tells_nothing(monkeypatch) -> None:
    """With a torch whose counts do not change with a second owner, the engine keeps all, and the reason says so."""
    alone = engine_references()
    monkeypatch.setattr(cotangents, "_counted", lambda share: alone)
    engine_references.cache_clear()
    try:
        assert engine_references() is None
        assert cotangents.why_not() == "this torch does not tell who else has a cotangent"
        function, x = Function(), leaf()
        y = function(x)
        (y * y).sum().backward()
        assert function.freed == [False]
    finally:
        monkeypatch.undo()
        engine_references.cache_clear()
