"""One training step of speculators 0.9, in its own environment: `python step_speculators.py problem.json threads`.

As its trainer does it: documents packed into one row, float32 weights, embedding and heads under autocast, AdamW, its
cross entropy in the plain version (the fused one needs a GPU). Only the anchors are given instead of drawn, and the
attention is SDPA: its FlexAttention has no backward pass on a CPU.

Its labels are the target's own choices, from the target's last hidden states. Those are made here so that they choose
the tokens of the documents, which all others take as labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from step_problem import Problem, Tensors, run, slot_weights, valid_slots
from torch import Tensor
from transformers import Qwen3Config


def prepare(problem: Problem, tensors: Tensors) -> Callable[[int], float]:
    model = core.DFlashDraftModel(_config(problem))
    frozen = {
        "embed_tokens.weight": tensors.embedding,
        "lm_head.weight": tensors.head,
        "verifier_lm_head.weight": tensors.head,
        "verifier_norm.weight": torch.ones(problem.hidden_size),
    }
    model.load_state_dict({**tensors.weights, **frozen})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=problem.lr, weight_decay=0.0)
    num_rows = problem.num_documents * problem.document_tokens
    batch = {
        "hidden_states": tensors.features.to(problem.compute_dtype).view(1, num_rows, -1),
        "input_ids": tensors.tokens.view(1, num_rows),
        "loss_mask": tensors.loss_mask.view(1, num_rows),
        "verifier_last_hidden_states": _choosing_states(tensors).to(problem.compute_dtype),
        "document_ids": torch.arange(problem.num_documents).repeat_interleave(problem.document_tokens)[None],
        "position_ids": torch.arange(problem.document_tokens).repeat(problem.num_documents)[None],
    }
    settings = {
        "loss_config": resolve_loss_config("ce", "eager"),
        "gamma": problem.gamma,
        "max_anchors": problem.num_blocks,
        "per_position_loss_weight": "fixed-exp-decay",
    }

    def step(number: int) -> float:
        starts = torch.arange(problem.num_documents)[:, None] * problem.document_tokens
        anchors = (torch.tensor(problem.anchors[number]) + starts).flatten()
        core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
        with torch.autocast("cpu", torch.bfloat16, enabled=problem.precision == "bf16"):
            _, loss, _ = model(**batch, **settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, problem.clip_norm)
        optimizer.step()
        # It divides by the number of slots, the others by the sum of their weights.
        return float(loss) * float(valid_slots(problem, number).sum() / slot_weights(problem, number).sum())

    return step


def _choosing_states(tensors: Tensors) -> Tensor:
    """Last hidden states [1, D * L, H]: that of a token is most like the head's row of the next token."""
    next_tokens = tensors.tokens.flatten().roll(-1)
    return tensors.head[next_tokens][None]


def _config(problem: Problem) -> DFlashSpeculatorConfig:
    layer = Qwen3Config(
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
    layer._attn_implementation = "sdpa"
    return DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=problem.vocab_size,
        block_size=problem.block_size,
        aux_hidden_state_layer_ids=list(range(1, problem.num_taps + 1)),
        mask_token_id=problem.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=problem.block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )


if __name__ == "__main__":
    run(prepare)
