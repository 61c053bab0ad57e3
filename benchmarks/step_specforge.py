"""One training step of SpecForge 0.2, in its own environment: `python step_specforge.py problem.json threads`.

As its trainer does it: documents as rows of a padded batch (here without padding), weights, embedding and head in the
compute type, its own optimizer with float32 copies, its objective with checkpointed slices of the default size. Only
the anchors are given instead of drawn, and the attention is SDPA: its FlexAttention has no backward pass on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.optimizer import BF16Optimizer
from step_problem import Problem, Tensors, run
from torch import Tensor
from transformers import Qwen3Config


def prepare(problem: Problem, tensors: Tensors) -> Callable[[int], float]:
    drafter = DFlashDraftModel(_config(problem))
    drafter.load_state_dict(tensors.weights)
    drafter.to(problem.compute_dtype)
    model = OnlineDFlashModel(
        drafter,
        target_lm_head=_head(tensors.head.to(problem.compute_dtype)),
        target_embed_tokens=_embedding(tensors.embedding.to(problem.compute_dtype)),
        mask_token_id=problem.mask_token_id,
        block_size=problem.block_size,
        attention_backend="sdpa",
        num_anchors=problem.num_blocks // problem.num_documents,
        loss_decay_gamma=problem.gamma,
    )
    optimizer = BF16Optimizer(
        drafter, lr=problem.lr, max_grad_norm=problem.clip_norm, warmup_ratio=0.0, lr_scheduler="constant"
    )
    features = tensors.features.to(problem.compute_dtype)
    loss_mask = tensors.loss_mask.float()

    def step(number: int) -> float:
        anchors = torch.tensor(problem.anchors[number])
        model._sample_anchor_positions = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
        loss, _, _ = model(tensors.tokens, features, loss_mask)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _config(problem: Problem) -> Qwen3Config:
    config = Qwen3Config(
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_hidden_layers=problem.num_layers,
        num_attention_heads=problem.num_heads,
        num_key_value_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        vocab_size=problem.vocab_size,
        rms_norm_eps=problem.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": problem.rope_theta},
        layer_types=["full_attention"] * problem.num_layers,
    )
    config.num_target_layers = 30
    config.block_size = problem.block_size
    config.dflash_config = {
        "target_layer_ids": list(range(problem.num_taps)),
        "mask_token_id": problem.mask_token_id,
    }
    config._attn_implementation = "sdpa"
    return config


def _head(weight: Tensor) -> torch.nn.Linear:
    with torch.device("meta"):
        head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head


def _embedding(weight: Tensor) -> torch.nn.Embedding:
    with torch.device("meta"):
        embedding = torch.nn.Embedding(*weight.shape)
    embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
    return embedding


if __name__ == "__main__":
    run(prepare)
