"""What a whole training step needs: every Thunder function of the program, what it saves, and what stands beside it.

A step runs the forwards of the *parts* in order, then the backwards in reverse order, then the optimizer:

    forward 0 -> forward 1 -> ... -> backward 1 -> backward 0 -> optimizer

and at each moment there is allocated

    parameters, inputs, gradients from before, optimizer state, cuBLAS workspaces       the base
    + what earlier parts saved and their backwards have not let go                        saved
    + outputs that the program still has in its hands                                     outputs
    + gradients on their way from one backward to another                                 passed
    + what the running part allocates itself                                              `simulate`

Rules, each as the run-time does it:

- A part's outputs are kept to the end of the step where the program can still reach them: what goes to no other part,
  and what goes to a part of another graph of torch.compile (the variable outlives the graph break; logits are such an
  output).
- A gradient of an argument that another part made is handed to that part's backward, and lives until that backward
  returns where autograd is not split (ThunderFX) and the trace does not take it over (`own_cotangents`).
- An output that nobody sends a gradient to gets one of zeros: a dense tensor of its size, or, where the backward says so
  (`expand_zero_cotangents`), one zero that is repeated. Nobody sends one to what goes to no part that returns a gradient for it,
  where some output of one element that goes nowhere is there to call backward on; without such a loss, backward is called on all.
- A gradient of a parameter is added to the gradient from before, in place; without one it stays.
- Every thread that multiplies matrices has a cuBLAS handle with a workspace: one for the forwards, one for the
  backwards. Linear layers with a bias run by cuBLASLt, which has a workspace of its own.

One set of constants serves all programs: the workspace comes from `devices`, the optimizers from `OPTIMIZERS`, the rest
is measured nowhere and follows from the Graphs.

    >>> from thunder_fusionfix.model import Op, Ref, Value
    >>> w, y = Value("w", (1024,), "f32", "cuda:0"), Value("y", (1024,), "f32", "cuda:0")
    >>> ops = (Op("torch.exp", (Ref("w"),), Ref("y")), Op("return", (Ref("y"),)))
    >>> forward = Graph("f", "inference", ("w",), ops, {"w": w, "y": y})
    >>> step = simulate_step([StepPart("f", forward, None)], workspace_bytes=0)
    >>> step.peak_bytes, step.base["inputs"]
    (8192, 4096)

Left out: what `simulate` leaves out; parameters that no part uses; the sum of two gradients that two parts send to one
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder_fusionfix.alias import Aliases
from thunder_fusionfix.devices import DEFAULT, LT_WORKSPACE_BYTES, find
from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import UNPACK, Arg, Graph, Holder, Op, Ref, Struct, Value, refs
from thunder_fusionfix.repeated import repeated_cotangents
from thunder_fusionfix.simulate import Prices, computing, hold_cotangents


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What happens between two steps; memory in multiples of the parameters' bytes."""

    state: int = 0  # kept from step to step
    temporary: int = 0  # while it runs
    updates: bool = True  # False: nothing runs
    keeps_gradients: bool = False  # the next step finds the gradients and adds to them; else they are set to None


# torch.optim's defaults on CUDA (foreach): AdamW keeps two averages, and takes the root of one into new tensors.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "none": Optimizer(updates=False),
    "keep-gradients": Optimizer(updates=False, keeps_gradients=True),  # a loop that calls backward and no more
    "sgd": Optimizer(),
    "adamw": Optimizer(state=2, temporary=1),
}


@dataclass(frozen=True, slots=True)
class StepPart:
    """One function that Thunder compiles, in the order in which the program calls them."""

    name: str  # "thunder_0 of graph 1", as `Capture.parts` names it
    forward: Graph
    backward: Graph | None  # None where nothing in it requires a gradient

    @property
    def graph(self) -> str:
        """Which graph of torch.compile the part belongs to."""
        return self.name.rpartition(" of graph ")[2]


