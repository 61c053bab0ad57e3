"""The parts of running on several ranks that one process can show; test_train_distributed has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_tools.errors import ConfigError
from train.devices import pick_device
from train.ranks import Ranks, join


def parameters(*sizes: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


def test_without_torchrun_a_process_is_alone_and_nothing_changes() -> None:
    with join("cpu") as ranks, ranks.stop_together():
        assert ranks == Ranks(device=torch.device("cpu"))
        assert ranks.is_first and ranks.gather("x") == ["x"]
        tensor, (parameter,) = torch.ones(3), parameters(2)
        ranks.sum(tensor)
        ranks.broadcast([tensor])
        ranks.sum_gradients([parameter])
        ranks.check()
        assert tensor.tolist() == [1.0] * 3 and parameter.grad is None


def test_an_error_of_a_lone_process_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), join("cpu") as ranks, ranks.stop_together():
        raise ZeroDivisionError


@pytest.mark.parametrize("limit", [1, 5, 9, 100])
def test_buckets_hold_every_parameter_once_in_order_and_obey_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("train.ranks._BUCKET_ELEMENTS", limit)
    from train.ranks import _buckets

    given = parameters(3, 2, 4, 9, 1, 1)
    buckets = list(_buckets(given))
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in given]
    assert all(len(bucket) == 1 or sum(p.numel() for p in bucket) <= limit for bucket in buckets)
    assert list(_buckets([])) == []


def test_every_process_of_a_machine_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert pick_device("cuda") == torch.device("cuda")
    assert pick_device("cpu", local_rank=7) == torch.device("cpu")
    with pytest.raises(ConfigError, match="more processes than GPUs"):
        pick_device("auto", local_rank=2)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto", local_rank=1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda")
