"""A loop around several parts, twice: ``paced_before.py`` alone, ``paced_after.py`` on workers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.tasks.fashion import load_images  # small pictures of clothes, in ten classes


class Trainer:
    """Owns its loop, as those of large projects do."""

    def __init__(self):
        x_train, y_train, *self.test = load_images()
        self.loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.schedule = StepLR(self.optimizer, step_size=2, gamma=0.5)

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self):
        for _epoch in range(3):
            for x, y in self.loader:
                self.train_step(x, y)
            self.schedule.step()

    def accuracy(self):
        x, y = self.test
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).float().mean()


def train():
    trainer = Trainer()
    trainer.train()
    print(f"accuracy {trainer.accuracy():.3f}")


if __name__ == "__main__":
    train()
