"""Laws of `splitter`: ThunderFX splits every graph as it would, and asks about equal nodes once."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from thunder.dynamo import ThunderCompiler
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_fusionfix._thunder import replaced, splitter
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.splitter import asking_once, node_key
from thunder_fusionfix.transform import FusionFixTransform

PLAIN = getattr(splitter.is_node_supported_by_thunder, "__wrapped__", splitter.is_node_supported_by_thunder)


def graph_of(fn: Callable, *examples: Any) -> torch.fx.Graph:
    """The FX graph of ``fn`` as Dynamo gives it to a backend, with fake tensors as example values of its arguments."""
    module = torch.fx.symbolic_trace(fn)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node, example in zip(module.graph.find_nodes(op="placeholder"), examples):
            is_tensor = isinstance(example, torch.Tensor)
            node.meta["example_value"] = mode.from_tensor(example) if is_tensor else example
    return module.graph


def call(fn: Callable, *examples: Any) -> torch.fx.Node:
    """The one node of ``fn`` that calls something."""
    return next(node for node in graph_of(fn, *examples).nodes if node.op.startswith("call"))


def sin(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


ones = torch.ones(4, 4)
PAIRS = {
    "target": ((sin, ones), (lambda x: torch.cos(x), ones)),
    "method or function": ((lambda x: x.sin(), ones), (sin, ones)),
    "constant": ((lambda x: torch.sum(x, 0), ones), (lambda x: torch.sum(x, 1), ones)),
    "constant's type": ((lambda x: torch.mul(x, 2), ones), (lambda x: torch.mul(x, 2.0), ones)),
    "keyword": ((lambda x: torch.sum(x, 0), ones), (lambda x: torch.sum(x, dim=0), ones)),
    "slice": ((lambda x: x[1:], ones), (lambda x: x[:1], ones)),
    "ellipsis": ((lambda x: x[..., 0], ones), (lambda x: x[None, 0], ones)),
    "shape": ((sin, ones), (sin, torch.ones(4, 8))),
    "dtype": ((sin, ones), (sin, ones.to(torch.bfloat16))),
    "need of a gradient": ((sin, ones), (sin, torch.ones(4, 4, requires_grad=True))),
    "one tensor twice": ((lambda x, y: torch.add(x, y), ones, ones), (lambda x, y: torch.add(x, x), ones, ones)),
    "which tensor": (
        (lambda x, y: torch.add(x, y), ones, torch.ones(4)),
        (lambda x, y: torch.add(y, x), ones, torch.ones(4)),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_node_key_of_nodes_that_differ_in_one_thing_differs(pair: str) -> None:
    """Nothing that Thunder's verdict may depend on is missing from a key."""
    one, other = PAIRS[pair]
    assert node_key(call(*one)) != node_key(call(*other))
    assert node_key(call(*one)) == node_key(call(*one))


@pytest.mark.parametrize("example", [3, None, torch.ones(4, 4).to_sparse()], ids=["number", "nothing", "sparse tensor"])
def test_node_key_of_a_node_that_takes_no_plain_tensor(example: Any) -> None:
    """What is no plain tensor is asked about each time; a layout is part of a key."""
    node = call(sin, example)
    if isinstance(example, torch.Tensor):
        assert node_key(node) != node_key(call(sin, torch.ones(4, 4)))
        return
    with pytest.raises(UnsupportedTraceError, match="no plain tensor"):
        node_key(node)


@contextlib.contextmanager
def counted_questions(*, once: bool) -> Iterator[list[torch.fx.Node]]:
    """Collects the nodes about which ThunderFX asks Thunder; with `splitter`'s memory before the question, or without."""
    asked = []

    def ask(node: torch.fx.Node, options: Any) -> Any:
        asked.append(node)
        return PLAIN(node, options)

    with replaced(splitter, "is_node_supported_by_thunder", asking_once(ask) if once else ask):
        yield asked


def layers(num_layers: int) -> Callable:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_layers):
            x = torch.sinc(torch.cat([-x[..., 2:], x[..., :2]], -1).float() * x) + x  # Thunder has no sinc
        return x

    return fn


def split(fn: Callable, **options: Any) -> tuple[str, list[str]]:
    """How ThunderFX splits ``fn``: the code of the split graph, and the reasons that it gives."""
    torch._dynamo.reset()
    compiler = ThunderCompiler(executors=(), **options)

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Callable:
        with replaced(torch._inductor, "compile", lambda piece, _: piece):
            compiler(graph, examples)
        return graph.forward

    torch.compile(fn, backend=backend)(torch.ones(4, 4, requires_grad=True))
    info = compiler.subgraph_infos[-1]
    return info.split_graph_module.code, [reason.info for reason in info.split_reasons]


def test_splitter_asks_about_equal_nodes_once_and_splits_as_ever() -> None:
    """Five layers take no more questions than two, but for what Thunder cannot run; the split and its reasons are Thunder's."""
    counts = {}
    for num_layers in (2, 5):
        with counted_questions(once=False) as asked:
            plain = split(layers(num_layers))
        num_plain = len(asked)
        with counted_questions(once=True) as asked:
            once = split(layers(num_layers), fusionfix_share_fusions=True)
        assert once == plain and len(once[1]) >= num_layers
        counts[num_layers] = len([node for node in asked if node.target is not torch.sinc])
        assert counts[num_layers] < num_plain
    assert counts[2] == counts[5]


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({}, False),
        ({"transforms": [FusionFixTransform()]}, True),
        ({"transforms": [FusionFixTransform()], "fusionfix_share_fusions": False}, False),
    ],
    ids=["plain", "with the transform", "switched off"],
)
def test_splitter_remembers_only_where_sharing_is_wanted(options: dict, once: bool) -> None:
    """One option switches all that is done once for equal things."""
    with counted_questions(once=True) as asked:
        split(layers(3), **options)
    targets = [node.target for node in asked if node.target is operator.mul]
    assert (len(targets) == 1) is once
