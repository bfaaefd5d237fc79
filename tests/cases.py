"""Small programs of the kind that break tools which reorder, un-fuse or recompute.

    from cases import CASES, backward_of

    case = CASES["shifted_causal_loss"]
    fn, args = case.build("cpu", torch.float32, "tiny")  # or "cuda", bfloat16, "full"
    out = fn(*args)
    if case.expects_backward:
        backward_of(out)

`Case.build` is deterministic: build twice to compare two compilers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """One program and what a checker has to know of it."""

    name: str
    kind: str  # what it is about: "layout", "inplace", "rng", ...
    make: Callable[[torch.device, torch.dtype, str], tuple[Callable, tuple]]
    expects_backward: bool
    mutates: tuple[str, ...] = ()  # what the call changes in place: "arg:0", "buffer:seen"; final values must match
    rng: bool = False  # it draws random numbers: compare under the same seed
    check: Callable[[Callable, tuple, Any], None] | None = None  # an invariant to call with fn, args and result

    def build(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, scale: str = "tiny"
    ) -> tuple[Callable, tuple]:
        """The callable and its arguments, the same every time; global random state is left as it was."""
        on = torch.device(device)
        with torch.random.fork_rng(devices=[on] if on.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(self.name.encode()) & 0x7FFFFFFF)
            fn, args = self.make(on, dtype, scale)
        return fn, tuple(args)


def case(
    kind: str,
    backward: bool,
    mutates: tuple[str, ...] = (),
    rng: bool = False,
    check: Callable[[Callable, tuple, Any], None] | None = None,
) -> Callable[[Callable], Case]:
    """Registers the decorated function as a case of its own name."""

    def register(make: Callable) -> Case:
        CASES[make.__name__] = Case(make.__name__, kind, make, backward, mutates, rng, check)
        return CASES[make.__name__]

    return register


def pick(scale, tiny, full):
    return tiny if scale == "tiny" else full


def rnd(*shape, device, dtype, grad=False, amp=1.0):
    t = torch.randn(*shape, device=device, dtype=dtype)
    if amp != 1.0:
        t.mul_(amp)
    return t.requires_grad_(grad)


def ids(high, *shape, device):
    return torch.randint(0, high, shape, device=device)


def tensors_of(tree) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def cotangent_for(t: torch.Tensor) -> torch.Tensor:
    """A fixed cotangent in the tensor's own dtype that varies along every dim (one full-size buffer, no more)."""
    g = torch.ones(t.shape, device=t.device, dtype=t.dtype)
    for d, n in enumerate(t.shape):
        wave = torch.cos(torch.arange(n, device=t.device, dtype=torch.float32) * (0.7 + 0.45 * d)) * 0.4
        g += wave.to(t.dtype).view([n if i == d else 1 for i in range(t.dim())])
    return g


def backward_of(out) -> None:
    seen, leaves = set(), []
    for t in tensors_of(out):
        if t.requires_grad and t.is_floating_point() and id(t) not in seen:
            seen.add(id(t))
            leaves.append(t)
    if not leaves:
        raise AssertionError("no output needs a gradient")
    torch.autograd.backward(leaves, [cotangent_for(t) for t in leaves])


def rotary_tables(length, width, device, dtype):
    freq = torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / width))
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), freq)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def swap_halves(v):
    lo, hi = v.chunk(2, dim=-1)
    return torch.cat((-hi, lo), dim=-1)


def apply_rotary(v, cos, sin):
    return v * cos + swap_halves(v) * sin


def lower_triangle(n, device):
    return torch.ones(n, n, device=device, dtype=torch.bool).tril()


class ScaleNorm(nn.Module):
    """RMS norm with the statistics taken in float32."""

    def __init__(self, width, device, dtype):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.gain


def lin(i, o, device, dtype, bias=False):
    return nn.Linear(i, o, bias=bias, device=device, dtype=dtype)


@case("horizontal", backward=False)
def parallel_relu_towers(device, dtype, scale):
    """Independent relu/matmul towers joined one after another; all relus can be hoisted together."""
    n, d = pick(scale, (5, 8), (24, 4096))
    towers = [rnd(d, d, device=device, dtype=dtype) for _ in range(n)]
    acc = rnd(d, d, device=device, dtype=dtype)

    def fn(acc, *towers):
        for t in towers:
            up = F.relu(t)
            mixed = torch.mm(up, up.t()) / d
            acc = acc + torch.mm(F.relu(mixed), acc) / d
        return acc

    return fn, (acc, *towers)


