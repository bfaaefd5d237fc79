"""`capture`: what Thunder makes of a program, on any machine, and nothing left behind."""

from __future__ import annotations

import gc
import re

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_fusionfix import _thunder
from thunder_fusionfix.capture import EXECUTORS, capture
from thunder_fusionfix.errors import UsageError

FUSION_TYPES = ("consecutive", "dataflow")


def loss(logits, labels):
    wide = logits.float()[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return F.cross_entropy(wide, labels[..., 1:].contiguous().view(-1))


def loss_args(device="meta"):
    logits = torch.empty(2, 8, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    return logits, torch.zeros(2, 8, dtype=torch.int64, device=device)


class Tied(torch.nn.Module):
    """Embedding and output share one weight; a buffer and a plain attribute hold tensors too."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(4))
        self.shift = [torch.zeros(4)]

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens) * self.scale + self.shift[0])).float().logsumexp(-1).sum()


class Broken(torch.nn.Module):
    """Two graphs, and a function in the second one that Thunder does not have."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return torch.sinc(torch.exp(x) * 2).sum()


def text(trace):
    """The printed trace without times."""
    return re.sub(r"took \d+ milliseconds", "", str(trace))


def fusions(trace):
    return [bsym.sym.name for bsym in trace.bound_symbols if bsym.sym.is_fusion]


def state():
    """Everything that a capture might leave changed."""
    from thunder.dynamo import splitter
    from thunder.transforms import autodiff

    executors = thunder.get_all_executors()
    return {
        "registry": [executor.name for executor in executors],
        "fusion passes": [vars(executor).get("fusion_pass") for executor in executors],
        "is_available": torch.cuda.is_available,
        "splitter": splitter.is_node_supported_by_thunder,
        "split": autodiff.split_into_forward_and_backward,
        "inductor": torch._inductor.compile,
        "fallbacks": (_thunder.ltorch._get_fake_arg, _thunder.ltorch._fake_type_to_thunder),
        "recompile limit": torch._dynamo.config.recompile_limit,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "gc": gc.isenabled(),
        "nvfuser version": getattr(_thunder.sys.modules.get(_thunder._NVFUSER_IMPL), "nvfuser_version", None),
    }


@pytest.mark.nvfuser
@pytest.mark.parametrize("fusion_type", FUSION_TYPES)
def test_capture_of_a_loss_has_nvfusers_regions(fusion_type):
    """nvFuser's real fusion pass runs: the regions hold what it claims, on the device that was asked for."""
    got = capture(loss, loss_args(), fusion_type=fusion_type)
    assert fusions(got.forward)[0] == "nvFusion0"
    assert any(name.startswith("nvFusion") for name in fusions(got.backward))
    assert "cuda:0 bf16[2, 8, 16]" in str(got.forward)


@pytest.mark.nvfuser
def test_capture_keeps_the_joint_trace_before_and_after_fusion():
    """`joint` is what the last fusion executor is given, `fused` what is split."""
    part = capture(loss, loss_args()).largest
    assert not fusions(part.joint)
    assert [name for name in fusions(part.fused) if name.startswith("nvFusion")]


def test_capture_without_fusion_executors_keeps_the_trace_before_the_split():
    """With no fusion executor, `joint` still holds forward and backward in one."""
    part = capture(loss, loss_args(), executors=("sdpa",)).largest
    assert part.joint is part.fused
    assert "nll_loss_backward" in str(part.joint)
    assert "nll_loss_backward" not in str(part.forward)


def test_capture_of_an_automatic_fallback_has_its_gradient():
    """Thunder finds the gradient of `torch.mm` by running autograd, which must not ask for a driver."""
    got = capture(torch.mm, (torch.empty(2, 3, requires_grad=True), torch.empty(3, 4)), executors=("sdpa",))
    assert "_vjp(" in str(got.backward)
    assert '"cuda:0 f32[2, 3]"' in str(got.backward)


def test_capture_of_a_checkpointed_module_traces_what_it_recomputes():
    """Thunder's splitter rewrites checkpointed functions; the program still runs to its end under fake tensors."""

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.inner(t)), x, use_reentrant=False)
            torch._dynamo.graph_break()
            return x.sum()

    got = capture(Checkpointed(), (torch.randn(2, 4),), executors=("torchcompile",))
    assert len(got.parts) == 2
    assert "tanh" in str(got.parts[0].forward)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_capture_of_real_and_meta_tensors_is_equal(device):
    """Only shapes, strides, dtypes and requires_grad of the arguments count."""
    expected = capture(loss, loss_args("cpu"), executors=("torchcompile",))
    got = capture(loss, loss_args(device), executors=("torchcompile",))
    assert text(got.forward) == text(expected.forward)
    assert text(got.backward) == text(expected.backward)


