"""Products whose rows do not start at multiples of 16 bytes, run with padded operands where that is faster.

The trap, the cure and the price: `thunder_fusionfix.padding`. What runs: `thunder_fusionfix.products`, by the operators of
`fold_matmuls`, which are claimed for more products than folds need: linear layers and matmuls, forward and backward, of two matrices or
of two tensors with the same leading dims.

    t5 = ltorch.matmul(t3, t4)                     # t3: "cuda:0 bf16[1, 28, 4096, 1]", t4: "cuda:0 bf16[1, 28, 1, 4096]"

    t5 = fusionfix_matmul(t3, t4, 134217728, 268435456)   # at run time: both padded to 8 along the 1, if their strides ask for it

Stage: the operators of the executor entry. Needs: 2-byte floats on a GPU, static sizes. Claims: a product of which some layout of dense
operands would be padded; every other one stays as it was, and costs the host nothing. Keeps: shapes, dtypes, row-major results.
Changes: the order of sums, within cuBLAS's own spread between kernels. Copies of at most 16 MiB where the user asked for memory.
"""

from __future__ import annotations

from thunder_fusionfix.layout import Shape
from thunder_fusionfix.matmul_copies import Product, product_of, shapes_of
from thunder_fusionfix.model import Decision, Graph
from thunder_fusionfix.padding import ALIGNED, may_pad

NAME = "pad_matmuls"


def is_claimed(left: Shape, right: Shape, limit: int) -> bool:
    """True for ``left @ right`` that may be faster padded: two matrices, an N-D tensor with a matrix, equal leading dims.

    >>> is_claimed((1, 28, 4096, 1), (1, 28, 1, 4096), 2**28), is_claimed((1, 28, 4096, 128), (1, 28, 128, 4096), 2**28)
    (True, False)
    >>> is_claimed((8, 4096, 28), (1, 28, 4096), 2**28)  # broadcast
    False
    """
    if min(len(left), len(right)) < 2 or not (2 in (len(left), len(right)) or left[:-2] == right[:-2]):
        return False
    return may_pad(left, right, limit)


def plan_pad_matmuls(graph: Graph) -> tuple[Decision, ...]:
    """What may run padded, and why: one decision for the products of ``graph`` that share a reason."""
    by_reason: dict[str, list[int]] = {}
    for pos, op in enumerate(graph.ops):
        product = product_of(op)
        if product is not None and product.pad_limit:
            by_reason.setdefault(_why(product, graph), []).append(pos)
    return tuple(
        Decision(NAME, found[0], graph.ops[found[0]].id, _what(found, graph), why, applied=True)
        for why, found in by_reason.items()
    )


def _what(found: list[int], graph: Graph) -> str:
    return f"{len(found)} product(s) run padded where their strides ask for it: {shapes_of(found, graph)}"


def _why(product: Product, graph: Graph) -> str:
    sizes = [size for name in (product.left, product.right) for size in (graph.values[name].shape or ())[-2:]]
    odd = dict.fromkeys(size for size in sizes if size % ALIGNED)
    are = "is no multiple" if len(odd) == 1 else "are no multiples"
    return f"{', '.join(map(str, odd))} {are} of {ALIGNED}: cuBLAS leaves rows off 16-byte steps to slower kernels"
