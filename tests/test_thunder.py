"""`_thunder` and the package's joining of Thunder: its mends, versions, and registration in every order of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import GraphBuilder

from thunder_fusionfix import _thunder
from thunder_fusionfix.alias import aliases
from thunder_fusionfix.capture import capture
from thunder_fusionfix.model import Op


def run(code):
    """Standard output of ``code`` in a new Python."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.nvfuser
def test_mend_gives_thunder_the_function_that_nvfuser_has(monkeypatch):
    """The function that fails is replaced once, by one that describes a tensor as Thunder documents it."""
    with _thunder.nvfuser_registered():
        impl = _thunder.nvfuser_impl()
    assert _thunder.mend_nvfuser() is False

    def fails(shape, stride):
        from nvfuser import compute_tensor_descriptor

        return compute_tensor_descriptor(shape, stride)

    monkeypatch.setattr(impl, "compute_contiguity", fails)
    with pytest.raises(ImportError):
        impl.compute_contiguity((2, 3), (3, 1))
    assert _thunder.mend_nvfuser() is True
    assert impl.compute_contiguity((1, 2, 3), (6, 3, 1)) == ((None, True, True), (2, 1, 0))
    assert impl.compute_contiguity((2, 3, 4), (12, 1, 3)) == ((True, True, True), (2, 0, 1))
    assert _thunder.mend_nvfuser() is False


@pytest.mark.nvfuser
def test_mend_leaves_an_older_nvfuser_alone(monkeypatch):
    """Where the module that Thunder asks is installed, nothing is replaced."""
    with _thunder.nvfuser_registered():
        impl = _thunder.nvfuser_impl()

    def original(shape, stride):
        return None

    monkeypatch.setattr(impl, "compute_contiguity", original)
    monkeypatch.setattr(_thunder.importlib.util, "find_spec", lambda name: name == "nvfuser" or None)
    assert _thunder.mend_nvfuser() is False
    assert impl.compute_contiguity is original


LOSSES = {
    "label smoothing": (torch.float32, {"label_smoothing": 0.1}, False),
    "class weights": (torch.float32, {"weight": torch.ones(10)}, False),
    "sum": (torch.float32, {"reduction": "sum"}, False),
    "bfloat16": (torch.bfloat16, {}, False),
    "a label that is ignored": (torch.float32, {"ignore_index": 3}, False),
    "what the rule was written for": (torch.float32, {}, True),
}


@pytest.mark.nvfuser
@pytest.mark.parametrize(("dtype", "options", "accepted"), LOSSES.values(), ids=list(LOSSES))
def test_an_executors_gradient_rule_is_taken_where_its_checker_accepts_the_op(dtype, options, accepted):
    """nvFuser's rule for `cross_entropy` ignores smoothing and weights, gives ignored labels >= 0 a gradient, and what it makes of bfloat16 does not compile."""
    logits, labels = torch.zeros(8, 10, dtype=dtype, requires_grad=True), torch.zeros(8, dtype=torch.long)
    options = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    captured = capture(lambda x, y, kw: F.cross_entropy(x, y, **kw), (logits, labels, options))
    assert ("nv_cross_entropy" in str(captured.forward)) == accepted


def test_mend_of_gradient_rules_is_done_once_and_for_tested_releases(monkeypatch):
    """An executor that can fuse an op but refuses it has no say in its gradient; others keep theirs."""
    assert _thunder.mend_gradient_rules() is False

    class Executor:
        def __init__(self, accepts: bool) -> None:
            self.accepts = accepts

        def can_execute(self, bsym) -> bool:
            return self.accepts

    op = SimpleNamespace(sym=SimpleNamespace(id="an op without a rule of Thunder's"), args=())
    transforms = _thunder.thunder.core.transforms
    for accepts in (True, False):
        executor = Executor(accepts)
        with monkeypatch.context() as patch:
            patch.setattr(
                transforms, "_get_gradfn_and_executor", lambda bsym, executor=executor: ("its rule", executor)
            )
            patch.setattr(_thunder.thunder.transforms.autodiff, "_get_gradfn_and_executor", None)
            patch.setattr(_thunder, "_thunder_version", lambda: "0.1.0")
            assert _thunder.mend_gradient_rules() is False
        with monkeypatch.context() as patch:
            patch.setattr(
                transforms, "_get_gradfn_and_executor", lambda bsym, executor=executor: ("its rule", executor)
            )
            patch.setattr(_thunder.thunder.transforms.autodiff, "_get_gradfn_and_executor", None)
            assert _thunder.mend_gradient_rules() is True
            mended = transforms._get_gradfn_and_executor
            assert mended is _thunder.thunder.transforms.autodiff._get_gradfn_and_executor
            assert mended(op) == (("its rule", executor) if accepts else (None, None))


def test_replaced_restores_after_an_error():
    """A replaced attribute comes back, and one that was inherited is inherited again."""

    class Base:
        value = 1

    class Child(Base):
        pass

    with pytest.raises(ZeroDivisionError), _thunder.replaced(Child, "value", 2):
        assert (Child.value, Base.value) == (2, 1)
        raise ZeroDivisionError
    assert "value" not in vars(Child)


