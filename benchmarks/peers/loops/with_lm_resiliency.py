"""Loop with lm-resiliency's GEMINI: copies in host memory and on disk in each iteration; torchrun restarts the job."""

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency

from benchmarks.peers import job

dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = job.make()
resiliency = enable_resiliency(
    model,
    optimizer,
    interval=1,
    enable_detection=False,
    checkpoint=InMemoryCkptConfig(
        replication_jump=1,
        disk_flush_interval=1,
        disk_folder=str(job.folder() / "checkpoints"),
        run_id="peers",
        pin_memory=False,
    ),
    group=dist.new_group(backend="gloo"),  # else the library makes a group of NCCL, which needs GPUs
    device=torch.device("cpu"),
)
for iteration in range(resiliency.step_count + 1, job.iterations() + 1):
    model(job.batch(iteration, rank)).backward()
    job.average(model)
    optimizer.step()
    optimizer.zero_grad()
    job.committed(iteration, rank)
resiliency.close()
job.finished(model, rank)
dist.destroy_process_group()
