"""One statement of a printed trace as data.

Printed traces use a small part of Python: calls, literals, ``del``, ``return`` and unpacking. This module reads that part and no
more, by a tokenizer and a recursive descent of bounded depth, so text from strangers is neither executed nor able to exhaust
the stack, and a line of n characters takes time in O(n).

    >>> read_statement('[t2, _] = nvFusion0(t0, (1, -2), dtype=dtypes.float32)  # note')
    Statement(callee='nvFusion0', args=(Ref(name='t0'), (1, -2)), kwargs=(('dtype', Const(text='dtypes.float32')),), \
output=(Ref(name='t2'), None), annotation=None, comment='# note', cut=False)
    >>> read_statement("see the plot (above)") is None
    True
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from thunder_fusionfix.model import DEL, RETURN, UNPACK, Arg, Const, Ref, Struct, refs

MAX_DEPTH = 64  # brackets within brackets; printed traces need fewer than ten
MAX_DIGITS = 400  # Python refuses to convert some thousands, and no size needs more than 20

_TOKEN = re.compile(
    r"""[ \t]*(\#.*
    | [^\W\d]\w*(?:\.[^\W\d]\w*)*
    | (?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?j?
    | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"
    | \.\.\. | \(object\ of\ type\ [^()]*\) | <[^<>]*>
    | \\. | \S)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_LITERALS: dict[str, Arg] = {"True": True, "False": False, "None": None, "inf": float("inf"), "nan": float("nan")}
_TYPE_NAMES = frozenset(("bool", "int", "float", "complex", "str", "tuple", "list", "dict", "slice", "ellipsis"))
_ACCESSORS = {"get_parameter": "unpack_parameter", "get_buffer": "unpack_buffer", "get_submodule": "unpack_submodule"}
_IDENTIFIER = re.compile(r"[^\W\d]\w*\Z")


@dataclass(frozen=True, slots=True)
class Statement:
    """What one statement does; ``callee`` is also ``del``, ``return`` or ``unpack``."""

    callee: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    output: Arg = None
    annotation: str | None = None  # the type in ``x: "cuda:0 f32[2]" = args[0]``
    comment: str = ""  # with its "#"
    cut: bool = False  # the line ends before its brackets close


@dataclass(frozen=True, slots=True)
class Signature:
    """The ``def`` line of a trace."""

    name: str
    params: tuple[str, ...]
    elided: bool = False


class _NotUnderstood(Exception):
    pass


def read_statement(text: str, *, cut: bool = False) -> Statement | None:
    """The statement that ``text`` is; None where it is none that traces print.

    Args:
        text: one logical line, without indent.
        cut: the line is known to end before its brackets close: what is there is read, a last half name is left out.
    """
    try:
        return _Reader(text, cut).statement()
    except _NotUnderstood:
        return None


def read_signature(text: str) -> Signature | None:
    """The signature in a ``def`` line; None where it is not one.

    >>> read_signature("def computation(a, *args, b=2):")
    Signature(name='computation', params=('a', 'args', 'b'), elided=False)
    """
    try:
        return _Reader(text, cut=True).signature()
    except _NotUnderstood:
        return None


def unquoted(token: str) -> str:
    """The text of a printed string literal."""
    body = token[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    digits = match.group(1) or match.group(2) or match.group(3)
    if digits is not None:
        return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else match.group(0)
    return _ESCAPED.get(match.group(4), match.group(4))


class _Reader:
    """Reads one line; every method consumes tokens from the left and raises `_NotUnderstood` where they do not fit."""

    __slots__ = ("index", "may_be_cut", "text", "tokens", "was_cut")

    def __init__(self, text: str, cut: bool) -> None:
        self.text = text
        self.tokens = [(match.group(1), match.start(1)) for match in _TOKEN.finditer(text)]
        self.index = 0
        self.may_be_cut = cut
        self.was_cut = False
        if cut and self.tokens and _IDENTIFIER.match(self.tokens[-1][0]) and self.tokens[-1][0] not in _LITERALS:
            self.tokens.pop()  # it may be half a name

    @property
    def token(self) -> str:
        """The next token; empty at the end and before a comment."""
        if self.index >= len(self.tokens):
            return ""
        token = self.tokens[self.index][0]
        return "" if token[0] == "#" else token

    def take(self, expected: str) -> None:
        if self.token != expected:
            raise _NotUnderstood
        self.index += 1

    def closes(self, bracket: str) -> bool:
        """Takes a closing bracket if it is next, or if the line was cut before it."""
        token = self.token
        if token == bracket:
            self.index += 1
            return True
        if not token and self.may_be_cut:
            self.was_cut = True
            return True
        return False

    def comment(self) -> str:
        return next((token for token, _ in self.tokens[self.index :] if token[0] == "#"), "")

    # ------------------------------------------------------------ statements

    def statement(self) -> Statement:
        first = self.token
        if first in (DEL, RETURN):
            self.index += 1
            items, _ = self.items() if self.token else ((), False)
            if first == RETURN and self.token in (")", "]"):  # of what the trace was printed in
                self.index += 1
            self.at_end()
            if first == DEL and not items:
                raise _NotUnderstood
            args = tuple(Ref(name) for item in items for name in refs(item)) if first == DEL else items
            return Statement(first, args, comment=self.comment(), cut=self.was_cut)
        if not first or not (first[0] in "_([" or first[0].isalpha()):
            raise _NotUnderstood
        if self.is_call():
            callee, args, kwargs = self.call()
            if self.token == "[":  # globals()['key']
                raise _NotUnderstood
            self.at_end()
            return Statement(callee, args, kwargs, comment=self.comment(), cut=self.was_cut)
        return self.assignment()

    def assignment(self) -> Statement:
        place = self.place()
        if place is not None:
            return place
        targets, is_list = self.items()
        annotation = None
        if self.token == ":":
            self.index += 1
            if not self.token.startswith(('"', "'")):
                raise _NotUnderstood
            annotation = unquoted(self.token)
            self.index += 1
        self.take("=")
        output = _output(targets if is_list else targets[0])
        callee, args, kwargs = self.right_hand_side(is_list or isinstance(output, tuple))
        return Statement(callee, args, kwargs, output, annotation, self.comment(), self.was_cut)

    def place(self) -> Statement | None:
        """``x.attr = value`` and ``x[key] = value``; None where the line is neither."""
        first = self.token
        following = self.tokens[self.index + 1][0] if self.index + 1 < len(self.tokens) else ""
        if "." in first and following == "=" and first[0] not in "\"'0123456789":
            root, _, attribute = first.partition(".")
            self.index += 2
            return Statement("pack_attr", (Ref(root), attribute, self.value(0)), comment=self.comment())
        if following == "[" and _IDENTIFIER.match(first):
            self.index += 2
            key = self.value(0)
            self.take("]")
            self.take("=")
            return Statement("pack_setitem", (Ref(first), key, self.value(0)), comment=self.comment())
        return None

    def right_hand_side(self, unpacks: bool) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        name = self.token
        if self.is_call():
            callee, args, kwargs = self.call()
            if self.token != "[":
                return callee, args, kwargs
            self.index += 1
            key = self.value(0)
            self.take("]")
            return callee, (*args, key), kwargs
        if name == "[":
            items = self.value(0)
            return "pack_list", items if isinstance(items, tuple) else (items,), ()
        if not _is_name(name):
            raise _NotUnderstood
        self.index += 1
        if self.token == "[":
            self.index += 1
            key = self.value(0)
            self.take("]")
            return "unpack_key", (Ref(name), key), ()
        if "." in name:
            root, _, attribute = name.partition(".")
            return "unpack_attr", (Ref(root), attribute), ()
        if not unpacks:
            raise _NotUnderstood
        return UNPACK, (Ref(name),), ()

    def signature(self) -> Signature:
        self.take("def")
        name = self.token
        if not _IDENTIFIER.match(name):
            raise _NotUnderstood
        self.index += 1
        self.take("(")
        params: list[str] = []
        elided = False
        while not self.closes(")"):
            while self.token in ("*", "/", ","):
                self.index += 1
            if self.closes(")"):
                break
            if self.token == "...":
                elided = True
                self.index += 1
                continue
            if not _IDENTIFIER.match(self.token):
                raise _NotUnderstood
            params.append(self.token)
            self.index += 1
            if self.token == ":":
                self.index += 1
                self.value(0)
            if self.token == "=":
                self.index += 1
                self.value(0)
        return Signature(name, tuple(dict.fromkeys(params)), elided or self.was_cut)

    # ------------------------------------------------------------ expressions

    def is_call(self) -> bool:
        return (
            self.index + 1 < len(self.tokens)
            and _is_name(self.tokens[self.index][0])
            and self.tokens[self.index + 1][0] == "("
        )

    def call(self, depth: int = 0) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        callee = self.token
        self.index += 2
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        tokens = self.tokens
        while not self.closes(")"):
            if (
                self.index + 1 < len(tokens)
                and tokens[self.index + 1][0] == "="
                and _IDENTIFIER.match(tokens[self.index][0])
            ):
                name = self.token
                self.index += 2
                kwargs.append((name, self.value(depth + 1)))
            else:
                args.append(self.value(depth + 1))
            if self.token == ",":
                self.index += 1
            elif self.token != ")" and not (self.may_be_cut and not self.token):
                raise _NotUnderstood
        root, _, method = callee.rpartition(".")
        if method in _ACCESSORS and _IDENTIFIER.match(root):
            return _ACCESSORS[method], (Ref(root), *args), tuple(kwargs)
        return callee, tuple(args), tuple(kwargs)

    def items(self) -> tuple[tuple[Arg, ...], bool]:
        """Values up to ``=``, ``:`` or the end, and whether a comma makes a list of them."""
        values: list[Arg] = []
        is_list = False
        while True:
            values.append(self.value(0))
            if self.token != ",":
                break
            is_list = True
            self.index += 1
            if self.token in ("", "=", ":"):
                break
        return tuple(values), is_list

    def value(self, depth: int) -> Arg:
        if depth > MAX_DEPTH:
            raise _NotUnderstood
        token = self.token
        if not token:
            raise _NotUnderstood
        first = token[0]
        if _is_name(token):
            return self.named(token, depth)
        self.index += 1
        if first.isdigit() or (first == "." and len(token) > 1 and token[1].isdigit()):
            return _number(token)
        if first == "(" and len(token) > 1 or first == "<" and len(token) > 1 or token == "...":
            return Const(token)
        if first in "\"'" and len(token) > 1:
            return unquoted(token)
        if first == "(":
            return self.tuple_or_group(depth)
        if first == "[":
            return self.sequence("]", depth)[0]
        if first == "{":
            return self.struct(depth)
        if first in "+-":
            value = self.value(depth + 1)
            if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
                return -value if first == "-" else value
        raise _NotUnderstood

    def named(self, token: str, depth: int) -> Arg:
        if token in _LITERALS:
            self.index += 1
            return _LITERALS[token]
        if not self.is_call():
            self.index += 1
            return Const(token) if "." in token or token in _TYPE_NAMES else Ref(token)
        start = self.tokens[self.index][1]
        callee, args, kwargs = self.call(depth + 1)
        special = _special_number(callee, args)
        if special is not None:
            return special
        names = [*refs(args), *(name for _, arg in kwargs for name in refs(arg))]
        if names:  # an object of the user's around tensors, which must not get lost
            return tuple(Ref(name) for name in names)
        last, last_start = self.tokens[self.index - 1]
        return Const(self.text[start : last_start + len(last)])

    def tuple_or_group(self, depth: int) -> Arg:
        values, has_comma = self.sequence(")", depth)
        return values if has_comma or len(values) != 1 else values[0]

    def sequence(self, bracket: str, depth: int) -> tuple[tuple[Arg, ...], bool]:
        values: list[Arg] = []
        has_comma = False
        while not self.closes(bracket):
            values.append(self.value(depth + 1))
            if self.token == ",":
                has_comma = True
                self.index += 1
            elif self.token != bracket and not (self.may_be_cut and not self.token):
                raise _NotUnderstood
        return tuple(values), has_comma

    def struct(self, depth: int) -> Struct:
        items: list[tuple[str, Arg]] = []
        while not self.closes("}"):
            key = self.value(depth + 1)
            self.take(":")
            items.append((key if isinstance(key, str) else _key_text(key), self.value(depth + 1)))
            if self.token == ",":
                self.index += 1
            elif self.token != "}" and not (self.may_be_cut and not self.token):
                raise _NotUnderstood
        return Struct(tuple(items))

    def at_end(self) -> None:
        if self.token:
            raise _NotUnderstood


def _is_name(token: str) -> bool:
    first = token[:1]
    return first == "_" or first.isalpha()


def _output(targets: Arg) -> Arg:
    """Targets of an assignment: literals print as ``_`` and are None."""
    if isinstance(targets, Ref):
        return None if targets.name == "_" else targets
    if isinstance(targets, tuple):
        return tuple(_output(target) for target in targets if target != Const("..."))
    if isinstance(targets, Struct):
        return Struct(tuple((name, _output(target)) for name, target in targets.items))
    if targets is None:
        return None
    raise _NotUnderstood


def _number(token: str) -> Arg:
    if len(token) > MAX_DIGITS:
        return Const(token)
    if token[-1] == "j":
        return complex(token)
    return float(token) if any(mark in token for mark in ".eE") else int(token)


def _special_number(callee: str, args: tuple[Arg, ...]) -> Arg:
    """The number that ``float('inf')`` or ``complex(1.0, 2.0)`` prints; None for other calls."""
    if callee == "float" and len(args) == 1 and isinstance(args[0], str):
        return {"inf": float("inf"), "-inf": -float("inf"), "nan": float("nan")}.get(args[0].lower())
    if callee == "complex" and len(args) == 2 and all(isinstance(part, (int, float)) for part in args):
        return complex(*args)  # type: ignore[arg-type]
    return None


def _key_text(key: Arg) -> str:
    if isinstance(key, Ref):
        return key.name
    return key.text if isinstance(key, Const) else str(key)
