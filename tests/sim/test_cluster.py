"""Clusters from files and presets, faults as sentences; what is wrong is told by file and key."""

from __future__ import annotations

import itertools

import pytest

import paceline as pl
from paceline.common.faults import Fault, cut, degrade, freeze, join, kill, parse_fault, slow
from paceline.sim.cluster import PRESETS, load_cluster, read_faults
from paceline.sim.compute import Costs

NAMES = "ideal one-server ethernet-1g ethernet-10g ethernet-100g mixed-lab wan two-tier-256"


def write(tmp_path, text):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return str(path)


def test_the_presets_are_there_and_say_what_they_are():
    assert set(PRESETS) == set(NAMES.split())
    for preset in PRESETS.values():
        assert preset.about


def test_a_file_says_all_that_a_cluster_is(tmp_path):
    cluster = load_cluster(
        write(
            tmp_path,
            """
            about = "a lab"
            ranks_per_node = 2
            network = { latency_s = 1e-3, bytes_per_s = 1e8 }
            inside = { bytes_per_s = inf }
            loading = { sample_s = 1, prefetch = 2 }

            [compute]
            sample_s = 0.5
            spread = 0.25
            factors = [1, 2.0]
            slow = { 3 = 4.0 }

            [[faults]]
            kind = "freeze"
            rank = 1
            at_step = 10
            for_s = 3
            """,
        )
    )
    assert cluster.name == "lab" and cluster.node(3) == 1
    assert cluster.compute.factors == (1.0, 2.0) and cluster.compute.slow == {3: 4.0}
    assert cluster.loading.sample_s == 1.0
    assert cluster.faults == (Fault(kind="freeze", rank=1, at_step=10, for_s=3.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network = 3", r"lab.toml: network \(3\) must be of type Link"),
        ("[network]\nlatencey_s = 1", r'\[network\]: no option "latencey_s"; did you mean "lat'),
        ("[network]\nlatency_s = -1", r"\[network\]: latency_s \(-1.0\) must be at least 0"),
        ("[network]\nlatency_s = 'x'", r"\[network\]: latency_s \(x\) must be of type float"),
        ("[network]\nbytes_per_s = 0", r"bytes_per_s \(0.0\) must be above 0"),
        ("[network]\nlatency_s = nan", r"latency_s \(nan\) must be at least 0"),
        ("netwrk = {}", 'no option "netwrk"; did you mean "network"'),
        ("[compute]\nfactors = []", r"\[compute\]: factors \(\) must name at least one"),
        ("[compute]\nspread = 0.5\ntrace = [1.0]", "spread, lognormal and trace exclude"),
        ("[compute]\nspread = 1.5", r"\[compute\]: spread \(1.5\) must be below 1"),
        ("[[faults]]\nrank = 1", r"lab.toml, \[faults 1\]: kind is missing"),
        ("[[faults]]\nkind = 'kil'\nrank = 1", r"kind \(kil\) must be one of kill\|freeze"),
        ("ranks_per_node = true", r"ranks_per_node \(True\) must be of type int"),
        ("= 3", r"lab.toml: not a TOML file"),
        ("x" * (2 << 20), "must be at most 1048576 bytes"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    with pytest.raises(pl.UsageError, match=message):
        load_cluster(write(tmp_path, text))


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(pl.UsageError, match='no cluster "ethernet-1"; did you mean "ethernet-1'):
        load_cluster("ethernet-1")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(pl.UsageError, match=r"none\.toml: No such file"):
        load_cluster(str(tmp_path / "none.toml"))


def test_faults_are_sentences():
    assert kill(rank=2).at(step=10) == Fault(kind="kill", rank=2, at_step=10)
    assert freeze(rank=1, for_s=3).at(seconds=2) == Fault(kind="freeze", rank=1, at_s=2, for_s=3)
    assert slow(rank=0, factor=4).at(seconds=0).factor == 4
    assert join(rank=3).at(seconds=5).at_s == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kill(rank=-1), r"rank \(-1\) must be at least 0"),
        (lambda: kill(rank=1).at(), "at.seconds=.* or at.step="),
        (lambda: kill(rank=1).at(seconds=1, step=1), "at.seconds=.* or at.step="),
        (lambda: slow(rank=1, factor=0), r"factor \(0\) must be above 0"),
        (lambda: join(rank=1).at(step=1), "join takes at_s"),
        (lambda: Fault(kind="kill", rank=1, for_s=1.0), "is no option of kill"),
        (lambda: Fault(kind="slow", rank=1), "slow: factor is missing"),
        (lambda: Fault(kind="cut", rank=1, factor=0.5), "is an option of slow and degrade only"),
        (lambda: Fault(kind="kill"), "kill: rank is missing"),
        (lambda: Fault(kind="kill", rank=1, node=0), r"node \(0\) is an option of cut and degrade"),
        (lambda: cut(), "cut takes a rank or a node, and maybe its peer"),
        (lambda: cut(rank=1, node=0), "cut takes a rank or a node, and maybe its peer"),
        (lambda: cut(rank=1, peer=1), r"peer \(1\) must differ from rank \(1\)"),
        (lambda: cut(node=1, peer=1), r"peer \(1\) must differ from node \(1\)"),
        (lambda: cut(rank=1).at(step=3), "cut takes at_s: a link has no steps"),
        (lambda: degrade(rank=1, factor=10), r"factor \(10\) must be below 1: the share"),
        (lambda: degrade(rank=1, factor=0), r"factor \(0\) must be above 0"),
        (lambda: freeze(rank=1, for_s=0), r"for_s \(0\) must be above 0"),
    ],
)
def test_faults_that_make_no_sense_are_refused(make, message):
    with pytest.raises(pl.UsageError, match=message):
        make()


