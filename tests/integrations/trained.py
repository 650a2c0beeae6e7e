"""What the tests of trainers train, the same for each of them; losses are those of each step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.tasks.fashion import load_images

BATCH, EPOCHS, MAX_NORM = 32, 2, 0.5


def clothes(count=640):
    """Images and labels, in their order."""
    x, y, *_ = load_images()
    return TensorDataset(x[:count], y[:count])


def loader(count=640):
    return DataLoader(clothes(count), batch_size=BATCH)


def new_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def new_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_paced(worker):
    import paceline as pl

    net, losses = new_net(), []
    optimizer, batches = new_optimizer(net), worker.setup_dataloaders(loader())
    with pl.paced(net, optimizer):
        for _ in range(EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                worker.clip_gradients(MAX_NORM)
                optimizer.step()
                losses.append(loss.item())
    return losses


def train_lightning(worker):
    import lightning

    from paceline.integrations.lightning import PacelineStrategy

    module = new_module(lightning)
    trainer = lightning.Trainer(
        **quiet(), max_epochs=EPOCHS, gradient_clip_val=MAX_NORM, strategy=PacelineStrategy()
    )
    trainer.fit(module, loader())
    return module.losses


def quiet():
    """Arguments of a Lightning Trainer that writes nothing."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return dict.fromkeys(names, False) | {"accelerator": "cpu"}


def new_module(lightning, **hooks):
    """A LightningModule that notes its losses; ``hooks`` are more methods of its class."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses, self.batches = new_net(), [], []

        def training_step(self, batch):
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            self.batches.append((self.current_epoch, len(x)))
            return loss

        def configure_optimizers(self):
            return new_optimizer(self)

    for name, hook in hooks.items():
        setattr(Module, name, hook)
    return Module()


def train_fabric(worker):
    import lightning

    from paceline.integrations.fabric import PacelineStrategy

    fabric = lightning.Fabric(accelerator="cpu", strategy=PacelineStrategy())
    net, losses = new_net(), []
    net, optimizer = fabric.setup(net, new_optimizer(net))
    batches = fabric.setup_dataloaders(loader())
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(net, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            losses.append(loss.item())
    return losses


def train_accelerate(worker):
    from paceline.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, losses = new_net(), []
    net, optimizer, batches = accelerator.prepare(net, new_optimizer(net), loader())
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(loss.item())
    return losses


def train_huggingface(worker, folder):
    from paceline.integrations.huggingface import Trainer

    return train_bert(Trainer, folder)


class Tokens(torch.utils.data.Dataset):
    """Sequences of the tokens 1 and 2; the label says which one comes first."""

    def __init__(self, count=640):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 3, (count, 9), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens[0] - 1}


def new_bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = BertConfig(
        vocab_size=3,
        num_attention_heads=2,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **sizes,
    )
    return BertForSequenceClassification(config)


def bert_arguments(folder, **more):
    from transformers import TrainingArguments

    settings = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "average_tokens_across_devices": False,  # else each loss counts twice in DDP
        "learning_rate": 5e-3,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **settings | more)


def noting_losses(trainer_class):
    """A trainer that notes the loss of each batch."""

    class Noting(trainer_class):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if model.training:
                self.__dict__.setdefault("losses", []).append(loss.item())
            return loss

    return Noting


def train_bert(trainer_class, folder):
    trainer = noting_losses(trainer_class)(
        new_bert(), bert_arguments(folder), train_dataset=Tokens()
    )
    trainer.train()
    return trainer.losses
