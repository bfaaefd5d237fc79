"""The plugin: one word, or one object, switches the transform on in any of Thunder's recipes."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
from cpu_nvfuser import calls, nvfuser_on_cpu
from thunder.core.recipe import PluginPolicy
from thunder.plugins import get_plugin
from thunder.recipes import BaseRecipe

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.plugin import FusionFix
from thunder_fusionfix.transform import FusionFixTransform


class Scores(torch.nn.Module):
    """A transpose of a computed tensor, which nvFuser takes into its region."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return torch.matmul((x.exp() * 2).t(), self.weight)


def step(model):
    """Output and gradient of the weight of one step."""
    torch.manual_seed(1)
    out = model(torch.randn(4, 5, requires_grad=True))
    out.sum().backward()
    return out, model.get_parameter("weight").grad


@pytest.mark.nvfuser
def test_plugin_by_name_fixes_the_model():
    """The model's regions hold no transpose, and its output and gradient are eager's."""
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = step(thunder.compile(Scores(), recipe=BaseRecipe(fuser="nvfuser"), plugins="fusionfix"))
        ran = list(calls)
    assert ran and not any("transpose" in name for name in ran)
    torch.testing.assert_close(got, step(Scores()))


@pytest.mark.nvfuser
def test_plugin_as_an_object_takes_options_and_holds_the_report():
    """What the transform of the object did can be asked for; an option reaches it."""
    plugin, off = FusionFix(strict=True), FusionFix(unfuse_layouts=False)
    for one in (plugin, off):
        with nvfuser_on_cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(thunder.compile(Scores(), recipe=BaseRecipe(fuser="nvfuser"), plugins=one))
    assert [report.stage for report in plugin.transform.reports] == ["forward", "backward"]
    assert "sunk transpose" in plugin.transform.report() and "sunk" not in off.transform.report()


def test_plugin_stands_after_the_recipes_own_transforms():
    """It sees what the recipe made, and adds one transform and nothing else."""
    plugin = FusionFix()
    assert plugin.policy is PluginPolicy.POST
    (transform,) = plugin.setup_transforms()
    assert isinstance(transform, FusionFixTransform)
    assert plugin.setup_executors() is None and plugin.setup_lookasides() is None


def test_plugin_is_known_to_thunder_by_name():
    """The name gives the class, so that each model gets a plugin of its own."""
    assert get_plugin("fusionfix") is FusionFix
    assert get_plugin("fusionfix")().transform is not get_plugin("fusionfix")().transform


def test_wrong_option_of_the_plugin_fails_where_it_is_given():
    """An unknown option is an error that names it, before anything is compiled."""
    with pytest.raises(UsageError, match="no option 'fule'"):
        FusionFix(fule=3)
