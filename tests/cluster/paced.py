"""Training script of the example with a pause in each micro-batch, which leaves the cores to starting processes.

The loss is five times as large in the iteration that the environment variable SPIKE names, if it is set.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

PAUSE_S = 0.08
SPIKE = int(os.environ.get("SPIKE", "0"))

_script = Path(__file__).parents[2] / "examples" / "pretrain_moe" / "pretrain_gpt.py"
_source = _script.read_text().replace('if __name__ == "__main__":', "if False:")
exec(compile(_source, str(_script), "exec"), globals())
_forward_step = globals()["forward_step"]


def _five_times(loss_func, *tensors):
    loss, tokens, losses = loss_func(*tensors)
    return 5 * loss, tokens, {name: value * value.new_tensor([5.0, 1.0]) for name, value in losses.items()}


def forward_step(data_iterator, model):
    """Run the example's forward step after a pause."""
    time.sleep(PAUSE_S)
    output, loss_func = _forward_step(data_iterator, model)
    is_spike = globals()["get_args"]().curr_iteration + 1 == SPIKE
    return output, partial(_five_times, loss_func) if is_spike else loss_func


if __name__ == "__main__":
    sys.argv[0] = str(_script)
    globals()["main"]()
