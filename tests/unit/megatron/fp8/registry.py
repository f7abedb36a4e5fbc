"""Model of Transformer Engine's registry of FP8 scales with delayed scaling, for tests on machines without it.

The model registers, concatenates, reduces and updates as Transformer Engine 2.20 does, with the same names. The parts
that it leaves out do not change which tensors an update reaches. Tensors are on the CPU. The model records each
reduction with its group and its number of amaxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

HISTORY = 4
LARGEST = 448.0
NOTE, RECOMPUTED = "buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute"


@dataclass
class State:
    """State of the registry that all modules of a process share."""

    fp8_enabled: bool = False
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[torch.Tensor]] = field(default_factory=list)
    autocast_arguments: dict[str, tuple[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Process group, which is a new object in each generation."""

    name: str


class Manager:
    """Registry of one process; a test creates a subclass for each rank."""

    quantization_state: State
    reductions: list[tuple[Any, int]]

    @classmethod
    def begin(cls) -> None:
        """Start with the empty registry of a new process, and without recorded reductions."""
        cls.quantization_state, cls.reductions = State(), []

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = State()

    @classmethod
    def key(cls, group: Any) -> str:
        return f"recipe=delayed,group={id(group)}"

    @classmethod
    def register(cls, meta: dict[str, Any]) -> None:
        if NOTE in meta:
            return
        meta[NOTE] = []
        state = cls.quantization_state
        for direction in ("forward", "backward"):
            tensors = meta["scaling_fwd" if direction == "forward" else "scaling_bwd"]
            key = f"{direction}_{cls.key(meta['fp8_group'])}"
            state.global_amax_buffer.setdefault(key, []).append(tensors.amax_history[0])
            state.global_amax_history_buffer.setdefault(key, []).append(tensors.amax_history)
            state.global_scale_buffer.setdefault(key, []).append(tensors.scale)
            meta[NOTE] += [len(state.global_amax_buffer[key]) - 1, key]

    @classmethod
    def reduce_and_update(cls, direction: str) -> None:
        state = cls.quantization_state
        for key, amaxes in state.global_amax_buffer.items():
            key_direction, context = key.split("_", 1)
            if key_direction != direction:
                continue
            _, group = state.autocast_arguments[context]
            cls.reductions.append((group, len(torch.cat(amaxes))))
            histories, scales = state.global_amax_history_buffer[key], state.global_scale_buffer[key]
            for history, scale in zip(histories, scales, strict=True):
                amax = history.amax(0)
                scale.copy_(torch.where(amax > 0, LARGEST / amax, scale))
                history.copy_(history.roll(-1, 0))
                history[0] = 0.0

    @classmethod
    @contextmanager
    def autocast(cls, group: Any) -> Iterator[None]:
        """Enter a region of FP8. If an interruption cuts off its end, the region restores nothing."""
        state = cls.quantization_state
        before = state.fp8_enabled, state.fp8_distributed_group, state.is_first_fp8_module
        state.autocast_arguments[cls.key(group)] = ("delayed", group)
        state.fp8_enabled, state.fp8_distributed_group = True, group
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        yield
        state.fp8_enabled, state.fp8_distributed_group, state.is_first_fp8_module = before
        state.autocast_depth -= 1
        if state.autocast_depth == 0:
            cls.reduce_and_update("forward")

    @classmethod
    def is_first(cls) -> bool:
        state = cls.quantization_state
        is_first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return is_first


@dataclass
class Tensors:
    """Scales of one direction, with the history of their amaxes."""

    scale: torch.Tensor
    amax_history: torch.Tensor


class Linear(torch.nn.Module):
    """Module in FP8, whose forward pass records ``amax`` for each of its tensors."""

    def __init__(self, manager: type[Manager]) -> None:
        super().__init__()
        self.manager = manager
        self.fp8_meta: dict[str, Any] = {"fp8_group": None}
        self.is_initialised = False
        self.sets_gradient_scales = False

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        products = self.fp8_meta["num_gemms"]
        for direction, count in (("scaling_fwd", 3 * products), ("scaling_bwd", 2 * products)):
            if direction not in self.fp8_meta:
                self.fp8_meta[direction] = Tensors(torch.ones(count), torch.zeros(HISTORY, count))

    def forward(self, amax: float) -> None:
        state = self.manager.quantization_state
        if state.fp8_enabled and not self.is_initialised:
            self.fp8_meta["num_gemms"], self.fp8_meta["fp8_group"] = 1, state.fp8_distributed_group
            self.init_fp8_meta_tensors(None)
            self.is_initialised = True
        self.manager.register(self.fp8_meta)
        self.sets_gradient_scales = self.manager.is_first()
        self.fp8_meta["scaling_fwd"].amax_history[0] = amax

    def keep_for_recomputation(self) -> None:
        """Keep the scales of a forward pass that the backward pass recomputes."""
        kept, scale = self.manager.quantization_state.fp8_tensors_recompute_buffer, self.fp8_meta["scaling_fwd"].scale
        if RECOMPUTED not in self.fp8_meta:
            kept.append(deque())
            self.fp8_meta[RECOMPUTED] = len(kept) - 1
        kept[self.fp8_meta[RECOMPUTED]].append(scale.clone())

    def recomputed_with(self) -> torch.Tensor:
        """Return the scales of the first forward pass, which the recomputation uses."""
        return self.manager.quantization_state.fp8_tensors_recompute_buffer[self.fp8_meta[RECOMPUTED]].popleft()

    def backward(self, amax: float) -> None:
        self.fp8_meta["scaling_bwd"].amax_history[0] = amax
        if self.sets_gradient_scales:  # the first module of a forward pass is the last of its backward pass
            self.manager.reduce_and_update("backward")
