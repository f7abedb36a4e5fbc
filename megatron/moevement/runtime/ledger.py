"""Metrics of each iteration, kept through failures and replays until the metrics line is written."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.moevement.optimizer.norms import as_logged
from megatron.moevement.runtime.live import Live
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.rendezvous.status_page import wait_until_held
from moevement_core.session.run_directory import number


@dataclass(frozen=True, slots=True)
class _Known:
    """Report of one rank after a failure, from which ranks find the missing metrics of the last committed iteration."""

    written: int
    """Newest iteration whose metrics line the rank has written; 0 on ranks that write none."""
    line: dict[str, Any] | None
    """Metrics of the last committed iteration; None on ranks that do not know them."""


class Ledger:
    """Metrics lines of iterations on one rank; the last rank, which has the losses, writes them.

    Args:
        live: Megatron's objects on this rank.
    """

    def __init__(self, live: Live) -> None:
        self.step_s: float | None = None
        """Seconds that the last training step of this rank took."""
        self.last_loss: float | str | None = None
        self.micro_batch_losses: tuple[int, Any] = (0, None)
        """Iteration of this rank's last forward and backward passes, and the losses that they returned."""
        self.mean_losses: tuple[int, dict[str, torch.Tensor]] = (0, {})
        """Iteration of the last :meth:`average`, and its losses by name, on the host."""
        self.held_out: dict[str, Any] = {}
        """Last loss on the validation set and on the test set, by the name of the set."""
        self.evaluated_set = "validation"
        self._live = live
        self._replayed: dict[int, dict[str, Any]] = {}
        """Metrics of replayed iterations, by iteration, because the last rank may have failed before it wrote them."""

    def replayed(self, iteration: int, losses: Mapping[str, Any], skipped: bool, grad_norm: float | None) -> None:
        """Keep the metrics of an iteration that this rank replayed or redid, until :meth:`complete` writes them.

        The function reads learning rate and loss scale from the optimizer, so the caller first restores both to their
        values after this iteration.
        """
        self._replayed[iteration] = self._line_of(losses, skipped, grad_norm)

    def write(
        self,
        iteration: int,
        losses: Mapping[str, torch.Tensor],
        checkpointing: Mapping[str, Any],
        *,
        learning_rate: float | None,
        loss_scale: float,
        skipped: bool,
        grad_norm: float | None,
    ) -> None:
        """Write the metrics line of an iteration when Megatron logs the iteration; ranks without a record do nothing.

        Args:
            iteration: iteration that was committed.
            losses: losses by name.
            checkpointing: metrics of sparse checkpointing in this iteration; empty without sparse checkpointing.
            learning_rate: learning rate of the step.
            loss_scale: loss scale of the step.
            skipped: True if the step was skipped.
            grad_norm: gradient norm of the step.
        """
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        self._replayed.clear()  # an audit has executed iterations again whose lines are written
        if self._live.record is None:
            return
        wait_until_held()
        tokens = get_current_global_batch_size() * self._live.args.seq_length
        numbers = {name: number(value) for name, value in losses.items()}
        self.last_loss = numbers.get("lm loss", self.last_loss)
        self._live.record.metric(
            iteration=iteration,
            loss=numbers.pop("lm loss", None),
            **numbers,
            grad_norm=number(grad_norm),
            learning_rate=learning_rate,
            loss_scale=number(loss_scale),
            skipped=skipped,
            tokens_per_s=tokens / self.step_s if self.step_s else None,
            iteration_s=self.step_s,
            time=time.time(),
            **checkpointing,
        )

    def average(self, iteration: int) -> None:
        """Average the losses of ``iteration`` over ranks, before its update. Collective over ranks of the last stage.

        Megatron averages them after the update. A rank that fails in between takes its part of the losses with it.
        With this average, each other rank of the last stage knows the losses of every iteration that was committed.

        Ranks without losses return at once.
        """
        ran, micro_batches = self.micro_batch_losses
        if ran == iteration and micro_batches:
            losses = _averaged(micro_batches)
            self.mean_losses = (iteration, {name: loss.cpu() for name, loss in losses.items()})

    def forget_average(self) -> None:
        """Forget the last :meth:`average`: the job rolls back, and may leave its iteration out."""
        self.mean_losses = (0, {})

    def losses_of(self, iteration: int) -> dict[str, torch.Tensor] | None:
        """Return the mean losses of ``iteration``; None if this rank has averaged those of another one, or none."""
        averaged, losses = self.mean_losses
        return losses if averaged == iteration else None

    def complete(self, until: int, outcome: Mapping[str, Any]) -> None:
        """Write the missing metrics lines up to iteration ``until`` after a failure. Collective.

        Args:
            until: last committed iteration; model and optimizer already have the state after it.
            outcome: outcome of the optimizer step of ``until``.
        """
        record = self._live.record
        newest = record.newest_metric() if record is not None else None
        lines, self._replayed = self._replayed, {}
        line = lines.get(until)
        if line is None and (losses := self.losses_of(until)) is not None:
            line = self._line_of(losses, bool(outcome.get("overflow")), as_logged(outcome.get("clip_norm")))
        gathered: list[_Known] = all_gather_objects(_Known(newest["iteration"] if newest else 0, line), _Known)
        written = gathered[-1].written  # The last rank writes the lines.
        if written >= until:
            return
        # A line with losses is from a rank of the last stage, which executed or restored the iteration.
        known = [rank.line for rank in gathered if rank.line is not None]
        lines[until] = max(known, key=lambda line: bool(line["losses"]), default={})
        if record is None:
            return
        wait_until_held()
        for iteration in range(written + 1, until + 1):
            line = lines.get(iteration, {})
            losses = line.pop("losses", {})
            zeros = outcome.get("zeros") if iteration == until else None
            _write_scalars(self._live.args, iteration, losses, line, zeros=zeros)
            self.last_loss = losses.get("lm loss", self.last_loss)
            loss = losses.pop("lm loss", None)
            grad_norm, unknown = number(line.pop("grad_norm", None)), dict.fromkeys(("tokens_per_s", "iteration_s"))
            record.metric(
                iteration=iteration, loss=loss, **losses, grad_norm=grad_norm, **line, **unknown, recovered=True,
                time=time.time(),
            )  # fmt: skip

    def _line_of(self, losses: Mapping[str, Any], skipped: bool, grad_norm: float | None) -> dict[str, Any]:
        """Return the metrics that Megatron's trainer logs right after an iteration, with the current learning rate."""
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        optimizer = self._live.optimizer
        return {
            "losses": {name: number(value) for name, value in losses.items()},
            "grad_norm": grad_norm,
            "learning_rate": get_canonical_lr_for_logging(optimizer.param_groups),
            "loss_scale": optimizer.get_loss_scale().item(),
            "skipped": bool(skipped),
        }


