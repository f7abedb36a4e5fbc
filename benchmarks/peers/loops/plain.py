"""Loop without fault tolerance."""

import torch.distributed as dist

from benchmarks.peers import job

dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = job.make()
for iteration in range(1, job.iterations() + 1):
    model(job.batch(iteration, rank)).backward()
    job.average(model)
    optimizer.step()
    optimizer.zero_grad()
    job.committed(iteration, rank)
job.finished(model, rank)
dist.destroy_process_group()
