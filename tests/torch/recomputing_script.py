"""A DDP script whose rank VICTIM kills itself once in backward. The others compute its samples meanwhile.

Prints how it ended, as JSON; the parameters go to the file PARAMETERS.
"""

import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from recomputing_programs import die, loss, make_loader, make_model, optimizer_of, vector
from torch.nn.parallel import DistributedDataParallel

import bml.torch

N_EPOCHS = 60


def main() -> None:
    dist.init_process_group("bml")
    rank, again = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    dies = rank == int(os.environ["VICTIM"]) and not again
    model = make_model(in_float64=True)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(ddp)
    hook = bml.torch.recompute_hook(ddp, loss)
    loader = make_loader(rank, dist.get_world_size())
    loops = bml.torch.resumable(ddp, optimizer, hook=hook)
    gap_s, last = 0.0, time.monotonic()
    for epoch in loops.epochs(N_EPOCHS):
        loader.sampler.set_epoch(epoch)
        for step, samples in enumerate(loops.batches(hook.batches(loader))):
            optimizer.zero_grad()
            made = loss(ddp, samples)
            if dies and (epoch, step) == (1, 5):
                model[0].weight.register_hook(die)
            made.backward()
            optimizer.step()
            # The others go on while it starts again, and are not done before it contributes.
            time.sleep(0.01 if len(bml.torch.contributors()) == dist.get_world_size() else 0.1)
            now = time.monotonic()
            gap_s, last = max(gap_s, now - last) if epoch else 0.0, now
    found = vector(model)
    if bml.torch.is_writer():
        torch.save(found, os.environ["PARAMETERS"])
    end = {
        "rank": rank,
        "digest": hashlib.sha256(found.numpy().tobytes()).hexdigest(),
        "samples": hook.samples(),
        "contributors": bml.torch.contributors(),
        "gap_s": gap_s,
        "n_epochs": N_EPOCHS,
    }
    print(json.dumps(end), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
