"""A drill that a trainer does not define is refused before training begins."""

from __future__ import annotations

import pytest

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.errors import ConfigError
from moevement_core.session.drill import refuse_without_wipe
from moevement_core.trainer.binding import Binding


class Trainer(MegatronBinding):
    wipe = Binding.wipe


def test_a_trainer_without_wipe_refuses_to_be_wiped() -> None:
    live = Live()
    refuse_without_wipe(Trainer(live, Ledger(live)), ())
    refuse_without_wipe(MegatronBinding(live, Ledger(live)), {3})
    with pytest.raises(ConfigError, match=r"--moevement-wipe-at 3\b.*\bTrainer\b.*\bwipe\(\)"):
        refuse_without_wipe(Trainer(live, Ledger(live)), {7, 3})
