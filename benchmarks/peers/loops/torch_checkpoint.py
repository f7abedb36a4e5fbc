"""Loop with torch's asynchronous distributed checkpoint of the whole state in each iteration; torchrun restarts the job."""

import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from benchmarks.peers import job


class State(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


dist.init_process_group("gloo")
for_saving = dist.new_group(backend="gloo")
rank = dist.get_rank()
model, optimizer = job.make()
state = {"job": State(model, optimizer)}
folder = job.folder() / "checkpoints"
complete = [int(path.parent.name) for path in folder.glob("*/.metadata")]
newest, saving = max(complete, default=0), None
if newest:
    dcp.load(state, checkpoint_id=folder / str(newest))
for iteration in range(newest + 1, job.iterations() + 1):
    model(job.batch(iteration, rank)).backward()
    job.average(model)
    optimizer.step()
    optimizer.zero_grad()
    job.committed(iteration, rank)
    if saving is not None:
        saving.result()
        if rank == 0:
            shutil.rmtree(folder / str(iteration - 2), ignore_errors=True)
    saving = dcp.async_save(state, checkpoint_id=folder / str(iteration), process_group=for_saving)
if saving is not None:
    saving.result()
job.finished(model, rank)
dist.destroy_process_group()
