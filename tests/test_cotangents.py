"""own_cotangents at run time: what is taken over from the engine, and that whoever else has a cotangent keeps it."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from thunder.executors.torch_autograd import connect_to_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

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
        gradient = given * 3
        memory = StorageWeakRef(given.untyped_storage()) if torch._C._has_storage(given) else None
        del given
        self.freed.append(memory is not None and memory.expired())
        return (gradient,)


@pytest.fixture(autouse=True)
def measured() -> None:
    """A compile asks before it writes the statement."""
    engine_references()


def leaf() -> torch.Tensor:
    return torch.randn(SIZE, requires_grad=True)


def test_engine_references_tell_here() -> None:
    """Counting works with this torch and Python, and every second owner is seen."""
    alone = engine_references()
    assert alone is not None
    assert len(set(alone)) == 2, "one count for a tensor, another for a view"
    assert not any(cotangents._counted(share) in alone for share in cotangents._OTHER_OWNERS)


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


# ---------------------------------------------------------------- who calls the backward, and how


def test_batched_cotangents_are_left_alone() -> None:
    """Those of ``is_grads_batched`` and of a vectorized jacobian are plain tensors by their type, but have no storage to count."""
    function, x = Function(), torch.randn(4, requires_grad=True)
    (jacobian,) = torch.autograd.grad(function(x) * 2, x, torch.eye(4), is_grads_batched=True)
    torch.testing.assert_close(jacobian, 6 * torch.eye(4))
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(lambda x: Function()(x) * 2, x, vectorize=True), 6 * torch.eye(4)
    )


@pytest.mark.parametrize("names", range(4))
def test_node_called_without_the_engine_leaves_its_argument_whole(names: int) -> None:
    """A ``.grad`` counts as much as the engine does, but no engine is there."""
    function, x, weight = Function(), leaf(), leaf()
    weight.grad = torch.ones(SIZE)
    y, held = function(x), [weight.grad] * names
    *_, gradient = y.grad_fn.apply(*[weight.grad])
    del held
    torch.testing.assert_close(gradient, 3 * torch.ones(SIZE))
    torch.testing.assert_close(weight.grad, torch.ones(SIZE))
    assert function.freed == [False]


@pytest.mark.parametrize("names", range(4))
def test_count_made_while_dynamo_runs_another_thread_is_not_taken_for_another(names: int, monkeypatch) -> None:
    """Python then holds the engine's arguments longer: what that adds must not hide a user's references once it is over."""
    inside, over = threading.Event(), threading.Event()

    def wait() -> None:
        torch._dynamo.graph_break()
        inside.set()
        over.wait()

    monkeypatch.setattr(cotangents, "_alone", {})
    thread = threading.Thread(target=torch.compile(wait, backend="eager"))
    thread.start()
    try:
        assert inside.wait(60)
        there = engine_references()
    finally:
        over.set()
        thread.join()
    here = cotangents._counted(cotangents._nobody_else)
    assert there is not None and there[0].python >= here.python
    is_quiet = there[0].python > here.python  # no thread of an earlier test is still in Dynamo
    for _ in range(2):  # before and after this thread has asked for itself
        function, x, kept = Function(), leaf(), []
        y = function(x)
        y.register_hook(lambda given, kept=kept: kept.extend([given] * names))
        (y * y).sum().backward()
        for given in kept:
            torch.testing.assert_close(given, 2 * y.detach())
        torch.testing.assert_close(x.grad, 18 * x.detach())
        engine_references()
    assert function.freed == [names == 0] or (function.freed == [False] and not is_quiet)


class Listener(TorchFunctionMode):
    """Keeps every tensor that a function of torch's is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.kept += [arg for arg in args if isinstance(arg, torch.Tensor)]
        return function(*args, **(kwargs or {}))


def test_function_mode_neither_sees_nor_keeps_an_emptied_tensor() -> None:
    """Counting and taking over are no calls of the user's program: with them or without, a mode is shown the same tensors."""
    shown = []
    for owns in (True, False):
        function, x = Function(owns), leaf()
        y = function(x)
        loss = (y * y).sum()
        with Listener() as listener:
            torch.autograd.backward(loss)  # the method of a tensor would lift the mode
        torch.testing.assert_close(x.grad, 18 * x.detach())
        shown.append([tensor.shape for tensor in listener.kept])
    assert shown[0] and shown[0] == shown[1]


