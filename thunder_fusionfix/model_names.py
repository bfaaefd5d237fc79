"""What a user may call a model: one of `NAMES`, or file.py:function. Known without torch, so that a wrong name fails at once.

>>> check_name("causal-lm-loss")
>>> check_name("qwen2.5")
Traceback (most recent call last):
thunder_fusionfix.errors.UsageError: no model 'qwen2.5'; the nearest is qwen2.5-7b. Choose one of qwen2.5-7b, ...
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from thunder_fusionfix.errors import UsageError

# The keys of `models.MODELS`, which takes torch to import.
NAMES = (
    *("qwen2.5-7b", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b", "mixtral-small", "gpt2", "gpt-neox", "vit"),
    *("causal-lm-loss", "causal-lm-loss-shifted-labels"),
)


def check_name(name: str) -> None:
    """Raises `UsageError` where ``name`` is no model's and no file.py:function with a file that is there."""
    if is_file_and_function(name):
        file_and_function(name)
    elif name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"; the nearest is {near[0]}. Choose" if near else "; choose"
        raise UsageError(f"no model {name!r}{hint} one of {', '.join(NAMES)}, or give file.py:function")


def is_file_and_function(name: str) -> bool:
    """True for what is meant as file.py:function."""
    return ":" in name or name.endswith(".py")


def file_and_function(name: str) -> tuple[str, str]:
    """Both halves of "file.py:function".

    Raises:
        UsageError: one of them is missing, or there is no such file.
    """
    path, _, function = name.rpartition(":")
    if not path or not function:
        raise UsageError(f"{name}: name the function too, as in {name.rstrip(':')}:build")
    if not Path(path).is_file():
        raise UsageError(f"{path}: there is no such file; give the path of a Python file")
    return path, function
