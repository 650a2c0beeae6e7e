"""A plain script for any launcher: torchrun, mpirun, srun, Ray, or none.

On two workers, and on one:

    torchrun --standalone --nproc-per-node 2 examples/torchrun.py
    python examples/torchrun.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.lab.tasks.fashion import load_images

# The launcher's environment gives rank and number of workers; leaving the block ends the run.
with pl.init(strategy="sasgd(interval=8)") as worker:
    x_train, y_train, x_test, y_test = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    loader = worker.setup_dataloaders(loader)

    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    worker.finish()  # the model now holds the method's answer, the same on every worker
    if worker.leads:
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean()
        print(f"workers {worker.size}: accuracy {accuracy:.3f}")
