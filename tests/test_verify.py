"""Laws of `verify`: legal rewrites pass, and each broken trace is caught by its own rule and by no other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from mutants import (
    BROKEN,
    CUT_ROWS_FORWARD,
    EFFECTS,
    IGNORED_ROWS_FORWARD,
    LEGAL,
    MASK,
    REORDER,
    REWRITE,
    SMALL,
    SPLIT,
    Mutant,
    Pair,
    edited,
    single_faults,
)
from strategies import random_graph

from thunder_fusionfix.errors import VerifyError
from thunder_fusionfix.execute import compare
from thunder_fusionfix.model import Graph, Op
from thunder_fusionfix.normal_form import Forms
from thunder_fusionfix.parse import parse
from thunder_fusionfix.verify import GRAPH_RULES, PAIR_RULES, RULES, Allow, check_graph, verify

EVERYTHING = Allow(may_reorder=True, may_rewrite_regions=True, may_split_regions=True, may_keep_longer=True)


@pytest.mark.parametrize("pair", LEGAL, ids=lambda pair: pair.name)
def test_verify_legal_rewrite_accepted(pair: Pair) -> None:
    """A rewrite that changes no value and no effect passes under what it was allowed."""
    verify(pair.before, pair.after, pair.allow)


@pytest.mark.parametrize("pair", LEGAL, ids=lambda pair: pair.name)
def test_verify_legal_rewrite_computes_the_same(pair: Pair) -> None:
    """The rewrites that the tests call legal are legal when run, so a verifier that accepts too much cannot hide here."""
    result = compare(pair.before, pair.after)
    assert result.differing == ()
    assert result.compared or "elements" in (result.skipped or "")


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.name)
def test_verify_broken_trace_caught_by_its_rule(mutant: Mutant) -> None:
    """A broken trace is rejected, and the message names the rule."""
    with pytest.raises(VerifyError, match=f"rule {mutant.rule} broken"):
        verify(mutant.before, mutant.after, mutant.allow)


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.name)
def test_verify_broken_trace_accepted_without_its_rule(mutant: Mutant) -> None:
    """With that one rule switched off the broken trace passes: the rule is what catches it."""
    verify(mutant.before, mutant.after, mutant.allow, [rule for rule in RULES if rule.name != mutant.rule])


@pytest.mark.parametrize("mutant", [m for m in BROKEN if m.rule == "same-values"], ids=lambda mutant: mutant.name)
def test_verify_wrong_value_is_wrong_when_run(mutant: Mutant) -> None:
    """What the tests call another value comes out as another value, so they ask nothing of the verifier that is not needed."""
    result = compare(mutant.before, mutant.after, exact=True)
    takes_part = result.skipped is None and mutant.before_text != EFFECTS  # effects are not run
    assert result.differing or not takes_part


def with_shared_ops(before: Graph, after: Graph) -> Graph:
    """``after`` with the very objects of ``before`` where ops or sub-ops are equal, as `Reader` gives them."""
    known = {part: part for op in before.ops for part in (op, *op.subops)}

    def shared(op: Op) -> Op:
        return known.get(op) or replace(op, subops=tuple(map(shared, op.subops)))

    return replace(after, ops=tuple(map(shared, after.ops)))


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.name)
def test_verify_broken_trace_caught_where_the_rest_is_known(mutant: Mutant) -> None:
    """What a pass left alone, and what an earlier check worked out, hides no fault."""
    forms = Forms()
    after = with_shared_ops(mutant.before, mutant.after)
    verify(mutant.before, mutant.before, mutant.allow, PAIR_RULES, forms)
    for _ in range(2):
        with pytest.raises(VerifyError, match=f"rule {mutant.rule} broken"):
            verify(mutant.before, after, mutant.allow, forms=forms)


@pytest.mark.parametrize("pair", LEGAL, ids=lambda pair: pair.name)
def test_verify_legal_rewrite_accepted_where_the_rest_is_known(pair: Pair) -> None:
    """A table that knows the trace before, and ops that both traces share, change no verdict."""
    forms = Forms()
    verify(pair.before, pair.before, pair.allow, PAIR_RULES, forms)
    verify(pair.before, with_shared_ops(pair.before, pair.after), pair.allow, forms=forms)


def test_verify_same_op_over_another_value_is_worked_out_anew() -> None:
    """An op that both traces share is no known value where a name in it means another type."""
    text = """
def computation(x):
  # x: "cpu f32[2, 3]"
  y = prims.reshape(x, (3, 2))  # y: "cpu f32[3, 2]"
  z = prims.convert_element_type(y, dtypes.float32)  # z: "cpu f32[3, 2]"
  return z