SENTENCES = {
    "kill(rank=2).at(seconds=1)": kill(rank=2).at(seconds=1.0),
    "kill(rank=2).at(step=10)": kill(rank=2).at(step=10),
    " freeze(rank=1, for_s=3).at(seconds=0.5) ": freeze(rank=1, for_s=3.0).at(seconds=0.5),
    "slow(rank=0, factor=2)": slow(rank=0, factor=2.0),
    "join(rank=3).at(seconds=5)": join(rank=3).at(seconds=5.0),
    "cut(rank=1, peer=2, for_s=1e-3)": cut(rank=1, peer=2, for_s=1e-3),
    "degrade(node=1, factor=0.1).at(seconds=2)": degrade(node=1, factor=0.1).at(seconds=2.0),
}


@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_that_was_typed_is_the_fault_it_says(text):
    assert parse_fault(text) == SENTENCES[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil(rank=2)", r'fault \(kil\(rank=2\)\): no fault "kil"; did you mean "kill"\?'),
        ("kill(rnk=2)", 'no option "rnk"; did you mean "rank"'),
        ("kill(2)", r"options have names, as in kill\(rank=1\).at\(step=40\)"),
        ("kill(rank=2", "must be like kill"),
        ("kill", "must be like kill"),
        ("", "must be like kill"),
        ("kill(rank=2).at(second=1)", r"a fault happens at\(seconds=...\) or at\(step=...\)"),
        ("kill(rank=2).on(seconds=1)", "a fault happens at"),
        ("kill(rank=2).at(seconds=1, step=1)", "a fault happens at"),
        ("kill(rank=__import__('os').getpid())", "options are plain numbers"),
        ("kill(rank='2')", r"rank \(2\) must be of type int"),
        ("kill(rank=2, for_s=1)", "for_s .* is no option of kill"),
        ("slow(rank=1)", "slow: factor is missing"),
        ("(lambda: 0)()", "must be like kill"),
    ],
)
def test_a_sentence_with_a_slip_says_what_to_type(text, message):
    with pytest.raises(pl.UsageError, match=message):
        parse_fault(text)


def test_a_file_of_faults_holds_faults_and_nothing_else(tmp_path):
    path = tmp_path / "script.toml"
    path.write_text('[[faults]]\nkind = "cut"\nnode = 1\nfor_s = 2\n')
    assert read_faults(path) == (cut(node=1, for_s=2.0),)
    path.write_text('[[fault]]\nkind = "cut"\nnode = 1\n')
    with pytest.raises(
        pl.UsageError, match=r'script.toml: no option "fault"; did you mean "faults"'
    ):
        read_faults(path)


def cost(text, rank, tmp_path):
    return Costs(load_cluster(write(tmp_path, text)), rank, seed=0)


def test_computing_is_charged_by_samples_and_slowness(tmp_path):
    text = "compute = { step_s = 1.0, sample_s = 0.1, factors = [1.0, 2.0], slow = { 1 = 3.0 } }"
    assert cost(text, 0, tmp_path).gradient_s(10) == pytest.approx(2.0)
    assert cost(text, 1, tmp_path).gradient_s(10) == pytest.approx(12.0)
    assert cost(text, 0, tmp_path).forward_s(30) == pytest.approx(1.0)


def test_jitter_is_bounded_and_a_function_of_seed_and_rank(tmp_path):
    text = "compute = { step_s = 1.0, spread = 0.2 }"
    draws = [cost(text, 0, tmp_path).gradient_s(1) for _ in range(2)]
    costs = cost(text, 0, tmp_path)
    many = [costs.gradient_s(1) for _ in range(500)]
    assert draws[0] == draws[1] == many[0]
    assert 0.8 <= min(many) < 0.85 and 1.15 < max(many) <= 1.2
    assert cost(text, 1, tmp_path).gradient_s(1) != many[0]


def test_lognormal_times_have_mean_one_and_a_long_tail(tmp_path):
    costs = cost("compute = { step_s = 2.0, lognormal = 0.5 }", 0, tmp_path)
    many = [costs.gradient_s(1) for _ in range(4000)]
    assert sum(many) / len(many) == pytest.approx(2.0, rel=0.05)
    assert max(many) > 6.0 and min(many) > 0.0


def test_a_trace_is_taken_in_turn_from_a_place_of_each_rank(tmp_path):
    text = "compute = { step_s = 1.0, trace = [1.0, 2.0, 3.0, 4.0, 5.0] }"
    taken = []
    for rank in range(8):
        costs = cost(text, rank, tmp_path)
        taken.append([costs.gradient_s(1) for _ in range(6)])
    for steps in taken:
        assert sorted(steps[:5]) == [1, 2, 3, 4, 5] and steps[5] == steps[0]
        assert all(b == a % 5 + 1 for a, b in itertools.pairwise(steps))
    assert len({steps[0] for steps in taken}) > 1


def test_a_loader_that_prefetches_is_waited_for_only_when_it_is_behind(tmp_path):
    plain = cost("loading = { batch_s = 1.0 }", 0, tmp_path)
    assert [plain.loading_s(4, now) for now in (0.0, 5.0)] == [1.0, 1.0]
    ahead = cost("loading = { batch_s = 1.0, prefetch = 2 }", 0, tmp_path)
    # asked for at 0, 5, 5.1, 5.2: the first two are loaded at 1 and 2, then one place at a time
    asked = [0.0, 5.0, 5.1, 5.2]
    assert [ahead.loading_s(4, now) for now in asked] == pytest.approx([1.0, 0.0, 0.0, 0.8])
