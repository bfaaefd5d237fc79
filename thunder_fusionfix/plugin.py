"""The Thunder plugin: ``thunder.compile(model, plugins="fusionfix")`` adds the transform to any recipe.

Give an object instead of the name to set options, or to read the report:

    plugin = FusionFix(memory_budget="60GB")
    model = thunder.compile(model, plugins=plugin)
    ...
    print(plugin.transform.report())

It stands after the recipe's own transforms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thunder_fusionfix._thunder import Plugin, PluginPolicy, Transform, register_plugin

if TYPE_CHECKING:
    from thunder_fusionfix.transform import FusionFixTransform


class FusionFix(Plugin):
    """Adds `FusionFixTransform` after the recipe's own transforms.

    Args:
        **options: those of `FusionFixTransform`.

    Raises:
        UsageError: an option is unknown or has an illegal value.
    """

    policy = PluginPolicy.POST

    def __init__(self, **options: Any):
        # here, because this module is imported on joining Thunder, which may happen while `read` is being imported
        from thunder_fusionfix.transform import FusionFixTransform

        self.transform: FusionFixTransform = FusionFixTransform(**options)

    def setup_transforms(self) -> list[Transform]:
        return [self.transform]


register_plugin("fusionfix", FusionFix)
