"""What the kernels of attention's backward allocate while they run: a float32 accumulator for the gradient of the query, and row sums.

A backward kernel goes through keys in blocks and adds to the gradient of every query with each; the sums are in float32, and the
gradient that is returned is a rounded copy. With B, H, L, D the sizes of the query, ``[batch, heads, length, head dim]``:

    kernel             accumulator, float32                                                       row sums, float32
    flash              [B, H, L up to 128, D up to 32]                                            [B, H, L up to 128]
    cuDNN              [B, H, L, D], 512 bytes more                                               [B, H, L]
    memory-efficient   [B, H, L up to T, D up to T] and 16 bytes for each T x T tile of it;       [B, H, L]
                       T is 64 for head dims up to 64, else 128

"up to" is the next multiple. Attention that chooses its kernel at run time (`passes.cudnn_attention`) has the larger of flash and
cuDNN: flash, but for 512 bytes where nothing is rounded up. It is memory of the op alone, as the temporaries of a region are.

Evidence: measured on an H200 (torch 2.11, cuDNN 9.19) in bf16 for ten shapes with head dims of 16 to 128, causal or not;
`tests/test_attention_workspace.py` has them. Flash and memory-efficient are as measured to the byte, cuDNN to 512 bytes.

Left out: the 512 bytes that cuDNN's forward takes; copies that pad or align operands; accumulators for the gradients of key and
value, which the memory-efficient kernel needs for bf16 head dims above 128, and the flash kernel where the key has fewer heads
than the query; and the further accumulators of the flash kernel where torch is asked for deterministic algorithms.

    >>> from thunder_fusionfix.model import Op, Ref, Value
    >>> op = Op("fusionfix_attention_backward", (Ref("g"), Ref("q"), Ref("k"), Ref("v")), (Ref("dq"), Ref("dk"), Ref("dv")))
    >>> workspace_of(op, {"q": Value("q", (8, 12, 197, 64), "bf16", "cuda:0")}).at_peak
    (('accumulator for dq', 6291456), ('row sums for dq', 98304))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thunder_fusionfix.effects import ATTENTION_BACKWARD, FLASH_BACKWARD, short_name
from thunder_fusionfix.layout import Shape, Strides
from thunder_fusionfix.model import Op, Ref, Value
from thunder_fusionfix.segments import NOTHING, Temporaries

Workspace = tuple[int, int]
"""Bytes of the accumulator and of the row sums."""

FLOAT32 = 4  # bytes


def flash(shape: Shape) -> Workspace:
    """What torch's flash kernel allocates for a query of this shape, ``[batch, heads, length, head dim]``."""
    batch, heads, length, dim = shape
    sums = batch * heads * _up(length, 128) * FLOAT32
    return sums * _up(dim, 32), sums


def cudnn(shape: Shape) -> Workspace:
    """What cuDNN's kernel allocates, as `flash`."""
    batch, heads, length, dim = shape
    sums = batch * heads * length * FLOAT32
    return sums * dim + 512, sums


def memory_efficient(shape: Shape) -> Workspace:
    """What torch's memory-efficient kernel allocates, as `flash`."""
    batch, heads, length, dim = shape
    tile = 64 if dim <= 64 else 128
    num_tiles = batch * heads * -(-length // tile) * -(-dim // tile)
    return num_tiles * (tile * tile * FLOAT32 + 16), batch * heads * length * FLOAT32


def flash_or_cudnn(shape: Shape) -> Workspace:
    """The larger of the two."""
    return max(flash(shape), cudnn(shape), key=sum)


# operators that take the gradient of the output, then the query
KERNELS: Mapping[str, Callable[[Shape], Workspace]] = {
    FLASH_BACKWARD: flash,
    ATTENTION_BACKWARD: flash_or_cudnn,
    "sdpaex_scaled_dot_product_efficient_attention_backward": memory_efficient,
    "cudnn_sdpa_bwd": cudnn,
}


def is_attention_backward(op: Op) -> bool:
    """True for an operator whose workspace is known."""
    return short_name(op.id) in KERNELS


def workspace_of(
    op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None] | None = None
) -> Temporaries:
    """The memory that ``op`` allocates while it runs; nothing where it is no backward of attention, or its shapes are not known.

    ``strides`` are not looked at: the kernels take what they need whatever lies where.
    """
    kernel = KERNELS.get(short_name(op.id))
    if kernel is None or len(op.args) < 2 or not isinstance(op.args[1], Ref) or not op.outputs:
        return NOTHING
    shape = values[op.args[1].name].shape
    if shape is None or len(shape) != 4 or 0 in shape:
        return NOTHING
    accumulator, sums = kernel(shape)
    gradient = op.outputs[0]
    return Temporaries((), ((f"accumulator for {gradient}", accumulator), (f"row sums for {gradient}", sums)))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
