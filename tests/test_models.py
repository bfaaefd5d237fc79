"""`models`: every name builds, sizes are checked, and files that do not fit are refused in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thunder_fusionfix import models
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.models import MODELS, load_model

SMALL = {
    "qwen2.5-7b": {"layers": 1, "hidden_size": 28},
    "qwen2.5-0.5b": {"layers": 1, "hidden_size": 28},
    "llama-3.2-1b": {"layers": 1, "hidden_size": 64},
    "llama-3-8b": {"layers": 1, "hidden_size": 64},
    "mixtral-small": {"layers": 1, "hidden_size": 32},
    "gpt2": {"layers": 1, "hidden_size": 24},
    "gpt-neox": {"layers": 1, "hidden_size": 256},
    "vit": {"layers": 1, "hidden_size": 24},
}
RUNNABLE = {  # small enough to compute on a CPU in a moment
    "mixtral-small": {"layers": 2, "hidden_size": 32, "seq": 8, "batch": 2},
    "gpt2": {"layers": 1, "hidden_size": 24, "seq": 8},
    "vit": {"layers": 1, "hidden_size": 24, "seq": 4, "batch": 2},
    "causal-lm-loss": {"seq": 4, "batch": 2},
    "causal-lm-loss-shifted-labels": {"seq": 4, "batch": 2},
}


def write(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_on_meta_in_bfloat16(name):
    """A named model takes no memory, and its weights are bf16 whatever the caller's default dtype is."""
    program = load_model(name, **SMALL.get(name, {}))
    tensors = [*program.args, *program.kwargs.values()]
    if isinstance(program.fn, torch.nn.Module):
        assert {parameter.dtype for parameter in program.fn.parameters()} == {torch.bfloat16}
        tensors += program.fn.parameters()
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_model_computes_a_finite_loss_and_gradients(name):
    """The program is a training step: a scalar loss with a gradient for everything that requires one."""
    torch.manual_seed(0)
    program = load_model(name, **RUNNABLE[name], device="cpu")
    out = program.fn(*program.args, **program.kwargs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    assert loss.isfinite()
    inputs = program.fn.parameters() if isinstance(program.fn, torch.nn.Module) else program.args[:1]
    assert all(tensor.grad is not None for tensor in inputs)


def test_both_forms_of_the_loss_are_equal():
    """Shifting the labels instead of the logits changes nothing but the layout."""
    torch.manual_seed(0)
    first = load_model("causal-lm-loss", seq=6, batch=2, device="cpu")
    second = load_model("causal-lm-loss-shifted-labels", seq=6, batch=2, device="cpu")
    torch.testing.assert_close(first.fn(*first.args), second.fn(*first.args))


def test_sizes_of_the_public_report_are_kept():
    """hidden_size=28 changes the width alone: 28 heads, 4 of them for keys, and the vocabulary stay."""
    model = load_model("qwen2.5-7b", layers=2, hidden_size=28).fn
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (28, 4, 152064)
    assert (config.intermediate_size, len(model.model.layers)) == (18944, 2)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3", {}, "no model 'qwen3'; choose one of qwen2.5-7b, .*or give file.py:function"),
        ("causal-lm-loss", {"layers": 2}, "causal-lm-loss has no layers"),
        ("qwen2.5-7b", {"seq": 0}, "seq=0: at least 1"),
        ("qwen2.5-7b", {"hidden_size": 30}, r"hidden_size=30: 28 \(heads\), or 28 times an even number"),
        ("qwen2.5-7b", {"hidden_size": 84}, "hidden_size=84"),
        ("vit", {"seq": 200}, "seq=200: for vit a square number"),
        ("there/is/none.py:build", {}, "there/is/none.py: there is no such file"),
        ("program.py", {}, "name the function too, as in program.py:build"),
    ],
)
def test_a_wrong_name_or_size_is_refused_with_what_is_legal(name, sizes, message):
    """The message names what was given and what can be given."""
    with pytest.raises(UsageError, match=message):
        load_model(name, **sizes)


def test_a_file_gives_callable_and_arguments(tmp_path):
    """A user's function returns a callable, positional arguments and, where it likes, keyword arguments."""
    path = write(
        tmp_path, "import torch\ndef two(): return torch.exp, [1]\ndef three(): return torch.add, (1,), {'other': 2}"
    )
    program = load_model(f"{path}:two")
    assert (program.name, program.fn, program.args, dict(program.kwargs)) == ("two", torch.exp, (1,), {})
    program = load_model(f"{path}:three")
    assert (program.args, dict(program.kwargs)) == ((1,), {"other": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no function 'build'"),
        ("build = 3", "defines no function 'build'"),
        ("import no_such_module", "failed when it was run: ModuleNotFoundError"),
        ("def build(): return 1 / 0", ":build failed: ZeroDivisionError: division by zero"),
        ("def build(): return print", r"must return \(callable, args\)"),
        ("def build(): return 3, ()", r"must return \(callable, args\)"),
        ("def build(): return print, 3", "args as a tuple or list"),
        ("def build(): return print, (), 3", "kwargs as a dict"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, message):
    """Each way in which a file can be wrong has its own line."""
    with pytest.raises(UsageError, match=message):
        load_model(f"{write(tmp_path, text)}:build")


def test_sizes_are_refused_for_files(tmp_path):
    """A file makes its own sizes."""
    with pytest.raises(UsageError, match="sizes are for named models"):
        load_model(f"{write(tmp_path, 'def build(): return print, ()')}:build", layers=2)


@pytest.mark.parametrize(("release", "options"), [("4.47.1", {}), ("5.0.0", {"use_cache": False})])
def test_release_5_trains_without_a_cache(release, options):
    """From release 5 on a cache of keys would split the graph at each layer; before, models are left as users have them."""
    assert models._of_release(SimpleNamespace(__version__=release)) == options
