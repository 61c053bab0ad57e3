"""The processes of one training run: what they add up together, and how all of them stop when one fails.

torchrun starts them (`torchrun --no-python dflash-train run ...`) and names them by environment variables. Without
torchrun a process is alone, and everything here costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cache_tools.errors import DflashError
from train.devices import pick_device

# How long a rank waits for the others. They may be writing a checkpoint to a slow disk.
_TIMEOUT = timedelta(minutes=10)
# How long a rank that failed waits for the others to hear it. Then it ends, and they lose the connection.
_FAREWELL = timedelta(seconds=60)
_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Gradients are summed in pieces of this many elements, so that no second copy of all of them exists.
_BUCKET_ELEMENTS = 1 << 26


class OtherRankFailed(DflashError):
    """This process stops because another rank failed, which says why."""


class RankLost(DflashError):
    """Another rank ended or fell silent without a word."""


@dataclass(kw_only=True)
class Ranks:
    """This process and its peers. Peers call the same methods in the same order.

    Every method that communicates raises OtherRankFailed when a peer failed before it got there, and RankLost when
    a peer is gone.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    control: dist.ProcessGroup | None = None
    """Connections over the CPU, apart from those for tensors: what a failed rank says here meets nothing else.
    None: this process is alone."""
    connected: bool = True
    """No communication has failed yet."""

    @property
    def is_first(self) -> bool:
        """Only the first rank writes and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Replaces a tensor of `device` by its sum over all ranks, the same bits on each."""
        if self.control is None:
            return
        self.check()
        with self._talking():
            dist.all_reduce(tensor)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces every parameter's gradient by its sum over all ranks. None counts as zero."""
        if self.control is None:
            return
        for bucket in _buckets(parameters):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
            self.sum(flat)
            for parameter, summed in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = summed.view_as(parameter)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors of `device` with those of the first rank."""
        if self.control is None:
            return
        self.check()
        with self._talking():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; anything that can be pickled."""
        if self.control is None:
            return [value]
        self.check()
        values: list[Any] = [None] * self.world_size
        with self._talking():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def check(self, *, failed: bool = False) -> None:
        """Waits until all ranks are here. With `failed` it tells them to stop.

        Raises OtherRankFailed when another rank failed; if several did, on all but the first of them.
        """
        if self.control is None:
            return
        flags = torch.zeros(self.world_size, dtype=torch.int32)
        flags[self.rank] = failed
        with self._talking():
            work = dist.all_reduce(flags, group=self.control, async_op=True)
            assert work is not None
            work.wait(_FAREWELL if failed else _TIMEOUT)
        first = next((rank for rank, flag in enumerate(flags.tolist()) if flag), None)
        if first is not None and not (failed and first == self.rank):
            raise OtherRankFailed(f"rank {first} failed", where=f"rank {self.rank}", fix="see what that rank says")

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            with _losing_a_rank():
                yield
        except RankLost:
            self.connected = False
            raise

    def leave(self) -> None:
        """Ends the connections. Their threads must not live on until the interpreter ends: that can abort it."""
        if self.control is not None and self.connected:  # a broken one would make this wait for its time-out
            self.control = None
            dist.destroy_process_group()

    @contextmanager
    def stop_together(self) -> Iterator[None]:
        """A failure inside the block ends the block on every rank; the first rank that failed raises its error.

        Every communication begins with `check`, so a rank that failed meets its peers at their next one.
        """
        try:
            yield
            self.check()
        except (OtherRankFailed, RankLost):
            raise
        except Exception:
            with suppress(RankLost):  # then nobody is left to be told
                self.check(failed=True)
            raise


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """Connects the ranks that torchrun started, each with its own `device` (a value of --device).

    Raises ConfigError for a device that is not there, RankLost when the others do not come.
    """
    if not os.environ.keys() >= _VARIABLES:
        yield Ranks(device=pick_device(device))
        return
    own = pick_device(device, local_rank=int(os.environ["LOCAL_RANK"]))
    with _losing_a_rank():
        if own.type == "cuda":
            torch.cuda.set_device(own)
            dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=own)
        else:
            dist.init_process_group("gloo", timeout=_TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    ranks = Ranks(device=own, rank=dist.get_rank(), world_size=dist.get_world_size(), control=control)
    del control  # the last reference is to go in `leave`
    try:
        yield ranks
    finally:
        ranks.leave()


def is_first_process() -> bool:
    """Whether this process may speak for all, known before they are connected."""
    return not os.environ.keys() >= _VARIABLES or os.environ["RANK"] == "0"


@contextmanager
def _losing_a_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # how torch reports closed connections and waits that took too long
        raise RankLost(
            "the connection to another rank was lost",
            where=f"rank {os.environ.get('RANK')}",
            got=error,
            fix="see what the other ranks say, then run the same command again; it resumes",
        ) from error


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