@case("horizontal", backward=True)
def parallel_relu_towers_train(device, dtype, scale):
    """The same towers with gradients: in the backward every tower's relu mask is ready early."""
    n, d = pick(scale, (4, 8), (16, 4096))
    towers = [rnd(d, d, device=device, dtype=dtype, grad=True) for _ in range(n)]
    acc = rnd(d, d, device=device, dtype=dtype, grad=True)

    def fn(acc, *towers):
        for t in towers:
            acc = acc + torch.mm(F.relu(torch.mm(F.relu(t), t) / math.sqrt(d)), acc) / d
        return acc

    return fn, (acc, *towers)


@case("horizontal", backward=False)
def big_outputs_small_shared_bias(device, dtype, scale):
    """Two branches share only a small bias; each makes one large tensor for its own consumer."""
    r, d = pick(scale, (6, 8), (65536, 4096))
    left = rnd(r, d, device=device, dtype=dtype)
    right = rnd(r + r // 2, d, device=device, dtype=dtype)
    bias = rnd(d, device=device, dtype=dtype)
    wl = rnd(d, 4, device=device, dtype=dtype)
    wr = rnd(d, 3, device=device, dtype=dtype)

    def fn(left, right, bias, wl, wr):
        a = torch.mm(F.silu(left + bias), wl)
        b = torch.mm(torch.tanh(right + bias), wr)
        return a, b

    return fn, (left, right, bias, wl, wr)


class ParallelBlock(nn.Module):
    def __init__(self, width, heads, inner, partial, device, dtype):
        super().__init__()
        self.heads, self.hd, self.rot = heads, width // heads, int(width // heads * partial)
        self.norm_attn = nn.LayerNorm(width, device=device, dtype=dtype)
        self.norm_mlp = nn.LayerNorm(width, device=device, dtype=dtype)
        self.qkv = lin(width, 3 * width, device, dtype, bias=True)
        self.merge = lin(width, width, device, dtype, bias=True)
        self.up = lin(width, inner, device, dtype, bias=True)
        self.down = lin(inner, width, device, dtype, bias=True)

    def forward(self, x, cos, sin, allowed):
        b, s, w = x.shape
        packed = self.qkv(self.norm_attn(x)).view(b, s, self.heads, 3 * self.hd).transpose(1, 2)
        q, k, v = packed.split(self.hd, dim=-1)
        q = torch.cat((apply_rotary(q[..., : self.rot], cos, sin), q[..., self.rot :]), dim=-1)
        k = torch.cat((apply_rotary(k[..., : self.rot], cos, sin), k[..., self.rot :]), dim=-1)
        score = torch.matmul(q, k.transpose(-1, -2)) * (self.hd**-0.5)
        score = score.masked_fill(~allowed, float("-inf"))
        ctx = torch.matmul(torch.softmax(score.float(), dim=-1).to(x.dtype), v)
        ctx = ctx.permute(0, 2, 1, 3).reshape(b, s, w)
        return x + self.merge(ctx) + self.down(F.gelu(self.up(self.norm_mlp(x))))


@case("residual", backward=True)
def neox_parallel_residual(device, dtype, scale):
    """GPT-NeoX block: attention and MLP both start from the block's input; partial rotary."""
    b, s, w, h, inner, layers = pick(scale, (2, 6, 32, 4, 64, 2), (1, 4096, 2560, 32, 10240, 4))
    blocks = nn.ModuleList(ParallelBlock(w, h, inner, 0.5, device, dtype) for _ in range(layers))
    cos, sin = rotary_tables(s, int(w // h * 0.5), device, dtype)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x, cos, sin, allowed):
            for blk in self.blocks:
                x = blk(x, cos, sin, allowed)
            return x

    return Stack(), (rnd(b, s, w, device=device, dtype=dtype, grad=True), cos, sin, lower_triangle(s, device))


class SequentialBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, inner, device, dtype):
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv_heads, width // heads
        self.n1, self.n2 = ScaleNorm(width, device, dtype), ScaleNorm(width, device, dtype)
        self.q = lin(width, heads * self.hd, device, dtype)
        self.k = lin(width, kv_heads * self.hd, device, dtype)
        self.v = lin(width, kv_heads * self.hd, device, dtype)
        self.o = lin(heads * self.hd, width, device, dtype)
        self.gate = lin(width, inner, device, dtype)
        self.up = lin(width, inner, device, dtype)
        self.down = lin(inner, width, device, dtype)

    def widen(self, t):
        b, k, s, d = t.shape
        r = self.heads // self.kv
        return t[:, :, None].expand(b, k, r, s, d).reshape(b, k * r, s, d)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        y = self.n1(x)
        q = self.q(y).view(b, s, self.heads, self.hd).transpose(1, 2)
        k = self.k(y).view(b, s, self.kv, self.hd).transpose(1, 2)
        v = self.v(y).view(b, s, self.kv, self.hd).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        a = F.scaled_dot_product_attention(q, self.widen(k), self.widen(v), is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SequentialStack(nn.Module):
    def __init__(self, layers, *a):
        super().__init__()
        self.blocks = nn.ModuleList(SequentialBlock(*a) for _ in range(layers))

    def forward(self, x, cos, sin):
        for blk in self.blocks:
            x = blk(x, cos, sin)
        return x


@case("residual", backward=True)
def llama_sequential_residual(device, dtype, scale):
    """LLaMA-like stack: the residual sum between blocks should be rebuilt or kept once, not twice; SDPA must not be recomputed."""
    b, s, w, h, kv, inner, layers = pick(scale, (2, 8, 32, 4, 2, 48, 2), (1, 4096, 4096, 32, 8, 11008, 4))
    cos, sin = rotary_tables(s, w // h, device, dtype)
    return SequentialStack(layers, w, h, kv, inner, device, dtype), (
        rnd(b, s, w, device=device, dtype=dtype, grad=True),
        cos,
        sin,
    )


@case("saved", backward=True)
def same_activation_two_layouts(device, dtype, scale):
    """One activation feeds a product as it is and another one transposed: save it once."""
    n, d = pick(scale, (6, 8), (8192, 4096))
    x = rnd(n, d, device=device, dtype=dtype, grad=True)
    wa = rnd(d, d, device=device, dtype=dtype, grad=True, amp=d**-0.5)
    wb = rnd(n, d, device=device, dtype=dtype, grad=True, amp=n**-0.5)

    def fn(x, wa, wb):
        h = torch.tanh(x)
        return torch.mm(h, wa), torch.mm(h.t(), wb), (h.t() * 2).reshape(-1)[: d + 1]

    return fn, (x, wa, wb)


@case("dtype", backward=True)
def casts_around_transposes(device, dtype, scale):
    """cast - transpose - cast back - scale - transpose, repeated; each step is cheap, a saved copy is not."""
    b, s, h, d = pick(scale, (2, 5, 3, 4), (4, 4096, 32, 128))
    x = rnd(b, s, h, d, device=device, dtype=dtype, grad=True)
    g = rnd(h, 1, d, device=device, dtype=dtype, grad=True)

    def fn(x, g):
        y = x.float().transpose(1, 2)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = y.to(x.dtype) * g
        z = y.transpose(-1, -2).double().sum(-1).to(torch.float32)
        return y.transpose(1, 2).flatten(2), z

    return fn, (x, g)


class GatedMLP(nn.Module):
    def __init__(self, width, inner, act, device, dtype):
        super().__init__()
        self.a, self.b, self.c = (
            lin(width, inner, device, dtype),
            lin(width, inner, device, dtype),
            lin(inner, width, device, dtype),
        )
        self.act = act

    def forward(self, x):
        return self.c(self.act(self.a(x)) * self.b(x))


@case("mlp", backward=True)
def llama_mlp_tower(device, dtype, scale):
    """Many equal norm + SwiGLU MLPs in a row; equal blocks must get equal fusions in the same argument order."""
    n, w, inner, layers = pick(scale, (6, 8, 12, 4), (8192, 4096, 11008, 6))
    net = nn.Sequential(
        *[m for _ in range(layers) for m in (ScaleNorm(w, device, dtype), GatedMLP(w, inner, F.silu, device, dtype))]
    )
    return net, (rnd(n, w, device=device, dtype=dtype, grad=True),)


@case("loss", backward=True)
def shifted_causal_loss(device, dtype, scale):
    """HF-style loss: upcast all logits, cut the last step, make contiguous, flatten, cross entropy with ignored labels."""
    b, s, v = pick(scale, (2, 6, 13), (1, 4096, 152064))
    logits = rnd(b, s, v, device=device, dtype=dtype, grad=True)
    labels = ids(v, b, s, device=device)
    labels[:, : s // 3] = -100

    def fn(logits, labels):
        wide = logits.float()
        ahead = wide[..., :-1, :].contiguous().view(-1, v)
        gold = labels[..., 1:].contiguous().view(-1)
        return F.cross_entropy(ahead, gold, ignore_index=-100)

    return fn, (logits, labels)


class TiedLM(nn.Module):
    def __init__(self, vocab, width, device, dtype):
        super().__init__()
        self.table = nn.Embedding(vocab, width, device=device, dtype=dtype)
        self.norm = ScaleNorm(width, device, dtype)
        self.mix = lin(width, width, device, dtype)
        self.head = lin(width, vocab, device, dtype)
        self.head.weight = self.table.weight
        self.vocab = vocab

    def forward(self, tokens):
        h = self.table(tokens)
        h = h + torch.tanh(self.mix(self.norm(h)))
        logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].reshape(-1, self.vocab).float(), tokens[:, 1:].reshape(-1)), logits


@case("loss", backward=True)
def tied_embedding_lm(device, dtype, scale):
    """Embedding and output layer share one weight: its two gradients must be added, the parameter seen once."""
    b, s, v, w = pick(scale, (2, 6, 17, 8), (2, 4096, 50304, 2048))
    return TiedLM(v, w, device, dtype), (ids(v, b, s, device=device),)


@case("loss", backward=True)
def activation_for_outside_loss(device, dtype, scale):
    """A relu tower whose output goes to a loss outside the compiled part: the incoming gradient must be droppable at its last use."""
    n, d, depth = pick(scale, (6, 8, 5), (16384, 8192, 5))

    def fn(x):
        for _ in range(depth):
            x = F.relu(x - 0.01)
        return x

    return fn, (rnd(n, d, device=device, dtype=dtype, grad=True),)


@case("layout", backward=True)
def attention_explicit_rotary(device, dtype, scale):
    """Attention with explicit transposes, half-swapping rotary (slice, neg, cat), softmax in float32."""
    b, s, h, d = pick(scale, (2, 6, 3, 8), (2, 2048, 32, 128))
    x = rnd(b, s, h * d, device=device, dtype=dtype, grad=True)
    wq, wk, wv, wo = (rnd(h * d, h * d, device=device, dtype=dtype, grad=True, amp=(h * d) ** -0.5) for _ in range(4))
    cos, sin = rotary_tables(s, d, device, dtype)

    def fn(x, wq, wk, wv, wo, cos, sin, allowed):
        q = F.linear(x, wq).view(b, s, h, d).transpose(1, 2)
        k = F.linear(x, wk).view(b, s, h, d).transpose(1, 2)
        v = F.linear(x, wv).view(b, s, h, d).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        p = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(d)
        p = torch.where(allowed, p, torch.full_like(p, -1e4))
        p = torch.softmax(p, dim=-1, dtype=torch.float32).to(q.dtype)
        ctx = torch.matmul(p, v).transpose(1, 2).contiguous().view(b, s, h * d)
        return F.linear(ctx, wo)

    return fn, (x, wq, wk, wv, wo, cos, sin, lower_triangle(s, device))


@case("layout", backward=True)
def grouped_qkv_expand(device, dtype, scale):
    """LitGPT-like packed QKV: reshape to groups, permute, split, expand K and V over the group, reshape (a copy), rotary."""
    b, s, groups, per, d = pick(scale, (2, 5, 2, 3, 4), (2, 2048, 8, 4, 128))
    width = groups * (per + 2) * d
    qkv = rnd(b, s, width, device=device, dtype=dtype, grad=True)
    cos, sin = rotary_tables(s, d, device, dtype)

    def fn(qkv, cos, sin):
        t = qkv.reshape(b, s, groups, per + 2, d).permute(0, 2, 3, 1, 4)
        q, k, v = t[:, :, :per], t[:, :, per : per + 1], t[:, :, per + 1 :]
        k = k.expand(b, groups, per, s, d).reshape(b, groups * per, s, d)
        v = v.expand(b, groups, per, s, d).reshape(b, groups * per, s, d)
        q = q.reshape(b, groups * per, s, d)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    return fn, (qkv, cos, sin)


@case("layout", backward=True)
def sequence_first_bmm_attention(device, dtype, scale):
    """[S, B, H] attention through bmm on heads folded into the batch (Megatron/BART style)."""
    s, b, h, d = pick(scale, (5, 2, 2, 4), (2048, 2, 32, 64))
    x = rnd(s, b, h * d, device=device, dtype=dtype, grad=True)
    packed = rnd(3 * h * d, h * d, device=device, dtype=dtype, grad=True, amp=(h * d) ** -0.5)
    out = rnd(h * d, h * d, device=device, dtype=dtype, grad=True, amp=(h * d) ** -0.5)

    def fn(x, packed, out):
        q, k, v = F.linear(x, packed).view(s, b * h, 3 * d).split(d, dim=-1)
        p = torch.bmm(q.transpose(0, 1) / math.sqrt(d), k.permute(1, 2, 0))
        ctx = torch.bmm(torch.softmax(p, dim=-1), v.transpose(0, 1))
        return F.linear(ctx.transpose(0, 1).reshape(s, b, h * d), out)

    return fn, (x, packed, out)


@case("inplace", backward=True)
def mask_built_then_filled(device, dtype, scale):
    """A causal mask made from integers, cut by padding with masked_fill_ in place, added to the scores."""
    b, h, s, d = pick(scale, (2, 2, 5, 4), (4, 16, 2048, 64))
    q = rnd(b, h, s, d, device=device, dtype=dtype, grad=True)
    k = rnd(b, h, s, d, device=device, dtype=dtype, grad=True)
    lengths = torch.arange(b, device=device) % s + 1

    def fn(q, k, lengths):
        pos = torch.arange(s, device=q.device)
        keep = (pos[None, :] <= pos[:, None])[None] & (pos[None, None, :] < lengths[:, None, None])
        bias = torch.zeros(b, s, s, device=q.device, dtype=q.dtype)
        bias.masked_fill_(~keep, -1e4)
        score = torch.matmul(q, k.transpose(-2, -1)) * 0.1
        return torch.softmax(score + bias[:, None], dim=-1)

    return fn, (q, k, lengths)


@case("matmul", backward=True)
def seq_first_linear_batch1(device, dtype, scale):
    """Linear on [S, 1, H] whose size-1 dim carries a foreign stride: foldable without a copy."""
    s, w, o = pick(scale, (6, 8, 5), (8192, 4096, 4096))
    base = rnd(1, s, w, device=device, dtype=dtype, grad=True)
    weight = rnd(o, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)

    def fn(base, weight):
        x = base.transpose(0, 1)
        return F.gelu(F.linear(x, weight)), torch.matmul(x, weight.t())

    return fn, (base, weight)


@case("matmul", backward=True)
def seq_first_linear_noncontiguous(device, dtype, scale):
    """Linear on [S, B, H] seen through a transpose, small B: bmm over S is much slower than one folded mm."""
    s, b, w, o = pick(scale, (6, 3, 8, 5), (4096, 4, 4096, 8192))
    base = rnd(b, s, w, device=device, dtype=dtype, grad=True)
    weight = rnd(o, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)
    bias = rnd(o, device=device, dtype=dtype, grad=True)

    def fn(base, weight, bias):
        return F.relu(F.linear(base.transpose(0, 1), weight, bias))

    return fn, (base, weight, bias)


@case("matmul", backward=True)
def input_gradient_only(device, dtype, scale):
    """Weights are frozen, only the input needs a gradient; awkward row counts."""
    n, a, w, layers = pick(scale, (5, 3, 8, 2), (1021, 37, 1024, 4))
    net = nn.Sequential(
        *[m for _ in range(layers) for m in (lin(w, w, device, dtype, True), nn.SiLU())], lin(w, 1, device, dtype)
    )
    net.requires_grad_(False)
    return net, (rnd(n, a, w, device=device, dtype=dtype, grad=True),)


@case("matmul", backward=True)
def broadcast_batch_product(device, dtype, scale):
    """Batch dims that broadcast on both sides; the small operand must not be copied out."""
    b, h, p, q, r = pick(scale, (4, 3, 1, 5, 6), (512, 16, 1, 256, 128))
    a = rnd(b, h, p, q, device=device, dtype=dtype, grad=True)
    c = rnd(h, q, r, device=device, dtype=dtype, grad=True)
    e = rnd(b, 1, r, 2, device=device, dtype=dtype, grad=True)

    def fn(a, c, e):
        return torch.matmul(torch.matmul(a, c), e)

    return fn, (a, c, e)


@case("slices", backward=True)
def chunk_loop_slice_assign(device, dtype, scale):
    """A buffer filled by slice assignment in a loop; every write is functionalised to a full copy."""
    n, w, o, chunks = pick(scale, (8, 6, 5, 4), (16384, 2048, 4096, 16))
    x = rnd(n, w, device=device, dtype=dtype, grad=True)
    weight = rnd(o, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)

    def fn(x, weight):
        out = torch.zeros(n, o, device=x.device, dtype=x.dtype)
        step = n // chunks
        for c in range(chunks):
            out[c * step : (c + 1) * step] = F.silu(F.linear(x[c * step : (c + 1) * step], weight))
        return out

    return fn, (x, weight)


@case("slices", backward=True)
def chunk_loop_cat(device, dtype, scale):
    """The same work with cat: nothing but one chunk's inner activation should be alive at a time."""
    n, w, inner, chunks = pick(scale, (8, 6, 12, 4), (16384, 2048, 8192, 16))
    x = rnd(n, w, device=device, dtype=dtype, grad=True)
    w1 = rnd(inner, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)
    w2 = rnd(w, inner, device=device, dtype=dtype, grad=True, amp=inner**-0.5)

    def fn(x, w1, w2):
        return torch.cat([F.linear(F.gelu(F.linear(p, w1)), w2) for p in x.split(n // chunks)], dim=0)

    return fn, (x, w1, w2)


@case("slices", backward=True)
def split_with_unused_parts(device, dtype, scale):
    """A split whose middle part is unused and whose last part is smaller."""
    n, w = pick(scale, (5, 4), (40001, 4096))
    x = rnd(n, w, device=device, dtype=dtype, grad=True)

    def fn(x):
        parts = torch.split(torch.tanh(x), n // 2)
        return parts[0] * 3, parts[-1].t()

    return fn, (x,)


@case(
    "inplace",
    backward=True,
    mutates=("buffer:bn.running_mean", "buffer:bn.running_var", "buffer:bn.num_batches_tracked"),
)
def channels_last_conv_norm(device, dtype, scale):
    """channels_last conv, batch norm in training mode (running statistics change), relu, 1x1 conv, skip."""
    b, c, hw = pick(scale, (2, 4, 6), (64, 256, 56))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(c, c, 3, padding=1, bias=False, device=device, dtype=dtype)
            self.bn = nn.BatchNorm2d(c, device=device, dtype=dtype)
            self.b = nn.Conv2d(c, c, 1, device=device, dtype=dtype)

        def forward(self, x):
            y = F.relu(self.bn(self.a(x)))
            return x + self.b(y)

    net = Net().train()
    for conv in (net.a, net.b):
        conv.weight = nn.Parameter(conv.weight.detach().contiguous(memory_format=torch.channels_last))
    x = rnd(b, c, hw, hw, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return net, (x.requires_grad_(True),)


@case("inplace", backward=True, mutates=("buffer:centre", "buffer:seen"))
def buffer_changed_then_read(device, dtype, scale):
    """A module that updates a float and an integer buffer and uses the new values in the same forward."""
    n, d = pick(scale, (6, 5), (65536, 2048))

    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(d, device=device, dtype=dtype))
            self.register_buffer("seen", torch.zeros((), device=device, dtype=torch.int64))
            self.gain = nn.Parameter(torch.ones(d, device=device, dtype=dtype))

        def forward(self, x):
            self.seen.add_(1)
            self.centre.mul_(0.5).add_(x.detach().mean(0) * 0.5)
            return (x - self.centre) * self.gain / self.seen

    return Centre(), (rnd(n, d, device=device, dtype=dtype, grad=True),)


@case("inplace", backward=False, mutates=("arg:0",))
def read_broadcast_then_overwrite(device, dtype, scale):
    """The old value is read through a broadcast, then the input is overwritten: the read must come first."""
    r, c, k = pick(scale, (5, 2, 3), (8192, 4096, 4))
    state = rnd(r, c, device=device, dtype=dtype)
    big = rnd(k, r, c, device=device, dtype=dtype)

    def fn(state, big):
        fresh = torch.sigmoid(state) - 1
        out = torch.maximum(big, state)
        state.copy_(fresh)
        return out

    return fn, (state, big)


@case("inplace", backward=False, mutates=("arg:0",))
def views_taken_before_write(device, dtype, scale):
    """Two views are made, then the base changes: both views must show the change."""
    n, m = pick(scale, (3, 4), (8192, 8192))
    x = rnd(n, m, device=device, dtype=dtype)

    def fn(x):
        flat = x.view(-1)
        tail = x[1:]
        x.add_(1.0)
        return flat * 2, tail.exp(), x.t().sum(0)

    return fn, (x,)


@case("alias", backward=False, mutates=("arg:1",))
def argument_is_row_of_other(device, dtype, scale):
    """arg 1 is a row of arg 0 and is changed in place; arg 0 is returned and read afterwards."""
    n, m = pick(scale, (3, 4), (4096, 4096))
    x = rnd(n, m, device=device, dtype=dtype)

    def fn(x, row):
        row.add_(10)
        return x * 1.0, row * 2

    return fn, (x, x[1])


@case("inplace", backward=False, mutates=("arg:0", "arg:1"))
def copy_out_then_change_source(device, dtype, scale):
    """src is copied to dst and then changed; dst must keep the old values."""
    n, m = pick(scale, (3, 4), (8192, 8192))
    dst, src = rnd(n, m, device=device, dtype=dtype), rnd(n, m, device=device, dtype=dtype)

    def fn(dst, src):
        dst.copy_(src)
        src.neg_()
        return src + dst

    return fn, (dst, src)


@case("inplace", backward=False, mutates=("arg:3", "arg:4"))
def kv_cache_step(device, dtype, scale):
    """New keys and values are put into preallocated caches in place, then attention reads the caches."""
    b, h, cap, d, new = pick(scale, (1, 2, 6, 4, 2), (4, 32, 8192, 128, 16))
    q, k, v = (rnd(b, h, new, d, device=device, dtype=dtype) for _ in range(3))
    kc, vc = (
        torch.zeros(b, h, cap, d, device=device, dtype=dtype),
        torch.zeros(b, h, cap, d, device=device, dtype=dtype),
    )
    pos = torch.arange(1, 1 + new, device=device)

    def fn(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        score = torch.matmul(q, kc.transpose(-1, -2)) / math.sqrt(d)
        reach = torch.arange(cap, device=q.device)[None, :] <= pos[:, None]
        return torch.matmul(torch.softmax(score.masked_fill(~reach, -1e4), -1), vc)

    return fn, (q, k, v, kc, vc, pos)


@case("alias", backward=False)
def views_and_inputs_returned(device, dtype, scale):
    """Outputs that are an input itself, views of it, and one tensor returned twice."""
    n, m = pick(scale, (4, 6), (8192, 4096))
    x = rnd(n, m, device=device, dtype=dtype)

    def fn(x):
        y = x + 1
        return (
            {"same": x, "flip": x.t(), "row": x[1:], "flat": x.view(-1), "grid": x.view(n, 2, -1).permute(1, 0, 2)},
            y,
            (y, y.t()),
        )

    return fn, (x,)


def _dropout_grad_matches(fn, args, out):
    # with x = 1 everywhere, out = mask/(1-p) and grad = cotangent * mask/(1-p)
    for x, y in zip((args[0], args[1]), out):
        torch.testing.assert_close(x.grad, cotangent_for(y) * y.detach(), rtol=2e-2, atol=1e-5)


@case("rng", backward=True, rng=True, check=_dropout_grad_matches)
def two_branches_of_dropout(device, dtype, scale):
    """A large branch and a small one draw dropout masks in that order; a memory-driven scheduler wants the small one first."""
    big, small = pick(scale, ((40, 6), (3, 4)), ((65536, 2048), (256, 64)))
    a = torch.ones(*big, device=device, dtype=dtype, requires_grad=True)
    b = torch.ones(*small, device=device, dtype=dtype, requires_grad=True)

    def fn(a, b):
        wide = F.dropout(a, 0.3)
        narrow = F.dropout(b, 0.5)
        return wide, narrow

    return fn, (a, b)


def _checkpoint_dropout_matches(fn, args, out):
    x, y = args[0], out
    torch.testing.assert_close(x.grad, cotangent_for(y) * y.detach(), rtol=2e-2, atol=1e-5)


@case("rng", backward=True, rng=True, check=_checkpoint_dropout_matches)
def dropout_under_checkpoint(device, dtype, scale):
    """Dropout inside a checkpointed region: the recomputed mask has to be the forward's mask."""
    n, w = pick(scale, (40, 6), (32768, 4096))
    x = torch.ones(n, w, device=device, dtype=dtype, requires_grad=True)

    def region(t):
        return F.dropout(F.dropout(t, 0.25), 0.25)

    def fn(x):
        return checkpoint(region, x, use_reentrant=False)

    return fn, (x,)


@case("recompute", backward=True)
def checkpointed_gated_mlp(device, dtype, scale):
    """A checkpointed gated MLP whose recomputed pieces depend on each other: they must be placed in data-flow order."""
    n, w, inner, layers = pick(scale, (6, 8, 12, 3), (16384, 2048, 8192, 6))
    mlps = nn.ModuleList(GatedMLP(w, inner, F.silu, device, dtype) for _ in range(layers))
    norms = nn.ModuleList(ScaleNorm(w, device, dtype) for _ in range(layers))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlps, self.norms = mlps, norms

        def forward(self, x):
            for m, nrm in zip(self.mlps, self.norms):
                x = x + checkpoint(m, nrm(x), use_reentrant=False)
            return x

    return Net(), (rnd(n, w, device=device, dtype=dtype, grad=True),)


@case("layout", backward=False)
def shape_ops_only(device, dtype, scale):
    """Nothing but reshapes and transposes of an input: no kernel should run."""
    a, b, c = pick(scale, (2, 3, 4), (40, 2048, 2048))
    x = rnd(2, a, b, c, device=device, dtype=dtype)

    def fn(x):
        folded = x.reshape(2 * a, b, c)
        return folded, folded.transpose(1, 2), x.flatten(0, 1).unsqueeze(1)

    return fn, (x,)


@case("layout", backward=True)
def permute_reshape_copies(device, dtype, scale):
    """Permutes and reshapes that cannot be views, one after another, with a little arithmetic between."""
    a, b, c, d = pick(scale, (2, 3, 4, 6), (16, 64, 128, 96))
    x = rnd(a, b, c, d, device=device, dtype=dtype, grad=True)

    def fn(x):
        y = x.permute(0, 2, 1, 3).reshape(a, c, b * d)
        y = (y * 2).permute(2, 0, 1).reshape(b, d * a, c)
        y = y.transpose(0, 2).reshape(-1, b, d, a).movedim(3, 0)
        z = y.reshape(a * c, -1)
        return z.t().reshape(b, -1) - 1, y.flatten(1, 2)

    return fn, (x,)


@case("shapes", backward=True)
def zero_sized_pieces(device, dtype, scale):
    """Empty tensors joined, sliced, reduced, multiplied and reshaped beside ordinary ones."""
    n, w = pick(scale, (3, 4), (8192, 4096))
    x = rnd(n, w, device=device, dtype=dtype, grad=True)
    empty = rnd(n, 0, device=device, dtype=dtype, grad=True)
    weight = rnd(w, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)

    def fn(x, empty, weight):
        joined = torch.cat((F.linear(x, weight), empty), dim=1)
        nothing = F.linear(x[:0], weight)
        return joined, nothing.reshape(0, 2, w // 2).transpose(1, 2), empty.sum(1) + x.sum(1)

    return fn, (x, empty, weight)


@case("shapes", backward=True)
def unit_dims_everywhere(device, dtype, scale):
    """Dims of size 1 in every place, with odd strides, through matmul, sum, squeeze, expand and transpose."""
    w = pick(scale, 5, 16384)
    x = rnd(1, 1, w, device=device, dtype=dtype, grad=True)
    col = rnd(1, w, 1, device=device, dtype=dtype).transpose(0, 2).detach().requires_grad_(True)
    one = rnd(1, 1, device=device, dtype=dtype, grad=True)

    def fn(x, col, one):
        y = x.transpose(0, 1) * one
        z = torch.matmul(y, col)
        return y.squeeze(0).expand(3, w), z.squeeze(), x.reshape(1, w).sum(0, keepdim=True), one.squeeze()

    return fn, (x, col, one)


@case("shapes", backward=True)
def mixed_outputs_dict(device, dtype, scale):
    """A dict with nested tuples of float, integer and bool results, some unused inside, some without gradients."""
    n, w = pick(scale, (6, 8), (16384, 4096))
    x = rnd(n, w, device=device, dtype=dtype, grad=True)
    weight = rnd(w, w, device=device, dtype=dtype, grad=True, amp=w**-0.5)

    def fn(x, weight):
        h = torch.cat((F.linear(x, weight)[:, : w // 2], x[:, w // 2 :]), dim=1)
        unused = torch.exp(h * 1000)
        del unused
        top = h.argmax(dim=1)
        return {"h": h, "aux": (h.sum(1), (top, h > 0)), "count": (h > 0).sum(), "const": 3, "none": None}

    return fn, (x, weight)
