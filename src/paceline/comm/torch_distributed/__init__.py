"""Ranks that talk over torch.distributed: gloo on CPUs, nccl on GPUs."""
