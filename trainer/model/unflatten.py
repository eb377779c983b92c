"""Run a causal module that knows no boundaries on packed rows: each segment gets a row of a rectangle of its own.

The module may be recurrent, convolutional, linear attention, or attention with a mask of its own; it is called as it
is, once for each rectangle (`rectangles.py`). Everything it receives per token (hidden states, rotary embeddings,
positions) is laid out alike. Padding stands on the right, where a causal module does not look, so values are exact;
it gets no gradient. What is per token is known from two recorded calls on rows of unlike length: the dimension that
grew. The rest of the model stays packed.

While no boundaries are given, a wrapped module runs as if it were not wrapped. `Unflattening.follow` makes a model
take boundaries from its keyword arguments, also again in backward, where checkpointed layers are recomputed.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from shards.errors import ModelError
from trainer.model.attention import segment_ids
from trainer.model.rectangles import Rectangles, plan_rectangles

LAYOUT_KEYWORD = "packrow_layout"
"""Keyword argument of a model's forward: the `Rectangles` of the row, planned ahead; else they are planned there."""

BOUNDARY_KEYWORDS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Role:
    """How a tensor that a module receives or returns follows the tokens."""

    token_dim: int
    batch_dim: int | None
    "Dimension of size 1 before it, which becomes the rows; None for what all rows share, as positions do."


