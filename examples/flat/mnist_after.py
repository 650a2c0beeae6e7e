"""A classifier of pictures, twice: ``mnist_before.py`` alone, ``mnist_after.py`` on workers."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.lab.tasks.fashion import load_images  # clothes, in ten classes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 2)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(400, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = self.dropout(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch_idx} of {len(train_loader)}: loss {loss:.4f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    count = len(test_loader.dataset)
    print(f"test set: loss {test_loss / count:.4f}, accuracy {correct / count:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--dry-run", action="store_true", help="one batch of each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=25)
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()
    worker = pl.init(strategy="gossip")
    device = worker.device
    torch.manual_seed(args.seed + worker.rank)

    x_train, y_train, x_test, y_test = load_images()
    train_loader = DataLoader(TensorDataset(x_train, y_train), args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(x_test, y_test), args.test_batch_size)

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    model, optimizer = worker.setup(model, optimizer)
    train_loader = worker.setup_dataloaders(train_loader, epochs=args.epochs)

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        if worker.leads:
            with worker.answer(model):
                test(model, device, test_loader)
        scheduler.step()

    worker.finish()
    if args.save_model and worker.leads:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