@dataclass(frozen=True, slots=True)
class Phase:
    """One forward, one backward, or the optimizer."""

    name: str
    live_bytes: tuple[int, ...]  # on the whole device, op by op
    peak_pos: int
    calls: tuple[int, ...] = ()  # positions of the ops that compute: neither bookkeeping nor views

    @property
    def peak_bytes(self) -> int:
        return self.live_bytes[self.peak_pos]


@dataclass(frozen=True)
class StepTimeline:
    """What a training step needs."""

    phases: tuple[Phase, ...]
    base: Mapping[str, int]  # "parameters", "inputs", "gradients", "optimizer state", "cuBLAS workspaces"
    saved_bytes: int  # allocated by the forwards and still there when the last one returns, outputs included
    backward_start_bytes: int  # the most in the first tenth of the backwards' calls
    holders: tuple[Holder, ...]  # at the peak, largest first; the base and other parts in one line each
    unknown: tuple[str, ...] = ()  # tensors whose bytes are not known, counted as 0
    notes: tuple[str, ...] = ()
    is_lower_bound: bool = False  # some region allocates inside what no Graph shows

    @cached_property
    def peak_phase(self) -> Phase:
        """The first phase that reaches the peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak_phase.peak_bytes

    def peak_of(self, stage: str) -> int:
        """The most in phases whose name begins with ``stage``: "forward", "backward", "optimizer"; 0 without any."""
        return max((phase.peak_bytes for phase in self.phases if phase.name.startswith(stage)), default=0)


def simulate_step(
    parts: Sequence[StepPart],
    *,
    optimizer: str = "none",
    workspace_bytes: int | None = None,
    split_autograd: bool = False,
) -> StepTimeline:
    """The StepTimeline of one step in a steady loop.

    Args:
        parts: in call order.
        optimizer: a name in `OPTIMIZERS`. Gradients are set to None after each step, but with "keep-gradients".
        workspace_bytes: of each cuBLAS handle; by default that of `devices.DEFAULT`.
        split_autograd: as Thunder's option: the cotangents are let go when the backward does. False under ThunderFX.

    Raises:
        UsageError: no such optimizer, or no part at all.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"--optimizer {optimizer!r}: one of {', '.join(OPTIMIZERS)}")
    if not parts:
        raise UsageError("a step needs at least one part that Thunder compiles")
    workspace = find(DEFAULT).workspace_bytes if workspace_bytes is None else workspace_bytes
    return _Step(parts, OPTIMIZERS[optimizer], workspace, split_autograd).run()


Key = tuple[int, str]  # a storage of the step: the part that made it (-1: there before) and its name


