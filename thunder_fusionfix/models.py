"""Models by name, built in code and never downloaded, and programs from a user's file.

Weights are random, or nothing at all on the default device "meta": a capture needs shapes alone. Sizes are the published ones
unless overridden; ``qwen2.5-7b`` with ``hidden_size=28`` is the model of Thunder's public memory report for Qwen2.5.

    >>> program = load_model("causal-lm-loss", seq=16)
    >>> [tuple(tensor.shape) for tensor in program.args]
    [(1, 16, 152064), (1, 16)]

Adding a model: one function that takes `Sizes` and a device, one entry in `MODELS`, and its name in `model_names`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model_names import check_name, file_and_function, is_file_and_function

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a caller may change of a model; None: the model has no such size."""

    layers: int | None = None
    hidden_size: int | None = None
    seq: int | None = None  # tokens; for vision models patches
    batch: int | None = 1


@dataclass(frozen=True, slots=True)
class Program:
    """Something to compile and what to call it with."""

    name: str
    fn: Callable
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """A named configuration."""

    summary: str
    sizes: Sizes  # the published ones
    build: Callable[[Sizes, str], tuple[Any, ...]]  # sizes, device -> (callable, args) or (callable, args, kwargs)


def load_model(
    name: str,
    *,
    layers: int | None = None,
    hidden_size: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    device: str = "meta",
) -> Program:
    """The program that ``name`` stands for.

    Args:
        name: a key of `MODELS`, or "file.py:function" where the function takes nothing and returns (callable, args) or
            (callable, args, kwargs).
        layers: overrides the model's own number; likewise hidden_size, seq and batch.
        device: where weights and inputs of a named model are made. "meta" takes no memory.

    Raises:
        UsageError: an unknown name, a size that the model does not have or cannot take, or a file that does not fit.
    """
    given = Sizes(layers, hidden_size, seq, batch)
    check_name(name)
    if is_file_and_function(name):
        return _from_file(name, given)
    model = MODELS[name]
    made = model.build(_override(name, model.sizes, given), device)
    return Program(name, *made)


def _override(name: str, sizes: Sizes, given: Sizes) -> Sizes:
    for size in fields(Sizes):
        value = getattr(given, size.name)
        if value is None:
            continue
        if getattr(sizes, size.name) is None:
            raise UsageError(f"{name} has no {size.name}; leave it out")
        if value < 1:
            raise UsageError(f"{size.name}={value}: at least 1")
        sizes = replace(sizes, **{size.name: value})
    return sizes


# ---------------------------------------------------------------- a user's file


def _from_file(name: str, given: Sizes) -> Program:
    path, function = file_and_function(name)
    if given != Sizes(batch=None):
        raise UsageError(f"sizes are for named models; {name} makes its own")
    build = getattr(_run_file(path), function, None)
    if not callable(build):
        raise UsageError(f"{path} defines no function {function!r}")
    try:
        made = build()
    except Exception as error:
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise UsageError(f"{name} must return (callable, args) or (callable, args, kwargs)")
    if not isinstance(made[1], (tuple, list)) or not isinstance(made[-1] if len(made) == 3 else {}, Mapping):
        raise UsageError(f"{name} must return args as a tuple or list, and kwargs as a dict")
    return Program(function, made[0], tuple(made[1]), *made[2:])


def _run_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} failed when it was run: {type(error).__name__}: {error}") from error
    return module


# ---------------------------------------------------------------- Hugging Face