@dataclass(frozen=True)
class Call:
    """One recorded call of a module."""

    arguments: dict[str, Any]
    result: Any

    @property
    def inputs(self) -> dict[Path, Tensor]:
        """Tensors by their place among the arguments."""
        return dict(leaves_of(self.arguments))

    @property
    def outputs(self) -> dict[Path, Tensor]:
        """Tensors by their place in the result."""
        return dict(leaves_of(self.result))


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names, however they were given."""
    return dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs


class _Spread(torch.autograd.Function):
    """Tokens -> slots; the gradient of a token is that of its slot, none comes from padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rectangles: Rectangles, dim: int) -> Tensor:
        """Return `x` with as many slots along `dim` as it had tokens."""
        ctx.slots, ctx.dim = rectangles.slots, dim
        return x.index_select(dim, rectangles.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pick the tokens' gradients."""
        return grad.index_select(ctx.dim, ctx.slots), None, None


class _Collect(torch.autograd.Function):
    """Slots -> tokens; padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rectangles: Rectangles, dim: int) -> Tensor:
        """Return `x` with as many tokens along `dim` as it had slots."""
        ctx.slots, ctx.dim, ctx.size = rectangles.slots, dim, x.shape[dim]
        return x.index_select(dim, rectangles.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Put the tokens' gradients into their slots."""
        shape = list(grad.shape)
        shape[ctx.dim] = ctx.size
        return grad.new_zeros(shape).index_copy_(ctx.dim, ctx.slots, grad), None, None


def spread(x: Tensor, role: Role, rectangles: Rectangles) -> list[Tensor]:
    """Lay a packed tensor out as rectangles.

    Example: hidden states (1, T, D) with `Role(1, 0)` become one (rows, length, D) for each rectangle.

    Raises:
        ModelError: The tensor has other tokens than the boundaries.
    """
    dim = role.token_dim
    if x.shape[dim] != len(rectangles.slots):
        raise ModelError(
            f"a layer got {x.shape[dim]} tokens under boundaries of {len(rectangles.slots)}; expected as many. "
            "Run forward and backward of one micro-batch before the next."
        )
    if role.batch_dim is None:
        return _shared(x, dim, rectangles)
    parts = cast(Tensor, _Spread.apply(x, rectangles, dim)).split([r * n for r, n in rectangles.shapes], dim)  # type: ignore[no-untyped-call]
    out = []
    for part, (rows, length) in zip(parts, rectangles.shapes, strict=True):
        shape = [*part.shape[:dim], rows, length, *part.shape[dim + 1 :]]
        out.append(part.reshape(shape).movedim(dim, role.batch_dim).squeeze(role.batch_dim + 1))
    return out


def _shared(x: Tensor, dim: int, rectangles: Rectangles) -> list[Tensor]:
    """Return what every row has in common, read off the first row of each rectangle, which is the longest."""
    out, at = [], 0
    for rows, length in rectangles.shapes:
        out.append(x.index_select(dim, rectangles.tokens[at : at + length]))
        at += rows * length
    return out


def collect(parts: list[Tensor], role: Role, rectangles: Rectangles) -> Tensor:
    """Put what a module returned for each rectangle back into the packed row; the inverse of `spread`.

    Raises:
        ModelError: What it returned is shared by all rows, so that it belongs to no token.
    """
    if role.batch_dim is None:
        raise ModelError("a layer returned one tensor for all rows; expected a row for each.")
    flat = []
    for part in parts:
        moved = part.unsqueeze(role.batch_dim).movedim(role.batch_dim + 1, role.token_dim)
        flat.append(moved.flatten(role.token_dim, role.token_dim + 1))
    return cast(Tensor, _Collect.apply(torch.cat(flat, role.token_dim), rectangles, role.token_dim))  # type: ignore[no-untyped-call]


def needs_rectangles(model: nn.Module) -> bool:
    """Return whether a model has modules that run on rectangles, which are best planned ahead of a step."""
    known = getattr(model, "unflattening", None)
    return isinstance(known, Unflattening) and bool(known.modules)


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested tuples, lists and mappings, each with its place."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves_of(item, (*path, i))


def replaced(value: Any, replace: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """Return the value with every tensor replaced; the containers keep their types."""
    if isinstance(value, Tensor):
        return replace(path, value)
    if isinstance(value, dict):
        fields = {key: replaced(item, replace, (*path, key)) for key, item in value.items()}
        return type(value)(**fields) if hasattr(value, "to_tuple") else type(value)(fields)  # a ModelOutput takes names
    if isinstance(value, (tuple, list)):
        items = [replaced(item, replace, (*path, i)) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def roles_of(short: dict[Path, Tensor], long: dict[Path, Tensor], tokens: tuple[int, int]) -> dict[Path, Role | None]:
    """Say which tensors are per token, from those of two calls on rows of `tokens` tokens.

    Returns:
        A role for each tensor whose shape changed; None where it changed in another way (scores of tokens by tokens).
    """
    roles: dict[Path, Role | None] = {}
    for path, left in short.items():
        right = long.get(path)
        if right is None or left.shape == right.shape:
            continue
        grown = [d for d in range(left.dim()) if left.dim() == right.dim() and left.shape[d] != right.shape[d]]
        if len(grown) != 1 or (left.shape[grown[0]], right.shape[grown[0]]) != tokens:
            roles[path] = None
            continue
        dim = grown[0]
        ones = [d for d in range(dim) if left.shape[d] == 1]
        # the first dimension by habit, else the one next to the tokens, as in (3, 1, T) of multimodal positions
        roles[path] = Role(dim, 0 if 0 in ones else ones[-1] if ones else None)
    return roles


@dataclass
class Unflattening:
    """What the wrapped modules of one model have in common: the boundaries of the row under way."""

    rectangles: Rectangles | None = None
    "None while modules run as they are."
    slack: int = 0
    "Padding beyond need, which proofs ask for."
    hands_over: bool = False
    "Whether layers that keep segments apart themselves want `seq_idx`, which transformers' kernels know, too."
    modules: dict[str, str] = field(default_factory=dict)
    "Names of the wrapped modules, and their classes."
    _owner: nn.Module | None = None
    _wrapped: list[nn.Module] = field(default_factory=list)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def wrap(self, module: nn.Module, name: str, short: Call, long: Call, tokens: tuple[int, int]) -> None:
        """Make a module run on rectangles while there are boundaries, in place; `undo` takes that back.

        Args:
            name: What to call it in messages.
            short: A call on a packed row of `tokens[0]` tokens.
            long: The same on one of `tokens[1]`.

        Raises:
            ModelError: It receives or returns something that cannot be laid out.
        """
        inputs, outputs = (
            roles_of(getattr(short, side), getattr(long, side), tokens) for side in ("inputs", "outputs")
        )
        bad = [path for path, role in inputs.items() if role is None and path[-1] not in BOUNDARY_KEYWORDS]
        if bad or not any(outputs.values()):
            what = f"receives {'.'.join(map(str, bad[0]))}, tokens by tokens" if bad else "returns nothing per token"
            raise ModelError(f"{name} ({type(module).__name__}): {what}; expected one row for each token.")
        original = module.forward

        @torch.compiler.disable  # the shapes of rectangles differ from row to row
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.rectangles is None:
                return original(*args, **kwargs)
            arguments = by_name(original, args, kwargs)
            return _on_rectangles(original, arguments, self.rectangles, inputs, outputs, frozenset(short.inputs))

        module.forward = forward
        self._wrapped.append(module)
        self.modules[name] = type(module).__name__

    def undo(self) -> None:
        """Take wrappers and hooks off again."""
        for module in self._wrapped:
            del module.__dict__["forward"]
        for hook in self._hooks:
            hook.remove()
        self.hands_over = False
        self._wrapped, self._hooks, self.modules = [], [], {}

    def follow(self, *modules: nn.Module) -> None:
        """Let a model's own modules take boundaries from their keyword arguments: the outermost one that is called."""
        for module in modules:
            module.unflattening = self  # type: ignore[assignment]
            takes = inspect.signature(module.forward).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in takes.values())
            enter = functools.partial(self._enter, None if takes_all else frozenset(takes))
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, known: frozenset[str] | None, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        planned, boundaries = kwargs.pop(LAYOUT_KEYWORD, None), kwargs.get("cu_seq_lens_q")
        if self._owner is None and boundaries is not None:
            if planned is None:
                planned = plan_rectangles(boundaries.cpu().numpy(), slack=self.slack).to(boundaries.device)
            self._owner, self.rectangles = module, planned
            if self.hands_over and "seq_idx" not in kwargs:
                kwargs["seq_idx"] = segment_ids(boundaries, len(planned.slots))
        return args, {key: value for key, value in kwargs.items() if known is None or key in known}

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._owner is not module:
            return
        rectangles, self._owner, self.rectangles = self.rectangles, None, None
        for _, tensor in leaves_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._again(rectangles))  # type: ignore[no-untyped-call]

    def _again(self, rectangles: Rectangles | None) -> None:
        """Give the boundaries of a forward back while its backward runs."""
        self.rectangles = rectangles
        torch.autograd.Variable._execution_engine.queue_callback(self._done)

    def _done(self) -> None:
        self.rectangles = None


def _on_rectangles(
    original: Callable[..., Any],
    arguments: dict[str, Any],
    rectangles: Rectangles,
    inputs: dict[Path, Role | None],
    outputs: dict[Path, Role | None],
    known: frozenset[Path],
) -> Any:
    """Call a module once for each rectangle and put its results back into the packed row."""
    # Boundaries, and positions that a module makes for itself unless it is told, are of the packed row.
    strange = {path[0] for path, _ in leaves_of(arguments) if path not in known} | BOUNDARY_KEYWORDS
    arguments = {key: value for key, value in arguments.items() if key not in strange and key[:7] != "packrow"}
    laid_out: dict[Path, list[Tensor]] = {}
    for path, tensor in leaves_of(arguments):
        if (role := inputs.get(path)) is not None:
            laid_out[path] = spread(tensor, role, rectangles)
    results = [
        original(**replaced(arguments, functools.partial(_part, laid_out, i))) for i in range(len(rectangles.shapes))
    ]
    found = [dict(leaves_of(result)) for result in results]

    def collected(path: Path, _: Tensor) -> Tensor | None:
        role = outputs.get(path)
        return None if role is None else collect([each[path] for each in found], role, rectangles)

    return replaced(results[0], collected)


def _part(laid_out: dict[Path, list[Tensor]], i: int, path: Path, tensor: Tensor) -> Tensor:
    parts = laid_out.get(path)
    return tensor if parts is None else parts[i]
