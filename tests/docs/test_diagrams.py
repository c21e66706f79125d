"""scripts/diagrams.py draws what the source has, nothing outside of the picture, or refuses."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from scripts.diagrams import draw

from tests.docs.pages import ROOT

Element = ElementTree.Element


PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STATES = """stateDiagram-v2
    accTitle: A door
    [*] --> shut
    shut --> open: pull
    open --> open: push, knock
    open --> shut: push
"""


def drawn(source: str) -> Element:
    figure = ElementTree.fromstring(draw(source).replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    picture = figure.find("svg")
    assert picture is not None
    return picture


def numbers(element: Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


@pytest.mark.parametrize("source", SOURCES, ids=re.findall(r"accTitle: (.+)", PAGE))
class TestPage:
    def test_every_label_is_in_the_picture(self, source: str) -> None:
        text = " ".join(each.text or "" for each in drawn(source).iter("text"))
        labels = re.findall(r'\["(.+?)"\]|: (.+)$|as (.+)$', source.partition("\n    ")[2], re.M)
        for label in [part for found in labels for part in found if part]:
            if f"accTitle: {label}" not in source:
                for word in label.replace("<br>", " ").split():
                    assert word in text

    def test_everything_is_inside(self, source: str) -> None:
        picture = drawn(source)
        width, height = map(float, picture.attrib["viewBox"].split()[2:])
        for box in picture.iter("rect"):
            x, y, wide, high = numbers(box, "x", "y", "width", "height")
            assert 0 <= x <= x + wide <= width + 1 and 0 <= y <= y + high <= height + 1
        for text in picture.iter("text"):
            x, y = numbers(text, "x", "y")
            assert 0 <= x <= width and 0 <= y <= height

    def test_no_box_covers_another(self, source: str) -> None:
        boxes = [
            numbers(each, "x", "y", "width", "height")
            for each in drawn(source).iter("rect")
            if each.attrib["class"] == "node"
        ]
        assert len(boxes) > 2
        for index, (x, y, wide, high) in enumerate(boxes):
            for left, top, width, height in boxes[index + 1 :]:
                assert (
                    x + wide <= left or left + width <= x or y + high <= top or (top + height <= y)
                )


def test_an_arrow_for_each_transition_and_the_start() -> None:
    arrows = [each for each in drawn(STATES).iter("path") if "marker-end" in each.attrib]
    assert len(arrows) == 4


def test_the_text_has_all_of_it() -> None:
    description = drawn(STATES).findtext("desc")
    assert description == (
        "It starts in shut. shut to open: pull. open to open: push, knock. open to shut: push."
    )


@pytest.mark.parametrize(
    "source",
    [
        "pie\n    accTitle: x\n",
        "stateDiagram-v2\n    [*] --> a\n",
        STATES + "    state fork <<fork>>\n",
        "flowchart TD\n    accTitle: x\n    a -.-> b\n",
        "flowchart TD\n    accTitle: x\n    a --> b --> a\n",
        "sequenceDiagram\n    accTitle: x\n    loop forever\n",
    ],
)
def test_what_it_can_t_draw_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"draw|accTitle|cycle"):
        draw(source)
