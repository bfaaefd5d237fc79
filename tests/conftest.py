"""Options and marks of the test suite."""

from __future__ import annotations

import functools
import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="write the golden traces in traces/ anew")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@pytest.fixture(scope="session")
def bless(request: pytest.FixtureRequest) -> bool:
    """True where golden files are to be written anew instead of compared."""
    return bool(request.config.getoption("--bless"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pytest --slow runs it"))
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("nvfuser") and (reason := why_no_nvfuser()):
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def why_no_gpu() -> str | None:
    """Why tests that need a GPU and nvFuser cannot run here; None where they can."""
    import torch

    return why_no_nvfuser() or (None if torch.cuda.is_available() else "torch sees no NVIDIA GPU")


@functools.cache
def why_no_nvfuser() -> str | None:
    """Why tests that need nvFuser's fusion pass cannot run here; None where they can."""
    found = importlib.util.find_spec("nvfuser_direct")
    return None if found else "nvFuser is not installed; it has wheels for Python 3.10 and 3.12 on Linux only"