def test_capture_of_fake_tensors_is_equal():
    """Arguments may be fake already, in another mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = loss_args("cuda")
    got = capture(loss, args, executors=("torchcompile",))
    assert text(got.forward) == text(capture(loss, loss_args(), executors=("torchcompile",)).forward)


def test_capture_on_the_cpu_says_cpu():
    """`device` is where all tensors are said to be."""
    assert '"cpu bf16[2, 8, 16]"' in str(capture(loss, loss_args(), device="cpu").forward)


def test_capture_of_a_module_leaves_it_as_it_is_and_ties_tied():
    """A module is copied without its weights, and a shared parameter stays one parameter."""
    model = Tied()
    got = capture(model, (torch.zeros(2, 3, dtype=torch.int64),), executors=("torchcompile",))
    assert {tensor.device.type for tensor in (*model.parameters(), model.scale, model.shift[0])} == {"cpu"}
    assert type(model.shift[0]) is torch.Tensor
    assert str(got.forward).count('"cuda:0 f32[8, 4]"') == 1
    assert got.notes == ()


def test_capture_of_a_split_program_has_a_part_for_each_piece_and_says_what_is_left_out():
    """torch.compile's graphs and ThunderFX's pieces are the parts; what ThunderFX does not give to Thunder is named."""
    got = capture(Broken(), (torch.randn(2, 4),), executors=("torchcompile",))
    assert [part.name for part in got.parts] == [
        "thunder_0 of graph 0",
        "thunder_0 of graph 1",
        "thunder_2 of graph 1",
    ]
    assert all(part.backward is not None for part in got.parts)
    assert any("sinc" in note for note in got.notes)
    assert any("2 graphs" in note for note in got.notes)
    ended, cut = sorted(got.splits, key=lambda split: split.graph)
    assert (ended.by, ended.graph, ended.what.split(":")[0]) == ("torch.compile", 0, "test_capture.py")
    assert "graph break" in ended.why
    assert (cut.by, cut.graph, cut.what, cut.times) == ("ThunderFX", 1, "sinc", 1) and "fallback" in cut.why


def test_capture_knows_what_torch_compile_gets_between_thunders_pieces():
    """A piece of torch.compile's is no part, but what it takes, saves and gives is known, in the order of the calls."""
    got = capture(Broken(), (torch.randn(2, 4),), executors=("torchcompile",))
    assert [part.name for part in got.called] == [
        "thunder_0 of graph 0",
        "thunder_0 of graph 1",
        "inductor_1 of graph 1",
        "thunder_2 of graph 1",
    ]
    (between,) = got.between
    assert not between.is_thunders and between.backward is not None and "sinc" in str(between.forward)
    assert between not in got.parts and not fusions(between.forward)


def test_capture_again_is_equal():
    """A second capture in one process shows the same."""
    args = (torch.randn(2, 4),)
    first, second = (capture(Broken(), args, executors=("torchcompile",)) for _ in range(2))
    assert [text(part.forward) for part in first.parts] == [text(part.forward) for part in second.parts]


