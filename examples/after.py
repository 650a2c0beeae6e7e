"""One training loop, twice: ``before.py`` in one process, ``after.py`` on two workers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.lab.tasks.fashion import load_images  # small pictures of clothes, in ten classes


def train(worker):
    torch.manual_seed(0)
    x_train, y_train, x_test, y_test = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    loader = worker.setup_dataloaders(loader)

    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean()
        print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    pl.launch(train, workers=2, strategy="sasgd")
