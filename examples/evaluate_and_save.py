"""Evaluate during training, save, stop, resume, and use the model without Paceline."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.lab.tasks.fashion import load_images


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model):
    _, _, x_test, y_test = load_images()
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


def train(worker, checkpoint, epochs):
    """Train until ``epochs`` are complete; resume from ``checkpoint``, if it exists."""
    x_train, y_train, _, _ = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    batches = worker.setup_dataloaders(loader)
    if Path(checkpoint).exists():
        worker.load(checkpoint)

    for epoch in range(batches.epoch, epochs):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if worker.rank == 0:  # the other workers do not wait for this
            with worker.answer(model):
                worker.log(epoch=epoch + 1, accuracy=accuracy(model))
        worker.save(checkpoint)  # each worker writes its own part


def run(folder, epochs):
    """Train on two workers; ``folder`` gets configuration, metrics, trace and model."""
    arguments = {"checkpoint": str(folder / "checkpoint"), "epochs": epochs}
    result = pl.launch(train, workers=2, strategy="sasgd", arguments=arguments, out=folder)
    for record in result.metrics:
        print(f"epoch {record['epoch']}: accuracy {record['accuracy']:.3f}")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, epochs=2)
        print("stopped; resuming")
        run(folder, epochs=4)

        model = make_model()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        print(f"plain model: accuracy {accuracy(model):.3f}")
