"""Laws of `canonical`: equal programs get equal keys whatever their names and order, and equal keys mean equal programs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest

from thunder_fusionfix.canonical import Canonical, Op, Region, canonical

LABELS = ("sub", "neg", "mul 2.0", "two results")
TYPES = ("f32[4]", "f32[4]", "bf16[4]")  # f32 twice: equal-typed inputs shall be common


def random_region(rng: random.Random, num_ops: int) -> Region:
    """A region whose ops are few in kind, so that it is full of near repetitions."""
    types = [rng.choice(TYPES) for _ in range(rng.randint(1, 3))]
    inputs = tuple(range(len(types)))
    ops = []
    for _ in range(num_ops):
        label = rng.choice(LABELS)
        takes = tuple(rng.choices(range(len(types)), k=2 if label == "sub" else 1))
        gives = tuple(range(len(types), len(types) + (2 if label == "two results" else 1)))
        types += ["f32[4]"] * len(gives)
        ops.append(Op(label, takes, gives))
    made = [value for op in ops for value in op.gives]
    outputs = tuple(rng.sample(made, rng.randint(1, len(made))))
    return Region(tuple(types), inputs, tuple(ops), outputs)


def disguised(region: Region, rng: random.Random) -> Region:
    """The same program: other numbers, another order of ops that can run, of inputs and of outputs."""
    new = list(range(len(region.types)))
    rng.shuffle(new)
    types = [""] * len(new)
    for value, kind in enumerate(region.types):
        types[new[value]] = kind
    known, waiting, ops = set(region.inputs), list(region.ops), []
    while waiting:
        op = rng.choice([op for op in waiting if known.issuperset(op.takes)])
        waiting.remove(op)
        known.update(op.gives)
        ops.append(Op(op.label, tuple(new[v] for v in op.takes), tuple(new[v] for v in op.gives), op.identity))
    inputs, outputs = [new[v] for v in region.inputs], [new[v] for v in region.outputs]
    rng.shuffle(inputs)
    rng.shuffle(outputs)
    return Region(tuple(types), tuple(inputs), tuple(ops), tuple(outputs))


def run(region: Region, args: list[object], terms: dict[object, int]) -> list[int]:
    """What the region returns, as terms: two are one number where they are the same expression of the same arguments."""
    env = dict(zip(region.inputs, args))
    for op in region.ops:
        applied = (op.label, op.identity, tuple(env[value] for value in op.takes))
        for slot, value in enumerate(op.gives):
            env[value] = terms.setdefault((applied, slot), len(terms))
    return [env[value] for value in region.outputs]


def assert_replaces(stand_in: Region, its: Canonical, region: Region, form: Canonical) -> None:
    """``stand_in``, called with the arguments of ``region`` in its own order, returns what ``region`` does."""
    terms: dict[object, int] = {}
    args: list[object] = [f"argument {pos}" for pos in range(len(region.inputs))]
    arguments, results = its.argument_order(form), form.result_order(its)
    for pos, value in zip(arguments, stand_in.inputs):
        assert region.types[region.inputs[pos]] == stand_in.types[value]
    returned = run(stand_in, [args[pos] for pos in arguments], terms)
    assert [returned[pos] for pos in results] == run(region, args, terms)


@pytest.mark.parametrize("seed", range(60))
def test_canonical_of_a_disguised_region_has_its_key_and_replaces_it(seed: int) -> None:
    """Names and order leave no trace in the key, and the orders say how one region stands in for the other."""
    rng = random.Random(seed)
    region = random_region(rng, rng.randint(1, 25))
    other = disguised(region, rng)
    one, two = canonical(region), canonical(other)
    assert one.key == two.key
    assert_replaces(region, one, other, two)
    assert_replaces(other, two, region, one)


def test_canonical_regions_of_one_key_replace_each_other() -> None:
    """Equal keys mean equal programs: among 4,000 tiny regions hundreds share a key, and each computes what its twin does."""
    rng = random.Random(0)
    first: dict[object, tuple[Region, Canonical]] = {}
    twins = 0
    for _ in range(4000):
        region = random_region(rng, rng.randint(1, 3))
        form = canonical(region)
        stand_in, its = first.setdefault(form.key, (region, form))
        twins += stand_in is not region
        assert_replaces(stand_in, its, region, form)
    assert twins > 300 and len(first) > 300


def test_canonical_of_all_orders_of_a_symmetric_region_is_one_key() -> None:
    """A ring of subtractions looks the same from every op; in whatever order it is written, the key is one."""
    ops = [Op("sub", (pos, (pos + 1) % 4), (4 + pos,)) for pos in range(4)]
    rings = (
        Region(("f32[4]",) * 8, (0, 1, 2, 3), order, tuple(value for op in order for value in op.gives))
        for order in itertools.permutations(ops)
    )
    assert len({canonical(ring).key for ring in rings}) == 1


SUB = Region(
    ("f32[4]", "f32[4]", "f32[4]", "f32[4]"),
    inputs=(0, 1),
    ops=(Op("neg", (0,), (2,)), Op("sub", (2, 1), (3,), identity="sub of prims")),
    outputs=(3,),
)


@pytest.mark.parametrize(
    "change",
    {
        "label": {"ops": (SUB.ops[0], dataclasses.replace(SUB.ops[1], label="add"))},
        "identity": {"ops": (SUB.ops[0], dataclasses.replace(SUB.ops[1], identity="sub of another executor"))},
        "argument order": {"ops": (SUB.ops[0], dataclasses.replace(SUB.ops[1], takes=(1, 2)))},
        "argument": {"ops": (SUB.ops[0], dataclasses.replace(SUB.ops[1], takes=(0, 1)))},
        "type of an input": {"types": ("bf16[4]", *SUB.types[1:])},
        "what is returned": {"outputs": (2,)},
        "how much is returned": {"outputs": (2, 3)},
        "one input more": {"types": (*SUB.types, "f32[4]"), "inputs": (0, 1, 4)},
    }.items(),
    ids=lambda change: change[0],
)
def test_canonical_of_a_changed_region_has_another_key(change: tuple[str, dict]) -> None:
    """Everything that a region is belongs to its key."""
    assert canonical(dataclasses.replace(SUB, **change[1])).key != canonical(SUB).key


@pytest.mark.parametrize(
    "region",
    [
        dataclasses.replace(SUB, ops=SUB.ops[::-1]),
        dataclasses.replace(SUB, ops=(SUB.ops[0], dataclasses.replace(SUB.ops[1], gives=(2,)))),
        dataclasses.replace(SUB, ops=SUB.ops[:1]),
    ],
    ids=["taken before given", "given twice", "returned but never given"],
)
def test_canonical_of_an_impossible_region_raises(region: Region) -> None:
    """A region that cannot run has no form."""
    with pytest.raises(ValueError, match="value"):
        canonical(region)


def test_canonical_of_ten_thousand_equal_chains_takes_seconds() -> None:
    """An optimizer's step is thousands of equal updates: ties all the way, and still near-linear."""
    num_chains = 2500
    ops = []
    for start in range(0, 6 * num_chains, 6):
        ops += [
            Op("mul", (start, start + 1), (start + 2,)),
            Op("add", (start + 2, start), (start + 3,)),
            Op("sub", (start + 3, start + 1), (start + 4,)),
            Op("neg", (start + 4,), (start + 5,)),
        ]
    inputs = tuple(value for start in range(0, 6 * num_chains, 6) for value in (start, start + 1))
    region = Region(("f32[4]",) * 6 * num_chains, inputs, tuple(ops), tuple(range(5, 6 * num_chains, 6)))
    start_time = time.perf_counter()
    canonical(region)
    assert time.perf_counter() - start_time < 5
