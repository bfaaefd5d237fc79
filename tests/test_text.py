"""Normalised traces: what goes, what stays, and that nothing is lost that a Graph holds."""

from __future__ import annotations

import re

import thunder
import torch

from thunder_fusionfix.parse import parse
from thunder_fusionfix.text import normalised, sections, split_sections


def printed_traces():
    """A forward and a backward trace, printed by Thunder with times and quoted source."""
    jitted = thunder.jit(lambda x, w: torch.tanh(x.t() @ w) / 2)
    jitted(torch.ones(3, 2, requires_grad=True), torch.ones(3, 2))
    return [str(thunder.last_traces(jitted)[-1]), str(thunder.last_backward_traces(jitted)[-1])]


def test_normalised_trace_holds_nothing_of_this_machine():
    """Times and the path of the traced file are in what Thunder prints, and not in what is left."""
    forward, backward = printed_traces()
    assert __file__ in forward and "milliseconds" in backward
    for trace in (forward, backward):
        left = normalised(trace)
        assert not re.search(r"milliseconds|/test_text|\.py:\d", left)
        assert "\n\n" not in left and left.endswith("\n")


def test_normalised_trace_is_the_same_graph():
    """A trace and its normalised text read as equal Graphs."""
    for trace in printed_traces():
        assert parse(normalised(trace)) == parse(trace)


def test_normalising_twice_changes_nothing_more():
    """The normalised text is its own normal form."""
    for trace in printed_traces():
        assert normalised(normalised(trace)) == normalised(trace)


def test_paths_and_addresses_in_arguments_lose_what_differs():
    """An absolute path keeps the file's name, an address keeps nothing; shapes and numbers are no paths."""
    line = "t1 = load('/home/me/data/x.bin', <object at 0x7f3a5c001234>, (2, 3), 0x10)\n"
    assert normalised(line) == "t1 = load('x.bin', <object at 0x>, (2, 3), 0x10)\n"


def test_two_texts_that_differ_in_an_operation_differ_normalised():
    """Normalising hides no operation."""
    forward, _ = printed_traces()
    assert normalised(forward) != normalised(forward.replace("torch.tanh", "torch.sin"))


def test_sections_come_back_by_label():
    """Texts that were put into one file come back as they were, in order."""
    texts = {label: normalised(trace) for label, trace in zip(("f forward", "f backward"), printed_traces())}
    assert split_sections(sections(texts)) == texts
    assert list(split_sections(sections(texts))) == list(texts)
