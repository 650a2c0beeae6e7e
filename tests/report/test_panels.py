"""Pictures of several charts with one legend."""

import re
import xml.etree.ElementTree as ET

from paceline.lab.papers.full.claim import Panel
from paceline.report.panels import picture
from paceline.report.svg import style

SVG = "{http://www.w3.org/2000/svg}"
LINE = [(0.0, 0.1), (1.0, 0.8)]


def chart(title, **lines):
    return Panel(title=title, x="epochs", y="accuracy", lines=lines)


def texts(drawn):
    return [text.text for text in ET.fromstring(drawn).iter(f"{SVG}text")]


def test_a_name_has_one_style_and_one_line_of_the_legend():
    drawn = picture([chart("few", ours=LINE, theirs=LINE), chart("many", theirs=LINE)], "Curves")
    assert texts(drawn).count("theirs") == texts(drawn).count("ours") == 1
    assert len(re.findall(f'stroke="{style(1).color}"', drawn)) == 3  # two charts and the legend


def test_a_chart_without_lines_is_left_out():
    drawn = picture([chart("few", ours=[]), chart("many", ours=LINE, theirs=[])], "Curves")
    assert "many" in texts(drawn) and "few" not in texts(drawn)


def test_names_and_descriptions_are_escaped():
    root = ET.fromstring(picture([chart("a < b", **{"x & y": LINE})], 'a "b"'))
    assert root.get("aria-label") == 'a "b"'
    assert {"a < b", "x & y"} <= {text.text for text in root.iter(f"{SVG}text")}
