"""A small GPT on a text, twice: ``gpt_before.py`` alone, ``gpt_after.py`` on workers.

python prepare.py input.txt data
python gpt_before.py --data_dir=data --max_iters=500
"""

import json
import math
import os
import sys
from ast import literal_eval
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import paceline as pl

# Settings; each may be given as --name=value
out_dir = "out"
data_dir = "data"
init_from = "scratch"  # or "resume", from the checkpoint in out_dir
eval_interval = 50
eval_iters = 10
log_interval = 10
always_save_checkpoint = False
gradient_accumulation_steps = 2
batch_size = 8
block_size = 32
n_layer, n_head, n_embd, dropout = 2, 2, 64, 0.0
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 10
max_iters = 200
weight_decay, beta1, beta2 = 0.1, 0.9, 0.99
grad_clip = 1.0  # 0.0 for none
device = "cpu"
dtype = "float32"  # or "bfloat16", or "float16", which needs a gradient scaler
seed = 1337
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if not isinstance(globals().get(name), (bool, int, float, str)):
        raise SystemExit(f"there is no setting {name}")
    globals()[name] = value if isinstance(globals()[name], str) else literal_eval(value)

worker = pl.init(strategy="gossip")
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(seed + worker.rank)
mixed = torch.autocast(device, getattr(torch, dtype)) if dtype != "float32" else nullcontext()
with open(os.path.join(data_dir, "meta.json")) as file:
    vocab_size = json.load(file)["vocab_size"]


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    rows = torch.from_numpy(np.stack([data[i : i + block_size + 1] for i in starts]).astype("i8"))
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        heads = self.c_attn(self.ln_1(x)).view(b, t, 3, n_head, c // n_head).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def configure_optimizer():
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


iter_num, best_val_loss = 0, 1e9
model = GPT().to(device)
optimizer = configure_optimizer()
scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
model, optimizer = worker.setup(model, optimizer)
worker.plan(steps=max_iters + 1 - iter_num)


@torch.no_grad()
@worker.answer(model)
def estimate_loss():
    means = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with mixed:
                losses[k] = model(*get_batch(split)).item()
        means[split] = losses.mean().item()
    model.train()
    return means


@worker.answer(model)
def save_checkpoint():
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
    }
    torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


while iter_num <= max_iters:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and worker.leads:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            save_checkpoint()

    for _micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        worker.samples(len(X))
        with mixed:
            loss = model(X, Y) / gradient_accumulation_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        worker.clip_gradients(grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        worker.log(loss=loss.item() * gradient_accumulation_steps)
    iter_num += 1
