"""Accelerate by itself, twice: ``accelerate_before.py`` alone, ``.._after.py`` on workers."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.tasks.fashion import load_images  # small pictures of clothes, in ten classes


def train():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x_train, y_train, x_test, y_test = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, "accelerate")
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    accelerator.print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    train()
