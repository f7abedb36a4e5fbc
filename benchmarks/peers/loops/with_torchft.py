"""Loop with torchft: each rank is a replica group; a group that begins again heals from a live one."""

import os
from datetime import timedelta

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers import job

rank = int(os.environ["REPLICA_GROUP_ID"])
model, inner_optimizer = job.make()


def load_state_dict(state):
    model.load_state_dict(state["model"])
    inner_optimizer.load_state_dict(state["optimizer"])


def state_dict():
    return {"model": model.state_dict(), "optimizer": inner_optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=int(os.environ["PEERS_GLOO_S"]))),
    min_replica_size=int(os.environ["PEERS_REPLICAS"]),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"rank_{rank}",
    timeout=timedelta(seconds=30),
    init_sync=False,
)
averaged = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner_optimizer)
while manager.current_step() < job.iterations():
    before = manager.current_step()
    optimizer.zero_grad()
    averaged(job.batch(before + 1, rank)).backward()
    optimizer.step()
    if manager.current_step() > before:
        job.committed(manager.current_step(), rank)
job.finished(model, rank)
manager.shutdown()
