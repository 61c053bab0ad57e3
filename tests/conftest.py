"""Set-up that must happen before any test module is imported."""

from __future__ import annotations

import os

import torch

pytest_plugins = ["precompute_fixtures"]

# Triton decides when it is first imported whether kernels are compiled or interpreted; without a GPU only the latter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
