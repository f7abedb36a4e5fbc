"""Operators of an ``nn.Module``, and refusals of modules and operators that ``TorchBinding`` does not handle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from moevement_core.errors import ConfigError
from moevement_core.operators import EMBEDDING, HEAD, OperatorKind, layer_name

OperatorParts = tuple[str, OperatorKind, Sequence[nn.Parameter]]
"""Name of an operator, its kind, and its parameters on this rank."""


def operators_of(model: nn.Module) -> Iterator[OperatorParts]:
    """Yield operators of a model without experts: its layers, its embeddings, and the rest, the head.

    Layers are the elements of the outermost ``nn.ModuleList`` objects. A parameter that several modules share belongs
    to the first operator with it.
    """
    taken = set[int]()

    def new(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [each for each in parameters if not (id(each) in taken or taken.add(id(each)))]  # type: ignore[func-returns-value]

    outside = list(_outside_of_lists(model))
    embeddings = [
        each for module in outside if isinstance(module, nn.Embedding) for each in module.parameters(recurse=False)
    ]
    layers = [layer for module in outside if isinstance(module, nn.ModuleList) for layer in module]
    if first := new(embeddings):
        yield EMBEDDING, OperatorKind.EMBEDDING, first
    for number, layer in enumerate(layers):
        if own := new(layer.parameters()):
            yield layer_name(number), OperatorKind.LAYER, own
    if rest := new(model.parameters()):
        yield HEAD, OperatorKind.HEAD, rest


def _outside_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules in it, but not those inside of an ``nn.ModuleList``."""
    yield module
    if not isinstance(module, nn.ModuleList):
        for child in module.children():
            yield from _outside_of_lists(child)


def refuse_models(model: nn.Module) -> None:
    """Refuse models that this binding does not handle.

    Raises:
        ConfigError: the model averages gradients itself, or a parameter is not contiguous.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel; give TorchBinding the module inside it (.module), "
            "because TorchBinding averages gradients itself"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ConfigError(f"parameter {name} is not contiguous; make it so before you make the optimizer")


def refuse_unnamed(
    model: nn.Module, trained: Sequence[nn.Parameter], parts: Sequence[tuple[str, OperatorKind, list[nn.Parameter]]]
) -> None:
    """Refuse operators that do not hold each parameter exactly once.

    Raises:
        ConfigError: a parameter of the model or an optimizer is in no operator, or in several, or in two optimizers.
    """
    if len(trained) != len(set(map(id, trained))):
        raise ConfigError("a parameter is in several optimizers, or twice in one; give it to one")
    held = [id(parameter) for _, _, parameters in parts for parameter in parameters]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if missing := [each for each in (*names, *map(id, trained)) if each not in set(held)]:
        raise ConfigError(
            f"parameter {names.get(missing[0], 'of the optimizer that is not in the model')!r} is in no operator; "
            "give it to one"
        )
    if len(held) != len(set(held)):
        twice = next(each for each in held if held.count(each) > 1)
        raise ConfigError(f"parameter {names.get(twice, '?')!r} is in several operators; give it to one")
