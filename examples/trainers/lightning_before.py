"""A Lightning Trainer, twice: ``lightning_before.py`` alone, ``lightning_after.py`` on workers."""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.tasks.fashion import load_images  # small pictures of clothes, in ten classes


class Clothes(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def train():
    x_train, y_train, x_test, y_test = load_images()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    validation = DataLoader(TensorDataset(x_test, y_test), batch_size=1000)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        enable_progress_bar=False,
    )
    trainer.fit(Clothes(), loader, validation)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    train()
