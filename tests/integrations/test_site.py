"""The site of the documentation: it builds, nothing in it is broken, and strangers find things."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

import pytest
from documentation.build import build, run_zensical
from documentation.check import problems_of
from documentation.navigation import ROOT, navigation, pages_in
from documentation.stage import retargeted
from support.chromium import PROGRAM, Chromium
from support.namespaces import wait_until

import paceline as pl

pytestmark = pytest.mark.timeout(300)
WIDTHS = (360, 1280)


def in_browser(test):
    """Mark a test that needs Chromium."""
    without = pytest.mark.skipif(PROGRAM is None, reason="no chromium: apt-get install chromium")
    return pytest.mark.may_skip(without(test))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as by scripts/docs."""
    out = tmp_path_factory.mktemp("documentation") / "site"
    assert build(out) == []
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


# Building -----------------------------------------------------------------------------------------


def test_every_page_of_the_navigation_is_built(site):
    pages = pages_in(navigation())
    assert len(pages) > 50
    for page in pages:
        assert (site / page).with_suffix(".html").is_file(), page


@pytest.mark.parametrize("link", ["[x](gone.md)", "[x](#nowhere)", "[x](other.md#nowhere)"])
def test_a_broken_link_ends_the_build(link, tmp_path):
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\nnav = ["index.md"]')
    (tmp_path / "docs").mkdir()
    for name, text in (("index.md", "whole"), ("other.md", "whole")):
        (tmp_path / "docs" / name).write_text(f"# Title\n\n{text}\n")
    assert run_zensical(tmp_path) == []
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{link}\n")
    assert "does not exist" in run_zensical(tmp_path)[0]


def test_a_link_to_a_file_that_the_site_lacks_is_refused():
    page = ROOT / "docs" / "gpu.md"
    assert (
        retargeted("../examples/after.py", page, PurePosixPath("gpu.md")) == "examples.md#afterpy"
    )
    with pytest.raises(SystemExit, match=r"links to \.\./LICENSE, which the site lacks"):
        retargeted("../LICENSE", page, PurePosixPath("gpu.md"))


def test_what_is_broken_is_found(site, tmp_path):
    """In the HTML: a page and an anchor that are not there, a script of another server."""
    page = tmp_path / "index.html"
    page.write_text(
        '<a href="gone.html">x</a><a href="#nowhere">x</a><h1 id="here">x</h1><a href="#here">x</a>'
        '<script src="https://example.com/x.js"></script>'
    )
    (tmp_path / "look.css").write_text("@import url('https://example.com/font.css');")
    problems = "\n".join(problems_of(tmp_path))
    for target in ("gone.html", "#nowhere", "https://example.com/x.js", "font.css"):
        assert target in problems
    assert "#here" not in problems
    assert problems_of(site) == []


def test_the_reference_has_every_public_name_and_every_command(site):
    pages = "\n".join(page.read_text() for page in (site / "reference" / "api").glob("*.html"))
    for name in {*pl.__all__} - {"__version__"}:
        assert f'id="paceline.{name}"' in pages, name
    commands = (site / "reference" / "command-line.html").read_text()
    for option in ("--checkpoint-minutes", "--max-restarts", "--as-model", "--seeds", "--page"):
        assert option in commands


def test_docstrings_are_without_the_marks_of_other_markup(site):
    """In the API and the methods: roles and directives of reStructuredText."""
    for page in [*(site / "reference").rglob("*.html")]:
        text = page.read_text()
        assert not re.search(r":(meth|class|func|math|mod|attr|data):|\.\. math::", text), page.name
    assert "<math" in (site / "reference" / "methods.html").read_text()


def test_llms_txt_names_pages_that_are_there(site):
    text = (site / "llms.txt").read_text()
    targets = re.findall(r"\]\((\S+)\)", text)
    assert {*pages_in(navigation())} <= {*targets}
    for target in targets:
        assert (site / target).is_file(), target
    whole = (site / "llms-full.txt").read_text()
    assert "`launch(train, strategy='allreduce'" in whole and "--checkpoint-minutes" in whole


# Finding things -----------------------------------------------------------------------------------

