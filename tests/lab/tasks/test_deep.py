"""The larger networks, their data, and their recipes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from paceline.errors import UsageError
from paceline.lab.tasks.characters import CONTEXT, load_text
from paceline.lab.tasks.cifar import augment
from paceline.lab.tasks.networks import make_network
from paceline.lab.tasks.recipe import DEEP


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a little CIFAR-10, and a text."""
    root = tmp_path_factory.mktemp("data")
    random, images = np.random.default_rng(0), root / "cifar-10-batches-bin"
    images.mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(images / name)
    (root / "input.txt").write_bytes(bytes(range(32, 127)) * 20)
    return root


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [
        ("resnet20", 269_722, (2, 3, 32, 32)),
        ("resnet18", 11_173_962, (2, 3, 32, 32)),
        ("gpt", 4_902_912, (2, CONTEXT)),
    ],
)
def test_the_networks_have_the_size_that_papers_say(name, parameters, shape):
    net = make_network(name)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    x = torch.zeros(shape, dtype=torch.int64) if name == "gpt" else torch.zeros(shape)
    assert net(x).shape == ((2, CONTEXT, 256) if name == "gpt" else (2, 10))


def test_a_transformer_does_not_look_ahead():
    net, text = make_network("gpt").eval(), torch.randint(0, 256, (1, CONTEXT))
    other = text.clone()
    other[0, 70:] = 0
    with torch.no_grad():
        assert torch.allclose(net(text)[0, :70], net(other)[0, :70], atol=1e-5)
        assert not torch.allclose(net(text)[0, 70:], net(other)[0, 70:], atol=1e-2)


def test_augmented_images_are_shifted_and_mirrored():
    torch.manual_seed(0)
    images = torch.rand(40, 3, 32, 32)
    padded, mirrored = pad(images, [4] * 4), 0
    for number, image in enumerate(augment(images)):
        crops = padded[number].unfold(1, 32, 1).unfold(2, 32, 1).movedim(0, 2)
        plain = (crops == image).all(-1).all(-1).all(-1)
        turned = (crops == image.flip(-1)).all(-1).all(-1).all(-1)
        assert plain.sum() + turned.sum() == 1
        mirrored += int(turned.sum())
    assert 10 < mirrored < 30


def test_a_text_is_cut_into_windows_with_the_next_characters(folder):
    text = load_text(str(folder))
    assert torch.equal(text.x_train[:, 1:], text.y_train[:, :-1])
    assert torch.equal(text.x_train[1:, 0], text.y_train[:-1, -1])
    assert len(text.x_test) == (20 * 95 - 1) // CONTEXT // 10


def test_rates_rise_then_fall():
    for recipe in DEEP.values():
        rates = [recipe.share_of_rate(step / 100) for step in range(101)]
        top = rates.index(max(rates))
        assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:])[::-1]
        assert max(rates) == pytest.approx(1.0, abs=0.01) and rates[-1] <= 0.1001


@pytest.mark.parametrize("model", ["resnet20", "gpt"])
def test_they_train_in_virtual_time(paceline, folder, model):
    line = ["sim", "--model", model, "--data", folder, "--steps", 3, "--epochs", 4]
    wrote = paceline(*line, "-w", 2, "--batch-size", 2, "-s", "sasgd(interval=2)", "--json")
    result = json.loads(wrote.out.splitlines()[-1])
    assert result["steps"] == 6 and 0 < result["loss"] < 20
    assert result["accuracy"] is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "resnet20"], "--data is missing: a folder with CIFAR-10"),
        (["--model", "gpt"], "--data is missing: a folder with a text"),
        (["--model", "gpt", "--data", "."], "must hold a text: tinyshakespeare.txt or input.txt"),
        (["--model", "resnet18", "--data", "."], "must hold CIFAR-10: cifar-10-batches-bin"),
        (["--model", "resnet21"], 'did you mean "resnet20"?'),
        (["--model", "gpt", "--data", ".", "--full"], "--full is for Fashion-MNIST"),
    ],
)
def test_missing_data_and_misspelt_models_are_refused(paceline, more, message):
    assert message in paceline("sim", *more, code=2).err


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "input.txt").write_text("short")
    with pytest.raises(UsageError, match="must have at least 1281 characters"):
        load_text(str(tmp_path))
