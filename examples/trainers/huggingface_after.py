"""Hugging Face's Trainer, twice: ``huggingface_before.py`` alone, ``.._after.py`` on workers."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import paceline as pl
from paceline.integrations.huggingface import Trainer


class FirstTokens(Dataset):
    """Sequences of the tokens 1 and 2; the label says which one comes first."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 3, (count, 9), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens[0] - 1}


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean()}


def train(worker):
    config = BertConfig(
        vocab_size=3,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    args = TrainingArguments(
        "huggingface",
        num_train_epochs=2,
        learning_rate=5e-3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=256,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=FirstTokens(640, seed=0),
        eval_dataset=FirstTokens(256, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    pl.launch(train, workers=2, strategy="gossip")
