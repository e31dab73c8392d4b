"""Names, addresses and settings of an emulated fabric, without making one."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest

from bml.fabric import bpf, state
from bml.fabric.condition import BURST_NBYTES, Condition, Damage, Setting, setting, short_burst
from bml.fabric.injector import falling
from bml.fabric.layout import MANAGEMENT, Layout, belongs, parse_rate, rate_text
from bml.fabric.state import State
from bml.faults import Fault
from bml.topology import UsageError, bcube, big_switch, fat_tree, parse, torus

RATE, OTHER = 200_000_000, 400_000_000
SHAPES = [
    "bcube:3x2",
    "bcube:2x4",
    "bcube:4x2",
    "bcube:16x1",
    "torus:4x2",
    "torus:3x2",
    "graph:0-1-2,2-3,3-0,1-3",
    "torus:2x4",
    "switch:9",
]


def at_rest(*damages: str) -> Condition:
    return Condition(RATE, OTHER, frozenset(Damage.parse(text) for text in damages))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_name_and_address_is_there_once(shape: str) -> None:
    layout = Layout(parse(shape))
    ends = [end for cable in layout.cables for end in (cable.near, cable.far)]
    assert not [
        device for device, count in Counter((end.node, end.device) for end in ends).items() if count > 1
    ]
    assert all(len(end.device) <= 15 for end in ends), "the kernel's limit"
    addresses = [end.address for end in ends if end.address]
    assert len(set(addresses)) == len(addresses)
    assert {end.node for end in ends} <= set(layout.nodes)
    assert {end.bridge for end in ends if end.bridge} == set(layout.bridges)
    assert {link for cable in layout.cables for link in cable.links} == set(layout.fabric.links)
    for server, level in layout.fabric.links:
        end = layout.cable((server, level)).end_of(server)
        assert end.device == f"b{level}"
        assert end.address == f"{layout.nics(server)[level]}/24"


def test_addresses_tell_level_switch_and_server() -> None:
    layout = Layout(bcube(3, 2))
    assert layout.nics(4) == ("10.10.1.5", "10.11.1.5")
    assert layout.nics(8) == ("10.10.2.9", "10.11.2.9")
    assert layout.one_switch_address(4) == "10.20.0.5"
    assert layout.management_address(4) == "10.30.0.5"
    assert layout.coordinator_address == "10.30.0.254"
    assert layout.cable((4, 0)).far.device == "b0s4"
    assert layout.cable((4, 0)).far.bridge == "sw0-1"
    assert layout.namespace("s4") == "bml-s4"


def test_only_neighbours_share_a_subnet() -> None:
    layout = Layout(bcube(4, 2))
    for level in range(2):
        for one in layout.fabric.servers:
            subnet = layout.nics(one)[level].rpartition(".")[0]
            same = [
                each for each in layout.fabric.servers if layout.nics(each)[level].startswith(f"{subnet}.")
            ]
            assert same == sorted([one, *layout.fabric.neighbours(one, level)])


def test_torus_cables_join_two_servers() -> None:
    layout = Layout(torus(4, 2))
    cable = layout.cable((0, 0))
    assert cable is layout.cable((1, 0))
    assert {cable.near.node, cable.far.node} == {"s0", "s1"}
    assert cable.end_of(1).node == "s1"
    assert layout.bridges == ("one-switch", MANAGEMENT)


def test_a_level_that_an_odd_ring_does_not_wire_has_the_loopback() -> None:
    layout = Layout(torus(3, 1))
    assert [layout.nics(server).count("127.0.0.1") for server in layout.fabric.servers] == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(bcube(5, 2)), "25 servers, 16 can be emulated"),
        (lambda: Layout(fat_tree(4)), "cannot be emulated"),
        (lambda: Layout(bcube(3, 2).without("server:4")), "bring up the healthy one"),
        (lambda: Layout(big_switch(4), "a-b"), "is no name"),
        (lambda: Layout(bcube(2, 2)).cable((9, 0)), "no server 9"),
        (lambda: Layout(bcube(2, 2)).cables_of((0, 7)), "no switch 0/7"),
        (lambda: parse_rate("fast"), "'fast' is no rate"),
        (lambda: parse_rate("200 mbit"), "is no rate"),
        (lambda: parse_rate("1bit"), "is no rate"),
        (lambda: Damage.parse("cut:4"), "'cut:4' is no damage"),
        (lambda: Damage.parse("slow:4/0"), "'slow:4/0' is no damage"),
        (lambda: Damage.parse("cut:4/0,rate=1mbit"), "is no damage"),
        (lambda: Damage.parse("loss:4/0,share=0%"), "cannot lose 0.000000% of its packets"),
        (lambda: Damage.parse("loss:4/0,share=999%"), "cannot lose 999.000000% of its packets"),
        (lambda: Damage("loss", (4, 0), share=5.0), "cannot lose 500.000000% of its packets"),
        (lambda: Damage("loss", (4, 0), share=1e-9), "give 0.0001% to 100%"),
        (lambda: Damage("loss", (4, 0), share=float("nan")), "cannot lose nan%"),
        (lambda: Damage("slow", (4, 0), RATE, direction="up"), "'up' is no direction, one of out, in, both"),
        (lambda: Damage("cut", (4, 0), direction="out"), "'cut' has no direction: slow and loss alone"),
        (lambda: Damage("switch", (0, 1), rate_bit=RATE), "'switch' has no rate_bit: slow alone"),
        (lambda: Damage("slow", (4, 0), RATE, share=0.1), "'slow' has no share: loss alone"),
        (lambda: Damage.parse("slow:4/0,rate=1mbit,direction=up"), "is no damage"),
        (lambda: Damage.parse("cut:4/0,direction=out"), "is no damage"),
    ],
)
def test_what_cannot_be_says_why(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("text", ["200mbit", "1gbit", "10mbit", "500kbit"])
def test_rates_are_read_as_written(text: str) -> None:
    assert rate_text(parse_rate(text)) == text
    assert parse_rate("1.5mbit") == 1_500_000


def test_no_rate_loses_a_bit_on_the_way() -> None:
    for kbit in range(1001, 9999, 7):
        text = f"{kbit / 1000:.3f}mbit"
        assert parse_rate(text) == 1000 * kbit
        assert Fault.parse(f"slow:4/0@step=1,rate={text}").settings["rate"] == 1000 * kbit


@pytest.mark.parametrize(
    ("share", "bound"), [("0.0001%", 4295), ("5%", 214748365), ("50%", 1 << 31), ("100%", (1 << 32) - 1)]
)
def test_a_cable_loses_as_much_as_it_says(share: str, bound: int) -> None:
    damage = Damage.parse(f"loss:4/0,share={share}")
    _, drops_below, *_ = struct.iter_unpack("=BBhI", bpf.program(damage.share))
    assert drops_below[3] == bound
    assert str(damage) == f"loss:4/0,share={share}"


@pytest.mark.parametrize(
    "text",
    [
        "cut:4/0",
        "blackhole:12/1",
        "slow:4/1,rate=10mbit",
        "slow:4/1,rate=10mbit,direction=in",
        "loss:4/1,share=2%,direction=out",
        "switch:0/2",
    ],
)
def test_damage_is_read_as_written(text: str) -> None:
    assert str(Damage.parse(text)) == text


def slow_end(rate_bit: int) -> Setting:
    """An end of a cable that is slow: what it sends at once after a rest is little, too."""
    return Setting(True, rate_bit, burst_nbytes=short_burst(rate_bit, RATE))


@pytest.mark.parametrize(
    ("damage", "near", "far"),
    [
        ((), Setting(True, RATE), Setting(True, RATE)),
        (("cut:4/0",), Setting(True, RATE), Setting(False, RATE)),
        (("blackhole:4/0",), Setting(True, 0), Setting(True, 0)),
        (("slow:4/0,rate=10mbit",), slow_end(10**7), slow_end(10**7)),
        (("slow:4/0,rate=10mbit,direction=out",), slow_end(10**7), Setting(True, RATE)),
        (("slow:4/0,rate=10mbit,direction=in",), Setting(True, RATE), slow_end(10**7)),
        (
            ("slow:4/0,rate=10mbit,direction=in", "slow:4/0,rate=20mbit"),
            slow_end(2 * 10**7),
            slow_end(10**7),
        ),
        (("loss:4/0,share=2%",), Setting(True, RATE, 0.02), Setting(True, RATE, 0.02)),
        (("loss:4/0,share=2%,direction=out",), Setting(True, RATE), Setting(True, RATE, 0.02)),
        (("loss:4/0,share=2%,direction=in",), Setting(True, RATE, 0.02), Setting(True, RATE)),
        (("switch:0/1",), Setting(True, RATE), Setting(False, RATE)),
        (("switch:0/1", "blackhole:4/0"), Setting(True, 0), Setting(False, 0)),
        (("cut:3/0", "switch:1/1"), Setting(True, RATE), Setting(True, RATE)),
    ],
)
def test_settings_of_a_cable_to_a_switch(damage: tuple[str, ...], near: Setting, far: Setting) -> None:
    cable = Layout(bcube(3, 2)).cable((4, 0))
    assert setting(cable, cable.near, at_rest(*damage)) == near
    assert setting(cable, cable.far, at_rest(*damage)) == far


def test_settings_of_a_direct_cable() -> None:
    cable = Layout(torus(4, 2)).cable((1, 0))
    mine, theirs = cable.end_of(1), cable.end_of(0)
    assert not setting(cable, theirs, at_rest("cut:1/0")).up
    assert setting(cable, mine, at_rest("cut:1/0")).up, "the named NIC is left without a carrier"
    assert not setting(cable, mine, at_rest("switch:0/0")).up
    assert not setting(cable, theirs, at_rest("switch:0/0")).up
    assert setting(cable, mine, at_rest("slow:0/0,rate=10mbit")).rate_bit == 10**7
    out = at_rest("slow:0/0,rate=10mbit,direction=out")
    assert [setting(cable, end, out).rate_bit for end in (mine, theirs)] == [RATE, 10**7]


def test_networks_beside_the_fabric_are_not_touched() -> None:
    layout = Layout(bcube(3, 2))
    for cable in layout.cables:
        if cable.network != "fabric":
            expected = Setting(True, None if cable.network == MANAGEMENT else OTHER)
            assert setting(cable, cable.near, at_rest("switch:0/1", "cut:4/0")) == expected


def test_a_damage_stays_until_every_job_that_did_it_has_undone_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    cut, slow = Damage.parse("cut:4/0"), Damage.parse("slow:4/0,rate=10mbit")
    both = at_rest().with_damage(cut, "first").with_damage(cut, "second").with_damage(slow, "first")
    state.save("held", State("bcube:3x2", both, complete=True))
    saved = state.load("held")
    assert saved is not None
    assert saved.condition == both, "each job is another process"
    assert both.without_damage(cut, "third") == both
    for first, last in (("first", "second"), ("second", "first")):
        one_left = both.without_damage(cut, first)
        assert one_left.damages == {cut, slow}
        assert one_left.without_damage(cut, last).damages == {slow}
    assert both.healed(cut) == both.unharmed() == at_rest()


def test_no_job_undoes_what_was_done_by_hand() -> None:
    cut = Damage.parse("cut:4/0")
    by_hand = at_rest("cut:4/0")
    assert by_hand.with_damage(cut, "job") == by_hand == by_hand.without_damage(cut, "job")
    assert at_rest().with_damage(cut, "job").damaged(cut).without_damage(cut, "job") == by_hand


def test_a_part_has_its_newest_damage_and_heals_alone() -> None:
    now = at_rest("cut:4/0", "cut:4/1", "switch:0/1").damaged(Damage.parse("blackhole:4/0"))
    assert sorted(map(str, now.damages)) == ["blackhole:4/0", "cut:4/1", "switch:0/1"]
    assert sorted(map(str, now.healed(Damage("cut", (4, 0))).damages)) == ["cut:4/1", "switch:0/1"]
    assert sorted(map(str, now.healed(Damage("switch", (0, 1))).damages)) == ["blackhole:4/0", "cut:4/1"]


@pytest.mark.parametrize("over_s", [0.1, 2.0, 10.0])
def test_a_rate_falls_evenly_in_steps_of_half_a_second_or_less(over_s: float) -> None:
    steps = [(0.0, RATE), *falling(RATE, 20_000_000, over_s)]
    assert steps[-1] == (over_s, 20_000_000)
    lasts = [after[0] - before[0] for before, after in pairwise(steps)]
    falls = [before[1] - after[1] for before, after in pairwise(steps)]
    assert max(lasts) <= 0.5 + 1e-9
    assert max(lasts) == pytest.approx(min(lasts))
    assert max(falls) - min(falls) <= 1
    assert len(falls) >= 4


def test_a_rate_that_is_lower_already_or_falls_at_once() -> None:
    assert [*falling(RATE, 2 * RATE, 10.0)] == [(0.0, 2 * RATE)]
    assert [*falling(RATE, RATE // 2, 0.0)] == [(0.0, RATE // 2)]


def test_the_queue_holds_80_ms() -> None:
    assert Setting(True, RATE).queue_nbytes == 2_000_000 + 75_000


def test_namespaces_of_other_fabrics_are_other_names() -> None:
    assert belongs("bml-s12", "bml")
    assert belongs("bml-switches", "bml")
    for other in ("bml2-s1", "bml-s1x", "xbml-s1", "bml", "bml-s", "bml-probe-1"):
        assert not belongs(other, "bml")


@pytest.mark.parametrize(
    ("rate", "nbytes"), [("1mbit", 4096), ("100mbit", 16250), ("200mbit", 32500), ("1gbit", 65536)]
)
def test_what_passes_a_queue_as_one_packet_takes_about_a_millisecond(rate: str, nbytes: int) -> None:
    """But for very slow cables, which would have the processor handle every packet by itself."""
    assert Setting(up=True, rate_bit=parse_rate(rate)).segment_nbytes == nbytes


@pytest.mark.parametrize(
    ("rate", "nbytes"), [("1mbit", 8192), ("20mbit", 25_000), ("100mbit", 75_000), ("1gbit", 75_000)]
)
def test_a_short_burst_is_ten_milliseconds_and_two_packets_at_least(rate: str, nbytes: int) -> None:
    assert short_burst(parse_rate(rate)) == nbytes


@pytest.mark.parametrize("rate", ["5mbit", "20mbit", "100mbit", "250mbit", "1gbit", "10gbit"])
@pytest.mark.parametrize("divisor", [2, 10, 100])
def test_packets_that_wait_when_a_cable_gets_slow_fit_into_its_burst(rate: str, divisor: int) -> None:
    healthy_bit = parse_rate(rate)
    damage = Damage("slow", (4, 0), healthy_bit // divisor)
    cable = Layout(bcube(3, 2)).cable((4, 0))
    for burst_nbytes in (BURST_NBYTES, short_burst(healthy_bit)):
        healthy = Condition(healthy_bit, healthy_bit, burst_nbytes=burst_nbytes)
        before, after = (setting(cable, cable.near, each) for each in (healthy, healthy.damaged(damage)))
        headers_nbytes = 80 * -(-before.segment_nbytes // 1400)
        assert before.segment_nbytes + headers_nbytes <= after.burst_nbytes <= before.burst_nbytes


def test_a_burst_stays_in_damage_and_in_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    condition = Condition(RATE, OTHER, burst_nbytes=60_000)
    slow = condition.damaged(Damage.parse("slow:0/0,rate=1mbit"))
    assert slow.unharmed() == condition
    state.save("short", State("bcube:3x2", slow, complete=True))
    saved = state.load("short")
    assert saved is not None
    assert saved.condition == slow
    cable = Layout(bcube(3, 2)).cable((0, 0))
    assert {setting(cable, end, slow).burst_nbytes for end in (cable.near, cable.far)} == {35_750}
    whole = Layout(bcube(3, 2)).cable((1, 0))
    assert {setting(whole, end, slow).burst_nbytes for end in (whole.near, whole.far)} == {60_000}


def test_every_damage_can_be_read_as_it_is_written() -> None:
    n_made = 0
    for kind, rate_bit, share, direction in product(
        ("cut", "blackhole", "slow", "switch", "loss"),
        (0, 8_000, 1_234_567, 10_000_000),
        (0.0, 0.05, 1.0),
        ("both", "out", "in"),
    ):
        if (kind == "slow") != (rate_bit > 0):
            continue
        try:
            damage = Damage(kind, (4, 1), rate_bit, share, direction)
        except UsageError:
            continue
        assert Damage.parse(str(damage)) == damage
        n_made += 1
    assert n_made == 3 + 9 + 6  # cut, blackhole, switch; slow; loss
