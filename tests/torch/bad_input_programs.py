"""DDP scripts with odd and bad input, as ranks run them."""

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bml.torch

BATCH_SIZE, N_STEPS, BAD_STEP = 8, 6, 3
"""A rank gets bad input in BAD_STEP."""
_HANGS_S = 50


class Net(nn.Module):
    """Two layers of which the output is the sum, of whatever else there is, too."""

    def __init__(self, **more: Any):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.skips = False
        """Whether the right layer is not used."""
        self.terms: dict[str, Callable[[], Any]] = {
            "complex": lambda: (self.complex * 1j).real.sum(),
            "narrow": lambda: self.narrow.float().sum(),
            "empty": lambda: self.empty.sum(),
            "table": lambda: self.table(torch.arange(BATCH_SIZE) % 5),
        }
        for name, each in more.items():
            setattr(self, name, each)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.first(x))
        made = self.left(h) if self.skips else self.left(h) + self.right(h)
        for name, term in self.terms.items():
            if hasattr(self, name):
                made = made + term() * torch.linspace(0, 1, 3)  # a term alike for all classes changes nothing
        return made


def make_loader(rank: int, n_ranks: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    n_samples = BATCH_SIZE * N_STEPS * n_ranks
    x = torch.randn(n_samples, 6, generator=generator)
    data = TensorDataset(x, torch.randint(0, 3, (n_samples,), generator=generator))
    return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, n_ranks, rank))


def loss(model: Any, samples: Any) -> Any:
    x, y = samples
    return nn.functional.cross_entropy(model(x), y)


def vector(model: Any) -> Any:
    """All parameters as real numbers, so that none is lost."""
    wide = [each.detach().to(torch.complex128) for each in model.parameters()]
    return torch.cat([torch.view_as_real(each).reshape(-1) for each in wide])


def digest(model: Any) -> str:
    return hashlib.sha256(vector(model).numpy().tobytes()).hexdigest()


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)


# --- odd input, of which some is trained ------------------------------------------------------------------


def freeze(model: Any) -> None:
    model.right.requires_grad_(False)


def skip(model: Any) -> None:
    model.skips = True


def overflow(model: Any) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * float("inf"))


def lose_a_number(model: Any) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * float("nan"))


ODD_MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "two dtypes": lambda: {"narrow": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))},
    "complex": lambda: {"complex": nn.Parameter(torch.ones(400, dtype=torch.complex64))},
    "empty": lambda: {"empty": nn.Parameter(torch.empty(0, 3))},
    "float8": lambda: {"eight": nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)},
}
ODD_EVENTS: dict[str, tuple[Callable[[Any], None], tuple[int, ...]]] = {
    "Inf": (overflow, (1,)),
    "NaN": (lose_a_number, (1,)),
    "frozen on all ranks": (freeze, (0, 1)),
    "frozen on one rank": (freeze, (1,)),
    "unused on all ranks": (skip, (0, 1)),
    "unused on one rank": (skip, (1,)),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "meta": lambda: Net().to("meta"),
    "two devices": lambda: Net(right=nn.Linear(8, 3, device="meta")),
    "sparse": lambda: Net(table=nn.Embedding(5, 3, sparse=True)),
}


# --- bad input that ends ranks ----------------------------------------------------------------------------


def raise_in_backward(model: Any) -> None:
    def fails(gradient: Any) -> None:
        raise KeyError("of the user")

    model.first.weight.register_hook(fails)


def do_nothing(model: Any) -> None:
    pass


EVENTS = {
    "no gradient": skip,
    "frozen": freeze,
    "raises in backward": raise_in_backward,
}
MODELS: dict[str, Callable[[], Any]] = {
    "other shapes": lambda: Net(right=nn.Linear(8, 1)),
    "other dtype": lambda: Net().double(),
}


def train(case: str, bad: list[int], folder: str, hooked: bool = False, resumed: bool = False) -> None:
    """Train; the `bad` ranks get bad input. Rank r writes to FOLDER/r.json what it saw."""
    signal.alarm(_HANGS_S)  # it ends by this signal if it hangs
    dist.init_process_group("bml")
    rank = dist.get_rank()
    is_bad = rank in bad
    torch.manual_seed(5)
    model = MODELS.get(case, Net)() if is_bad else Net()
    with _reported(model, Path(folder) / f"{rank}.json") as report:
        cap = 0.0001 if case == "other buckets" and is_bad else None
        ddp = DistributedDataParallel(model, find_unused_parameters=resumed, bucket_cap_mb=cap)
        optimizer, loader = optimizer_of(model), make_loader(dist.get_rank(), dist.get_world_size())
        hook = bml.torch.recompute_hook(ddp, loss) if hooked else None
        loops = bml.torch.resumable(ddp, optimizer, hook=hook) if resumed else None
        for _ in loops.epochs(1) if loops else [0]:
            batches = hook.batches(loader) if hook else loader
            for step, samples in enumerate(loops.batches(batches) if loops else batches):
                if step == BAD_STEP and is_bad:
                    EVENTS.get(case, do_nothing)(model)
                optimizer.zero_grad()
                loss(ddp, samples).backward()
                optimizer.step()
                report["digests"].append(digest(model))
        report["contributors"] = bml.torch.contributors()
        report["complete"] = hook.samples()["complete"] if hook else None
    dist.destroy_process_group()


@contextmanager
def _reported(model: Any, path: Path) -> Iterator[dict[str, Any]]:
    report: dict[str, Any] = {"digests": [digest(model)], "said": None}
    try:
        yield report
    except Exception as error:
        report["said"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        report["end"] = digest(model)
        path.write_text(json.dumps(report))
