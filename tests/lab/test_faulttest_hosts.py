"""Random faults in the world of many hosts, in virtual time: its laws hold, and can fail."""

import pytest

from paceline.comm.hosts import registrar
from paceline.errors import UsageError
from paceline.lab.faulttest.campaign import campaign
from paceline.lab.faulttest.hosts.network import Network, StageListener, StageWire
from paceline.lab.faulttest.hosts.schedule import HOSTS, HostsFault, HostsSchedule, draw_hosts
from paceline.lab.faulttest.hosts.shrink import simpler_hosts
from paceline.lab.faulttest.hosts.stage import HostProcess, Stage
from paceline.lab.faulttest.hosts.world import HostsWorld, examine_hosts
from paceline.lab.faulttest.shrink import shrink
from paceline.lab.faulttest.worlds import parse

SEEDS = 100
SITES = [
    "kill",
    "stop",
    "cut",
    "drop",
    "registrar kill",
    "registrar stop",
    "connection broken",
    "struck off: died",
    "struck off: stopped",
    "left behind",
    "rejoined",
    "sum raised",
    "server followed",
    "push asked again",
    "batch given again",
    "post refused",
    "read",
    "met",
    "not met",
    "run again",
]


# All laws hold -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(warm_pool):
    return campaign([HOSTS], range(SEEDS))


@pytest.mark.timeout(1000)
def test_every_law_holds_under_random_faults(report):
    assert report.runs == {HOSTS: SEEDS}
    assert not report.failures, "\n".join(f"{f.text}\n  {f.command}" for f in report.failures)


@pytest.mark.parametrize("site", SITES)
def test_a_campaign_covers(report, site):
    assert report.sites[HOSTS][site] >= 1


# Schedules ---------------------------------------------------------------------------------------


def test_a_schedule_is_a_function_of_its_seed_and_parses_from_its_text():
    drawn = [draw_hosts(seed) for seed in range(50)]
    assert drawn == [draw_hosts(seed) for seed in range(50)]
    assert [parse(str(schedule)) for schedule in drawn] == drawn
    assert len(set(map(str, drawn))) == 50


def test_a_run_is_a_function_of_its_schedule():
    schedule = draw_hosts(7)
    traces = {HostsWorld(schedule).run().trace_hash for _ in range(2)}
    assert len(traces) == 1
    assert HostsWorld(schedule.but(seed=schedule.seed + 1)).run().trace_hash not in traces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"world": "moon"}', "world (moon) must be one of hosts"),
        ('{"world": "hosts", "acts": ["dance"]}', "act (dance) must be one of"),
        ('{"world": "hosts", "acts": ["meet", "sum"]}', "who meets must not sum"),
        ('{"world": "hosts", "acts": ["push"]}', "push needs a server"),
        ('{"world": "hosts", "wokers": 2}', 'did you mean "workers"'),
        ('{"world": "hosts", "faults": [{"kind": "kill"}]}', "rank is missing"),
        ('{"world": "hosts", "faults": [{"kind": "kill", "rank": 3}]}', "rank (3) must be below 3"),
        (
            '{"world": "hosts", "faults": [{"kind": "join", "rank": 1, "at_act": 3}]}',
            "at_act must not be given",
        ),
    ],
)
def test_an_invalid_schedule_is_refused(text, message):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_simpler_schedules_are_valid_and_differ():
    for seed in range(30):
        schedule = draw_hosts(seed)
        for smaller in simpler_hosts(schedule):
            assert smaller != schedule and parse(str(smaller)) == smaller


# Bugs are found ----------------------------------------------------------------------------------


