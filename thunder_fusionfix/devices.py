"""GPUs by name: how much memory torch can have there, and what cuBLAS takes of it.

Capacities are what torch reports as ``total_memory`` (it is less than the number in the name), in GiB with two digits
as its out-of-memory messages print it; boards of one name differ by a few tens of MiB.

    >>> find("H100-80GB").workspace_bytes
    33554432
    >>> fits(70 * 2**30, find("h100-80gb")), fits(80 * 2**30, find("h100-80gb"))
    (True, False)
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_fusionfix.errors import UsageError

GIB = 2**30
MIB = 2**20

# What a process takes of the GPU outside of torch's allocator: the CUDA context, kernels' code, libraries' own buffers.
CONTEXT_BYTES = 600 * MIB

# What torch gives to cuBLASLt, which runs products that add a bias, once such a product has run, unless CUBLASLT_WORKSPACE_SIZE says
# otherwise. Source: aten/src/ATen/cuda/CUDABlas.cpp; on an H200 six models with biases had it, two without had not.
LT_WORKSPACE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU."""

    name: str
    capacity_bytes: int  # torch.cuda.get_device_properties(0).total_memory
    capability: tuple[int, int]

    @property
    def workspace_bytes(self) -> int:
        """What torch gives to each cuBLAS handle, unless CUBLAS_WORKSPACE_CONFIG says otherwise.

        Source: aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB from capability 9.0 on; before, two pieces of 4096 KiB
        and eight of 16 KiB.
        """
        return 32 * MIB if self.capability >= (9, 0) else (2 * 4096 + 8 * 16) * 1024


def _device(name: str, gib: float, capability: tuple[int, int]) -> Device:
    return Device(name, int(gib * GIB), capability)


DEVICES = (
    _device("b200-180gb", 178.35, (10, 0)),
    _device("h200-141gb", 139.80, (9, 0)),
    _device("h100-80gb", 79.10, (9, 0)),
    _device("a100-80gb", 79.15, (8, 0)),
    _device("a100-40gb", 39.39, (8, 0)),
    _device("l40s-48gb", 44.39, (8, 9)),
    _device("a6000-48gb", 47.53, (8, 6)),
    _device("rtx5090-32gb", 31.36, (12, 0)),
    _device("rtx4090-24gb", 23.64, (8, 9)),
    _device("rtx3090-24gb", 23.69, (8, 6)),
    _device("l4-24gb", 22.03, (8, 9)),
    _device("a10g-24gb", 22.06, (8, 6)),
    _device("t4-16gb", 14.74, (7, 5)),
)

DEFAULT = "h100-80gb"


def find(name: str) -> Device:
    """The device called ``name``, in any case.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    for device in DEVICES:
        if device.name == name.lower():
            return device
    raise UsageError(f"--device {name!r}: one of {', '.join(device.name for device in DEVICES)}")


def fits(peak_bytes: int, device: Device) -> bool:
    """True where a step with this peak of allocated bytes has room beside the CUDA context.

    The allocator's own slack (reserved minus allocated) is not in it: near the edge a step may fail all the same.
    """
    return peak_bytes + CONTEXT_BYTES <= device.capacity_bytes
