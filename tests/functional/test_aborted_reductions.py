"""Updates never use a reduction that another rank aborted, even if it returns a wrong number, as NCCL's may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failure_free import digest_of, failure_free
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.launching import survive
from tests.training import SCRIPT

SCRIPT_WITH_WRONG_NORMS = """
import sys
import time

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from moevement_core.rendezvous.interruption import GenerationStore

sys.argv[0] = {script!r}
source = open({script!r}).read()
exec(compile(source.replace('if __name__ == "__main__":', "if False:"), {script!r}, "exec"), globals())

reduce_norm, wait = ChainedOptimizer.get_grad_norm, GenerationStore.wait_for_interrupted


def get_grad_norm(self):
    try:
        return reduce_norm(self)
    except RuntimeError:
        open({marker!r}, "w").close()
        return 1000.0


def wait_longer(self, timeout):
    wait(self, timeout)
    if torch.distributed.get_rank() == 1:
        time.sleep(1.0)


ChainedOptimizer.get_grad_norm, GenerationStore.wait_for_interrupted = get_grad_norm, wait_longer
main()
"""


@pytest.mark.full
def test_an_update_is_never_made_with_the_norm_of_an_aborted_reduction(tmp_path: Path) -> None:
    """Delay the monitoring thread by a second on the rank that gets a wrong norm."""
    script, marker = tmp_path / "wrong.py", tmp_path / "wrong"
    script.write_text(SCRIPT_WITH_WRONG_NORMS.format(script=str(SCRIPT), marker=str(marker)))
    nproc, layout = LAYOUTS["PP2"]
    flags = SPARSE | layout | {"train_iters": 10}
    wanted = failure_free(nproc, **flags)
    fault = ("rank=0,iteration=6,phase=copy,signal=EXC",)
    survived = survive(nproc, 1, tmp_path / "run", script=script, inject=fault, **flags)
    assert marker.exists(), "rank 1 got a wrong norm"
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(10)
    (failure,) = survived.failures()
    assert failure["recovery"] is None, "no state was lost, and no step was torn"
