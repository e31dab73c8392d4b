"""The collectives beside allreduce, as the training function calls them: a part of `bml.Session`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from bml.train.collectives import Collectives
from bml.train.operations import moving, reducing
from bml.train.pending import Pending
from bml.train.vectors import Arrays

Each = Sequence[npt.ArrayLike]
"""A list with an array for each server, all of one shape and dtype."""


class CollectiveCalls:
    """Calls that all servers make alike, with the same root, operation, shapes and dtypes.

    Ranks are ids of servers. A list "for each server" has `Session.n_servers` entries, also for servers that
    are lost; it may be a bucket, which is not copied. All raise what `Session.allreduce` raises; `NAME_async`
    begins a step as `allreduce_async` does.
    """

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def broadcast(self, arrays: Arrays, root: int = 0, *, out: Any = None) -> Any:
        """Give the arrays of server `root` to all servers, bit by bit; all bring the same shapes and dtypes.

        The arrays of a list may have different dtypes. If the root is lost before the step, the lowest
        contributor takes its place. The result is new memory, or `out`, which may be `arrays` itself. Raises
        UsageError for a root that is no server and for arrays that cannot be sent.
        """
        return self._collectives.run(*moving.broadcast(self._collectives, arrays, root, out))

    def broadcast_async(self, arrays: Arrays, root: int = 0, *, out: Any = None) -> Pending:
        """Begin a `broadcast`; raises UsageError as it does."""
        return self._collectives.begin(*moving.broadcast(self._collectives, arrays, root, out))

    def reduce(self, arrays: Arrays, root: int = 0, op: str = "sum", *, out: Any = None) -> Any:
        """Reduce as `allreduce` does, and give the result to server `root`; all others get None.

        If the root is lost, nobody gets a result. Raises UsageError for a root that is no server.
        """
        return self._collectives.run(*reducing.reduce(self._collectives, arrays, root, op, out))

    def reduce_async(self, arrays: Arrays, root: int = 0, op: str = "sum", *, out: Any = None) -> Pending:
        """Begin a `reduce`; raises UsageError as it does."""
        return self._collectives.begin(*reducing.reduce(self._collectives, arrays, root, op, out))

    def reduce_scatter(self, arrays: Each, op: str = "sum", *, out: Any = None) -> Any:
        """Reduce a list with an array for each server, and return this server's one of the result.

        The shares of lost servers are dropped. Raises UsageError for a list of another length, or of arrays
        of different shapes or dtypes.
        """
        return self._collectives.run(*reducing.reduce_scatter(self._collectives, arrays, op, out))

    def reduce_scatter_async(self, arrays: Each, op: str = "sum", *, out: Any = None) -> Pending:
        """Begin a `reduce_scatter`; raises UsageError as it does."""
        return self._collectives.begin(*reducing.reduce_scatter(self._collectives, arrays, op, out))

    def all_gather(self, array: npt.ArrayLike, *, out: Any = None) -> Any:
        """Give every server the arrays of all, as a list by id; all bring the same shape and dtype.

        The entry of a server that is not among the `contributors` is None, and its array in `out`, a list,
        stays as it is. Raises UsageError for an array that cannot be sent.
        """
        return self._collectives.run(*moving.all_gather(self._collectives, array, out))

    def all_gather_async(self, array: npt.ArrayLike, *, out: Any = None) -> Pending:
        """Begin an `all_gather`; raises UsageError as it does."""
        return self._collectives.begin(*moving.all_gather(self._collectives, array, out))

    def gather(self, array: npt.ArrayLike, root: int = 0, *, out: Any = None) -> Any:
        """Give server `root` the arrays of all, as `all_gather` does; all others get None.

        If the root is lost, nobody gets them. Raises UsageError for a root that is no server and for an array
        that cannot be sent.
        """
        return self._collectives.run(*moving.gather(self._collectives, array, root, out))

    def gather_async(self, array: npt.ArrayLike, root: int = 0, *, out: Any = None) -> Pending:
        """Begin a `gather`; raises UsageError as it does."""
        return self._collectives.begin(*moving.gather(self._collectives, array, root, out))

    def all_to_all(self, arrays: Each, *, out: Any = None) -> Any:
        """Send each server one array of a list, and return the list of those sent to this one, by sender.

        The entry of a server that is not among the `contributors` is None, and its array in `out`, a list,
        stays as it is. Raises UsageError for a list of another length, or of arrays of different shapes or
        dtypes.
        """
        return self._collectives.run(*moving.all_to_all(self._collectives, arrays, out))

    def all_to_all_async(self, arrays: Each, *, out: Any = None) -> Pending:
        """Begin an `all_to_all`; raises UsageError as it does."""
        return self._collectives.begin(*moving.all_to_all(self._collectives, arrays, out))

    def scatter(self, arrays: Each | None, root: int = 0, *, out: Any = None) -> Any:
        """Send each server its array of the list that server `root` has, in two steps.

        The others bring None: they are told shape and dtype. If the root is lost, all raise ContributorLost,
        and may go on. Raises UsageError for a root that is no server, and on the root for a list of another
        length, or of arrays of different shapes or dtypes.
        """
        return self._collectives.run(*moving.scatter(self._collectives, arrays, root, out))

    def scatter_async(self, arrays: Each | None, root: int = 0, *, out: Any = None) -> Pending:
        """Begin a `scatter`; raises UsageError as it does."""
        return self._collectives.begin(*moving.scatter(self._collectives, arrays, root, out))
