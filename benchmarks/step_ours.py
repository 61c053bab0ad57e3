"""One training step of this project: `python step_ours.py problem.json threads`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from step_problem import Problem, Tensors, run  # noqa: E402

from cache_tools.packs import PackPlan  # noqa: E402
from cache_tools.reader import Store  # noqa: E402
from train.anchors import sample_anchors  # noqa: E402
from train.batches import Pack, StepBatch  # noqa: E402
from train.config import TrainConfig  # noqa: E402
from train.drafter import DFlashDrafter  # noqa: E402
from train.drafter_config import DrafterConfig  # noqa: E402
from train.loop import train_step  # noqa: E402
from train.objective import OutputHead  # noqa: E402
from train.optimizers import Optimizers  # noqa: E402
from train.ranks import Ranks  # noqa: E402
from train.state import TrainingState  # noqa: E402
from train.tapped import LOSSLESS_PART, TappedStates  # noqa: E402
from train.target_parts import FinalNorm  # noqa: E402


def prepare(problem: Problem, tensors: Tensors) -> Callable[[int], float]:
    config = TrainConfig(
        store=Path("none"),
        out=Path("none"),
        mask_token_id=problem.mask_token_id,
        block_size=problem.block_size,
        gamma=problem.gamma,
        anchors_per_step=problem.num_blocks,
        clip_norm=problem.clip_norm,
        beta2=0.999,  # what the others leave it at
        lr=problem.lr,
        precision="bf16" if problem.precision == "bf16" else "fp32",
    )
    state = _state(problem, tensors, config)
    batch = _batch(problem, tensors)

    def step(number: int) -> float:
        batch_of_step = StepBatch(**{**batch, "step": number})
        sums, _ = train_step(state, batch_of_step, lr=problem.lr, noise=0.0)
        return sums.mean_loss

    return step


def draw_anchors(problem: Problem, tensors: Tensors, num_steps: int) -> list[list[list[int]]]:
    """The anchors that our step draws, [steps][D][A / D], as rows of their document."""
    length = problem.document_tokens
    drawn = []
    for step in range(num_steps):
        rows = sample_anchors(
            tensors.loss_mask.flatten().numpy(),
            _boundaries(problem).numpy(),
            range(problem.num_documents),
            seed=0,
            step=step,
            anchors_per_supervised=problem.num_blocks / int(tensors.loss_mask.sum()),
        )
        drawn.append([(rows[rows // length == d] % length).tolist() for d in range(problem.num_documents)])
    return drawn


def _boundaries(problem: Problem) -> torch.Tensor:
    return torch.arange(problem.num_documents + 1, dtype=torch.int32) * problem.document_tokens


def _batch(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    num_rows = problem.num_documents * problem.document_tokens
    pack = Pack(
        samples=tuple(range(problem.num_documents)),
        cu_seqlens=_boundaries(problem),
        input_ids=tensors.tokens.flatten(),
        loss_mask=tensors.loss_mask.flatten(),
        positions=torch.arange(problem.document_tokens).repeat(problem.num_documents),
        tapped=TappedStates(
            codec="raw",
            parts={LOSSLESS_PART: tensors.features.view(num_rows, problem.num_taps, -1).transpose(0, 1).contiguous()},
            first_rows=_boundaries(problem)[:-1].long(),
            first=None,
            channel_scale=None,
        ),
    )
    return {
        "epoch": 0.0,
        "packs": [pack],
        "supervised": int(tensors.loss_mask.sum()),
        "tokens": num_rows,
        "samples": np.arange(problem.num_documents),
        "unreadable": {},
        "state": {},
    }


def _state(problem: Problem, tensors: Tensors, config: TrainConfig) -> TrainingState:
    """What `prepare` of train.state makes from a store."""
    drafter = DFlashDrafter(
        DrafterConfig(
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            num_hidden_layers=problem.num_layers,
            num_attention_heads=problem.num_heads,
            num_key_value_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            vocab_size=problem.vocab_size,
            block_size=problem.block_size,
            mask_token_id=problem.mask_token_id,
            target_layer_ids=tuple(range(problem.num_taps)),
            num_target_layers=30,
            rope_theta=problem.rope_theta,
            rms_norm_eps=problem.rms_norm_eps,
            layer_types=("full_attention",) * problem.num_layers,
        )
    )
    drafter.load_state_dict(tensors.weights)
    width = problem.num_taps * problem.hidden_size
    return TrainingState(
        config=config,
        config_plain={},
        store=cast(Store, None),
        plan=cast(PackPlan, None),
        layer_ids=tuple(range(problem.num_taps)),
        ranks=Ranks(device=torch.device("cpu")),
        device=torch.device("cpu"),
        drafter=drafter,
        drafter_plain={},
        embedding=tensors.embedding.to(problem.compute_dtype),
        head=OutputHead(tensors.head.to(problem.compute_dtype)),
        final_norm=FinalNorm(torch.ones(problem.hidden_size), eps=problem.rms_norm_eps, adds_one=False),
        optimizer=Optimizers(config, drafter),
        average=None,
        feature_scale=torch.ones(width, dtype=problem.compute_dtype),
        noise_unit=torch.ones(width),
        total_steps=len(problem.anchors),
        step=0,
        saved_step=None,
        cursor={},
        order_hash=0,
        num_unreadable=0,
    )


if __name__ == "__main__":
    run(prepare)
