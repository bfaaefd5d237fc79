"""Gradients that nobody sent take no memory and no kernel: a large one comes to the backward as one repeated zero.

Stage: final, backward. Needs: Thunder's autograd functions as they are in 0.2.6, no CUDA graphs. Keeps: every op and every value.
Changes: one statement before the cotangents are unpacked.

    def backward_fn(saved_for_backward, cotangents):
      t863, t871, = cotangents            # t871: "cuda:0 bf16[1, 4096, 152064]", logits beside a loss: 1,246 MB of zeros

becomes

      expand_zero_cotangents(cotangents, (1,))
      t863, t871, = cotangents            # t871 has strides (0, 0, 0) where no gradient came

`torch.autograd.Function` fills a tensor with zeros for every output without a gradient, and the engine holds it until the backward
returns. A step of a causal LM calls backward on the loss and never on the logits beside it. How the statement has its effect
stands in `undefined`; which cotangents it leaves dense, in `repeated`. A cotangent that comes is not touched.
"""

from __future__ import annotations

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import EXPAND, UNPACK, Decision, Plan, Ref
from thunder_fusionfix.repeated import dense_uses

NAME = "expand_zero_cotangents"
MIN_BYTES = 2**20
"""Smaller zeros are filled as autograd does; another layout of them would compile fusions anew for little."""
_FLOATS = ("f64", "f32", "bf16", "f16")


def plan_expand_zero_cotangents(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan by which large cotangents that nobody sends come as repeated zeros.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many collections; None for no limit.
    """
    graph = facts.graph
    if graph.stage != "backward":
        return Plan()
    done = {name for op in graph.ops if op.id == EXPAND for name in op.inputs}
    expanded, decisions = list[tuple[str, tuple[int, ...]]](), list[Decision]()
    for pos, op in enumerate(graph.ops):
        if op.id != UNPACK or op.inputs[0] not in graph.args[1:] or op.inputs[0] in done:
            continue
        collection, items = op.inputs[0], op.output if isinstance(op.output, tuple) else ()
        large = {
            at: item.name
            for at, item in enumerate(items)
            if isinstance(item, Ref) and _is_large(facts, item.name) and items.count(item) == 1
        }
        dense = dense_uses(graph, large.values())
        decisions += [Decision(NAME, pos, collection, f"{name} stays dense", why, False) for name, why in dense.items()]
        positions = tuple(at for at, name in large.items() if name not in dense)
        if not positions:
            continue
        names = [large[at] for at in positions]
        nbytes = sum(graph.values[name].nbytes or 0 for name in names)
        what = f"{', '.join(names)} may come as one repeated zero"
        why = f"where nobody sends them, that is {megabytes(nbytes)} MB of zeros that are not filled"
        applied = fuel is None or len(expanded) < fuel
        if applied:
            expanded.append((collection, positions))
        decisions.append(Decision(NAME, pos, collection, what, why if applied else "no fuel is left", applied))
    return Plan(expanded=tuple(expanded), decisions=tuple(decisions))


def _is_large(facts: Facts, name: str) -> bool:
    value = facts.graph.values[name]
    return value.kind == "tensor" and value.dtype in _FLOATS and (value.nbytes or 0) >= MIN_BYTES