def test_capture_without_gradients_has_no_backward():
    """`grad=False`, or nothing that requires a gradient, gives one trace; only the second is worth a note."""
    got = capture(loss, loss_args(), executors=("torchcompile",), grad=False)
    assert (got.backward, got.notes) == (None, ())
    got = capture(torch.exp, (torch.ones(3),), executors=("torchcompile",))
    assert got.backward is None
    assert "no backward" in got.notes[0]


def test_capture_shows_what_transforms_change():
    """A transform's result is `forward`; what it was given is `forward_before`."""

    class Rename(thunder.Transform):
        def transform_trace_post_optimization(self, trace, **kwargs):
            new = _thunder.from_trace(trace)
            new.bound_symbols = list(trace.bound_symbols)
            return new

    given = [Rename()]
    part = capture(loss, loss_args(), executors=("torchcompile",), transforms=given).largest
    assert part.forward is not part.forward_before
    assert part.seconds.transforms > 0
    assert len(given) == 1
    plain = capture(loss, loss_args(), executors=("torchcompile",)).largest
    assert plain.forward is plain.forward_before


@pytest.mark.nvfuser
def test_part_compiling_lets_hooks_run_later():
    """Compile options can be read again, and nvFuser answers for its version, after the capture."""
    part = capture(loss, loss_args(), some_option=3).largest
    assert _thunder.get_compile_data() is None
    with part.compiling():
        assert _thunder.get_compile_option("some_option", "a test's") == 3
        assert _thunder.get_executor("nvfuser") in part.executors
    assert _thunder.get_compile_data() is None


@pytest.mark.parametrize("dynamo", [False, True])
def test_capture_undoes_what_it_patches(dynamo):
    """Thunder, torch and the garbage collector are as before."""
    before = state()
    capture(Tied(), (torch.zeros(2, 3, dtype=torch.int64),), dynamo=dynamo)
    assert {**before, "nvfuser version": None} == {**state(), "nvfuser version": None}
    again = state()
    capture(Tied(), (torch.zeros(2, 3, dtype=torch.int64),), dynamo=dynamo)
    assert again == state()


@pytest.mark.parametrize("dynamo", [False, True])
def test_capture_undoes_what_it_patches_after_an_error(dynamo):
    """The same where the program fails while it is traced."""

    class Fails(torch.nn.Module):
        def forward(self, x):
            return torch.exp(x).reshape(5)

    before = state()
    with pytest.raises(Exception, match=r"5|reshape"):
        capture(Fails(), (torch.randn(4, requires_grad=True),), executors=("torchcompile",), dynamo=dynamo)
    assert before == state()


def test_capture_without_nvfuser_says_so(monkeypatch):
    """Where nvFuser is not installed the other executors are used, with a note."""
    monkeypatch.setattr(_thunder, "nvfuser_version", lambda: None)
    got = capture(loss, loss_args(), executors=EXECUTORS)
    assert "nvFuser is not installed" in got.notes[0]
    assert not any(name.startswith("nvFusion") for name in fusions(got.forward))


def test_capture_of_arguments_that_share_memory_says_so():
    """Aliasing of arguments is not seen, and that is said."""
    base = torch.randn(4, 4, requires_grad=True)
    got = capture(lambda a, b: a * b, (base, base[1].detach()), executors=("torchcompile",))
    assert "share memory" in got.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executors": ("nvfusr",)}, "there is no executor 'nvfusr'; Thunder knows .*torchcompile_cat"),
        ({"fusion_type": "flow"}, "fusion_type='flow': 'dataflow' or 'consecutive'"),
    ],
)
def test_capture_with_a_wrong_option_names_it(options, message):
    """A wrong option is named together with what is legal."""
    with pytest.raises(UsageError, match=message):
        capture(loss, loss_args(), **options)


def test_capture_of_a_sparse_tensor_is_refused():
    """What cannot be captured is refused before anything is traced."""
    with pytest.raises(UsageError, match="sparse"):
        capture(torch.exp, (torch.eye(3).to_sparse(),))
