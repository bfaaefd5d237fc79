"""Equal fusion regions compile once.

Thunder defines and compiles every region for itself, so a model of 28 equal layers pays 28 times for the same kernels. Here
each region gets a key, `canonical` in the order-free form, and all regions of one key call one compiled fusion: the first
one that is called defines it, the others bring their arguments into its order and take its results in theirs.

On with `FusionFixTransform` or the executor entry in use; ``fusionfix_share_fusions`` alone switches it on, or off.

Invariants:

- The key is the whole region: symbols (as objects), constants with their types, dtypes, static shapes, devices, which value
  goes where, Thunder's options for the fusion. Names are not in it. What cannot be put into it (symbolic shapes, numbers
  without a static value in a shape, unknown proxies or objects) is not shared. What only a call can tell is told apart by
  the shared object: strides, and for ``torch.compile`` all that Dynamo would compile anew for.
- A region is looked up when it is first called: Thunder makes the callable of a region three times before it is ever called.
- Trace text and the order in which regions run do not change, so two compiles share alike, on every rank.
- A shared object lives as long as a region that uses it, and holds no tensor.
- Any thread may call any region. What is made once is made under a lock; nvFuser itself runs under Python's own.

Why not nvFuser's own `LruFusionCache`, which shares what it finds equal in the definitions (checked with 0.2.36):

- It compares two definitions by walking from the outputs without remembering where it was: a chain of n squares takes 2**n
  steps, 2.6 s for n = 22. Regions of the backward pass are of that kind.
- What it gives out does not keep alive what it points to: after an eviction the next use is a segmentation fault.
- It does not compare device meshes: fusions for the ranks (0, 1) and (2, 3) are one to it.
- It compares in the order of definition, so it needs a canonical order too, and each region would still be defined anew.

Independent fusions are not compiled side by side: nvFuser compiles under Python's lock, and only when it executes. The
segments of one fusion do compile side by side, by nvFuser's own threads.
"""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from thunder_fusionfix._thunder import (
    BoundSymbol,
    Device,
    DTensorProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    compile_data_and_stats,
    dtypes,
    get_compile_data,
    get_compile_option,
    get_compile_stats,
    make_executable,
    nvfuser_impl,
    torch_compile,
    untested_versions,
)
from thunder_fusionfix.canonical import Canonical, Op, Region, canonical
from thunder_fusionfix.config import PREFIX, check_option
from thunder_fusionfix.effects import effect_of
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import Op as TraceOp

OPTION = "share_fusions"

# ---------------------------------------------------------------- a region as data


