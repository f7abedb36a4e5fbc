"""A repeated step clips gradients by the coefficient of the original step, whatever type the norm had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.optimizer import committed
from megatron.moevement.optimizer.modes import RedoUpdates
from megatron.moevement.optimizer.norms import as_clipped_by, as_logged, recorded
from moevement_core.comms import plain


def coefficient(norm: Any, most: float = 1.0) -> Any:
    """Return the clipping coefficient as Megatron computes it, in the arithmetic of the norm."""
    return most / (norm + 1.0e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_coefficient_is_that_of_the_first_time(as_tensor: bool) -> None:
    norms = (torch.rand(500, generator=torch.Generator().manual_seed(1)) * 30 + 1).split(1)
    unlike = 0
    for tensor in norms:
        norm = tensor if as_tensor else float(tensor) ** 0.5
        marked, tensors = plain.flatten({"clip_norm": recorded(norm)})
        restored = as_clipped_by(plain.restore(marked, tensors)["clip_norm"])
        assert type(restored) is type(norm)
        expected, actual = (torch.as_tensor(coefficient(number)) for number in (norm, restored))
        assert expected.dtype == actual.dtype
        assert expected.shape == actual.shape
        assert torch.equal(expected, actual)
        unlike += as_tensor and not torch.equal(expected, torch.tensor([coefficient(float(tensor))]))
    assert unlike > 50 or not as_tensor, "a double in its place clips by something else"


def test_a_recorded_norm_is_no_view_and_is_logged_as_the_trainer_does() -> None:
    norm = torch.tensor([3.0000002])
    kept = recorded(norm)
    norm.zero_()
    assert isinstance(kept, torch.Tensor)
    assert as_logged(kept) == pytest.approx(3.0000002)
    assert (recorded(None), as_logged(None)) == (None, None)
    assert as_logged(0.1) == torch.tensor(0.1).item()


class Norm(torch.Tensor):
    """Tensor of a norm that records when it is copied to the host."""

    events: list[str]

    def detach(self) -> Any:
        self.events.append("to_host")
        return super().detach().as_subclass(torch.Tensor)


class Optimizer:
    """Chain of one optimizer that clips by a tensor and records its calls."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.config = SimpleNamespace(log_num_zeros_in_grad=False)
        self.chained_optimizers: list[Any] = [SimpleNamespace(config=SimpleNamespace(clip_grad=1.0), optimizer=None)]
        self.grad_norms_by_group: dict[str, Any] = {}
        self.coefficients: list[torch.Tensor] = []

    def _norm(self, value: float) -> Norm:
        norm = torch.tensor([value]).as_subclass(Norm)
        norm.events = self.events
        return norm

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> Any:
        self.events.append("norm")
        return self._norm(3.0000002)

    def _compute_grad_norms_by_group(self) -> dict[str, Any]:
        self.events.append("norms_by_group")
        self.grad_norms_by_group = {"g": self._norm(7.0000005)}
        return self.grad_norms_by_group

    def count_zeros(self) -> int:
        self.events.append("zeros")
        return 5

    def step(self) -> tuple[bool, Any, int | None]:
        self.prepare_grads()
        norm = self.get_grad_norm()
        self._compute_grad_norms_by_group()
        self.coefficients = [coefficient(value) for value in (norm, *self.grad_norms_by_group.values())]
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    def step_with_ready_grads(self) -> bool:
        self.events.append("update")
        return True