def test_a_failing_schedule_is_shrunk(monkeypatch):
    """A bug that needs the loss of a rank that has a batch: little else remains."""
    monkeypatch.setattr("paceline.comm.batches.SharedBatches.take_back", lambda *_: None)
    failing = HostsSchedule(
        workers=4,
        acts=("rest", "post", "draw", "draw", "publish", "draw"),
        pause_s=0.3,
        faults=(
            HostsFault(kind="drop", rank=2, at_s=0.2),
            HostsFault(kind="kill", rank=1, at_s=0.8),
        ),
    )
    while (violation := examine_hosts(failing).violation) is None:
        failing = failing.but(seed=failing.seed + 1)
    assert violation.law == "batches"
    smallest = shrink(failing, "batches")
    assert [fault.kind for fault in smallest.faults] == ["kill"]
    assert smallest.workers < 4 and len(smallest.acts) < 6
    assert examine_hosts(smallest).violation.law == "batches"


def test_a_run_that_hangs_breaks_a_law(monkeypatch):
    monkeypatch.setitem(registrar._ORDERS, "meet", lambda *_: None)
    violation = examine_hosts(HostsSchedule(acts=("meet", "draw"))).violation
    assert violation is not None and violation.law == "liveness"


# The network -------------------------------------------------------------------------------------


class Ends:
    """Two processes, one of which sends the other numbers."""

    def __init__(self, room=1000):
        self.stage = Stage(0)
        self.network = Network(self.stage, latency_s=0.01, room=room, dead_s=1.0)
        self.sender, self.receiver = (HostProcess(self.stage, host, host) for host in range(2))
        self.listener = StageListener(self.network, self.receiver, "here")
        self.network.listeners["here"] = self.listener
        self.connection = StageWire(self.network, self.sender).connect("here")

    def run(self, body):
        self.sender.start(body)
        self.stage.run()
        return [int(frames[0]) for _, frames in self.listener.waiting]


def test_frames_arrive_once_and_in_order_and_wait_for_a_link_that_is_cut():
    ends = Ends()

    def body():
        for number in range(20):
            assert ends.connection.send(str(number).encode())
            ends.stage.sleep(0.01)
            ends.network.cuts = [frozenset({0, 1})] if 5 <= number < 15 else []
        ends.stage.sleep(1.0)

    assert ends.run(body) == [*range(20)]
    assert not ends.connection.came_again()


def test_a_connection_that_breaks_loses_what_is_on_its_way_and_comes_again():
    ends = Ends()

    def body():
        ends.stage.sleep(0.5)
        for number in range(10):
            ends.connection.send(str(number).encode())
        ends.connection.break_down()
        ends.stage.sleep(1.0)
        assert ends.connection.came_again() and not ends.connection.came_again()
        ends.connection.send(b"10")
        ends.stage.sleep(0.5)

    arrived = ends.run(body)
    assert arrived == [*range(len(arrived) - 1), 10] and len(arrived) < 11


def test_a_connection_over_a_link_that_stays_cut_breaks():
    ends = Ends()

    def body():
        ends.stage.sleep(0.5)
        ends.network.cuts = [frozenset({0, 1})]
        ends.stage.sleep(2.0)
        assert ends.network.broken == 1
        ends.network.cuts = []
        ends.stage.sleep(1.0)
        assert ends.connection.came_again()

    ends.run(body)


def test_a_connection_without_room_says_so():
    ends = Ends(room=2)
    assert ends.run(lambda: ends.connection.send(b"0") or None) is not None

    full = Ends(room=2)

    def body():
        assert [full.connection.send(b"0") for _ in range(3)] == [True, True, False]

    full.run(body)


# The command -------------------------------------------------------------------------------------


def test_the_command_runs_this_world_alone(paceline):
    printed = paceline("faulttest", "--world", HOSTS, "--seeds", 2)
    assert "2 runs in" in printed.out and "gossip" not in printed.out


def test_the_command_replays_a_schedule(paceline):
    assert "all laws hold" in paceline("faulttest", "--replay", '{"world": "hosts"}').out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world", "moon"), "world (moon) must be one of simulated, hosts"),
        (("--world", HOSTS, "--method", "gossip"), "must come without --method"),
    ],
)
def test_options_that_do_not_fit_are_refused(paceline, options, message):
    assert message in paceline("faulttest", *options, code=2).err