def region_of(bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> Region:
    """The region that computes ``outputs`` from ``inputs``, without names.

    Where an op does more than give its outputs (writes in place, draws random numbers, is unknown), the order of the ops
    belongs to the program: a read before a write is not a read after it. Such a region keeps its order as part of its labels.

    Raises:
        UnsupportedTraceError: the region holds something that could make it differ from an equal-looking one.
    """
    types: list[str] = []
    values: dict[str, int] = {}
    for proxy in inputs:
        _add(proxy, values, types)
    is_pure = all(effect_of(_table_key(bsym)).is_pure for bsym in bsyms)
    ops = tuple(_op(bsym, values, types, None if is_pure else pos) for pos, bsym in enumerate(bsyms))
    missing = [proxy.name for proxy in outputs if proxy.name not in values]
    if missing:
        raise UnsupportedTraceError(f"share_fusions: the region returns {missing[0]}, which nothing in it gives")
    return Region(
        tuple(types),
        tuple(values[proxy.name] for proxy in inputs),
        ops,
        tuple(values[proxy.name] for proxy in outputs),
    )


def _add(proxy: Proxy, values: dict[str, int], types: list[str]) -> None:
    values[proxy.name] = len(types)
    types.append(type_text(proxy))


def _table_key(bsym: BoundSymbol) -> TraceOp:
    return TraceOp(bsym.sym.name, (), is_fusion=bsym.sym.is_fusion)


def _op(bsym: BoundSymbol, values: dict[str, int], types: list[str], place: int | None) -> Op:
    unknown = [proxy.name for proxy in bsym.flat_proxy_args if proxy.name not in values]
    if unknown:
        raise UnsupportedTraceError(
            f"share_fusions: {bsym.sym.name} takes {unknown[0]}, which nothing in the region gives"
        )
    spelling = _Spelling()
    label = spelling.symbol(bsym)
    given = {proxy.name: proxy for proxy in bsym.flat_proxy_outs if proxy.name not in values}
    taken = [proxy for proxy in spelling.proxies if proxy.name in values]
    # A value of a sub-symbol is in the label by its number alone, and is worth nothing outside.
    roles = {**{proxy.name: "takes" for proxy in taken}, **{name: "gives" for name in given}}
    parts = "; ".join(f"{roles.get(proxy.name, 'inner')} {type_text(proxy)}" for proxy in spelling.proxies)
    for proxy in given.values():
        _add(proxy, values, types)
    return Op(
        f"{place}: {label} | {parts}",
        tuple(values[proxy.name] for proxy in taken),
        tuple(values[name] for name in given),
        tuple(spelling.symbols),
    )


class Same:
    """Equal to another only where both hold one and the same object."""

    __slots__ = ("held",)

    def __init__(self, held: object):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class _Spelling:
    """Spells one bound symbol with its sub-symbols; proxies become numbers in the order in which they appear."""

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self.symbols: list[Same] = []  # Thunder takes symbols of one id for equal; executors know them as objects
        self._numbers: dict[str, int] = {}

    def symbol(self, bsym: BoundSymbol) -> str:
        if bsym._call_ctx or bsym.sym.is_fusion:
            raise UnsupportedTraceError(f"share_fusions: {bsym.sym.name} calls an object that only this trace knows")
        self.symbols.append(Same(bsym.sym))
        executor = getattr(bsym.sym.executor, "name", None)
        args, kwargs, output = self.value(bsym.args), self.value(bsym.kwargs), self.value(bsym.output)
        inner = ", ".join(self.symbol(subsymbol) for subsymbol in bsym.subsymbols)
        return f"{output} = {executor}.{bsym.sym.name}({args}, {kwargs}){{{inner}}}"

    def value(self, value: Any) -> str:
        if isinstance(value, Proxy):
            return self._proxy(value)
        if isinstance(value, dict):
            if not all(type(name) is str for name in value):
                raise UnsupportedTraceError("share_fusions: a dict with keys that are not strings")
            return "{" + ", ".join(f"{name!r}: {self.value(item)}" for name, item in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            kind = "list" if isinstance(value, list) else "tuple"
            return f"{kind}({', '.join(self.value(item) for item in value)})"
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        return constant_text(value)

    def _proxy(self, proxy: Proxy) -> str:
        if proxy.name not in self._numbers:
            self._numbers[proxy.name] = len(self._numbers)
            self.proxies.append(proxy)
        return f"%{self._numbers[proxy.name]}"


def constant_text(value: Any) -> str:
    """A constant with its type: 1, 1.0 and True are three, 0.0 and -0.0 two.

    Raises:
        UnsupportedTraceError: an object that is no plain constant.
    """
    if value is None or value is ... or type(value) in (bool, int, float, complex, str):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (dtypes.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return repr(value)
    if isinstance(value, Device):
        return f"device {value.device_str()}"
    if isinstance(value, type) and value in (bool, int, float, complex):  # number types stand for dtypes
        return f"type {value.__name__}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    raise UnsupportedTraceError(f"share_fusions: a constant of type {type(value).__name__}")


def type_text(proxy: Proxy) -> str:
    """What is known of a value before it exists: dtype, static shape, device; for a number its type and value.

    Raises:
        UnsupportedTraceError: a shape that only a call can tell, or a kind of value whose meaning is not known here.
    """
    if type(proxy) is TensorProxy:
        return _tensor_text(proxy)
    if type(proxy) is DTensorProxy:
        mesh = proxy.device_mesh
        spread = f"{mesh.device_type} {mesh.mesh.tolist()} {mesh.mesh_dim_names} {tuple(proxy.placements)!r}"
        return f"dtensor {_tensor_text(proxy)} of {_tensor_text(proxy.local_tensor)} on {spread}"
    if isinstance(proxy, NumberProxy):
        return f"{type(proxy).__name__} {proxy.python_type.__name__} {constant_text(proxy.value)}"
    raise UnsupportedTraceError(f"share_fusions: a value of type {type(proxy).__name__}")


def _tensor_text(proxy: Any) -> str:
    if not all(type(length) is int for length in proxy._shape):
        raise UnsupportedTraceError("share_fusions: a shape with symbolic lengths")
    # `dtype` hides that a scalar turned tensor gives way in type promotion.
    return f"{proxy.device.device_str()} {proxy.true_dtype!r} {tuple(proxy._shape)}"


# ---------------------------------------------------------------- what is shared


class SharedDefinitions:
    """nvFuser's definitions of one region, one for each way in which its inputs may lie in memory."""

    def __init__(self, form: Canonical, define: Callable[[Hashable], Any]):
        self.form = form
        self._define = define  # Thunder's, with its cache
        self._lock = threading.Lock()

    def __call__(self, descriptors: Hashable) -> Any:
        """The definition for inputs with these descriptors, ready to be executed from any thread."""
        with self._lock:
            definition = self._define(descriptors)
            make_executable(definition)
            return definition


# Functions for one region; models seen so far take one or two. Past the bound one function takes every further layout, and
# Dynamo's own (8 compiles of one code object, then an error where a full graph is asked for) is as far as without sharing.
MAX_LAYOUTS = 64


class SharedCompiled:
    """What ``torch.compile`` made of one region: a function of its own for each layout of the arguments.

    Dynamo keys what it compiles to the code object, and from the second layout on it makes lengths dynamic. With one
    function for all regions of a kind their layouts would meet there; with a function for each layout they do not.
    """

    def __init__(self, form: Canonical, build: Callable[[], Callable]):
        self.form = form
        self._build = build
        self._lock = threading.Lock()
        self._compiled: dict[Hashable, Callable] = {}

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled.get(layout_of(args))
        return (compiled or self._compiled_for(args))(*args)

    def _compiled_for(self, args: Sequence[Any]) -> Callable:
        with self._lock:
            layout = layout_of(args) if len(self._compiled) < MAX_LAYOUTS else None
            if layout not in self._compiled:
                self._compiled[layout] = self._build()
            return self._compiled[layout]


def layout_of(args: Sequence[Any]) -> Hashable:
    """What Dynamo would compile a region anew for, beside shape, dtype and device, which the region's key tells."""
    each = tuple(
        (type(arg), arg.stride(), arg.requires_grad) if isinstance(arg, torch.Tensor) else type(arg) for arg in args
    )
    names = [id(arg) for arg in args]
    return each if len(set(names)) == len(names) else (each, tuple(names.index(name) for name in names))


class _Registry:
    """Shared objects by key, each for as long as a region uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self.regions: Counter[str] = Counter()
        self.fusions: Counter[str] = Counter()

    def join(self, kind: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """The shared object of ``key``; made now where no region uses one yet."""
        with self._lock:
            self.regions[kind] += 1
            shared = self._shared.get((kind, key))
            if shared is None:
                self.fusions[kind] += 1
                shared = self._shared[kind, key] = make()
            return shared

    def alone(self, kind: str) -> None:
        """Counts a region that cannot be shared."""
        with self._lock:
            self.regions[kind] += 1
            self.fusions[kind] += 1


_registry = _Registry()


def sharing() -> dict[str, tuple[int, int]]:
    """For "nvFuser" and "torch.compile": how many regions were called so far in this process, and how many fusions they got."""
    with _registry._lock:
        return {kind: (count, _registry.fusions[kind]) for kind, count in sorted(_registry.regions.items())}


# ---------------------------------------------------------------- the callables that Thunder gets


class _SharedRegion:
    """One region of a trace, called as Thunder calls it.

    ``bsyms``, ``inputs`` and ``outputs`` are Thunder's; they are let go once the region has found its place.
    """

    kind: str

    def __init__(self, bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]):
        self._parts: tuple[tuple[Any, ...], ...] = (tuple(bsyms), tuple(inputs), tuple(outputs))
        self._lock = threading.Lock()
        self._call: Callable | None = None  # takes and gives in the shared order; None until the first call
        self._arguments: tuple[int, ...] | None = None  # None: the shared order is the region's own
        self._results: tuple[int, ...] | None = None

    def __call__(self, *args: Any) -> Any:
        call = self._call or self._find()
        if self._arguments is not None:
            args = tuple(args[pos] for pos in self._arguments)
        results = call(*args)
        return results if self._results is None else [results[pos] for pos in self._results]

    def _find(self) -> Callable:
        with self._lock:
            if self._call is not None:  # another thread was first
                return self._call
            try:
                form = self._form()
            except (UnsupportedTraceError, ValueError):
                _registry.alone(self.kind)
                call = self._unshared()
            else:
                shared = _registry.join(self.kind, (self._options(), form.key), lambda: self._share(form))
                self._arguments = _unless_given_order(shared.form.argument_order(form))
                self._results = _unless_given_order(form.result_order(shared.form))
                call = self._use(shared)
            self._call = call  # last: who sees it does not take the lock
            self._parts = ((), (), ())
            return call

    def _form(self) -> Canonical:
        return canonical(region_of(*self._parts))

    def _options(self) -> Hashable:
        """What beside the region decides what is compiled."""
        raise NotImplementedError

    def _share(self, form: Canonical) -> Any:
        """A new shared object, made of this region."""
        raise NotImplementedError

    def _use(self, shared: Any) -> Callable:
        """What to call, once ``shared`` is found."""
        raise NotImplementedError

    def _unshared(self) -> Callable:
        """What to call without sharing."""
        raise NotImplementedError


def _unless_given_order(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


class SharedFusion(_SharedRegion):
    """An nvFuser region; it has the attributes of Thunder's wrapper (``last_used``, ``name``, ...)."""

    kind = "nvFuser"

    def __init__(self, wrapper: Any, bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]):
        super().__init__(bsyms, inputs, outputs)
        self.wrapper = wrapper

    def _options(self) -> Hashable:
        return tuple(self.wrapper.enable_options or ()), tuple(self.wrapper.disable_options or ())

    def _share(self, form: Canonical) -> SharedDefinitions:
        return SharedDefinitions(form, self.wrapper.get_fd)

    def _use(self, shared: SharedDefinitions) -> Callable:
        # A cache of this region's own before the shared one: a step costs what it costs in Thunder.
        get_fd = functools.lru_cache(maxsize=2048)(shared)
        self.wrapper.get_fd = get_fd
        self.wrapper.cache_info = get_fd.cache_info
        self.wrapper.cache_clear = get_fd.cache_clear
        return self.wrapper

    def _unshared(self) -> Callable:
        return self.wrapper

    def __getattr__(self, name: str) -> Any:
        if name == "wrapper":  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.wrapper, name)

    def __repr__(self) -> str:
        return f"SharedFusion({self.wrapper.name})"


class SharedTorchCompile(_SharedRegion):
    """A region for ``torch.compile``; Thunder's function for it is made when it is first needed, and only then."""

    kind = "torch.compile"

    def __init__(
        self,
        make_compiled: Callable,
        bsyms: Sequence[BoundSymbol],
        inputs: Sequence[Proxy],
        outputs: Sequence[Proxy],
        mode: str | None,
    ):
        super().__init__(bsyms, inputs, outputs)
        self._mode = mode
        self._make_compiled = make_compiled
        # `make_compiled` asks the running compile for options. The compile is not kept alive: it holds the model.
        self._compile = tuple(map(_weakly, (get_compile_data(), get_compile_stats())))

    def _form(self) -> Canonical:
        if not all(type(proxy) is TensorProxy for proxy in self._parts[1]):
            # Dynamo compiles for each value of a number, and would run into its limit with those of all regions.
            raise UnsupportedTraceError("share_fusions: a region for torch.compile that takes numbers")
        return super()._form()

    def _options(self) -> Hashable:
        return self._mode

    def _share(self, form: Canonical) -> SharedCompiled:
        return SharedCompiled(form, self._builder())

    def _use(self, shared: SharedCompiled) -> Callable:
        return shared

    def _unshared(self) -> Callable:
        return self._builder()()

    def _builder(self) -> Callable[[], Callable]:
        """What calls Thunder's `make_compiled` as it would have been called; it does not hold this object."""
        make_compiled, parts, mode, compile_ = self._make_compiled, self._parts, self._mode, self._compile

        def build() -> Callable:
            data, stats = (held() for held in compile_)
            with compile_data_and_stats(data, stats):
                return make_compiled(*parts, mode=mode)

        return build


def _weakly(held: Any) -> Callable[[], Any]:
    return (lambda: None) if held is None else weakref.ref(held)


# ---------------------------------------------------------------- joining Thunder


def is_wanted() -> bool:
    """True where the compile that runs now is to share its fusions."""
    asked = get_compile_option(
        PREFIX + OPTION, "thunder_fusionfix: equal fusion regions compile once; see FusionFixConfig"
    )
    data = get_compile_data()
    return wanted(asked, getattr(data, "transforms", None) or (), getattr(data, "executors_list", None) or ())


def wanted(asked: bool | None, transforms: Iterable[object], executors: Iterable[object]) -> bool:
    """What the user wants, who gave ``asked`` as compile option, and these transforms and executors (or their names).

    The transform's own argument wins, then the compile option; without either, sharing goes with the transform or the
    executor entry, under versions that this release was tested with.

    Raises:
        UsageError: the option is neither True nor False.
    """
    if asked is not None:
        check_option(OPTION, asked)
    ours = [transform for transform in transforms if _is_ours(transform)]
    for transform in ours:
        asked = getattr(transform, "options", {}).get(OPTION, asked)
    if asked is not None:
        return asked
    return bool(ours or any(map(_is_ours, executors))) and not _untested()


def _is_ours(part: object) -> bool:
    return part == "fusionfix" or type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


@functools.cache
def _untested() -> bool:
    return bool(untested_versions())


def install() -> None:
    """Puts sharing between Thunder and the makers of its fusions; where it is there already, nothing changes."""
    impl = nvfuser_impl()
    if impl is not None and not hasattr(impl.create_fusion_definition_wrapper, "_shares"):
        impl.create_fusion_definition_wrapper = _sharing_nvfuser(impl.create_fusion_definition_wrapper)
    if not hasattr(torch_compile.make_compiled, "_shares"):
        torch_compile.make_compiled = _sharing_torch_compile(torch_compile.make_compiled)


def _sharing_nvfuser(create: Callable) -> Callable:
    @functools.wraps(create)
    def create_fusion_definition_wrapper(
        bsyms: list[BoundSymbol],
        name: str,
        sorted_unique_inputs: list[Proxy],
        sorted_unique_outputs: list[Proxy],
    ) -> Any:
        wrapper = create(bsyms, name, sorted_unique_inputs, sorted_unique_outputs)
        # Who asks for a region's inputs wants them as they came, under this region's name.
        if wrapper.store_inputs or wrapper.save_fake_inputs or not is_wanted():
            return wrapper
        return SharedFusion(wrapper, bsyms, sorted_unique_inputs, sorted_unique_outputs)

    create_fusion_definition_wrapper._shares = True  # type: ignore[attr-defined]
    return create_fusion_definition_wrapper


def _sharing_torch_compile(make: Callable) -> Callable:
    @functools.wraps(make)
    def make_compiled(
        bsyms: list[BoundSymbol],
        sorted_unique_inputs: list[Proxy],
        sorted_unique_outputs: list[Proxy],
        *,
        mode: str | None = None,
    ) -> Callable:
        fullgraph = get_compile_option("torch_compile_fullgraph", "Whether a TorchCompile region must be one graph.")
        # The other modes use CUDA graphs, whose memory belongs to one place in the program. A region that may fall into
        # several graphs may do anything between them.
        if mode not in (None, "default") or fullgraph is False or not is_wanted():
            return make(bsyms, sorted_unique_inputs, sorted_unique_outputs, mode=mode)
        return SharedTorchCompile(make, bsyms, sorted_unique_inputs, sorted_unique_outputs, mode)

    make_compiled._shares = True  # type: ignore[attr-defined]
    return make_compiled


install()
