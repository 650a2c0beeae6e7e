"""Batches that are read without a DataLoader's machinery are those that it would hand on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate

from paceline.training.batches import Batches, reads_here

X = torch.randn(30, 3, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30)
ORDER = [[3, 1, 29], [0, -1], [7, 7, 8, 9]]


class Drawing(Dataset):
    """Draws a random number for each sample, as those do that augment images."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"x": X[index] + torch.rand(()), "y": int(Y[index]), "text": str(index)}


class AtOnce(Drawing):
    def __getitems__(self, indices):
        return [(X[index], f"{index}") for index in indices]


class Named(TensorDataset):
    def __getitem__(self, index):
        return {"x": X[index]}


SETS = {
    "rows": TensorDataset(X, Y),
    "one tensor": TensorDataset(Y),
    "transposed": TensorDataset(X.transpose(1, 2), Y),
    "a part": Subset(TensorDataset(X, Y), range(29, -1, -1)),
    "a subclass": Named(X, Y),
    "drawing": Drawing(),
    "at once": AtOnce(),
}


def parts(batch):
    """All that is in a batch, in order."""
    if isinstance(batch, dict):
        batch = [batch[name] for name in sorted(batch)]
    return [part for each in batch for part in parts(each)] if isinstance(batch, list) else [batch]


def loader_of(data, **options):
    return DataLoader(data, batch_sampler=[*ORDER], **options)


@pytest.mark.parametrize("collate_fn", [None, lambda samples: [default_collate(samples), "own"]])
@pytest.mark.parametrize("name", SETS)
def test_batches_are_those_of_a_data_loader(name, collate_fn):
    loader, both = loader_of(SETS[name], collate_fn=collate_fn), []
    arrays = [torch.tensor(indices).numpy() for indices in ORDER]
    for batches in (loader, Batches(loader, lambda: iter(ORDER)), Batches(loader, arrays.__iter__)):
        torch.manual_seed(5)
        both.append(([*batches], torch.rand(3)))
    (theirs, drawn), *others = both
    for ours, also_drawn in others:
        assert torch.equal(drawn, also_drawn)
        for one, other in zip(theirs, ours, strict=True):
            assert type(one) is type(other)
            for a, b in zip(parts(one), parts(other), strict=True):
                assert type(a) is type(b)
                if isinstance(a, torch.Tensor):
                    assert torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
                else:
                    assert a == b


def test_a_loader_draws_from_its_own_generator():
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    one, other = (loader_of(SETS["rows"], generator=generator) for generator in generators)
    next(iter(one)), next(iter(Batches(other, lambda: iter(ORDER))))
    assert torch.equal(*(generator.get_state() for generator in generators))


def test_samples_that_are_collated_in_another_way_are(monkeypatch):
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, lambda batch, **_: len(batch))
    loader = loader_of(SETS["rows"])
    assert [*Batches(loader, lambda: iter(ORDER))] == [*loader] == [3, 2, 4]


def test_a_loader_that_does_more_is_left_to_torch():
    assert reads_here(loader_of(SETS["rows"]))
    assert not reads_here(loader_of(SETS["rows"], num_workers=1))
    assert not reads_here(loader_of(SETS["rows"], pin_memory=True))
