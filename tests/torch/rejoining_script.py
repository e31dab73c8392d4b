"""A script of torch.distributed in which rank VICTIM kills itself once, and prints how it ended."""

import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bml.torch


def main() -> None:
    begun = time.monotonic()
    dist.init_process_group("bml")
    rank, again = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    dies = rank == int(os.environ["VICTIM"]) and not again
    features = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, (features.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    loops = bml.torch.resumable(ddp, optimizer, scheduler)
    contributed_s, gap_s, last = -1.0, 0.0, time.monotonic()
    for epoch in loops.epochs(40):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loops.batches(loader)):
            if dies and (epoch, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            # The others go on while it starts again, and are not done before it contributes.
            time.sleep(0.01 if len(bml.torch.contributors()) == dist.get_world_size() else 0.1)
            now = time.monotonic()
            gap_s, last = max(gap_s, now - last) if epoch else 0.0, now
            if again and contributed_s < 0 and rank in bml.torch.contributors():
                contributed_s = now - begun
        scheduler.step()
    digest = hashlib.sha256(nn.utils.parameters_to_vector(model.parameters()).detach().numpy()).hexdigest()
    print("END", rank, digest, *scheduler.get_last_lr(), len(bml.torch.contributors()), flush=True)
    print("TIMES", rank, gap_s, contributed_s, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
