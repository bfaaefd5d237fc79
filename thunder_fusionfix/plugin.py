"""The Thunder plugin: ``thunder.compile(model, plugins="fusionfix")`` adds the transform to any recipe."""

from __future__ import annotations

from thunder_fusionfix._thunder import Plugin, PluginPolicy, Transform, register_plugin


class FusionFix(Plugin):
    """Adds `FusionFixTransform` after the recipe's own transforms."""

    policy = PluginPolicy.POST

    def setup_transforms(self) -> list[Transform]:
        # here, because this module is imported on joining Thunder, which may happen while `read` is being imported
        from thunder_fusionfix.transform import FusionFixTransform

        return [FusionFixTransform()]


register_plugin("fusionfix", FusionFix)
