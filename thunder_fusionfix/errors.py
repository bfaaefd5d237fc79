"""The exceptions of the project.

A message names the pass, the stage, the rule, the trace position and the symbol, and ends with what to do next.
"""

from __future__ import annotations


class FusionFixError(Exception):
    """Base of every error that the project raises on purpose."""


class UsageError(FusionFixError, ValueError):
    """An option, a file or a name that the user gave is wrong; one line that names it and says what is legal."""


class UnsupportedTraceError(FusionFixError):
    """The trace holds something that we cannot read or edit; the caller keeps its trace."""


class VerifyError(FusionFixError):
    """A rewritten trace broke a rule of `verify`: a bug of ours; the caller keeps its trace."""
