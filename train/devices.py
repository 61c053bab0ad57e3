"""Where to compute."""

from __future__ import annotations

import torch

from cache_tools.errors import ConfigError


def pick_device(name: str, *, local_rank: int | None = None) -> torch.device:
    """`auto` is cuda where there is one. `local_rank`: number of this process among those of the machine.

    Raises ConfigError for a cuda that is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device", got="--device cuda", fix="use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank is None:
        return torch.device("cuda")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "there are more processes than GPUs on this machine",
            got=f"process {local_rank + 1}",
            expected=f"at most {torch.cuda.device_count()}",
            fix="start as many with torchrun --nproc-per-node",
        )
    return torch.device("cuda", local_rank)