@contextlib.contextmanager
def _made_on(device: str, dtype: torch.dtype = DTYPE) -> Iterator[None]:
    """Parameters are made in ``dtype`` on ``device``: `Module.to` would make them twice, and fails on fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"this model needs transformers: pip install 'thunder-fusionfix[hf]' ({error})") from error
    return transformers


def _of_release(transformers: Any) -> dict[str, Any]:
    """What a release needs to be one graph under ThunderFX.

    Release 5 fills a cache of keys and values in training too, and begins it with a `cat` of an empty tensor of one
    dimension, which Thunder refuses. Release 4 begins with an assignment: left as users have it.
    """
    return {"use_cache": False} if int(transformers.__version__.split(".")[0]) >= 5 else {}


def _causal_lm(
    family: str, heads: int, vocab: int, positions: int, **options: Any
) -> Callable[[Sizes, str], tuple[Any, ...]]:
    """Builds the causal LM of ``{family}Config``, called with labels as a training step calls it."""

    def build(sizes: Sizes, device: str) -> tuple[Any, ...]:
        transformers = _transformers()
        _check_heads(sizes.hidden_size, heads)
        config = getattr(transformers, f"{family}Config")(
            vocab_size=vocab,
            num_hidden_layers=sizes.layers,
            num_attention_heads=heads,
            hidden_size=sizes.hidden_size,
            max_position_embeddings=max(positions, sizes.seq or 0),
            **_of_release(transformers),
            **options,
        )
        with _made_on(device):
            model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
            if (
                getattr(model, "loss_type", "") is None
            ):  # release 5 has none for GPT-2, and its warning splits the graph
                model.loss_type = "ForCausalLM"
            tokens = torch.randint(0, vocab, (sizes.batch, sizes.seq))
        return model.train(), (), {"input_ids": tokens, "labels": tokens}

    return build


def _check_heads(hidden_size: int | None, heads: int) -> None:
    """Raises `UsageError` where the hidden size does not split into heads that rotary embeddings can turn."""
    width, rest = divmod(hidden_size or 0, heads)
    if rest or (width % 2 and width != 1):
        raise UsageError(f"hidden_size={hidden_size}: {heads} (heads), or {heads} times an even number")


def _vit(sizes: Sizes, device: str) -> tuple[Any, ...]:
    transformers = _transformers()
    side = math.isqrt(sizes.seq or 0)
    if side * side != sizes.seq:
        raise UsageError(f"seq={sizes.seq}: for vit a square number, its patches (196 for an image of 224x224)")
    _check_heads(sizes.hidden_size, 12)
    config = transformers.ViTConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * (sizes.hidden_size or 0),
        image_size=16 * side,
        patch_size=16,
        num_labels=1000,
    )
    with _made_on(device):
        model = transformers.ViTForImageClassification(config)
        image = torch.randn(sizes.batch, 3, 16 * side, 16 * side)
        label = torch.randint(0, 1000, (sizes.batch,))
    return model.train(), (), {"pixel_values": image, "labels": label}


# ---------------------------------------------------------------- losses

VOCAB = 152064  # Qwen2.5's


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of transformers up to 4.49: the logits are shifted."""
    wide = logits.float()
    ahead = wide[..., :-1, :].contiguous().view(-1, wide.shape[-1])
    gold = labels[..., 1:].contiguous().view(-1)
    return F.cross_entropy(ahead, gold, ignore_index=-100)


def causal_lm_loss_shifted_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of newer transformers: the labels are padded and shifted, the logits only seen as rows."""
    wide = logits.float()
    gold = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(wide.view(-1, wide.shape[-1]), gold, ignore_index=-100)


def _loss(fn: Callable) -> Callable[[Sizes, str], tuple[Any, ...]]:
    def build(sizes: Sizes, device: str) -> tuple[Any, ...]:
        logits = torch.randn(sizes.batch or 1, sizes.seq or 1, VOCAB, dtype=DTYPE, device=device, requires_grad=True)
        labels = torch.randint(0, VOCAB, (sizes.batch or 1, sizes.seq or 1), device=device)
        return fn, (logits, labels)

    return build


# ---------------------------------------------------------------- mixture of experts


class _Norm(torch.nn.Module):
    """RMS norm written out: ThunderFX has no `torch.rms_norm` and would split the graph there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.gain


