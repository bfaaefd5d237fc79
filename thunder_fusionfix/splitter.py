"""ThunderFX's splitter asks about equal nodes once.

To learn whether Thunder can run a node of an FX graph, ThunderFX traces the node alone, with its gradient, each time that the
graph is walked: two to three times a node, 3 s for a layer of Qwen2. Nodes that differ in name alone get one answer, so here
what Thunder can run is remembered for as long as the graph lives, and the cost no longer grows with the number of layers.

Invariants:

- Only "yes" is remembered. "No" comes with a reason that names the node.
- Two nodes are equal if they call the same object with equal constants (types included) and tensors of equal class, shape,
  dtype, device, layout and need of a gradient, in equal places. A node that takes anything else is asked about each time.
- A verdict lasts for one graph: what Thunder can run may change between two.

Goes with `share_fusions`, by the same option. (`share` and `take_addmm` are imported late: this module is imported on joining
Thunder, which may happen while they are.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from thunder_fusionfix._thunder import FakeTensor, splitter
from thunder_fusionfix.config import PREFIX
from thunder_fusionfix.errors import UnsupportedTraceError

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def node_key(node: torch.fx.Node) -> Hashable:
    """What Thunder can tell of ``node``: equal for two nodes only if it can run both or neither.

    Raises:
        UnsupportedTraceError: the node takes something that we cannot compare.
    """
    from thunder_fusionfix.share import Same, constant_text

    inputs: dict[torch.fx.Node, int] = {}

    def spelled(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return f"%{inputs.setdefault(value, len(inputs))}"
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}({', '.join(map(spelled, value))})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{name!r}: {spelled(item)}' for name, item in value.items())})"
        if isinstance(value, slice):
            return f"slice({spelled(value.start)}, {spelled(value.stop)}, {spelled(value.step)})"
        return constant_text(value)

    target = node.target if isinstance(node.target, str) else Same(node.target)
    args = spelled(node.args), spelled(node.kwargs)
    return node.op, target, args, tuple(_tensor_key(arg) for arg in inputs)


def _tensor_key(node: torch.fx.Node) -> Hashable:
    example = node.meta.get("example_value")
    if type(example) not in _PLAIN_TENSORS or not all(type(length) is int for length in example.shape):
        raise UnsupportedTraceError(f"splitter: {node.name} is no plain tensor of static shape")
    return type(example), tuple(example.shape), example.dtype, example.device, example.layout, example.requires_grad


def _is_wanted(options: dict[str, Any]) -> bool:
    from thunder_fusionfix.share import OPTION, wanted

    asked, transforms, executors = (options.get(name) for name in (PREFIX + OPTION, "transforms", "executors"))
    return wanted(asked, transforms or (), executors or ())


def install() -> None:
    """Puts the memory, and what `take_addmm` knows, before ThunderFX's question; where it is there already, nothing changes."""
    if not hasattr(splitter.is_node_supported_by_thunder, "_asks_once"):
        splitter.is_node_supported_by_thunder = asking_once(taking_addmm(splitter.is_node_supported_by_thunder))


def taking_addmm(ask: Callable) -> Callable:
    """``ask``, with linear layers that are written as addmm among what Thunder can run."""

    @functools.wraps(ask)
    def is_node_supported_by_thunder(node: torch.fx.Node, thunder_options: dict[str, Any]) -> tuple[bool, Any]:
        from thunder_fusionfix.take_addmm import is_linear

        answer = ask(node, thunder_options)
        return (True, None) if not answer[0] and is_linear(node, thunder_options) else answer

    return is_node_supported_by_thunder


def asking_once(ask: Callable, is_wanted: Callable[[dict[str, Any]], bool] = _is_wanted) -> Callable:
    """``ask`` with a memory, where ``is_wanted`` says so of the options that ThunderFX compiles with."""
    supported: weakref.WeakKeyDictionary[torch.fx.Graph, set[Hashable]] = weakref.WeakKeyDictionary()

    @functools.wraps(ask)
    def is_node_supported_by_thunder(node: torch.fx.Node, thunder_options: dict[str, Any]) -> tuple[bool, Any]:
        try:
            key = node_key(node) if is_wanted(thunder_options) else None
        except UnsupportedTraceError:
            key = None
        if key is None:
            return ask(node, thunder_options)
        known = supported.setdefault(node.graph, set())
        if key in known:
            return True, None
        answer = ask(node, thunder_options)
        if answer[0]:
            known.add(key)
        return answer

    is_node_supported_by_thunder._asks_once = True  # type: ignore[attr-defined]
    return is_node_supported_by_thunder


install()
