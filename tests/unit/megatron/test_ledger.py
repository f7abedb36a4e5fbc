"""Losses that ranks of the last stage keep for the metrics line of an iteration."""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live


def test_a_rollback_forgets_the_loss_of_an_iteration_that_it_leaves_out() -> None:
    live = Live()
    live.args = Namespace(iterations_to_skip=[3])
    ledger = Ledger(live)
    ledger.mean_losses = (7, {"lm loss": torch.tensor(9.5)})
    assert ledger.losses_of(7) is not None
    MegatronBinding(live, ledger).leave_out([7])
    assert ledger.losses_of(7) is None
    assert live.args.iterations_to_skip == [3, 7]
