"""A rank destroys the process groups that its script leaves."""

from __future__ import annotations

import torch.distributed as dist

from moevement_core.launching.worker import end_groups


def test_groups_that_a_script_leaves_are_destroyed() -> None:
    end_groups()
    assert not dist.is_initialized(), "and where there are none nothing happens"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    end_groups()
    assert not dist.is_initialized()
    end_groups()