@pytest.mark.parametrize(
    ("version", "release", "expected"),
    [("2.10.0+cu128", "2.10", True), ("2.10", "2.10", True), ("2.1.0", "2.10", False), ("2.100.0", "2.10", False)],
)
def test_is_release_tells_patches_from_other_releases(version, release, expected):
    """A patch or build is the release; a longer number is another one."""
    assert _thunder._is_release(version, release) is expected


def test_installed_versions_are_tested_ones():
    """The environment of the tests is one that the project says it was tested with."""
    assert _thunder.untested_versions() == ()
    assert _thunder.warn_untested_versions() is False


def test_an_untested_version_is_named_once(monkeypatch):
    """One warning names every untested package with its version and the tested ones; what is missing is no fault."""
    versions = {"torch": "3.0.1", "lightning-thunder": "0.3.0", "nvFuser": None}
    monkeypatch.setattr(_thunder, "installed_versions", lambda: versions)
    _thunder.warn_untested_versions.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [_thunder.warn_untested_versions() for _ in range(2)] == [True, True]
        (warning,) = caught
        assert "torch 3.0.1 (tested: 2.10, 2.11); lightning-thunder 0.3.0 (tested: 0.2.6)" in str(warning.message)
        assert "nvFuser" not in str(warning.message)
    finally:
        _thunder.warn_untested_versions.cache_clear()


def test_importing_the_package_does_not_import_torch():
    """The pure layers and the command's help load without torch and Thunder."""
    code = "import sys, thunder_fusionfix.model; print(sorted({'torch', 'thunder'} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.parametrize("first", ["thunder", "thunder_fusionfix.read"])
def test_package_joins_thunder_whichever_is_imported_first(first):
    """Plugin and executor are registered, whatever the order of imports."""
    code = (
        f"import {first}, thunder_fusionfix, thunder; from thunder.plugins import get_plugin_names; "
        "print('fusionfix' in get_plugin_names(), thunder.extend.get_executor('fusionfix').name)"
    )
    assert run(code) == "True fusionfix"


def test_public_names_exist():
    """Every name in `__all__` can be taken from the package."""
    import thunder_fusionfix

    assert all(getattr(thunder_fusionfix, name) is not None for name in thunder_fusionfix.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        thunder_fusionfix.nothing  # noqa: B018


# ---------------------------------------------------------------- Thunder's executor of cuDNN

# The package as far as Thunder's executor needs it to be imported; no cuDNN behind it.
STUB_CUDNN = """
import sys, types
cudnn = types.ModuleType("cudnn")
cudnn.__version__, cudnn.backend_version = "1.26.0", lambda: 91002
cudnn.data_type = type("data_type", (), {})
sys.modules["cudnn"] = cudnn
from thunder_fusionfix import _thunder
"""


def test_every_operator_of_thunders_cudnn_executor_has_a_row() -> None:
    """Without dropout they are pure; the forward draws where it drops out, the backward is given what was drawn."""
    code = """
from thunder.extend import get_executor
from thunder_fusionfix.effects import effect_of
from thunder_fusionfix.model import Op, Ref
qkv = (Ref("q"), Ref("k"), Ref("v"), None)
for name in sorted(get_executor("cudnn")._opmap):
    args = ((*qkv, dropout, True) for dropout in (0.0, 0.1))
    print(name, *(effect_of(Op(name, given)).kind.value for given in args))
"""
    assert run(STUB_CUDNN + code).splitlines() == ["cudnn_sdpa_bwd compute compute", "cudnn_sdpa_fwd compute random"]


def test_strides_after_cudnn_attention_are_those_that_thunder_allocates() -> None:
    """Result and log-sum-exp are row-major, also where the query is a transposed view."""
    code = """
import contextlib, torch
from thunder.executors import cudnn_sdpa
graph = type("Graph", (), {"get_workspace_size": lambda self: 8, "execute": lambda self, *args, **kwargs: None})()
cudnn_sdpa._make_cudnn_sdpa_forward_graph = lambda *args: (*"QKVS", None, None, None, "output", "sums", graph)
cudnn_sdpa._get_cudnn_handle = lambda device: None
torch.cuda.device = lambda device: contextlib.nullcontext()
q = torch.rand(2, 16, 3, 8).transpose(1, 2)
out, sums, *_ = cudnn_sdpa._cudnn_sdpa_fwd_impl(q, q, q, None, 0.0, True)
print([q.stride(), out.stride(), sums.stride()])
"""
    given, *expected = ast.literal_eval(run(STUB_CUDNN + code))
    build = GraphBuilder()
    q = build.arg("q", (2, 3, 16, 8), strides=given)
    outputs = build.value("out", (2, 3, 16, 8)), build.value("sums", (2, 3, 16, 1)), build.value("seed", (1, 1, 1, 1))
    build.ops.append(Op("cudnn_sdpa_fwd", (q, q, q, None, 0.0, True), outputs))
    strides = aliases(build.returns(outputs)).strides
    assert [strides["out"], strides["sums"]] == expected and strides["seed"] is None
