"""A drill that a trainer does not define is refused before training begins."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.errors import ConfigError
from moevement_core.session.drill import refuse_without_wipe
from moevement_core.trainer.binding import Binding


class OwnTrainer(Binding):
    """Trainer that defines the core's methods, and no others."""

    operators = states = boundary = put_boundary = run = reduce = update = place = Mock()


def test_a_trainer_without_wipe_refuses_to_be_wiped() -> None:
    live = Live()
    refuse_without_wipe(OwnTrainer(), ())
    refuse_without_wipe(MegatronBinding(live, Ledger(live)), {3})
    with pytest.raises(ConfigError, match=r"--moevement-wipe-at 3\b.*\bOwnTrainer\b.*\bwipe\(\)"):
        refuse_without_wipe(OwnTrainer(), {7, 3})
