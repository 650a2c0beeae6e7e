"""The page: complete, small, self-contained, and safe whatever names it shows."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reports import material, result, run

from paceline.errors import UsageError
from paceline.report.charts import BYTES_SENT, EPOCHS, TIME, curves, measure_of, splits
from paceline.report.page import load_template, no_break, render
from paceline.report.svg import COLORS, Axis, log_ticks, style, ticks

EVIL = "<script>window.alarmed = true</script><img src=x onerror=alarm()>\"'&"


VOID = {"meta", "br", "img", "path", "rect", "circle", "link", "hr", "input"}


class Reader(HTMLParser):
    """Tags, attributes and texts of a page; fails on tags that do not match."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page_of(*runs, **more):
    return Reader(render(material(*runs, **more)))


@pytest.fixture(scope="module")
def page():
    runs = [
        run(method, workers, seed, system=system, evaluation_s=evaluation_s)
        for system in ("lab", "wan")
        for workers in (4, 16)
        for seed in (0, 1, 2)
        for method, evaluation_s in (("allreduce", 2.0), ("sasgd", 1.0), ("mine(interval=2)", 3.0))
    ]
    return render(material(*runs))


def test_the_verdict_comes_first(page):
    text = re.sub(r"<[^>]+>", " ", page[page.index("<body") :])
    assert 0 < text.index("sasgd was first") < text.index("Verdict") < text.index("All figures")


def test_every_picture_is_there_with_a_description(page):
    reader = Reader(page)
    named = [value for tag, key, value in reader.attributes if (tag, key) == ("svg", "aria-label")]
    for what in (
        "Accuracy against virtual time, 4 workers on lab",
        "Accuracy against epochs, 16 workers on wan",
        "Accuracy against bytes sent",
        "Time to accuracy 0.7 by number of workers, lab",
        "How each worker of sasgd spent its time",
        "Staleness of allreduce",
        "Distance from the mean model by number of workers, wan",
    ):
        assert any(name.startswith(what) for name in named), what
    assert reader.tags.count("figure") == reader.tags.count("details") == len(named)


def test_a_picture_has_its_numbers_beside_it(page):
    figure = next(f for f in page.split("<figure>") if "Accuracy against virtual time" in f)
    reader = Reader("<figure>" + figure.partition("</figure>")[0] + "</figure>")
    cells = [text.strip() for text in reader.texts if text.strip()]
    last = f"{result(seed=1).accuracy:.4f}"
    assert "sasgd" in cells and last in cells, "the mean accuracy at the end"


def test_all_provenance_is_there(page):
    text = Reader(page).texts
    whole = " ".join(text)
    for fact in ("paceline compare", "today", "a task", "0, 1, 2", "torch 1", "a test", "0.05"):
        assert fact in whole, fact
    assert "network.bytes_per_s" in whole and "100,000,000" in whole
    assert "interval 16" in whole and "0123456789abcdef" in whole


def test_nothing_is_loaded_from_the_network(page):
    reader = Reader(page)
    links = [value for _, key, value in reader.attributes if key in ("src", "href", "xlink:href")]
    assert links and all(link.startswith("#") for link in links)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert "@import" not in page and re.findall(r"url\(([^)]*)\)", page) == ["#hatch"] * len(
        re.findall(r"url\(", page)
    )
    (policy,) = [value for tag, key, value in reader.attributes if "default-src" in (value or "")]
    assert policy.startswith("default-src 'none'")


def test_anchors_lead_somewhere(page):
    reader = Reader(page)
    ids = {value for _, key, value in reader.attributes if key == "id"}
    wanted = {value[1:] for _, key, value in reader.attributes if key == "href"}
    assert wanted <= ids


def test_names_are_text_and_nothing_else():
    reader = page_of(
        run(EVIL, system=EVIL), run("sasgd", system=EVIL, error=EVIL), task=EVIL, command=EVIL
    )
    assert not {"script", "img"} & set(reader.tags)
    assert not [key for _, key, _ in reader.attributes if key.startswith("on")]
    assert " ".join(reader.texts).count("window.alarmed") > 5


@settings(max_examples=15)
@given(st.text(min_size=1, max_size=30))
def test_any_name_can_be_shown(name):
    Reader(render(material(run(name, evaluations=2), target=None)))


def test_a_single_seed_is_mentioned():
    runs = [run(name, workers) for name in ("a", "b") for workers in (2, 4)]
    whole = " ".join(page_of(*runs).texts)
    assert "not sure" in whole and "With one seed there is no interval" in whole


def test_one_number_of_workers_says_nothing_about_more():
    assert "More workers" not in " ".join(page_of(run("a"), run("b")).texts)


def test_runs_without_accuracy_show_their_loss_and_without_either_say_so():
    silent = [{"t": 2.0, "rank": 0, "loss": 0.5}, {"t": 3.0, "rank": 0, "loss": 0.25}]
    runs = [run("a", metrics=silent, accuracy=None)]
    assert measure_of(material(*runs)) == "loss"
    assert "Loss against virtual time" in " ".join(page_of(*runs, target=None).texts)
    text = " ".join(page_of(run("a", metrics=[], accuracy=None), target=None).texts)
    assert "neither accuracy nor loss" in text


def test_what_is_not_known_is_left_out():
    """A run under a launcher knows neither the bytes of other ranks nor its staleness."""
    bare = [{"t": 2.0, "rank": 0, "accuracy": 0.5}]
    one = run("a", metrics=bare, epoch_samples=None, staleness_counts=[], consensus_distance=None)
    text = " ".join(page_of(one).texts)
    assert "Accuracy against virtual time" in text
    assert "Accuracy against bytes" not in text and "Accuracy against samples" not in text


