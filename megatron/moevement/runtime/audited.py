"""Modules and gradients of Megatron's model that an audit observes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.optimizer.views import OperatorViews
from moevement_core.audit.evidence import AuditedModel
from moevement_core.audit.observe import before_reductions


def audited_model(chunks: list[Any], views: OperatorViews, *, is_overlapped: bool) -> AuditedModel:
    """Return the modules and parameters of a rank's virtual stages.

    Args:
        chunks: unwrapped virtual stages of this rank.
        views: views of this rank's operators.
        is_overlapped: True if Megatron reduces some gradients while it computes others. Then none are observed.
    """
    operators = {name: [trained.parameter for trained in entries] for name, entries in views.trained.items()}
    return AuditedModel(chunks, operators, _no_gradient if is_overlapped else _gradient)


def _no_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return None


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    buffer = getattr(parameter, "main_grad", None)
    return parameter.grad if buffer is None else buffer


def note_gradients(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note that all gradients are complete, before ``finalize_model_grads``."""
    before_reductions()
    return original(*args, **kwargs)
