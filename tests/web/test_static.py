"""The files of the page: colours can be told apart, nothing comes from elsewhere, nothing runs inline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bml.web
from bml.faults import Fault, FaultPlan
from bml.topology import parse
from bml.web.faults import OFFERS
from bml.web.words import SAID

STATIC = Path(bml.web.__file__).parent / "static"
CSS = (STATIC / "page.css").read_text()
HTML = (STATIC / "index.html").read_text()
SCRIPTS = [path.read_text() for path in sorted(STATIC.glob("*.js"))]


def palettes() -> dict[str, dict[str, str]]:
    """The colours by name, light and dark."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    found = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in (light, dark)]
    assert found[0].keys() == found[1].keys()
    return {"light": found[0], "dark": found[1]}


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2.2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_enough_contrast(theme: str) -> None:
    colour = palettes()[theme]
    fills = [f"{state}-fill" for state in SAID]
    pairs = [("ink", ground) for ground in ("back", "card", *fills)] + [("muted", "card"), ("muted", "back")]
    pairs += [("muted", f"{state}-fill") for state in ("working", "slow", "dead", "joining")]  # in the banner
    pairs += [(state, ground) for state in SAID for ground in ("card", f"{state}-fill")]
    pairs += [("focus", "card"), ("detour", "card")]
    assert {
        pair: ratio for pair in pairs if (ratio := contrast(colour[pair[0]], colour[pair[1]])) < 4.5
    } == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_have_enough_contrast(theme: str) -> None:
    colour = palettes()[theme]
    names = ["line", "detour", "focus", *(f"level-{level}" for level in range(4)), *SAID]
    assert {name: ratio for name in names if (ratio := contrast(colour[name], colour["card"])) < 3} == {}


def test_every_state_has_a_colour_and_a_sign() -> None:
    for state in SAID:
        assert f".{state} {{ --state: var(--{state});" in CSS
        assert f'id="sign-{state}"' in HTML


def test_every_variable_of_the_style_is_defined() -> None:
    used, defined = set(re.findall(r"var\(--([a-z0-9-]+)", CSS)), set(re.findall(r"--([a-z0-9-]+):", CSS))
    assert used - defined == {"width"}, "the script sets it"


def test_labels_of_dead_parts_stand_off_their_crosses() -> None:
    assert re.search(r"#drawing \.part\.dead text \{[^}]*paint-order: stroke; stroke: var\(--fill\);", CSS)


def rule(selector: str) -> str:
    """What the style says of this selector alone, for wide windows."""
    found = re.search(rf"^{re.escape(selector)} \{{ (.*?) \}}", CSS, re.MULTILINE)
    assert found, selector
    return found[1]


def test_what_grows_at_the_side_leaves_no_void_before_the_table_of_servers() -> None:
    """The side, which is long when a part is selected, stands beside fabric, history and table."""
    assert "grid-template-rows: auto auto auto 1fr" in rule("main")
    assert "grid-row: span 3" in rule("#side")
    assert rule("#fabric, #all") == "grid-column: 1 / 3;"
    assert rule("#history, #log, #all") == "align-self: start;"


def test_the_table_of_servers_is_as_high_as_a_window_has_room() -> None:
    assert "vh" in rule("#all .tall")


def test_every_table_has_a_name() -> None:
    made = [each for text in SCRIPTS for each in re.findall(r'make\("table", (\{[^}]*)', text)]
    tables = re.findall(r"<table[^>]*>", HTML) + made
    assert len(tables) == 2
    assert [each for each in tables if "aria-label" not in each] == []


def test_nothing_comes_from_another_host() -> None:
    for text in (CSS, HTML, *SCRIPTS, (STATIC / "icon.svg").read_text()):
        found = re.findall(
            r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"']*", re.sub(r"http://www\.w3\.org/[0-9a-z/]+", "", text)
        )
        assert found == []


def test_nothing_runs_inline() -> None:
    assert not re.search(r"<script(?![^>]* src=)|<style|\bstyle=|\bon[a-z]+=|javascript:", HTML)
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text) for text in SCRIPTS
    )


def test_movement_stops_for_those_who_ask_for_it() -> None:
    assert re.search(r"prefers-reduced-motion: reduce\) \{\s*\* \{ animation: none !important;", CSS)


def test_every_fault_that_is_offered_is_one() -> None:
    part = {"server": "4", "nic": "4/0", "switch": "0/1", "job": ""}
    for kind, offers in OFFERS.items():
        for offer in offers:
            fault = Fault.parse(offer.text.format(part[kind]), at_once=True)
            FaultPlan((fault,)).validate(parse("bcube:3x2"))
