"""The report in a real browser, at the widths of a phone, a tablet and a desk.

Screenshots stay in pytest's temporary folder (``--basetemp`` chooses it), below ``screenshots``.
"""

import pytest
from support.chromium import PROGRAM, Chromium
from support.reports import material, run

from paceline.report.page import render

WIDTHS = (360, 768, 1280)
LONG = "my_very_own_strategy_with_a_long_name(group_interval=16, server_optimizer=adagrad)"
EVIL = "<script>window.alarmed = true</script><img src=http://example.com/x.png>"

pytestmark = [
    pytest.mark.may_skip,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium in the path: apt-get install chromium"),
]


def everything():
    """Many methods, systems and seeds, with names and numbers that are hard to lay out."""
    methods = {"allreduce": 2.0, "sasgd": 1.0, "easgd": 0.004, "gossip": 90.0, LONG: 3.0, EVIL: 5.0}
    runs = [
        run(method, workers, seed, system=system, evaluation_s=evaluation_s * (1 + seed / 10))
        for system in ("lab", "a-cluster-of-" + "many-" * 12 + "words")
        for workers in (1, 64)
        for seed in (0, 1, 2)
        for method, evaluation_s in methods.items()
    ]
    failed = [run("layered", 64, seed, error=f"lost rank 2: {EVIL}" * 3) for seed in (0, 1, 2)]
    never = [run("cyclic", workers, top=0.2, evaluations=300) for workers in (1, 64)]
    old = [[age, 1 + age % 7] for age in range(0, 2000, 3)]
    stale = [run("ssp", workers, staleness_counts=old) for workers in (1, 64)]
    return material(*runs, *failed, *never, *stale, task=EVIL, command="paceline compare " * 12)


def little():
    """One short run with only the required measurements."""
    bare = {"worker_seconds": [], "staleness_counts": [], "consensus_distance": 0.0}
    return material(run("sasgd", evaluations=1, **bare))


PAGES = {"everything": everything, "little": little}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "screenshots"
    folder.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (folder / f"{name}.html").write_text(render(make()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module", params=[(n, w) for n in PAGES for w in WIDTHS], ids=str)
def seen(request, browser, folder):
    """A page at some width: as it opens, and with all its tables unfolded."""
    name, width = request.param
    browser.open(folder / f"{name}.html", width)
    browser.photograph(folder / f"{name}-{width}.png")
    closed = browser.measure()
    requests = [*browser.requests]
    browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    return {"closed": closed, "unfolded": browser.measure(), "requests": requests, "width": width}


@pytest.mark.parametrize("state", ["closed", "unfolded"])
def test_no_text_overlaps_another(seen, state):
    assert seen[state]["texts"] > 80
    assert seen[state]["overlaps"] == []


@pytest.mark.parametrize("state", ["closed", "unfolded"])
def test_no_text_is_cut_off_or_leaves_the_window(seen, state):
    assert seen[state]["cut"] == []
    assert seen[state]["width"] <= seen[state]["viewport"] == seen["width"]


def test_letters_are_large_enough_to_read(seen):
    assert seen["unfolded"]["smallest"] >= 11.5


def test_no_request_leaves_and_no_script_runs(seen):
    assert len(seen["requests"]) == 1 and seen["requests"][0].startswith("file://")
    assert seen["closed"]["loaded"] == []
    assert not seen["closed"]["alarmed"] and not seen["closed"]["scripts"]


def test_the_screenshots_are_kept(seen, folder):
    shots = [*folder.glob(f"*-{seen['width']}.png")]
    assert shots and all(shot.stat().st_size > 20_000 for shot in shots)


def test_it_prints(browser, folder):
    browser.open(folder / "everything.html", 1280)
    browser.print_to(folder / "everything.pdf")
    assert (folder / "everything.pdf").read_bytes().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.open(folder / "everything.html", 700)
    printed = browser.measure()
    browser.call("Emulation.setEmulatedMedia", media="")
    assert printed["overlaps"] == printed["cut"] == []


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("<p style='position:absolute'>one</p><p style='position:absolute'>two</p>", "overlaps"),
        ("<p style='white-space:nowrap'>" + "far too long " * 20 + "</p>", "cut"),
        ("<div style='height:5px;overflow:hidden'><p>cut</p></div>", "cut"),
        ("<svg width=50 height=20 viewBox='0 0 50 20'><text x=30 y=15>beyond</text></svg>", "cut"),
    ],
)
def test_the_measuring_finds_what_is_wrong(browser, tmp_path, page, found):
    (tmp_path / "wrong.html").write_text(f"<!doctype html>{page}")
    browser.open(tmp_path / "wrong.html", 360)
    assert browser.measure()[found]
