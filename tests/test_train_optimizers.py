"""Optimizers and the average of weights: what they update, how much, and that a resumed run cannot tell."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import LENGTHS, losses, run, settings
from torch import Tensor, nn

from cache_tools.errors import CheckpointError, ConfigError
from cache_tools.synthetic import make_store
from train import checkpoint as checkpoints
from train.config import TrainConfig
from train.export import fold_feature_scale
from train.loading import drafter_of_run
from train.loop import train
from train.optimizers import Optimizers, WeightAverage


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def config_with(**changes: Any) -> TrainConfig:
    return settings(Path("s.zarr"), Path("run"), **changes)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16, bias=False))


def step(model: nn.Module, optimizers: Optimizers, seed: int, lr: float = 1e-2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step(lr)
    assert all(parameter.grad is None for parameter in model.parameters())


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs_with_decay_on_matrices_only(weight_decay: float) -> None:
    model = small_model()
    plain = copy.deepcopy(model)
    ours = Optimizers(config_with(weight_decay=weight_decay), model)
    decays = [(p, weight_decay if p.ndim == 2 else 0.0) for p in plain.parameters()]
    theirs = torch.optim.AdamW([{"params": [p], "weight_decay": d} for p, d in decays], lr=1e-2, betas=(0.9, 0.95))
    for seed in range(4):
        step(model, ours, seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in plain.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        theirs.step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_muon_turns_matrices_by_steps_as_large_as_adamws_and_leaves_vectors_to_adamw() -> None:
    models = {name: small_model() for name in ("adamw", "muon")}
    starts = parameters_of(models["muon"])
    for name, model in models.items():
        step(model, Optimizers(config_with(optimizer=name), model), seed=1)
    moved = {
        name: [p - start for p, start in zip(parameters_of(model), starts, strict=True)]
        for name, model in models.items()
    }
    for by_adamw, by_muon in zip(moved["adamw"], moved["muon"], strict=True):
        if by_muon.ndim < 2:
            assert torch.equal(by_muon, by_adamw)
            continue
        assert by_adamw.square().mean().sqrt() == pytest.approx(1e-2, rel=0.02)
        # 0.2 of the learning rate is the RMS that AdamW's steps have in a long run, where gradients cancel.
        assert by_muon.square().mean().sqrt() == pytest.approx(2e-3, rel=0.2)
        values = torch.linalg.svdvals(by_muon)
        assert values.max() < 2.5 * values.min(), "all directions move alike"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saved_optimizers_continue_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    config = config_with(optimizer=optimizer, weight_decay=0.1)
    model = small_model()
    optimizers = Optimizers(config, model)
    for seed in range(3):
        step(model, optimizers, seed)
    torch.save(optimizers.state_dict(), tmp_path / "optimizer.pt")
    resumed = copy.deepcopy(model)
    others = Optimizers(config, resumed)
    others.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    step(model, optimizers, 9)
    step(resumed, others, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_the_average_of_three_steps_computed_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    values = [8.0, 4.0, 2.0, 1.0]
    with torch.no_grad():
        model.weight.fill_(values[0])
        average = WeightAverage(model, decay=0.24)
        for number, value in enumerate(values[1:], start=1):
            model.weight.fill_(value)
            average.update(number)
    by_hand = values[0]
    for kept, value in zip((2 / 11, 0.24, 0.24), values[1:], strict=True):  # 3/12 is above the decay asked for
        by_hand = kept * by_hand + (1 - kept) * value
    assert average.state_dict()["weight"].item() == pytest.approx(by_hand, rel=1e-6)
    assert model.weight.item() == 1.0


def test_a_run_with_muon_an_average_and_dpace_resumes_bit_for_bit(store: Path, tmp_path: Path) -> None:
    changes = {"optimizer": "muon", "ema_decay": 0.9, "slot_weights": "dpace", "weight_decay": 0.01}
    run(settings(store, tmp_path / "whole", **changes))

    def killer(line: str) -> None:
        if "step=8 " in line:
            raise KeyboardInterrupt

    interrupted = settings(store, tmp_path / "parts", **changes)
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, say=killer)
    run(interrupted)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (newest(tmp_path / name) for name in ("whole", "parts"))
    assert whole.average.keys() == whole.weights.keys()
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, parts.weights[name])
        assert torch.equal(whole.average[name], parts.average[name])
    assert not torch.equal(whole.average["fc.weight"], whole.weights["fc.weight"])


def newest(out: Path) -> checkpoints.Checkpoint:
    path = checkpoints.latest(out)
    assert path is not None
    return checkpoints.load(path)


def test_what_is_exported_and_evaluated_is_the_average(store: Path, tmp_path: Path) -> None:
    run(settings(store, tmp_path / "run", ema_decay=0.9, steps=4))
    saved = newest(tmp_path / "run")
    drafter = drafter_of_run(tmp_path / "run")
    found = drafter.state_dict()
    assert torch.equal(found["norm.weight"], saved.average["norm.weight"])
    assert not torch.equal(found["norm.weight"], saved.weights["norm.weight"])
    drafter.load_state_dict(saved.average)
    fold_feature_scale(drafter, saved.feature_scale)
    assert torch.equal(found["fc.weight"], drafter.fc.weight)


def test_the_average_does_not_change_the_training(store: Path, tmp_path: Path) -> None:
    for name, decay in (("plain", 0.0), ("averaged", 0.9)):
        run(settings(store, tmp_path / name, ema_decay=decay, steps=4))
    assert losses(tmp_path / "plain") == losses(tmp_path / "averaged")
    assert newest(tmp_path / "plain").average == {}


def test_a_run_does_not_change_its_optimizer_on_the_way(store: Path, tmp_path: Path) -> None:
    run(settings(store, tmp_path / "run", steps=2))
    with pytest.raises(CheckpointError, match="--optimizer"):
        run(settings(store, tmp_path / "run", steps=2, optimizer="muon"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"kl_weight": 1.5}, "kl_weight"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"slot_weights": "dpace", "gamma": 4.0}, "--gamma"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        config_with(**changes)
