"""Loop with local checkpoints of nvidia-resiliency-ext, with a copy on one other rank, in each iteration."""

import copy

import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from benchmarks.peers import job


class StateOnCpu(BasicTensorAwareStateDict):
    def __init__(self, state):  # without the check for CUDA tensors
        self.state_dict, self._is_hollow = state, False

    def restore_tensor_device(self, non_blocking=True):
        pass


dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = job.make()
copies = CliqueReplicationStrategy.from_replication_params(replication_jump=1, replication_factor=2)
for unfinished in (job.folder() / "checkpoints" / str(rank)).glob("*.dirty.pt"):
    unfinished.unlink()  # A kill during a save leaves such a file, with which the next save of the iteration fails.
manager = LocalCheckpointManager(job.folder() / "checkpoints", repl_strategy=copies)
newest = max(0, manager.find_latest())
if newest:
    saved, _ = manager.load()
    model.load_state_dict(saved.state_dict["model"])
    optimizer.load_state_dict(saved.state_dict["optimizer"])
for iteration in range(newest + 1, job.iterations() + 1):
    model(job.batch(iteration, rank)).backward()
    job.average(model)
    optimizer.step()
    optimizer.zero_grad()
    job.committed(iteration, rank)
    # The manager replaces tensors inside of the state, also in the dictionaries of the optimizer.
    state = {"model": dict(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    manager.save(StateOnCpu(state), iteration)
job.finished(model, rank)
dist.destroy_process_group()
