"""The verdict: right about which method was first, by how much, and how sure that is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import material, run

from paceline.lab.stats import ratio, spread
from paceline.report.material import Setting
from paceline.report.verdict import headline, standings, verdict

LAB = Setting("lab", 4)
SEEDS = range(3)


def verdict_on(*runs, setting=LAB, **more):
    return verdict(material(*runs, **more), setting)


def runs_of(method, *each, **more):
    return [
        run(method, seed=seed, evaluation_s=evaluation_s, **more)
        for seed, evaluation_s in enumerate(each)
    ]


def test_the_fastest_is_named_with_its_margin():
    found = verdict_on(
        run("slow", evaluation_s=3.0),
        run("quick", evaluation_s=1.0),
        run("middle", evaluation_s=2.0),
    )
    assert found.first == "quick"
    assert "quick reached accuracy 0.7 first, after 4.0 s of virtual time" in found.sentences[0]
    assert "2.00 times faster than middle" in found.sentences[0]
    assert "3.00 times faster than slow" in found.sentences[0]


def test_allreduce_is_what_others_are_compared_with():
    found = verdict_on(
        run("quick"),
        run("b", evaluation_s=2.0),
        run("allreduce", evaluation_s=3.0),
        run("d", evaluation_s=9.0),
    )
    assert "3.00 times faster than allreduce" in found.sentences[0]
    assert "than d" not in found.sentences[0]


def test_one_seed_is_never_sure():
    found = verdict_on(run("quick"), run("slow", evaluation_s=100.0))
    assert found.sure == "not sure" and "--seeds" in found.why


def test_two_seeds_are_too_few():
    found = verdict_on(*runs_of("quick", 1.0, 1.0), *runs_of("slow", 3.0, 3.1))
    assert found.sure == "not sure" and "3 seeds" in found.why


def test_a_clear_margin_over_three_seeds_is_sure():
    found = verdict_on(*runs_of("quick", 1.0, 1.1, 0.9), *runs_of("slow", 3.0, 3.2, 3.1))
    assert found.sure == "sure"
    assert "over 3 seeds" in found.why.lower() and "90 %" in found.why


def test_a_margin_that_changes_sides_is_not_sure():
    found = verdict_on(*runs_of("quick", 1.0, 4.0, 1.0), *runs_of("slow", 3.0, 1.0, 3.1))
    assert found.sure == "not sure" and "too close" in found.why


def test_less_than_the_time_between_two_evaluations_is_not_sure():
    found = verdict_on(*runs_of("quick", 1.0, 1.0, 1.0), *runs_of("slow", 1.1, 1.1, 1.1))
    assert found.sure == "not sure" and "measured about every 1.0 s" in found.why


def test_a_method_that_misses_the_target_is_named_and_never_first():
    found = verdict_on(run("quick", top=0.5, evaluation_s=0.1), run("slow", evaluation_s=5.0))
    assert found.first == "slow"
    assert "quick did not reach 0.7." in found.sentences


def test_a_method_that_misses_the_target_with_some_seeds_is_not_first():
    mixed = [run("quick", seed=0, evaluation_s=0.1), run("quick", seed=1, top=0.5)]
    found = verdict_on(*mixed, *runs_of("slow", 3.0, 3.0))
    assert found.first == "slow"
    assert "quick did not reach 0.7 in 1 of 2 runs." in found.sentences


def test_a_failed_run_is_reported():
    found = verdict_on(run("quick", error="lost rank 2 in all_reduce\n\nTraceback"), run("slow"))
    assert found.first == "slow"
    assert "quick failed: lost rank 2 in all_reduce." in found.sentences


def test_a_method_that_ran_alone_was_not_first():
    found = verdict_on(run("only", evaluation_s=2.0))
    assert found.first is None and found.sure is None
    assert found.sentences[0] == "only reached accuracy 0.7 after 8.0 s of virtual time."


def test_if_none_reaches_the_target_none_is_first():
    found = verdict_on(run("a", top=0.3), run("b", top=0.4))
    assert found.first is None and "No method reached" in found.sentences[0]


def test_without_a_target_there_is_no_race():
    found = verdict_on(run("a", top=0.5), run("b", top=0.8), target=None)
    assert found.first is None
    assert any("b ended with the highest accuracy" in s for s in found.sentences)


@pytest.mark.parametrize(
    ("wins", "said"),
    [
        ({("lab", 4): "a", ("lab", 8): "a"}, "a was first in every setting"),
        ({("lab", 4): "a", ("wan", 4): "b"}, "First was a on lab, b on wan"),
        ({("lab", 4): "a", ("lab", 8): "b"}, "First was a with 4 workers, b with 8 workers"),
        (
            {("lab", 4): "a", ("lab", 8): "b", ("wan", 4): "b"},
            "The first method depends on the setting",
        ),
    ],
)
def test_the_headline_says_which_method_was_first_where(wins, said):
    runs = [
        run(method, workers, system=system, evaluation_s=1.0 if method == first else 2.0)
        for (system, workers), first in wins.items()
        for method in ("a", "b")
    ]
    all_of_it = material(*runs)
    assert headline([verdict(all_of_it, s) for s in all_of_it.settings]).startswith(said)


TIMES = st.lists(st.floats(0.1, 100.0), min_size=3, max_size=6)


@given(TIMES, st.floats(0.2, 5.0))
def test_the_verdict_does_not_depend_on_the_unit_of_time(times, factor):
    first = [*runs_of("a", *times), *runs_of("b", *reversed(times))]
    other = [
        *runs_of("a", *(t * factor for t in times)),
        *runs_of("b", *(t * factor for t in reversed(times))),
    ]
    one, two = standings(material(*first), LAB), standings(material(*other), LAB)
    assert [s.spread.mean * factor for s in one] == pytest.approx([s.spread.mean for s in two])


@given(TIMES)
def test_a_method_is_never_surely_faster_than_itself(times):
    found = verdict_on(*runs_of("a", *times), *runs_of("b", *times))
    assert found.sure == "not sure"


@given(TIMES)
def test_an_interval_holds_its_mean_and_a_ratio_is_turned_round(times):
    middle = spread(times)
    assert middle.low <= middle.mean <= middle.high
    there, back = ratio(times, [*reversed(times)]), ratio([*reversed(times)], times)
    assert there.low == pytest.approx(1 / back.high)
    assert there.mean == pytest.approx(1 / back.mean)


def test_an_interval_is_students():
    """n = 3: 2.920 times the standard error, 1/sqrt(3)."""
    found = spread([1.0, 2.0, 3.0])
    assert found.high - found.mean == pytest.approx(2.920 / 3**0.5)


def test_seeds_are_compared_with_themselves():
    """The second method is twice as slow with every seed, although seeds differ."""
    found = verdict_on(*runs_of("a", 1.0, 5.0, 20.0), *runs_of("b", 2.0, 10.0, 40.0))
    assert "2.00 to 2.00 times faster" in found.why