@dataclass
class _Step:
    """Replays a step, phase by phase."""

    parts: Sequence[StepPart]
    optimizer: Optimizer
    workspace_bytes: int
    split_autograd: bool
    sizes: dict[Key, int] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    beside: list[tuple[Holder, ...]] = field(default_factory=list)  # by phase: the base and other parts
    inside: list[tuple[Holder, ...]] = field(default_factory=list)  # by phase: the running part at its peak
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def run(self) -> StepTimeline:
        for at in range(len(self.parts)):
            self._forward(at)
        saved = sum(self.sizes[key] for key in self._alive(len(self.parts)))
        for at in reversed(range(len(self.parts))):
            if self.parts[at].backward is not None:
                self._backward(at)
        if self.optimizer.updates:
            self._optimize()
        highest = max(range(len(self.phases)), key=lambda at: (self.phases[at].peak_bytes, -at))
        holders = (*self.beside[highest], *self.inside[highest])
        hides = any(
            _hides_memory(op)
            for part in self.parts
            for graph in (part.forward, part.backward)
            if graph
            for op in graph.ops
        )
        return StepTimeline(
            phases=tuple(self.phases),
            base={name: size for name, size in self.base.items()},
            saved_bytes=saved,
            backward_start_bytes=self._start_of_backward(),
            holders=tuple(sorted((holder for holder in holders if holder.nbytes), key=lambda holder: -holder.nbytes)),
            unknown=tuple(dict.fromkeys(self.unknown)),
            notes=tuple(dict.fromkeys([*self.notes, *([_INSIDE] if hides else [])])),
            is_lower_bound=hides,
        )

    # ------------------------------------------------ who made what

    @cached_property
    def forwards(self) -> list[Prices]:
        return [Prices(replace(part.forward, held=part.forward.held | set(part.forward.args))) for part in self.parts]

    @cached_property
    def outputs(self) -> list[tuple[str, ...]]:
        """By part: names of the tensors that its forward gives to the program, in order."""
        return [_outputs_of(part.forward) for part in self.parts]

    @cached_property
    def made_by(self) -> list[dict[str, tuple[int, str]]]:
        """By part: each argument that an earlier part made, to that part and the output.

        A captured part says nothing of where its arguments come from, so they are matched: the same name within one
        graph of torch.compile, else the same shape and dtype; the latest part first, each output once.
        """
        found: list[dict[str, tuple[int, str]]] = []
        for at, part in enumerate(self.parts):
            links: dict[str, tuple[int, str]] = {}
            for name in part.forward.args:
                if part.forward.values[name].kind != "tensor" or self._is_outside_name(name, at):
                    continue
                match = self._maker(at, name, set(links.values()))
                if match is not None:
                    links[name] = match
            found.append(links)
        return found

    def _is_outside_name(self, name: str, at: int) -> bool:
        """True for what an earlier part takes under the same name: parameters and inputs of the program."""
        return (
            any(name in part.forward.args for part in self.parts[:at]) or "_parameters_" in name or "_buffers_" in name
        )

    def _maker(self, at: int, name: str, taken: set[tuple[int, str]]) -> tuple[int, str] | None:
        value = self.parts[at].forward.values[name]
        for earlier in reversed(range(at)):
            values = self.parts[earlier].forward.values
            same_graph = self.parts[earlier].graph == self.parts[at].graph
            for output in self.outputs[earlier]:
                other = values[output]
                alike = (other.shape, other.dtype) == (value.shape, value.dtype) and other.shape
                if (
                    alike
                    and (earlier, output) not in taken
                    and (output == name or not same_graph or output not in self.outputs[at])
                ):
                    return earlier, output
        return None

    def key(self, at: int, name: str) -> Key:
        """The storage that ``name`` of part ``at`` has."""
        prices = self.forwards[at]
        storage = prices.aliases.storages[prices.aliases.storage_of[name]]
        outside = next((n for n in storage.names if n in self.parts[at].forward.args), None)
        if outside is None:
            key = (at, storage.root)
        elif outside in self.made_by[at]:
            return self.key(*self.made_by[at][outside])
        else:
            key = (-1, outside)
        self.sizes.setdefault(key, prices.sizes[storage.id])
        return key

    @cached_property
    def needs_grad(self) -> dict[Key, int]:
        """Parameters, and inputs that get a gradient, to the bytes of their gradient."""
        found: dict[Key, int] = {}
        for at, part in enumerate(self.parts):
            for argument, gradient in _gradients_of(part, self.notes):
                if argument not in self.made_by[at]:
                    found.setdefault(self.key(at, argument), self._backward_size(at, gradient))
        return found

    def _backward_size(self, at: int, name: str) -> int:
        prices = self.backwards[at]
        assert prices is not None
        return prices.sizes[prices.aliases.storage_of[name]]

    @cached_property
    def base(self) -> dict[str, int]:
        parameters = sum(self.sizes[key] for key in self.needs_grad)
        outside = {key for at in range(len(self.parts)) for key in self._outside(at)}
        handles = any(_multiplies(part.forward) for part in self.parts) + any(
            _multiplies(part.backward) for part in self.parts if part.backward is not None
        )
        biased = any(_adds_bias(part.forward) for part in self.parts)
        return {
            "parameters": parameters,
            "inputs": sum(self.sizes[key] for key in outside - self.needs_grad.keys()),
            "gradients": sum(self.needs_grad.values()) if self.optimizer.keeps_gradients else 0,
            "optimizer state": self.optimizer.state * parameters,
            "cuBLAS workspaces": handles * self.workspace_bytes + biased * LT_WORKSPACE_BYTES,
        }

    def _outside(self, at: int) -> Iterator[Key]:
        """What a part takes from outside of the step."""
        for name in self.parts[at].forward.args:
            if self._is_tensor(at, name) and self.key(at, name)[0] == -1:
                yield self.key(at, name)

    def _is_tensor(self, at: int, name: str) -> bool:
        return name in self.forwards[at].aliases.storage_of

    # ------------------------------------------------ who holds what

    @cached_property
    def saved(self) -> list[frozenset[Key]]:
        """By part: what its backward will take."""
        return [
            frozenset(self.key(at, name) for name in part.forward.saved if self._is_tensor(at, name))
            if part.backward
            else frozenset()
            for at, part in enumerate(self.parts)
        ]

    @cached_property
    def reached(self) -> list[frozenset[Key]]:
        """By part: outputs that the program can reach to the end of the step."""
        passed_on = {
            maker
            for at, links in enumerate(self.made_by)
            for maker in links.values()
            if self.parts[at].graph == self.parts[maker[0]].graph and self.parts[at].graph
        }
        return [
            frozenset(self.key(at, name) for name in names if (at, name) not in passed_on)
            for at, names in enumerate(self.outputs)
        ]

    def _alive(self, before: int, taking: int | None = None) -> set[Key]:
        """Storages that forwards made and that live while the parts ``before`` this one have their backward to run.

        ``taking`` is a part whose forward runs now: what it takes is alive too.
        """
        found = {
            key for at in range(len(self.parts)) for key in self.reached[at] if at < max(before, self.num_forwarded)
        }
        for at in range(min(before, self.num_forwarded)):
            found |= self.saved[at]
        if taking is not None:
            found |= {self.key(at, name) for at, name in self.made_by[taking].values()}
            found |= {  # on its way to a later part
                self.key(*maker)
                for links in self.made_by[taking + 1 :]
                for maker in links.values()
                if maker[0] < taking
            }
        return {key for key in found if key[0] >= 0}

    num_forwarded: int = 0  # parts whose forward has returned

    # ------------------------------------------------ phases

    def _forward(self, at: int) -> None:
        prices = self.forwards[at]
        self._phase(
            f"forward of {self.parts[at].name}", prices, self._alive(at, taking=at), own=prices.start_bytes, passed=0
        )
        self.num_forwarded = at + 1

    @cached_property
    def backwards(self) -> list[Prices | None]:
        return [
            None if part.backward is None else self._backward_prices(at, part.backward)
            for at, part in enumerate(self.parts)
        ]

    def _backward_prices(self, at: int, backward: Graph) -> Prices:
        graph = backward if self.split_autograd else hold_cotangents(backward)
        graph = replace(graph, values={**graph.values, **self._repeated_zeros(at, graph)})
        others = self._held_by_others(at)
        names = {name for name in graph.saved if self._is_tensor(at, name) and self.key(at, name) in others}
        return Prices(
            replace(graph, held=(graph.held - set(self.parts[at].forward.args)) | names), self.parts[at].forward
        )

    def _repeated_zeros(self, at: int, backward: Graph) -> dict[str, Value]:
        """Cotangents of part ``at`` that nobody sends and that come as one repeated zero: their values with strides of 0."""
        repeated = repeated_cotangents(backward)
        if not repeated or not self.has_loss:
            return {}
        flat = _flat_outputs_of(self.parts[at].forward)
        unpacked = next((op.output for op in backward.ops if op.id == UNPACK and op.inputs == backward.args[1:]), ())
        if not isinstance(unpacked, tuple) or len(unpacked) != len(flat):
            return {}
        found = {}
        for output, cotangent in zip(flat, unpacked):
            if isinstance(output, Ref) and isinstance(cotangent, Ref) and cotangent.name in repeated:
                value = backward.values[cotangent.name]
                if (at, output.name) not in self.sent and value.shape is not None:
                    found[value.name] = replace(value, strides=(0,) * len(value.shape))
        return found

    @cached_property
    def has_loss(self) -> bool:
        """True where the program gives a tensor of one element, which no part takes: backward is called on that alone."""
        taken = {maker for links in self.made_by for maker in links.values()}
        return any(
            part.forward.values[name].numel == 1 and (at, name) not in taken
            for at, part in enumerate(self.parts)
            if part.backward is not None
            for name in self.outputs[at]
        )

    @cached_property
    def sent(self) -> frozenset[tuple[int, str]]:
        """The outputs, each with its part, that a later part's backward sends a gradient to."""
        return frozenset(
            self.made_by[at][argument]
            for at, part in enumerate(self.parts)
            for argument, _ in _gradients_of(part, [])
            if argument in self.made_by[at]
        )

    def _held_by_others(self, at: int) -> set[Key]:
        """What the backward of part ``at`` cannot free: the program has it, or an earlier part saved it too."""
        found = {key for keys in self.reached for key in keys}
        for earlier in range(at):
            found |= self.saved[earlier]
        return found.union(self._outside(at))

    def _backward(self, at: int) -> None:
        prices = self.backwards[at]
        assert prices is not None
        others = self._held_by_others(at)
        saved = [name for name in prices.graph.saved if name in prices.aliases.storage_of and self._is_tensor(at, name)]
        ids = {prices.aliases.storage_of[name] for name in saved if self.key(at, name) in others}
        own = sum(prices.sizes[id] for id in ids)  # counted beside the part
        self._phase(f"backward of {self.parts[at].name}", prices, self._alive(at), own=own, passed=self._passed(at))
        for argument, gradient in _gradients_of(self.parts[at], self.notes):
            if argument in self.made_by[at]:
                self.on_their_way[self.made_by[at][argument]] = self._backward_size(at, gradient)
            elif not self.optimizer.keeps_gradients:
                key = self.key(at, argument)
                self.new_gradients[key] = self.needs_grad[key]

    on_their_way: dict[tuple[int, str], int] = field(default_factory=dict)  # gradients between backwards
    new_gradients: dict[Key, int] = field(default_factory=dict)

    def _passed(self, at: int) -> int:
        """Bytes of gradients on their way to a part other than ``at``, which has its own as cotangents."""
        self.on_their_way = {maker: size for maker, size in self.on_their_way.items() if maker[0] != at}
        return sum(self.on_their_way.values())

    def _optimize(self) -> None:
        parameters = self.base["parameters"]
        beside = self._beside(self._alive(0), 0)
        live = sum(holder.nbytes for holder in beside) + self.optimizer.temporary * parameters
        temporary = Holder(
            "temporaries of the optimizer", self.optimizer.temporary * parameters, "optimizer", "optimizer"
        )
        self.phases.append(Phase("optimizer", (live,), 0))
        self.beside.append(beside)
        self.inside.append((temporary,))

    def _phase(self, name: str, prices: Prices, alive: set[Key], *, own: int, passed: int) -> None:
        """Appends the phase of one part: its timeline, less what is counted beside it, on top of what is."""
        timeline = prices.timeline(None)
        beside = self._beside(alive, passed)
        offset = sum(holder.nbytes for holder in beside) - own
        live = tuple(nbytes + offset for nbytes in timeline.live_bytes) or (offset,)
        calls = computing(prices.graph)
        self.phases.append(Phase(name, live, timeline.peak_pos, calls))
        self.beside.append(beside)
        held = prices.graph.held
        self.inside.append(
            tuple(
                holder
                for holder in timeline.holders
                if not held.intersection(holder.names) or holder.producer == "cotangent"
            )
        )
        self.unknown += timeline.unknown

    def _beside(self, alive: set[Key], passed: int) -> tuple[Holder, ...]:
        found = [Holder(self._called(name), size, "before the step", "caller") for name, size in self.base.items()]
        found.append(Holder("gradients of parameters", sum(self.new_gradients.values()), "backward", "optimizer"))
        found.append(Holder("gradients between parts", passed, "backward", "backward"))
        reached = {key for keys in self.reached for key in keys}
        for at, part in enumerate(self.parts):
            kept = sum(self.sizes[key] for key in alive if key[0] == at and key not in reached)
            outputs = sum(self.sizes[key] for key in alive if key[0] == at and key in reached)
            found.append(Holder(f"saved by {part.name}", kept, part.name, "backward"))
            found.append(Holder(f"outputs of {part.name}", outputs, part.name, "caller"))
        return tuple(found)

    def _called(self, kind: str) -> str:
        """What a kind of the base is called among holders: as the one tensor that it is where it is one, as a loss's logits."""
        outside = {key for at in range(len(self.parts)) for key in self._outside(at)}
        tensors = {"parameters": self.needs_grad.keys(), "inputs": outside - self.needs_grad.keys()}.get(kind, ())
        return next(iter(tensors))[1] if len(tensors) == 1 else kind

    def _start_of_backward(self) -> int:
        backwards = [phase for phase in self.phases if phase.name.startswith("backward")]
        live = [phase.live_bytes[pos] for phase in backwards for pos in phase.calls]
        return max(live[: max(1, -(-len(live) // 10))], default=0)


# ---------------------------------------------------------------- what one part alone has to know


def held_in_a_step(backward: Graph, forward: Graph, shared: Aliases) -> Graph:
    """``backward`` with saved outputs of its forward in `Graph.held`: an order that counts on their end gains nothing.

    A program mostly has the forward's outputs in its hands while the backward runs, as logits beside a loss.

    Args:
        backward: as `read` gives it.
        forward: of the same part.
        shared: its aliases.
    """
    outputs = {shared.storage_of[name] for name in _outputs_of(forward)}
    saved = (name for name in backward.saved if shared.storage_of.get(name) in outputs)
    return replace(backward, held=backward.held.union(saved))


# ---------------------------------------------------------------- reading a part's Graphs


def _outputs_of(forward: Graph) -> tuple[str, ...]:
    """Names of the tensors that a forward gives to the program, in order; its own arguments left out."""
    result = forward.result
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, Struct):
        first = dict(first.items).get("output")
    elif forward.stage != "forward":
        first = result
    names = dict.fromkeys(refs(first))
    return tuple(name for name in names if forward.values[name].kind == "tensor" and name not in forward.args)


def _flat_outputs_of(forward: Graph) -> tuple[Arg, ...]:
    """What a forward gives to autograd, in the order of the cotangents; nothing for text of an older Thunder."""
    result = forward.result
    first = result[0] if isinstance(result, tuple) and result else None
    flat = dict(first.items).get("flat_output") if isinstance(first, Struct) else None
    return flat if isinstance(flat, tuple) else ()


def _gradients_of(part: StepPart, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Each argument of the forward that gets a gradient, with the gradient's name in the backward."""
    if part.backward is None:
        return
    result = part.backward.result
    flat = result[0] if isinstance(result, tuple) and len(result) == 1 and isinstance(result[0], tuple) else result
    gradients = flat if isinstance(flat, tuple) else ()
    if len(gradients) != len(part.forward.args):
        notes.append(
            f"{part.name} returns {len(gradients)} gradients for {len(part.forward.args)} arguments; matched in order"
        )
    for argument, gradient in zip(part.forward.args, gradients):
        for name in refs(gradient):
            yield argument, name


_INSIDE = (
    "A TorchCompile region multiplies matrices: what Inductor allocates inside is not counted, so that the prediction "
    "is a lower bound."
)


def _hides_memory(op: Op) -> bool:
    """True for a region whose kernels exchange tensors that only its compiler knows, as matmuls make Inductor do."""
    return op.id.startswith("TorchCompile") and any(effect_of(leaf).kind is Kind.MATMUL for leaf in op.leaves)


def _multiplies(graph: Graph) -> bool:
    """True where some op multiplies matrices, and so needs a cuBLAS handle."""
    return any(effect_of(leaf).kind is Kind.MATMUL for op in graph.ops if op.id != UNPACK for leaf in op.leaves)


def _adds_bias(graph: Graph) -> bool:
    """True where some product of matrices adds a bias, by a third tensor."""
    return any(
        effect_of(leaf).kind is Kind.MATMUL and len(refs(leaf.args[:3])) == 3
        for op in graph.ops
        if op.id != UNPACK
        for leaf in op.leaves
    )
