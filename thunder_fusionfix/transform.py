"""`FusionFixTransform`: the adapter by which Thunder calls the final passes. It decides nothing.

    from thunder.dynamo import ThunderCompiler
    from thunder_fusionfix import FusionFixTransform

    fix = FusionFixTransform()
    backend = ThunderCompiler(executors=("sdpa", "torchcompile_cat", "nvfuser"), transforms=[fix])
    model = torch.compile(model, backend=backend)
    ...
    print(fix.report())

It stands anywhere in a list of transforms; those after it see the fixed traces.
"""

from __future__ import annotations

from typing import Any

from thunder_fusionfix._thunder import TraceCtx, Transform, given_options
from thunder_fusionfix.config import PREFIX, FusionFixConfig, option_names
from thunder_fusionfix.joint import JointReport
from thunder_fusionfix.model import Report
from thunder_fusionfix.pipeline import fix_trace


class FusionFixTransform(Transform):
    """Takes memory-costly layout ops out of fusions, after Thunder made them.

    One object may serve every subgraph of a program; it keeps no state between calls but its reports.

    Args:
        **options: see `FusionFixConfig`; each may be given to Thunder instead, with the prefix ``fusionfix_``. The entry
            "fusionfix" in the executor list takes them as well.

    Raises:
        UsageError: an option is unknown or has an illegal value.
    """

    def __init__(self, **options: Any):
        FusionFixConfig.from_options(options)  # a wrong option fails here, not inside a compile
        self.options = options
        self.reports: list[Report] = []  # one for each trace that was looked at, in the order of compilation
        self.entry_reports: list[JointReport] = []  # what the entry "fusionfix" did to each trace before its fusions

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        config = FusionFixConfig.from_options({**given_options(PREFIX, option_names()), **self.options})
        fixed, report = fix_trace(computation_trace, config)
        if report is not None:
            self.reports.append(report)
        return fixed

    def report(self) -> str:
        """What was done and what was refused, trace by trace, with the reason and the bytes of each decision; the entry's first."""
        from thunder_fusionfix.report import (
            entry_text,
            report_text,
        )  # for people only: a training step needs none of it

        parts = [*map(entry_text, self.entry_reports), *map(report_text, self.reports)]
        return "\n\n".join(parts) or "no trace with fusion regions was compiled"

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"thunder_fusionfix.FusionFixTransform({options})"
