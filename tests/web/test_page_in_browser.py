"""The page of a real job in a real browser: what happens is shown within 2 s, also to those without a mouse.

It takes half a minute: one job and one browser go through a cut and its heal, a kill, a join, a server that
computes slowly, and the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from browser import complaints, opened, resize, until

from bml.cluster.launcher import jobsocket

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
]

SHOWN_S = 2.0
HAPPENS_S = 30.0
TRAIN = """
import os, time
import numpy as np

def train(session):
    w = session.empty(1000)
    w[:] = 0
    session.state(params=w)
    for batch in session.batches(4800, global_batch=48, epochs=1000, seed=1, balance=True):
        time.sleep(0.001 * len(batch.indices))
        stop = np.full(1, len(batch.indices) * os.path.exists({stop!r}), "f4")
        lost = lambda indices: [np.zeros(1000, "f4"), np.zeros(1, "f4")]
        _, told = batch.allreduce([np.zeros(1000, "f4"), stop], recompute=lost)
        w += 1
        if told[0]:
            return session.server
"""
#: Notes what the page shows whenever its headline changes, and when; times are those of time.time().
WATCH = """
window.shown = [];
const text = id => document.getElementById(id).textContent;
const note = () => window.shown.push({
  at_s: Date.now() / 1000, headline: text("headline"),
  troubles: text("troubles"), detours: text("detours"), live: text("live"),
});
new MutationObserver(note).observe(document.getElementById("headline"), {childList: true, subtree: true});
note();
"""


class Visit:
    """A browser that looks at the only job."""

    def __init__(self, driver: Any):
        self.driver = driver
        self.since = 0.0

    def text(self, identity: str) -> str:
        said = self.driver.execute_script(f"return document.getElementById({identity!r}).textContent")
        return str(said)

    def shows(self, headline: str) -> dict[str, Any]:
        """Wait for a headline that begins so; returns what the page showed when it came."""

        def found() -> Any:
            shown = self.driver.execute_script("return window.shown")
            return [
                each for each in shown if each["headline"].startswith(headline) and each["at_s"] > self.since
            ]

        first: dict[str, Any] = until(found, HAPPENS_S, f"{headline!r} is shown")[0]
        self.since = first["at_s"]
        return first

    def after(self, act: Callable[[], Any]) -> None:
        """Do something; what the page showed before does not count."""
        self.since = time.time()
        act()

    def view_at(self, words: str) -> float:
        """When the last view with such a reason was in force."""
        views = jobsocket.call(None, {"do": "status"})["views"]
        return float([view for view in views if words in view["reason"]][-1]["at_s"])


def inject(fault: str) -> None:
    jobsocket.call(None, {"do": "inject", "fault": fault})


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def focused(driver: Any) -> str:
    """What has the focus, in words."""
    script = (
        "const e = document.activeElement; "
        "return e.dataset.part || e.id || e.dataset.key || e.textContent || e.tagName"
    )
    return str(driver.execute_script(script))


def by_tab(driver: Any) -> list[str]:
    """Everything that Tab reaches, once round."""
    driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    found: list[str] = []
    for _ in range(200):
        press(driver, "\ue004")
        if (here := focused(driver)) in found or driver.execute_script(
            "return document.activeElement === document.body"
        ):
            break
        found.append(here)
    return found


def by_arrows(driver: Any) -> set[str]:
    """All parts of the drawing that arrow keys reach from the one that has the focus."""
    found, ahead = {focused(driver)}, [focused(driver)]
    while ahead:
        at = ahead.pop()
        for arrow in "\ue012\ue013\ue014\ue015":
            driver.execute_script("document.querySelector(`[data-part='${arguments[0]}']`).focus()", at)
            press(driver, arrow)
            if (to := focused(driver)) not in found:
                found.add(to)
                ahead.append(to)
    return found


@pytest.mark.serial("a person sees what happens within two seconds")
def test_a_job_is_watched_and_hurt_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stop = tmp_path / "stop"
    (tmp_path / "train.py").write_text(TRAIN.format(stop=str(stop)))
    command = [sys.executable, "-m", "bml", "run", "--web", "--web-inject", str(tmp_path / "train.py")]
    options = ["--fabric", "bcube:2x2", "--launcher", "processes", "--transport", "tcp", "--detect-s", "3"]
    with commands.begun(*command, *options, cwd=tmp_path) as job:
        assert job.stdout is not None
        url = job.stdout.readline().split()[-1]
        with opened(url) as driver:
            visit = Visit(driver)
            driver.execute_script(WATCH)
            visit.shows("All 4 servers work")
            assert visit.text("troubles") == "Nothing: all parts work."
            _cut_and_heal(visit)
            _keyboard(driver)
            _kill_by_click_and_join(visit)
            _slow(visit)
            for width in (400, 1280):
                resize(driver, width, 900)
                wide = driver.execute_script("return document.documentElement.scrollWidth")
                assert wide <= width, "the page is wider than the window"
            visit.after(stop.touch)
            visit.shows("The job has ended well: 4 servers reached the end after")
            job.communicate(timeout=30)
            assert job.returncode == 0
            assert visit.text("connection") == ""
            assert complaints(driver) == []


def _cut_and_heal(visit: Visit) -> None:
    visit.after(lambda: inject("cut:1/0,for=4s"))
    shown = visit.shows("4 of 4 servers in the view; 1 NIC dead")
    assert "NIC 1/0 is dead" in shown["troubles"]
    assert "View 2: " in shown["live"], "it is said to those who do not see it"
    assert "From 0 to 1: NIC 0/1 to 2" in visit.text("detours")
    assert shown["at_s"] - visit.view_at("NIC 1/0") <= SHOWN_S
    healed = visit.shows("All 4 servers work")
    assert healed["at_s"] - visit.view_at("works again") <= SHOWN_S


def _keyboard(driver: Any) -> None:
    reached = by_tab(driver)
    parts = [each for each in reached if each.startswith("server:")]
    assert len(parts) == 1, f"the drawing is one stop: {reached}"
    can = driver.execute_script(
        "return [...document.querySelectorAll('button, input, a[href], .scroll[tabindex=\"0\"]')]"
        ".filter(each => each.checkVisibility() && !each.closest('dialog'))"
        ".map(each => each.id || each.dataset.key || each.textContent)"
    )
    assert set(can) - {"stage"} <= set(reached)
    driver.execute_script("document.querySelector(`[data-part='${arguments[0]}']`).focus()", parts[0])
    assert by_arrows(driver) == {
        *(f"server:{each}" for each in range(4)),
        *(f"switch:{level}/{group}" for level in range(2) for group in range(2)),
    }


def _kill_by_click_and_join(visit: Visit) -> None:
    driver = visit.driver
    driver.execute_script("document.querySelector('[data-part=\"server:3\"]').focus()")
    press(driver, "\ue007")  # Enter
    kill = until(lambda: driver.find_elements("css selector", "[data-fault='kill:3']"), 5, "its faults")[0]
    kill.click()
    press(driver, "\ue00c")  # Escape
    assert jobsocket.call(None, {"do": "status"})["lost"] == {}, "it was not confirmed"
    kill.click()
    assert driver.execute_script("return document.getElementById('confirm').open")
    visit.after(driver.find_element("css selector", "#confirm .danger").click)
    shown = visit.shows("3 of 4 servers in the view; 1 server dead")
    assert "killed by signal 9" in shown["troubles"]
    assert shown["at_s"] - visit.view_at("server 3 is dead") <= SHOWN_S
    driver.find_element("id", "fault").send_keys("join:3\n")
    visit.after(driver.find_element("css selector", "#confirm .danger").click)
    joined = visit.shows("All 4 servers work")
    assert joined["at_s"] - visit.view_at("server 3 has caught up") <= SHOWN_S
    until(lambda: "server 3 asks to join" in visit.text("events"), SHOWN_S, "the request to join")


def _slow(visit: Visit) -> None:
    visit.after(lambda: inject("busy:2,share=70%,for=6s"))
    shown = visit.shows("4 of 4 servers in the view; 1 server slow")
    assert "Server 2 is slow: it computes at" in shown["troubles"]
    visit.shows("All 4 servers work")
