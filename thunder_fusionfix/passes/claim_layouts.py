from __future__ import annotations
from thunder_fusionfix.joint import JointFacts, JointPlan
def plan_claim_layouts(facts: JointFacts, other: JointPlan, fuel: int | None = None) -> JointPlan:
    return JointPlan()
