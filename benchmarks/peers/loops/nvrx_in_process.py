"""Loop in the in-process restart of nvidia-resiliency-ext, with reserve ranks; it goes on from a file of each iteration."""

import os
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "error"
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from benchmarks.peers import job

PORT = int(os.environ["MASTER_PORT"])
GLOO_S, WRAPPER_S = (float(seconds) for seconds in os.environ["PEERS_TIMEOUTS"].split())


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(job.RANKS), inprocess.rank_assignment.ShiftRanks()
    ),
    monitor_thread_interval=timedelta(seconds=WRAPPER_S),
    monitor_process_interval=timedelta(seconds=WRAPPER_S),
    last_call_wait=timedelta(seconds=WRAPPER_S),
    monitor_process_logfile=str(job.folder() / "monitor{rank}"),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", PORT + 2 + call_wrapper.iteration, world, is_master=rank == 0, multi_tenant=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GLOO_S))
    model, optimizer = job.make()
    file, newest = job.folder() / "state", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        newest = saved["iteration"]
    for iteration in range(newest + 1, job.iterations() + 1):
        model(job.batch(iteration, rank)).backward()
        job.average(model)
        with call_wrapper.atomic():
            optimizer.step()
            optimizer.zero_grad()
            job.committed(iteration, rank)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
                torch.save(state, file.with_suffix(".new"))
                file.with_suffix(".new").rename(file)
    job.finished(model, rank)
    dist.destroy_process_group()


train()
