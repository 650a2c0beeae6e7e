"""Runs over the network of one host: losses, the registrar's own death, strangers, checkpoints."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
import torch
import zmq
from support import resuming, runs
from support.worlds import on_hosts
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.link import RankLink
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.hosts.registrar_process import at_descriptor
from paceline.comm.hosts.secret import Secret, new_token
from paceline.comm.hosts.zeromq import ZmqWire
from paceline.comm.limits import Limits

WORKERS, SAMPLES = 3, 40
pytestmark = on_hosts


def launch(strategy, *faults, **how):
    return pl.launch(
        runs.train_through_losses,
        workers=WORKERS,
        strategy=strategy,
        faults=faults,
        transport="hosts",
        **how,
    )


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "sasgd(interval=2)", "allreduce"])
def test_the_others_continue_when_a_worker_dies(strategy):
    runs.check_that_others_continue(launch, strategy)


@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "cyclic", "layered"])
def test_a_server_that_dies_has_a_successor_that_finds_what_it_left(strategy, tmp_path):
    runs.check_that_a_server_has_a_successor(launch, strategy, tmp_path)


def test_a_worker_that_was_stopped_for_too_long_comes_back(tmp_path):
    how = {"until_incarnation": 2, "pids": str(tmp_path), "thaws": True}
    fault = pl.freeze(rank=1).at(step=3)
    result = launch("gossip", fault, limits=pl.Limits(dead_s=0.5), arguments=how)
    assert runs.happened(result, "rejoined") == [1]
    assert set(runs.answers(result)) == {0, 1, 2}


def test_a_lost_worker_is_restarted():
    runs.check_that_a_lost_worker_is_restarted(launch, "easgd(interval=2)")


# The registrar -----------------------------------------------------------------------------------


def strike_the_registrar(worker, number):
    """Rank 0 sends a signal to the registrar, which the fork server has started before all ranks.

    The batches before and after are given out by a registrar alone.
    """
    net = runs.new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6))
    batches = worker.setup_dataloaders(DataLoader(data, batch_size=2))
    for step, (numbers, inputs) in enumerate(batches):
        net(inputs).square().mean().backward()
        sgd.step()
        worker.log(taken=" ".join(map(str, numbers.tolist())))
        if worker.rank == 0 and step == 3:
            os.kill(min(runs.children_of(os.getppid())), number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_registrar_is_started_again_and_knows_what_it_knew(number):
    how = {"arguments": {"number": int(number)}, "limits": pl.Limits(dead_s=0.5)}
    result = pl.launch(strike_the_registrar, workers=2, strategy="gossip", transport="hosts", **how)
    taken = [int(number) for metric in result.metrics for number in metric["taken"].split()]
    assert sorted(taken) == list(range(SAMPLES)) and result.lost_workers == 0


# Checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", [("hosts", "hosts"), ("hosts", "shared_memory")])
@pytest.mark.parametrize("strategy", ["sasgd(interval=2)", "layered"])
def test_a_run_goes_on_from_its_checkpoint_in_this_world_or_another(strategy, transports, tmp_path):
    first, second = transports
    how = {**resuming.HOW, "strategy": strategy, "out": tmp_path, "on_loss": "stop"}
    with pytest.raises(pl.PeerLost, match="rank 1"):
        fault = pl.kill(rank=1).at(step=8)
        pl.launch(resuming.train, transport=first, faults=[fault], **how)
    result = pl.launch(resuming.train, transport=second, resume=True, **how)
    assert result.resumed_at is not None
    assert result.samples == 4 * resuming.SAMPLES


# Strangers ---------------------------------------------------------------------------------------


@pytest.fixture
def listening():
    """A registrar in a thread, and the address at which it listens."""
    token, limits = new_token(), Limits()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = at_descriptor(
            Registrar(1, 1, (), limits.dead_s),
            os.dup(listener.fileno()),
            Journal.create(),
            Secret(token, encrypted=True),
            limits,
        )
        threading.Thread(target=process.run, daemon=True).start()
        yield token, listener.getsockname()


def enter(address, secret):
    """Try to enter as rank 0; the link, once the registrar has replied."""
    limits = Limits(progress_limit_s=1.0)
    wire = ZmqWire(secret, limits.dead_s)
    link = RankLink(f"tcp://{address[0]}:{address[1]}", "127.0.0.1", 0, wire, limits, ())
    try:
        return link.order("enter", "host", 1, [])
    finally:
        link.close()


def test_who_has_not_the_token_learns_nothing_and_stops_nothing(listening):
    token, address = listening
    for secret in (Secret(new_token(), True), Secret(new_token(), False), Secret(token, False)):
        with pytest.raises(pl.CommTimeout):
            enter(address, secret)
    with socket.create_connection(address) as stranger:
        stranger.sendall(os.urandom(1 << 16))
    assert enter(address, Secret(token, True))["incarnation"] == 1


GARBAGE = [b"", b"{", b"[]", b"7", b'{"beat": []}', b'{"client": {}}', b"\xff" * 99, b"[" * 9999]


def test_what_a_member_says_that_makes_no_sense_stops_nothing(listening):
    token, address = listening
    secret, context = Secret(token, True), zmq.Context()
    member = context.socket(zmq.DEALER)
    secret.show(member)
    member.connect(f"tcp://{address[0]}:{address[1]}")
    for text in GARBAGE:
        member.send(text)
        member.send_multipart([text, text])
    assert enter(address, secret)["incarnation"] == 1
    context.destroy(linger=0)
