"""The simulated clusters of the claims, beside the presets."""

from __future__ import annotations

from dataclasses import replace

from paceline.sim.cluster import Cluster, CollectiveCosts, Compute, Link, Loading, load_cluster
from paceline.sim.models import MODELS, StandsFor

BATCH_S = 1e-3 + 16 * 3e-4
"""The time of a batch of 16 on the machines of the presets."""

PARAMETERS = 10_000
"""The parameters in runs without gradients; the network charges for the bytes of the real model."""
ETHERNET = replace(
    load_cluster("ethernet-1g"),
    stands_for=StandsFor(
        model="mlp", bytes=407_080, tensors=4, sample_s=BATCH_S, source="the presets: assumed"
    ),
)
"""For runs without gradients: the built-in MLP, with a batch of 16 in each step."""

CONTENDED = replace(
    load_cluster("ethernet-1g"),
    name="contended",
    about="1 Gbit/s Ethernet; of each four machines one is 2 and one 4 times slower",
    compute=Compute(step_s=1e-3, sample_s=3e-4, spread=0.05, factors=(1.0, 1.0, 2.0, 4.0)),
)


def without_network(cluster: Cluster) -> Cluster:
    """The same machines on links that cost nothing."""
    return replace(cluster, name=f"{cluster.name}, no cost", network=Link(), inside=Link())


AUTHORS = "a call for each tensor"
LOADERS = {
    AUTHORS: (CollectiveCosts(algorithm="ring", calls=0), 0),
    "one fused ring": (CollectiveCosts(algorithm="ring", calls=1), 0),
    "a call for each tensor, prefetching": (CollectiveCosts(algorithm="ring", calls=0), 2),
    "one fused ring, prefetching": (CollectiveCosts(algorithm="ring", calls=1), 2),
}
"""The collectives, and how many batches are loaded ahead; the first is as in the authors' code."""


def as_resnet50(loader: str) -> Cluster:
    """Nodes of 4 ranks that train a model of the size of ResNet-50; compute times are assumed."""
    collectives, prefetch = LOADERS[loader]
    assumed = "a batch of 64 on a GPU of 2014: assumed"
    return replace(
        load_cluster("two-tier-256"),
        name=f"two tiers, {loader}",
        compute=Compute(spread=0.05),
        loading=Loading(batch_s=1.0, prefetch=prefetch),
        collectives=collectives,
        stands_for=replace(MODELS["resnet50"], sample_s=1.5, source=assumed),
    )
