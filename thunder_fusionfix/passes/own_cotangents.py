"""The backward takes its cotangents over from autograd's engine, so that each is freed after its last use.

Stage: final, backward. Needs: an engine that holds the cotangents until the backward returns, as ThunderFX's does
(`simulate.hold_cotangents`). Keeps: every op and every value. Changes: one statement before the cotangents are unpacked.

    def backward_fn(saved_for_backward, cotangents):
      ...
      t863, t871, = cotangents            # t863: "cuda:0 bf16[1, 4096, 152064]", the gradient of the logits
      clear_mutable_collection(cotangents)
      del cotangents
      t900 = torch.matmul(t863, t12)      # its last use
      del t863                            # frees nothing: the engine has it

becomes

      own_cotangents(cotangents)          # t863 is the trace's alone
      t863, t871, = cotangents
      ...
      del t863                            # frees 1,246 MB, before the backward of the layers

What the statement does, and when it does nothing, stands in `cotangents`: somebody else who has a cotangent keeps it. It costs the host
what a few launches cost, at each step: for the cotangents of a megabyte of a program in many small functions, as GPT-2 is under
ThunderFX, that is more than they are worth. Hence the option ``own_min_bytes``.
"""

from __future__ import annotations

from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import OWN, UNPACK, Decision, Plan

NAME = "own_cotangents"


def plan_own_cotangents(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan by which a backward trace takes over what the engine holds and the trace does not return.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many collections; None for no limit.
    """
    graph, least = facts.graph, facts.config.own_min_bytes
    if graph.stage != "backward":
        return Plan()
    taken = {name for op in graph.ops if op.id == OWN for name in op.inputs}
    returned = {
        name for op in graph.ops[-1:] for name in op.inputs
    }  # a view of one that is returned is found at run time
    owned, decisions = list[str](), list[Decision]()
    for pos, op in enumerate(graph.ops):
        if op.id != UNPACK or op.inputs[0] not in graph.args[1:] or op.inputs[0] in taken:
            continue
        held = [name for name in op.outputs if name in graph.held and (graph.values[name].nbytes or 0) >= least]
        freed = [name for name in held if name not in returned]
        if not held:
            continue
        nbytes = sum(graph.values[name].nbytes or 0 for name in freed)
        why = "their last use comes before the return; the engine would hold them to the end"
        if not freed:
            why = "the trace returns them"
        elif fuel is not None and len(owned) >= fuel:
            why = "no fuel is left"
        else:
            owned.append(op.inputs[0])
        applied = op.inputs[0] in owned
        what = f"took over {', '.join(freed or held)}" if applied else f"{', '.join(held)} stay the engine's"
        decisions.append(Decision(NAME, pos, op.inputs[0], what, why, applied, nbytes if applied else 0))
    return Plan(owned=tuple(owned), decisions=tuple(decisions))