"""
    before, forms = parse(text), Forms()
    after = replace(before, values={**before.values, "z": replace(before.values["z"], dtype="f64")})
    first, second = forms.of(before), forms.of(after)
    assert first.values["y"] == second.values["y"] and first.values["z"] != second.values["z"]


def test_every_rule_has_a_broken_trace() -> None:
    """No rule goes untested."""
    assert {rule.name for rule in RULES} == {mutant.rule for mutant in BROKEN}


@pytest.mark.parametrize("pair", LEGAL, ids=lambda pair: pair.name)
def test_verify_by_default_allows_nothing(pair: Pair) -> None:
    """The same rewrites are rejected where the pass did not admit them."""
    if pair.before_text != pair.after_text:
        with pytest.raises(VerifyError):
            verify(pair.before, pair.after)


@pytest.mark.parametrize("allow", [Allow(), REORDER, REWRITE, SPLIT, EVERYTHING])
def test_verify_unchanged_graph_accepted(allow: Allow) -> None:
    """Every well-formed trace is a legal rewrite of itself."""
    rng = random.Random(0)
    for _ in range(60):
        graph = random_graph(rng, 12, stage=rng.choice(("inference", "forward", "backward")))
        check_graph(graph)
        verify(graph, graph, allow)


def test_verify_single_fault_in_random_graph_is_caught_or_harmless() -> None:
    """Whatever fault is accepted, running both traces shows no difference."""
    rng = random.Random(1)
    num_caught = num_accepted = 0
    for _ in range(250):
        graph = random_graph(rng, 10, effects=False)
        for broken in single_faults(graph):
            try:
                verify(graph, broken, EVERYTHING)
            except VerifyError:
                num_caught += 1
            else:
                assert compare(graph, broken, exact=True).differing == ()
                num_accepted += 1
    assert num_caught > 50, num_caught


@pytest.mark.parametrize(
    "name",
    ["loss forward: slice and reshape hoisted past the cast", "loss backward: reshape sunk past a pad and a cast"],
)
def test_verify_single_fault_in_real_trace_is_caught(name: str) -> None:
    """In the loss of a real model each fault that fits the shapes is caught."""
    pair = next(pair for pair in LEGAL if pair.name == name)
    broken = list(single_faults(pair.after))
    assert len(broken) >= 2
    for graph in broken:
        with pytest.raises(VerifyError, match="rule same-values broken"):
            verify(pair.before, graph, REWRITE)


def test_verify_two_judges_agree_that_nothing_changed() -> None:
    """A graph against itself is equal for the executable judge too, effects included."""
    rng = random.Random(2)
    for _ in range(40):
        graph = random_graph(rng, 12)
        assert compare(graph, graph).differing == ()


def test_error_shows_rule_place_values_and_trace() -> None:
    """A message names the stage, the rule, the position, the values with types, the lines around, and what to do."""
    broken = parse(edited(SMALL, ("torch.matmul(t1, t2)", "torch.matmul(t1, w)")))
    with pytest.raises(VerifyError) as caught:
        verify(parse(SMALL), broken, REWRITE)
    text = str(caught.value)
    assert "inference trace: rule same-values broken at 1: t3 is another value than before" in text
    assert "before: apply" in text and "now:" in text
    assert "t3: cuda:0 f32[6, 3]" in text
    assert ">    1  t3 = torch.matmul(t1, w)" in text and "     0  [t1, t2] = nvFusion0(x, w)" in text
    assert "fuel=N" in text


def test_error_about_what_is_gone_shows_the_trace_before() -> None:
    """Where something is missing the lines come from the trace that had it."""
    gone = parse(SMALL.replace('  t3 = torch.matmul(t1, t2)  # t3: "cuda:0 f32[6, 3]"\n', "  t3 = prims.exp(t1)\n"))
    with pytest.raises(VerifyError, match=r"trace before the pass: rule same-ops broken at 1: .* is gone|is new"):
        verify(parse(SMALL), gone, REORDER)


def test_check_graph_asks_rules_on_one_trace_only() -> None:
    """The rules are two tables without a name in common."""
    assert not {rule.name for rule in GRAPH_RULES} & {rule.name for rule in PAIR_RULES}
    with pytest.raises(VerifyError, match="use-after-del"):
        check_graph(parse(SMALL.replace("  del t1\n", "  del t1, t2\n")))


def test_verify_labels_that_cannot_hold_the_ignored_one_are_not_trusted() -> None:
    """Whether -100 among bytes is the ignored label or class 156 is a kernel's business, so the pair is rejected."""
    before, after = (parse(text.replace("i64", "ui8")) for text in (CUT_ROWS_FORWARD, IGNORED_ROWS_FORWARD))
    with pytest.raises(VerifyError, match="same-values"):
        verify(before, after, MASK)
