"""FP8 with delayed scaling in a process that keeps its model through an interruption."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron.moevement.fp8 import interrupted
from megatron.moevement.optimizer.scales import Scales
from megatron.moevement.restart.groups import Groups, move_to_groups
from moevement_core.errors import RecoveryError
from tests.unit.megatron.fp8.registry import Group, Linear, Manager


class Rank:
    """Model of one rank: virtual stages of FP8 modules."""

    def __init__(self, *modules: int) -> None:
        class Own(Manager):
            pass

        self.manager = Own
        self.manager.begin()
        self.chunks = [torch.nn.ModuleList(Linear(Own) for _ in range(count)) for count in modules]
        for chunk in self.chunks:
            chunk.config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")  # type: ignore[assignment]

    @property
    def modules(self) -> list[Any]:
        return [module for chunk in self.chunks for module in self.of(chunk)]

    @staticmethod
    def of(chunk: Any) -> list[Any]:
        return list(chunk)

    def iterate(self, group: Any, amax: float) -> None:
        """Run one microbatch through all virtual stages, forward and backward."""
        for chunk in self.chunks:
            with self.manager.autocast(group):
                for module in self.of(chunk):
                    module(amax)
        for chunk in reversed(self.chunks):
            for module in reversed(self.of(chunk)):
                module.backward(amax)

    def begin_forward(self, group: Any, amax: float) -> None:
        """Begin a forward pass, and cut it off within its FP8 region."""
        region = self.manager.autocast(group)
        region.__enter__()
        self.modules[0](amax)
        region.gen.close()

    def updated(self, group: Any, amax: float) -> int:
        """Run an iteration, and return the number of modules of which it updates all scales."""
        before = [self.scales(module) for module in self.modules]
        self.iterate(group, amax)
        return sum(
            all((new != old).all() for new, old in zip(self.scales(module), scales, strict=True))
            for module, scales in zip(self.modules, before, strict=True)
        )

    @staticmethod
    def scales(module: Any) -> list[torch.Tensor]:
        if "scaling_fwd" not in module.fp8_meta:
            return [torch.ones(3), torch.ones(2)]
        return [module.fp8_meta[direction].scale.clone() for direction in ("scaling_fwd", "scaling_bwd")]

    def is_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(random, "FP8GlobalStateManager", self.manager, raising=False)
            interrupted.forget_regions()
        for module in self.modules:
            interrupted.reset_registration(module)


def test_an_iteration_updates_all_scales_after_an_interruption_too(monkeypatch: pytest.MonkeyPatch) -> None:
    survivor, group, later = Rank(5), Group("generation 0"), Group("generation 1")
    assert survivor.updated(group, 2.0) == 5
    survivor.begin_forward(group, 3.0)
    survivor.is_interrupted(monkeypatch)
    state = survivor.manager.quantization_state
    assert (state.autocast_depth, state.fp8_enabled, state.is_first_fp8_module) == (0, False, False)
    before = Groups((group,), ((0, 1),))
    del group
    move_to_groups(before, Groups((later,), ((0, 1),)))
    assert survivor.updated(later, 4.0) == 5
    assert Rank(5).updated(later, 4.0) == 5, "and those of a replacement"


def test_survivors_and_a_replacement_enter_the_same_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a survivor begins with an empty registry, as a replacement does. Virtual stages fill it in turn.

    If the survivor kept its full registry, it would reduce more amaxes than the replacement.
    """
    survivor, replacement, group, later = Rank(3, 2), Rank(3, 2), Group("generation 0"), Group("generation 1")
    survivor.iterate(group, 2.0)
    survivor.iterate(group, 2.0)
    survivor.is_interrupted(monkeypatch)
    for module in survivor.modules:
        module.fp8_meta["fp8_group"] = later
    survivor.manager.reductions.clear()
    for rank in (survivor, replacement):
        rank.iterate(later, 4.0)
        rank.iterate(later, 4.0)
    assert survivor.manager.reductions == replacement.manager.reductions
    assert [count for _, count in replacement.manager.reductions[:2]] == [9, 15], "the model of the registry fills"


def test_a_recomputed_forward_pass_has_the_scales_of_its_own_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, group = Rank(2), Group("generation 0")
    rank.iterate(group, 2.0)
    for module in rank.modules:
        module.keep_for_recomputation()  # and no backward pass follows
    rank.is_interrupted(monkeypatch)
    rank.iterate(group, 4.0)
    for module in rank.modules:
        module.keep_for_recomputation()
        assert torch.equal(module.recomputed_with(), module.fp8_meta["scaling_fwd"].scale)


def test_a_recomputation_that_was_cut_off_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recomputation:
        _is_first_fp8_module: ClassVar[list[bool]] = []
        runs = False

        def __exit__(self, *_: object) -> None:
            Recomputation.runs = False

    Recomputation.runs = True
    Recomputation._is_first_fp8_module.append(True)
    monkeypatch.setattr(random, "activation_recompute_forward", Recomputation, raising=False)
    Rank(1).is_interrupted(monkeypatch)
    assert not Recomputation.runs
    assert Recomputation._is_first_fp8_module == []


def test_operations_of_fused_sequences_register_again() -> None:
    operation: Any = torch.nn.Module()
    forward = {"buffer_index_and_autocast_key": (0, "key"), "num_quantizers": 1}
    operation._fp8_metas = {"forward": forward, "backward": None}
    interrupted.reset_registration(operation)
    assert forward == {"num_quantizers": 1}


def test_a_replacement_gets_scales_before_its_modules_have_run() -> None:
    trained, replacement, group = Rank(2, 1), Rank(2, 1), Group("generation 0")
    scales = Scales(trained.chunks)  # created before the first iteration, as by an optimizer
    trained.iterate(group, 2.0)
    boundary = scales.copies()
    Scales(replacement.chunks).put(boundary)
    for restored, original in zip(replacement.modules, trained.modules, strict=True):
        for direction in ("scaling_fwd", "scaling_bwd"):
            assert torch.equal(restored.fp8_meta[direction].scale, original.fp8_meta[direction].scale)
            assert torch.equal(restored.fp8_meta[direction].amax_history, original.fp8_meta[direction].amax_history)
    for rank in (trained, replacement):
        rank.iterate(group, 8.0)
    assert all(map(torch.equal, replacement.scales(replacement.modules[2]), trained.scales(trained.modules[2])))


def test_a_survivor_of_the_first_iteration_gets_the_scales_that_it_began_with() -> None:
    rank = Rank(1, 1)
    scales = Scales(rank.chunks)
    boundary = scales.copies()
    rank.iterate(Group("generation 0"), 2.0)
    scales.put(boundary)
    for module in rank.modules:
        assert all((scale == 1).all() for scale in rank.scales(module))
        assert not module.fp8_meta["scaling_fwd"].amax_history.any()


@pytest.mark.parametrize("count", [1, 3])
def test_scales_of_another_model_are_refused(count: int) -> None:
    saved, other = Rank(*[2] * 2), Rank(*[2] * count)
    saved.iterate(Group("generation 0"), 2.0)
    with pytest.raises(RecoveryError):
        Scales(other.chunks).put(Scales(saved.chunks).copies())
