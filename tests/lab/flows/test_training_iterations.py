"""Iterations beside closed forms, and beside the model that measured iterations were compared with."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest

from bml.lab.flows.training.iterations import Iterations, Overlap
from bml.lab.flows.training.layers import Layer, computed_s

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HUGE = 10**15


class Line:
    """Wires that take a start-up and a time for each byte."""

    def __init__(self, start_s: float, byte_s: float, piece_nbytes: int = HUGE):
        self.start_s, self.byte_s, self.piece_nbytes = start_s, byte_s, piece_nbytes

    def seconds(self, nbytes: int) -> float:
        return self.start_s + nbytes * self.byte_s


def drawn(seed: int) -> tuple[list[Layer], Line]:
    """Random layers, whose computation takes about as long as their gradients on these wires."""
    chance = random.Random(seed)
    n = chance.randint(1, 12)
    layers = [
        Layer(str(at), round(10 ** chance.uniform(3, 7)), forward_s := chance.random() ** 3, 2 * forward_s)
        for at in range(n)
    ]
    total = sum(layer.nbytes for layer in layers)
    whole_s = computed_s(layers) * 10 ** chance.uniform(-0.5, 0.5)
    return layers, Line(whole_s / n * chance.choice([0, 0.05]), whole_s / total)


def played(layers: list[Layer], wires: Line, overlap: Overlap, n: int = 8, by_need: bool = True):
    state = Iterations(overlap, by_need)
    return [state.iterate(layers, wires) for _ in range(n)]


def all_s(layers: list[Layer], wires: Line) -> float:
    return sum(wires.seconds(layer.nbytes) for layer in layers if layer.nbytes)


@pytest.mark.parametrize("seed", range(20))
def test_without_overlap_an_iteration_is_computation_and_all_steps(seed):
    layers, wires = drawn(seed)
    wanted = computed_s(layers) + all_s(layers, wires)
    assert played(layers, wires, Overlap.none) == pytest.approx([wanted] * 8)


@pytest.mark.parametrize("seed", range(20))
def test_under_backward_some_gradient_and_all_after_it_hold_the_iteration_up(seed):
    """The last step ends after max over i of: gradient i is there, then it and all behind it are sent."""
    layers, wires = drawn(seed)
    ready_s, now = [], sum(layer.forward_s for layer in layers)
    for layer in reversed(layers):
        now += layer.backward_s
        ready_s.append(now)
    steps_s = [wires.seconds(layer.nbytes) for layer in reversed(layers)]
    wanted = max(ready_s[at] + sum(steps_s[at:]) for at in range(len(layers)))
    assert played(layers, wires, Overlap.backward) == pytest.approx([wanted] * 8)


@pytest.mark.parametrize("overlap", Overlap)
def test_a_single_layer_hides_nothing(overlap):
    layers, wires = [Layer("a", 10**6, 0.1, 0.2)], Line(0.01, 1e-7)
    seconds = played(layers, wires, overlap)
    # In `forward` an iteration ends with backward: the wires' time is in the next one.
    assert seconds[1:] == pytest.approx([0.3 + 0.41] * 7)
    assert seconds[0] == pytest.approx(0.3 if overlap is Overlap.forward else 0.71)


def test_all_is_hidden_where_the_first_layer_sends_nothing():
    """Two layers, of which the second one's gradient has the whole of two passes of the first one."""
    layers = [Layer("a", 0, 1.0, 2.0), Layer("b", 10**6, 0.5, 1.0)]
    for step_s, wanted in ((2.9, 4.5), (3.1, 4.6)):
        seconds = played(layers, Line(step_s, 0.0), Overlap.forward)
        assert seconds[1:] == pytest.approx([wanted] * 7)
    assert played(layers, Line(1.9, 0.0), Overlap.backward) == pytest.approx([4.5] * 8)


def test_what_is_needed_first_overtakes():
    """Backward has b, then a; a is needed first, but b has begun to be sent in pieces before it is there."""
    layers = [Layer("a", 10**6, 1.0, 1.0), Layer("b", 10**7, 1.0, 1.0)]
    wires = Line(0.0, 1 / 4e6, 4 * 10**6)  # a: 1 piece of 1 s; b: 10 pieces
    # b is there after 3 s, a after 4 s. In order of begin a is a sum 13 + 1 s after the start; by need the
    # wires send two pieces of b (the second was settled before a was there), then a: it is a sum after 6 s.
    assert played(layers, wires, Overlap.forward, 1) == [4.0]
    for by_need, first_s in ((False, 14.0), (True, 6.0)):
        state = Iterations(Overlap.forward, by_need)
        state.iterate(layers, wires)
        seconds = state.iterate(layers, wires)
        start_s = max(first_s - 4.0, 0.0) + 1.0  # when a has been computed
        b_s = 14.0 - 4.0 if by_need else 13.0 - 4.0
        assert seconds == pytest.approx(max(start_s, b_s) + 1.0 + 2.0)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("way", ["fifo", "late", "priority"])
def test_the_model_of_measured_iterations_has_the_same_times(seed, way, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import priority

    layers, wires = drawn(seed)
    total = sum(layer.nbytes for layer in layers)
    wires.piece_nbytes = total // 9
    plan = priority.Plan(
        tuple(layer.n_parameters for layer in layers), tuple(layer.forward_s for layer in layers)
    )
    wanted = priority.modelled(plan, way, total * wires.byte_s, wires.start_s, wires.piece_nbytes, n=12)
    overlap = Overlap.backward if way == "fifo" else Overlap.forward
    seconds = played(layers, wires, overlap, 13, by_need=way == "priority")
    if way == "fifo":  # its iterations end with backward, ours with the last sum: both have the same period
        assert median(seconds) == pytest.approx(wanted, rel=1e-6)
    else:
        assert median(seconds[2:12]) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_times_are_between_their_bounds_and_fall_with_overlap(seed):
    layers, wires = drawn(seed)
    compute_s, wires_s = computed_s(layers), all_s(layers, wires)
    none, backward, begin, need = (
        sum(played(layers, wires, overlap, 60, by_need)[10:]) / 50
        for overlap, by_need in (
            (Overlap.none, True),
            (Overlap.backward, True),
            (Overlap.forward, False),
            (Overlap.forward, True),
        )
    )
    assert begin <= backward * (1 + 1e-9) <= none * (1 + 2e-9)
    for each in (none, backward, begin, need):
        assert max(compute_s, wires_s) * (1 - 1e-2) <= each <= (compute_s + wires_s) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("overlap", [Overlap.none, Overlap.backward])
def test_slower_wires_and_longer_computation_take_longer(seed, overlap):
    layers, wires = drawn(seed)
    slower = Line(wires.start_s * 1.3, wires.byte_s * 1.3)
    longer = [Layer(one.name, one.n_parameters, one.forward_s, one.backward_s * 1.2) for one in layers]
    before = played(layers, wires, overlap, 1)[0]
    assert before <= played(layers, slower, overlap, 1)[0] <= 1.3 * before * (1 + 1e-9)
    assert before <= played(longer, wires, overlap, 1)[0]