class _ExpertsLayer(torch.nn.Module):
    """Attention, then a mixture of experts in which every expert sees every token: no shape depends on the data."""

    def __init__(self, width: int, heads: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.heads, self.chosen = heads, chosen
        self.norm_attention, self.norm_experts = _Norm(width), _Norm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.gate = torch.nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.up = torch.nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = torch.nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, seq, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))

        rows = self.norm_experts(x).view(1, batch * seq, width)
        scores = torch.softmax(self.router(rows[0]).float(), dim=-1)
        least = torch.topk(scores, self.chosen, dim=-1).values[:, -1:]
        weights = torch.where(scores >= least, scores, 0.0)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        rows = rows.expand(self.gate.shape[0], -1, -1)
        done = torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)
        return x + (done * weights.t().unsqueeze(-1)).sum(0).view(batch, seq, width)


class _ExpertsLM(torch.nn.Module):
    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleList(_ExpertsLayer(width, 16, 7 * width // 2, 4, 2) for _ in range(layers))
        self.norm = _Norm(width)
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return causal_lm_loss_shifted_labels(self.head(self.norm(x)), labels)


def _experts(sizes: Sizes, device: str) -> tuple[Any, ...]:
    _check_heads(sizes.hidden_size, 16)
    with _made_on(device):
        model = _ExpertsLM(sizes.layers or 1, sizes.hidden_size or 1, 32000)
        tokens = torch.randint(0, 32000, (sizes.batch or 1, sizes.seq or 1))
    return model, (tokens, tokens)


# ---------------------------------------------------------------- the list

MODELS: Mapping[str, Model] = {
    "qwen2.5-7b": Model(
        "Qwen2.5-7B; with --hidden-size 28 the model of the public memory report",
        Sizes(layers=28, hidden_size=3584, seq=4096),
        _causal_lm("Qwen2", heads=28, vocab=VOCAB, positions=32768, num_key_value_heads=4, intermediate_size=18944),
    ),
    "qwen2.5-0.5b": Model(
        "Qwen2.5-0.5B, embedding and output tied",
        Sizes(layers=24, hidden_size=896, seq=4096),
        _causal_lm(
            "Qwen2",
            heads=14,
            vocab=151936,
            positions=32768,
            num_key_value_heads=2,
            intermediate_size=4864,
            tie_word_embeddings=True,
        ),
    ),
    "llama-3.2-1b": Model(
        "Llama 3.2 1B, embedding and output tied",
        Sizes(layers=16, hidden_size=2048, seq=4096),
        _causal_lm(
            "Llama",
            heads=32,
            vocab=128256,
            positions=131072,
            num_key_value_heads=8,
            intermediate_size=8192,
            tie_word_embeddings=True,
        ),
    ),
    "llama-3-8b": Model(
        "Llama 3 8B",
        Sizes(layers=32, hidden_size=4096, seq=4096),
        _causal_lm("Llama", heads=32, vocab=128256, positions=8192, num_key_value_heads=8, intermediate_size=14336),
    ),
    "mixtral-small": Model(
        "Mixtral's shape in small: 4 experts of which 2 count, each of them run on every token",
        Sizes(layers=4, hidden_size=1024, seq=4096),
        _experts,
    ),
    "gpt2": Model(
        "GPT-2, without dropout",
        Sizes(layers=12, hidden_size=768, seq=1024),
        _causal_lm("GPT2", heads=12, vocab=50257, positions=1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "gpt-neox": Model(
        "GPT-NeoX with attention and MLP side by side, in the sizes of Pythia 2.8B",
        Sizes(layers=32, hidden_size=2560, seq=2048),
        _causal_lm(
            "GPTNeoX", heads=32, vocab=50304, positions=2048, intermediate_size=10240, use_parallel_residual=True
        ),
    ),
    "vit": Model("ViT-Base, 16x16 patches", Sizes(layers=12, hidden_size=768, seq=196, batch=8), _vit),
    "causal-lm-loss": Model(
        "the loss of a causal LM alone: float32 logits, shifted, made contiguous, cross entropy",
        Sizes(seq=4096),
        _loss(causal_lm_loss),
    ),
    "causal-lm-loss-shifted-labels": Model(
        "the same in the newer form: labels padded and shifted, logits only viewed",
        Sizes(seq=4096),
        _loss(causal_lm_loss_shifted_labels),
    ),
}
