"""Lightning Fabric, twice: ``fabric_before.py`` alone, ``fabric_after.py`` on workers."""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.tasks.fashion import load_images  # small pictures of clothes, in ten classes


def train():
    fabric = lightning.Fabric(accelerator="cpu")
    fabric.launch()
    x_train, y_train, x_test, y_test = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
    fabric.save("fabric.ckpt", {"model": model})
    if fabric.is_global_zero:
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean()
        print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    train()
