"""The optimizers of a run behind one interface, and the running average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.config import TrainConfig


class Optimizers:
    """AdamW for all parameters, or Muon for the matrices and AdamW for the vectors.

    Muon's steps are scaled by 0.2 * sqrt(larger side), which gives them the RMS of AdamW's (arXiv 2502.16982), so that
    one learning rate serves both. All matrices of a drafter are hidden ones: embedding and head are the target's.
    """

    def __init__(self, config: TrainConfig, drafter: nn.Module) -> None:
        matrices = [p for p in drafter.parameters() if p.ndim >= 2]
        vectors = [p for p in drafter.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if config.optimizer == "muon":
            self._parts["muon"] = torch.optim.Muon(
                matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        else:
            groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
        self._parts["adamw"] = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)

    def step(self, lr: float) -> None:
        """Updates the parameters at this learning rate and drops their gradients."""
        for optimizer in self._parts.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of each optimizer by name, ready to be saved."""
        return {name: optimizer.state_dict() for name, optimizer in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` gave."""
        for name, optimizer in self._parts.items():
            optimizer.load_state_dict(state[name])


class WeightAverage:
    """Exponential moving average of a drafter's weights, in their float32."""

    def __init__(self, drafter: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = dict(drafter.named_parameters())
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after `step` >= 1 finished steps.

        The decay rises to its value as (1 + step) / (10 + step), so that the random start is soon forgotten.
        """
        kept = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._averages.values()), list(self._parameters.values()), 1 - kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of the parameters; not copies."""
        return self._averages

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the drafter has the averages for weights; behind it its own again, to the bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from what `state_dict` gave."""
        for name, average in self._averages.items():
            average.copy_(state[name])
