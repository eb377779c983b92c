"""Find the modules of a model that mix tokens without calling packed attention, and whether they keep segments apart.

Found by what they do, not by name: a module is called again with other numbers at the first token, and mixes if the
result changes at a later one. The search starts at the body and goes down into layers and into whatever contains packed
attention; below that the highest module that mixes is taken whole, so that a convolution stays inside its mixer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainer.model.unflatten import Call, Path, Role, by_name, leaves_of, replaced, roles_of


@contextmanager
def recorded_calls(root: nn.Module, calls: dict[nn.Module, Call]) -> Iterator[None]:
    """Note the last call of every module below `root`, itself included."""

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls[module] = Call(by_name(module.forward, args, kwargs), result)

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in root.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_mixers(
    body: nn.Module,
    short: dict[nn.Module, Call],
    long: dict[nn.Module, Call],
    tokens: tuple[int, int],
    attention: set[nn.Module],
) -> dict[str, nn.Module]:
    """Return the modules that mix tokens, by name.

    Args:
        short: Calls of a forward over one document of `tokens[0]` tokens.
        long: The same for `tokens[1]`.
        attention: Modules that call packed attention, which are left out.
    """
    found: dict[str, nn.Module] = {}

    def descend(name: str, module: nn.Module, is_layer: bool) -> None:
        if module in attention:
            return
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            for key, child in module.named_children():
                descend(f"{name}.{key}", child, True)
            return
        if module is not body and not (module in short and _mixes(module, short, long, tokens)):
            return
        inside = any(each in attention for each in module.modules())
        before = len(found)
        if module is body or is_layer or inside:
            for key, child in module.named_children():
                descend(f"{name}.{key}" if name else key, child, False)
        if len(found) == before and module is not body and not inside:
            found[name] = module  # it mixes, and nothing in it that was looked at does

    descend("", body, False)
    return found


_NOISE = 1e-5  # of an output's spread: experts compute tokens in batches of other sizes


def _mixes(
    module: nn.Module, short: dict[nn.Module, Call], long: dict[nn.Module, Call], tokens: tuple[int, int]
) -> bool:
    return module in long and reach(module, short[module], short[module], long[module], tokens, 1) > _NOISE


def leaks(module: nn.Module, packed: Call, short: Call, long: Call, tokens: tuple[int, int], first: int) -> bool:
    """Return whether a module's results after the first segment, of `first` tokens, depend on that segment.

    Args:
        packed: A call of a forward over a packed row of `tokens[0]` tokens.
        short: A call over as many tokens without boundaries; with `long`, of `tokens[1]`, it shows what is per token.
    """
    return reach(module, packed, short, long, tokens, first) > _NOISE


def reach(module: nn.Module, call: Call, short: Call, long: Call, tokens: tuple[int, int], first: int) -> float:
    """Return how far later results move when the first `first` tokens do, in units of their spread."""
    inputs = roles_of(short.inputs, long.inputs, tokens)
    outputs = roles_of(short.outputs, long.outputs, tokens)

    def change(path: Path, tensor: Tensor) -> Tensor:
        role = inputs.get(path)
        if role is None or not tensor.is_floating_point():
            return tensor
        moved = tensor.clone()
        moved.narrow(role.token_dim, 0, first).mul_(-0.7).add_(0.3)
        return moved

    before, after = module(**call.arguments), module(**replaced(call.arguments, change))
    moved = dict(leaves_of(after))
    return max((_moved(x, moved[path], outputs.get(path), first) for path, x in leaves_of(before)), default=0)


def _moved(left: Tensor, right: Tensor, role: Role | None, begin: int) -> float:
    if role is None or not left.is_floating_point():
        return 0.0
    count = left.shape[role.token_dim] - begin
    left, right = (x.narrow(role.token_dim, begin, count).float() for x in (left, right))
    return float((left - right).abs().max() / (left.std() + 1e-30))