def _write_scalars(
    args: Namespace, iteration: int, losses: Mapping[str, Any], line: Mapping[str, Any], zeros: int | None
) -> None:
    """Write an iteration's metrics to TensorBoard, under the names that Megatron's trainer uses."""
    from megatron.training.global_vars import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None or iteration % args.tensorboard_log_interval:
        return
    scalars = {**losses, "grad-norm": line.get("grad_norm"), "learning-rate": line.get("learning_rate")}
    if args.log_loss_scale_to_tensorboard:
        scalars["loss-scale"] = line.get("loss_scale")
    if args.log_num_zeros_in_grad:
        scalars["num-zeros"] = zeros
    for name, value in scalars.items():
        if isinstance(value, int | float):
            writer.add_scalar(name, value, iteration)


def _averaged(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Average the losses of an iteration's micro-batches, as Megatron does. Collective over ranks of the last stage.

    For each micro-batch, Megatron returns each loss as its sum over tokens and the number of tokens. If the training
    script has an old form of loss function, Megatron returns the mean.
    """
    from megatron.core import parallel_state

    losses = {}
    for name in micro_batches[0]:
        values = [micro_batch[name].view(-1) for micro_batch in micro_batches]
        if values[0].numel() == 2:
            total = torch.vstack(values).sum(dim=0)
            torch.distributed.all_reduce(
                total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            losses[name] = total[0] / total[1]
        else:
            losses[name] = torch.cat(values).mean()
    return losses