def test_a_large_comparison_stays_below_2_mb():
    runs = [
        run(f"method-{i}", workers, system=system, evaluations=400)
        for i in range(11)
        for workers in (4, 16, 64, 256)
        for system in ("lab", "wan")
    ]
    page = render(material(*runs))
    assert 500_000 < len(page.encode()) < 2_000_000
    assert page.count("Accuracy against epochs") > 8
    Reader(page)


def test_charts_of_single_settings_are_left_out_if_they_do_not_fit(monkeypatch):
    runs = [run("a", workers) for workers in (2, 4, 8)]
    whole = render(material(*runs))
    monkeypatch.setattr("paceline.report.page.MAX_BYTES", len(whole) // 2)
    page = render(material(*runs))
    assert len(page) <= len(whole) // 2
    assert "too many settings to draw" in page and "too many settings" not in whole
    assert "by number of workers" in page and "All figures" in page


def test_more_than_2_mb_is_refused(monkeypatch):
    monkeypatch.setattr("paceline.report.page.MAX_BYTES", 1000)
    with pytest.raises(UsageError, match=r"runs \(1\) must be fewer"):
        render(material(run()))


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match=r'pip install "paceline\[report\]"'):
        load_template()


# Charts ------------------------------------------------------------------------------------------


def test_a_curve_is_the_mean_over_seeds_at_each_evaluation():
    shown = material(run("a", seed=0, evaluations=3), run("a", seed=10, evaluations=3))
    chart = curves(shown, shown.settings[0], TIME, {"a": style(0)}, 100)
    ends = [result(seed=s, evaluations=3).accuracy for s in (0, 10)]
    assert chart.rows[-1] == ("a", "3.0000", f"{sum(ends) / 2:.4f}")
    assert 'opacity="0.16"' in chart.svg, "the range of the seeds"


def test_curves_are_drawn_against_what_they_say():
    shown = material(run("a", evaluations=4))
    drawn = {
        across.title: curves(shown, shown.settings[0], across, {"a": style(0)}, 100).rows[-1][1]
        for across in (TIME, EPOCHS, BYTES_SENT)
    }
    assert drawn == {"time": "4.0000", "epochs": "4.0000", "bytes sent": "20.0000"}


def test_values_far_below_the_target_are_not_drawn_but_listed():
    dip = [0.05, 0.7, 0.1, 0.8]
    metrics = [{"t": 2.0 + i, "rank": 0, "accuracy": y} for i, y in enumerate(dip)]
    shown = material(run("a", metrics=metrics), target=0.75)
    chart = curves(shown, shown.settings[0], TIME, {"a": style(0)}, 100)
    assert [row[2] for row in chart.rows] == [f"{y:.4f}" for y in dip]
    assert chart.svg.count("<circle") == 2 and chart.svg.count("<title>a<") == 2, "two pieces"
    assert ">0.05<" not in chart.svg and ">0.5<" in chart.svg


def test_a_method_that_learns_nothing_is_still_drawn():
    shown = material(run("a"), run("b", top=0.1), target=0.75)
    chart = curves(shown, shown.settings[0], TIME, {"a": style(0), "b": style(1)}, 100)
    assert "<title>b<" in chart.svg


def test_the_bars_of_many_workers_are_means_of_neighbors():
    each = [{"compute": 2.0, "wait": rank % 2, "io": 0.5} for rank in range(64)]
    one = run("a", 64, worker_seconds=each)
    (chart,) = splits(material(one), one.setting, 32)
    assert [row[0] for row in chart.rows][:2] == ["0-1", "2-3"] and len(chart.rows) == 32
    assert chart.rows[0][1:] == ("2.0000", "0.5000", "0.5000")


def test_styles_differ_by_more_than_color():
    drawn = [style(number) for number in range(30)]
    assert len(set(drawn)) == 30
    assert len({(how.dash, how.mark) for how in drawn[:22]}) == 22


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", [*COLORS, "#555555", "#333333", "#0060a8", "#8a3a00"])
def test_colors_contrast_with_white(color):
    assert 1.05 / (luminance(color) + 0.05) > 4.5


def test_text_contrasts_with_its_background(page):
    tint = luminance("#f3f6f9")
    for color in re.findall(r"color: (#[0-9a-f]{6})", page):
        assert (tint + 0.05) / (luminance(color) + 0.05) > 4.5, color


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_lie_within_and_are_few(low, span, most):
    found = ticks(low, low + span, most)
    assert len(found) <= most + 2
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    assert found == sorted(found)


@given(st.floats(1e-6, 1e6), st.floats(2.0, 1e6))
def test_ticks_of_a_log_scale_lie_within_and_are_few(low, factor):
    found = log_ticks(low, low * factor)
    assert len(found) <= 6
    assert all(low <= tick <= low * factor for tick in found)


def test_an_axis_of_one_value_has_room():
    assert Axis.of("x", 3.0, 3.0).share(3.0) == 0.0


def test_numbers_keep_their_units():
    assert no_break("1.5 ms and 3 MB in 4 runs") == "1.5\u00a0ms and 3\u00a0MB in 4 runs"


def test_what_a_report_needs_survives_json():
    outcome = result()
    assert type(outcome)(**json.loads(json.dumps(vars(outcome)))) == outcome
