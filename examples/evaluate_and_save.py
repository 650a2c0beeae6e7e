"""Evaluate while training, save, stop, go on, and use the model without Paceline."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.tasks.fashion import load_images


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model):
    _, _, x_test, y_test = load_images()
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


def train(worker, checkpoint, first, last):
    """Train from epoch ``first`` to before ``last``; a first one above 0 goes on from a save."""
    x_train, y_train, _, _ = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    batches = worker.setup_dataloaders(loader)
    if first > 0:
        worker.load(checkpoint)
        batches.epoch = first  # the data goes on in the order of this epoch

    for epoch in range(first, last):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if worker.rank == 0:  # nobody else has to act for this
            with worker.answer(model):
                worker.log(epoch=epoch + 1, accuracy=accuracy(model))
        worker.save(checkpoint)  # each worker writes its own part


def run(folder, first, last):
    """Train on two workers; ``folder`` gets configuration, metrics, trace and model."""
    how = {"checkpoint": str(folder / "checkpoint"), "first": first, "last": last}
    result = pl.launch(train, workers=2, strategy="sasgd", arguments=how, out=folder)
    for record in result.metrics:
        print(f"epoch {record['epoch']}: accuracy {record['accuracy']:.3f}")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, first=0, last=2)
        print("stopped; going on")
        run(folder, first=2, last=4)

        model = make_model()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        print(f"plain model: accuracy {accuracy(model):.3f}")