@pytest.fixture(autouse=True)
def sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the begin and end of each uninterruptible section."""

    @contextmanager
    def atomic() -> Iterator[None]:
        EVENTS.append("atomic")
        yield
        EVENTS.append("over")

    monkeypatch.setattr(committed, "atomic", atomic)


EVENTS: list[str] = []


def commit_point() -> tuple[Optimizer, committed.CommittedOptimizer]:
    EVENTS.clear()
    optimizer = Optimizer(EVENTS)
    point = committed.CommittedOptimizer(
        optimizer, lambda: {"n": 1}, lambda boundary: {}, lambda: EVENTS.append("vote"), lambda: point.step(4)
    )
    return optimizer, point


def test_norms_are_on_the_host_before_nothing_may_wait_any_more_and_followers_clip_by_them() -> None:
    optimizer, point = commit_point()
    optimizer.step()
    assert EVENTS == [
        "norm", "to_host", "norms_by_group", "to_host", "vote", "atomic", "update", "over",
    ]  # fmt: skip
    assert point.mark is not None
    follower, behind = commit_point()
    behind.follow(4, point.mark.outcome, {"loss_scalers": [None]})
    assert [torch.equal(a, b) for a, b in zip(optimizer.coefficients, follower.coefficients, strict=True)] == [True] * 2
    assert [coefficient.dtype for coefficient in follower.coefficients] == [torch.float32] * 2
    assert [event for event in EVENTS if event != "to_host"] == ["atomic", "update", "over"]
    assert behind.mark is not None
    assert as_logged(behind.mark.outcome["clip_norm"]) == as_logged(point.mark.outcome["clip_norm"])


def test_gradients_are_said_to_be_final_when_they_are_clipped_and_nothing_is_updated() -> None:
    optimizer, point = commit_point()
    point.updating = lambda: EVENTS.append(f"final {len(optimizer.coefficients)}")
    optimizer.step()
    assert EVENTS[-4:] == ["atomic", "final 2", "update", "over"]
    EVENTS.clear()
    point.redo(RedoUpdates(optimizer, {}, lambda: EVENTS.append("put")))
    assert EVENTS[-2:] == ["put", "update"], "those of an update that is made again are put in place later"
    assert not any(event.startswith("final") for event in EVENTS)


def test_ranks_vote_on_an_overflow_too_before_the_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Optimizer) -> tuple[bool, Any, int | None]:
        assert self.prepare_grads()
        self.events.append("skipped")
        return False, None, None

    monkeypatch.setattr(Optimizer, "prepare_grads", lambda self: True)
    monkeypatch.setattr(Optimizer, "step", step)
    _, point = commit_point()
    point.step(4)
    assert EVENTS == ["vote", "atomic", "skipped", "over"]


def test_a_rank_without_parameters_votes_after_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a rank whose optimizers are all stubs, on which Megatron clips nothing, votes as the others do."""
    stub = SimpleNamespace(config=SimpleNamespace(clip_grad=1.0), optimizer=None, is_stub_optimizer=True)
    monkeypatch.setattr(committed, "members", lambda optimizer: [stub])
    optimizer, point = commit_point()
    monkeypatch.setattr(optimizer, "_compute_grad_norms_by_group", dict)
    point.step(4)
    assert EVENTS.count("vote") == 1
    assert EVENTS.index("vote") > EVENTS.index("norm")


def test_zeros_are_counted_before_the_section_and_once() -> None:
    optimizer, point = commit_point()
    optimizer.config.log_num_zeros_in_grad = True
    assert optimizer.step()[2] == 5
    assert [event for event in EVENTS if event in ("zeros", "vote", "atomic", "update")] == [
        "zeros", "vote", "atomic", "update",
    ]  # fmt: skip
    assert point.mark is not None
    follower, behind = commit_point()
    follower.config.log_num_zeros_in_grad = True
    behind.follow(4, point.mark.outcome, {"loss_scalers": [None]})
    assert "zeros" not in EVENTS, "a rank that follows asks nobody"
    assert behind.mark is not None
    assert behind.mark.outcome["zeros"] == 5


def test_the_token_count_of_a_step_that_is_followed_is_that_of_the_record() -> None:
    _, point = commit_point()
    point._num_tokens = lambda: 96
    point.step(4)
    assert point.mark is not None
    assert point.mark.outcome["num_tokens"] == 96
    _, behind = commit_point()  # a follower: it counted no batch, or another one
    behind.follow(4, point.mark.outcome, {"loss_scalers": [None]})
    assert behind.mark is not None
    assert behind.mark.outcome["num_tokens"] == 96


def test_an_interrupted_step_leaves_no_section_open() -> None:
    optimizer, point = commit_point()
    optimizer.chained_optimizers[0].start_param_sync_for_bucket_group_subset = None

    def interrupted() -> Any:
        raise KeyboardInterrupt

    vars(optimizer)["get_grad_norm"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        point.step(4)
    optimizer.chained_optimizers[0]._defer_param_sync = True  # its exit was interrupted, too
    point.interrupted()
    EVENTS.clear()
    optimizer._compute_grad_norms_by_group()  # as in a replay
    assert EVENTS == ["norms_by_group", "to_host"], "no vote, and no section that nobody leaves"
    assert optimizer.chained_optimizers[0]._defer_param_sync is False
    assert point.mark is None