def test_what_a_hook_notes_on_a_cotangent_stays_on_it() -> None:
    """A backward may return its cotangent, and a later hook look for the note."""

    def note(given: torch.Tensor) -> None:
        given.scaled = True

    function, x = Function(), leaf()
    y = function(x)
    y.register_hook(note)
    (y * y).sum().backward()
    assert function.freed == [False]


# ---------------------------------------------------------------- views


class Views(torch.autograd.Function):
    """y -> 2 y, whose backward gives a view of a tensor twice as long, as one that ends in a slice and a reshape; keeps what it is told to."""

    @staticmethod
    def forward(context, y, kept, keep):
        context.kept, context.keep = kept, keep
        return 2 * y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        whole = torch.cat([2 * gradient, gradient])
        kept = {
            "base": whole,
            "sibling": whole[SIZE:],
            "overlapping": whole[SIZE // 2 :],
            "storage": whole.untyped_storage(),
        }
        if context.keep in kept:
            context.kept += [kept[context.keep], whole.clone()]
        return whole.view(2, SIZE)[0], None, None


@pytest.mark.parametrize("keep", ["", "base", "sibling", "overlapping", "storage"])
def test_view_is_taken_over_where_nobody_else_has_what_it_is_a_view_of(keep: str) -> None:
    """All of its memory goes then; whoever kept the tensor, another view or the storage finds it whole."""
    function, x, kept = Function(), leaf(), []
    Views.apply(function(x), kept, keep).square().sum().backward()
    torch.testing.assert_close(x.grad, 72 * x.detach())
    assert function.freed == [not keep]
    if keep == "storage":
        kept[0] = torch.empty(0).set_(kept[0], 0, (2 * SIZE,), (1,))
    if keep:
        got, whole = kept
        assert got.numel() in (2 * SIZE, SIZE, SIZE + SIZE // 2)
        torch.testing.assert_close(got, whole[-got.numel() :])


@pytest.mark.parametrize("hook", [lambda kept, given: kept.append(given), lambda kept, given: kept.append(given._base)])
def test_view_that_a_hook_keeps_stays_whole(hook) -> None:
    """The view, or what it is a view of."""
    function, x, kept = Function(), leaf(), []
    y = function(x)
    y.register_hook(lambda given: hook(kept, given))
    Views.apply(y, [], "").square().sum().backward()
    torch.testing.assert_close(x.grad, 72 * x.detach())
    torch.testing.assert_close(kept[0][:SIZE], 8 * y.detach())
    assert function.freed == [False]


# ---------------------------------------------------------------- the question that is asked at compile time


def test_question_saves_no_tensor_and_calls_nothing_that_a_mode_sees(monkeypatch) -> None:
    """A checkpoint around the compile counts saved tensors; one more in the first forward than in the second is an error there."""
    monkeypatch.setattr(cotangents, "_alone", {})
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), Listener() as listener:
        assert engine_references() is not None
    assert not saved and not listener.kept


def test_question_is_answered_on_the_cpu_whatever_the_default_device(monkeypatch) -> None:
    """No device is touched for it."""
    monkeypatch.setattr(cotangents, "_alone", {})
    with torch.device("meta"):
        assert engine_references() is not None


def test_question_without_an_answer_is_asked_again(monkeypatch) -> None:
    """Under compiled autograd, say, nothing can be told; the next compile may be another matter."""
    monkeypatch.setattr(cotangents, "_alone", {})

    def answer(share):
        raise RuntimeError("compiled autograd")

    with monkeypatch.context() as patch:
        patch.setattr(cotangents, "_counted", answer)
        assert engine_references() is None
    assert engine_references() is not None


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
    assert alone is not None
    monkeypatch.setattr(cotangents, "_counted", lambda share: alone[0])
    monkeypatch.setattr(cotangents, "_alone", {})
    assert engine_references() is None
    assert cotangents.why_not() == "this torch does not tell who else has a cotangent"
    function, x = Function(), leaf()
    y = function(x)
    (y * y).sum().backward()
    assert function.freed == [False]