QUESTIONS = {
    "How do I use BatchNorm?": (
        ["use BatchNorm"],
        ["How-to", "BatchNorm"],
        "statistics of all workers' data together",
    ),
    "How do I resume a run?": (
        ["save checkpoints and resume"],
        ["How-to", "Checkpoints and resume"],
        "the same command resumes from the last checkpoint",
    ),
    "Which method suits two sites with 100 Mbit/s?": (
        ["two sites with 100 Mbit/s"],
        ["Choose a method", "a slow network, or two sites"],
        "Two sites of four machines, with 100 Mbit/s and 20 ms between them",
    ),
    "How do I log to TensorBoard?": (
        ["log to TensorBoard and others"],
        ["How-to", "Loggers"],
        "--log tensorboard",
    ),
    "What if a worker is killed?": (
        ["keep training when workers die"],
        ["How-to", "Lost workers"],
        "if a worker dies, the others continue at once",
    ),
    "How do I simulate 64 workers?": (
        ["simulate many workers"],
        ["How-to", "Simulation"],
        "--workers 64",
    ),
    "How do I use Slurm?": (
        ["use torchrun, Slurm, MPI"],
        ["How-to", "torchrun, Slurm, MPI", "Slurm"],
        "srun --kill-on-bad-exit=0",
    ),
    "How do I write a method?": (
        ["Write a method"],
        ["Tutorial", "Write a method", "The method"],
        "class PullMean(pl.Strategy)",
    ),
    "How do I clip gradients?": (
        ["clip gradients"],
        ["How-to", "Clipping"],
        "worker.clip_gradients(max_norm)",
    ),
    "How do I stop early?": (
        ["stop early"],
        ["How-to", "Early stopping"],
        "worker.stop_all() ends the loaders of all workers",
    ),
}
"""What a stranger asks: the clicks from the front page, those by tabs and menus, and the answer."""

LINK = """
((text) => {
  const seen = (link) => {
    const box = link.getBoundingClientRect();
    return link.checkVisibility({visibilityProperty: true, opacityProperty: true})
           && box.width > 0 && box.left >= 0 && box.right <= innerWidth + 1;
  };
  const links = [...document.querySelectorAll("a")];
  return links.find((link) => link.innerText.trim() === text && seen(link))?.href;
})(%s)
"""
"""Where a link leads that can be seen without moving the page sideways."""
READ = "document.querySelector('article').innerText.replace(/\\s+/g, ' ')"
FOUND = """
[...document.querySelectorAll("*")].map((one) => one.shadowRoot?.textContent ?? "").join(" ")
"""


def click(browser, text, width):
    """Follow the link with this text."""
    target = browser.evaluate(LINK % json.dumps(text))
    assert target is not None, f"no link {text!r} can be seen"
    browser.open(target, width)


@in_browser
@pytest.mark.parametrize(("way", "width"), [(0, 360), (0, 1280), (1, 1280)])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stranger_finds_the_answer_in_three_clicks(question, way, width, site, browser):
    """On phones the menus are folded away, so there the links of the pages are clicked."""
    clicks, answer = QUESTIONS[question][way], QUESTIONS[question][2]
    assert len(clicks) <= 3
    browser.open(site / "index.html", width)
    for text in clicks:
        click(browser, text, width)
    assert answer in browser.evaluate(READ)


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "page", ["index.html", "how-to/batchnorm.html", "choose.html", "reference/api/runs.html"]
)
def test_a_page_loads_nothing_from_elsewhere_and_fits_the_screen(page, width, site, browser):
    browser.open(site / page, width)
    assert not [url for url in browser.requests if not url.startswith(("file:", "data:"))]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


@in_browser
def test_the_search_works_without_a_server(site, browser):
    browser.open(site / "index.html", 1280)
    browser.evaluate("document.querySelector('.md-search__button').click()")
    wait_until(lambda: "md-search" not in browser.evaluate("document.activeElement.className"), 30)
    browser.call("Input.insertText", text="recalibrate")
    wait_until(lambda: "How-to" in browser.evaluate(FOUND), 30)
