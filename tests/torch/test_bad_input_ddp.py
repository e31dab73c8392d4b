"""Bad input of DDP scripts that ends ranks: which of them is told what, and what all hold then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bad_input_programs import BAD_STEP, N_STEPS  # noqa: E402
from forked_ranks import run_groups  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.timeout(310)]

PROGRAM = "bad_input_programs"
N_RANKS = 3
UNREDUCED = "RuntimeError: Expected to have finished reduction in the prior iteration"
SAME_MODEL = "Give all ranks the same model, of the same dtypes, and the same options of Distributed"

Case = dict[str, Any]


def reports(cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """What the ranks saw in each case; all of them have come to an end."""
    for number, each in enumerate(cases):
        each["folder"] = str(folder / str(number))
        Path(each["folder"]).mkdir()
    ended = run_groups(N_RANKS, f"{PROGRAM}.train", cases, limit_s=300)
    found = []
    for each, ends in zip(cases, ended, strict=True):
        ranks = [json.loads(Path(each["folder"], f"{rank}.json").read_text()) for rank in range(N_RANKS)]
        for end, rank in zip(ends, ranks, strict=True):
            assert isinstance(end, str) == (rank["said"] is not None), (each, end)
            assert isinstance(end, str) or end is None, (each, end)
        found.append(ranks)
    return found


def test_one_rank_with_bad_input_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    cases: dict[str, tuple[Case, str, int]] = {
        "other shapes": ({}, "appears not to match sizes of the same param in process 0", 0),
        "frozen": ({}, UNREDUCED, BAD_STEP + 1),  # DDP tells it one step late
        "no gradient": ({"hooked": True}, "right.weight, right.bias got none", BAD_STEP),
        "raises in backward": ({"hooked": True, "resumed": True}, "KeyError: 'of the user'", BAD_STEP),
    }
    given = [{"case": name, "bad": [1], **case} for name, (case, _, _) in cases.items()]
    found = reports(given, tmp_path)
    for name, ranks, (case, said, n_steps) in zip(cases, found, cases.values(), strict=True):
        lost = ranks.pop(1)
        assert said in lost["said"], name
        assert len(lost["digests"]) == 1 + n_steps, name
        assert lost["end"] == lost["digests"][-1], name
        for rank in ranks:
            assert rank["said"] is None, name
            assert rank["digests"] == ranks[0]["digests"], name
            assert len(rank["digests"]) == 1 + N_STEPS, name
            assert rank["contributors"] == [0, 2], name
            assert rank["complete"] is (True if case.get("hooked") else None), name
        if n_steps:
            assert lost["digests"][: 1 + BAD_STEP] == ranks[0]["digests"][: 1 + BAD_STEP], name


def test_bad_input_of_all_ranks_leaves_them_in_the_state_of_the_last_step(tmp_path: Path) -> None:
    cases: dict[str, tuple[Case, str, int]] = {
        "other dtype": ({"bad": [1]}, SAME_MODEL, 0),
        "other buckets": ({"bad": [1], "resumed": True}, SAME_MODEL, 0),
        "no gradient": ({"bad": [0, 1, 2], "hooked": True}, "right.weight, right.bias got none", BAD_STEP),
    }
    found = reports([{"case": name, **case} for name, (case, _, _) in cases.items()], tmp_path)
    for name, ranks, (_, said, n_steps) in zip(cases, found, cases.values(), strict=True):
        for rank in ranks:
            assert said in rank["said"], name
            assert len(rank["digests"]) == 1 + n_steps, name
            assert rank["end"] == rank["digests"][-1], name
        assert n_steps == 0 or len({rank["end"] for rank in ranks}) == 1, name
