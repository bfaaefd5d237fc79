"""Options: every one has a name, a default and a check, and a wrong one is told in a line that says what is right."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_fusionfix import config
from thunder_fusionfix.config import FusionFixConfig, check_option, option_names, parse_bytes
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.passes import PASSES

NAMES = [field.name for field in fields(FusionFixConfig)]


def test_no_option_gives_the_defaults():
    """Nothing asked for is the default of every option."""
    assert FusionFixConfig.from_options({}) == FusionFixConfig()


def test_options_are_taken_by_name():
    """What is asked for is set, what is not keeps its default."""
    found = FusionFixConfig.from_options({"reorder": False, "fuel": 3, "memory_budget": "2GB"})
    assert found == FusionFixConfig(reorder=False, fuel=3, memory_budget="2GB")
    assert found.memory_budget_bytes == 2_000_000_000 and FusionFixConfig().memory_budget_bytes is None


def test_config_cannot_be_changed():
    """One config serves a whole compile."""
    with pytest.raises(FrozenInstanceError):
        FusionFixConfig().reorder = False


@pytest.mark.parametrize("name", NAMES)
def test_default_of_every_option_is_legal(name):
    """Giving an option its own default is never wrong."""
    check_option(name, getattr(FusionFixConfig(), name))
    assert name in option_names()


@pytest.mark.parametrize("name", NAMES)
def test_value_of_another_type_is_refused_by_name(name):
    """An object that is no value at all is refused for every option, in one line that names it."""
    with pytest.raises(UsageError, match=rf"option {name}\b") as error:
        FusionFixConfig.from_options({name: object()})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("fuel", (None, 0, 5), (-1, 1.5, True, "3")),
        ("entry_fuel", (None, 0, 5), (-1, 1.5, True, "3")),
        ("own_min_bytes", (0, 1024), (None, -1, 0.5, True)),
        ("split_min_bytes", (0, 1024), (None, -1, 0.5, True)),
        ("recompute_min_bytes", (0, 1024), (None, -1, 0.5, True)),
        ("memory_budget", (None, "60GB", 1024), ("", "much", 0, -5, True, "1e9 apples")),
        ("strict", (True, False), (None, 0, 1, "True")),
    ],
)
def test_legal_values_are_taken_and_their_neighbours_refused(name, legal, illegal):
    """A bool is no number and a number is no bool: Python would take both."""
    for value in legal:
        assert getattr(FusionFixConfig.from_options({name: value}), name) == value
    for value in illegal:
        with pytest.raises(UsageError, match=name):
            FusionFixConfig.from_options({name: value})


def test_unknown_option_lists_the_legal_ones():
    """A misspelt name is told together with all names that there are."""
    with pytest.raises(UsageError, match="no option 'reoder'") as error:
        FusionFixConfig.from_options({"reoder": False})
    assert all(name in str(error.value) for name in NAMES)


def test_every_final_pass_has_an_option():
    """A pass is switched off by the option of its name, which is on by default."""
    assert all(getattr(FusionFixConfig(), item.name) is True for item in PASSES)


def test_every_option_says_what_it_does():
    """The line of each field has a comment: it is all the documentation that an option has."""
    lines = inspect.getsource(config.FusionFixConfig).splitlines()
    for name in NAMES:
        (line,) = (line for line in lines if line.strip().startswith(f"{name}:"))
        assert len(line.partition("  # ")[2]) > 10


# ---------------------------------------------------------------- sizes


UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@given(st.integers(1, 10**6), st.sampled_from([unit for unit in UNITS if unit != "KiB"]), st.sampled_from(["", " "]))
def test_size_is_the_number_times_its_unit(number, unit, space):
    """Decimal units count in thousands, binary ones in 1024s; a space between is allowed."""
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]


@given(st.integers(1, 2**60))
def test_number_of_bytes_is_itself(number):
    """A plain number, as int or as text, is bytes."""
    assert parse_bytes(number) == parse_bytes(str(number)) == number


@pytest.mark.parametrize(
    "size", ["", "GB", "-1GB", "1.2.3GB", "1e9", "0", "0GB", "0.1B", "12 parsecs", True, None, 1.5e300]
)
def test_what_is_no_size_is_refused_with_examples(size):
    """Text that is no size, and sizes that are no byte, are told together with how a size is written."""
    with pytest.raises(ValueError, match="size"):
        parse_bytes(size)
