"""Training by Megatron-Bridge that starts again in place after every failure."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, override

from megatron.moevement.bridge.arguments import BridgeArguments
from megatron.moevement.bridge.host import MegatronBridge
from megatron.moevement.bridge.preflight import check
from megatron.moevement.restart.in_process import RestartedTraining
from megatron.moevement.restart.saves import forget_results
from megatron.moevement.runtime.job import Process
from moevement_core.comms.address import store_address
from moevement_core.rendezvous.store import connect_store
from moevement_core.restart.generation import generation
from moevement_core.restart.in_process import is_restarted_in_process, run_through_failures


class _Attempt(NamedTuple):
    """Object with which Bridge's ``_pretrain`` runs as one attempt of several, and so leaves its cleanup to others."""

    iteration: int


def restart_in_process(
    process: Process, flags: Namespace, original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Enter Bridge's ``_pretrain`` again after failures, in jobs that restart in place; in all others, enter it once.

    Args:
        process: this process.
        flags: parsed flags of this project.
        original: Bridge's ``_pretrain``.
        state: Bridge's ``GlobalState``.
        args: further arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        ConfigError: the job cannot run with its settings.
    """
    arguments = BridgeArguments(flags, state)
    check(arguments, state)
    process.take_trainer(arguments, MegatronBridge(state))
    if not is_restarted_in_process():
        if kwargs.get("store") is None and (address := store_address()):
            kwargs["store"] = connect_store(address)
        return original(state, *args, **kwargs)
    return run_through_failures(_BridgeTraining(process, original, (state, *args), kwargs))


class _BridgeTraining(RestartedTraining):
    @property
    def _state(self) -> Any:
        return self._args[0]

    @override
    def enter(self, store: Any) -> Any:
        now = generation()
        number = 0 if now is None else now.roster.generation
        more = {**self._kwargs, "store": store, "inprocess_call_wrapper": _Attempt(number)}
        return self._pretrain(*self._args, **more)

    @override
    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        if device is not None:
            os.environ["LOCAL_RANK"] = str(device)

    @override
    def forget_generation(self, *, was_saving: bool) -> None:
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

        destroy_num_microbatches_calculator()
        state = self._state
        state._timers = None
        queue, state._async_calls_queue = state._async_calls_queue, None
        if queue is not None:
            was_saving = was_saving or bool(queue.async_calls)
            queue.async_calls.clear()  # otherwise its destructor waits until all ranks finish them
            with suppress(Exception):  # The worker may be dead.
                queue.close(abort=True)
        if was_saving:
            forget_results()
