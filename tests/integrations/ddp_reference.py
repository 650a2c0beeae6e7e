"""What DistributedDataParallel does over gloo: the losses of each rank, one file for each.

torchrun starts it; the first argument is the folder.
"""

import json
import os
import sys
from pathlib import Path

import torch
import trained
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer


def clothes(rank):
    """A plain loop, whose global batches are in the order of the data."""
    model = DistributedDataParallel(trained.new_net())
    optimizer = trained.new_optimizer(model)
    x, y = trained.clothes().tensors
    losses = []
    for _ in range(trained.EPOCHS):
        for begin in range(0, len(x), 2 * trained.BATCH):
            own = slice(begin + rank * trained.BATCH, begin + (rank + 1) * trained.BATCH)
            optimizer.zero_grad()
            loss = cross_entropy(model(x[own]), y[own])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), trained.MAX_NORM)
            optimizer.step()
            losses.append(loss.item())
    return losses


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    losses = {"clothes": clothes(rank), "bert": trained.train_bert(Trainer, sys.argv[1])}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
