"""Training script of the example with a pause in each micro-batch, which leaves the cores to starting processes."""

import sys
import time
from pathlib import Path

PAUSE_S = 0.08

_script = Path(__file__).parents[2] / "examples" / "pretrain_moe" / "pretrain_gpt.py"
_source = _script.read_text().replace('if __name__ == "__main__":', "if False:")
exec(compile(_source, str(_script), "exec"), globals())
_forward_step = globals()["forward_step"]


def forward_step(data_iterator, model):
    """Run the example's forward step after a pause."""
    time.sleep(PAUSE_S)
    return _forward_step(data_iterator, model)


if __name__ == "__main__":
    sys.argv[0] = str(_script)
    globals()["main"]()
