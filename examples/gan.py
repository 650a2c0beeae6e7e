"""A GAN on two workers: two models and two optimizers in one run.

The generator learns to put points on a circle. The loop is a plain one, as DCGAN's: two steps for
each batch, of the discriminator and of the generator.
"""

import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

NOISE, RADIUS, WIDTH = 4, 1.0, 48


def make_models():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    d = nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH))
    return g.append(nn.Linear(WIDTH, 2)), d.extend([nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)])


def circle(points):
    angles = torch.rand(points, generator=torch.Generator().manual_seed(1)) * 2 * math.pi
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def judge(g):
    """How far the generator's points are from the circle, and how many of its 8 parts have some."""
    points = g(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(2)))
    part = (torch.atan2(points[:, 1], points[:, 0]) / math.pi * 4).floor()
    counts = torch.bincount((part + 4).clamp(0, 7).long(), minlength=8)
    return (points.norm(dim=1) - RADIUS).abs().mean().item(), int((counts > 40).sum())


def train(worker, epochs):
    g, d = make_models()
    g_opt = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_opt = torch.optim.Adam(d.parameters(), lr=3e-3, betas=(0.5, 0.99))
    (g, d), (g_opt, d_opt) = worker.setup((g, d), (g_opt, d_opt))
    data = DataLoader(TensorDataset(circle(4096)), batch_size=64, shuffle=True)
    loader = worker.setup_dataloaders(data)
    for epoch in range(epochs):
        for (real,) in loader:
            fake = g(torch.randn(len(real), NOISE))

            d_opt.zero_grad()
            (softplus(-d(real)) + softplus(d(fake.detach()))).mean().backward()
            d_opt.step()

            g_opt.zero_grad()
            softplus(-d(fake)).mean().backward()  # fills the discriminator's gradients, too
            g_opt.step()
        if worker.leads and epoch % 4 == 3:
            with worker.answer(g), torch.no_grad():
                distance, parts = judge(g)
            print(f"epoch {epoch + 1}: {distance:.3f} from the circle, {parts} of 8 parts")
            worker.log(distance=distance, parts=parts)


if __name__ == "__main__":
    pl.launch(train, workers=2, strategy="easgd", arguments={"epochs": 16})
