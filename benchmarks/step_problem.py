"""The training step that all contenders of train_step.py compute, and how each is timed.

Needs only torch, so that it can be imported in every contender's own environment. Letters: V = vocabulary, H = hidden
size, F = tapped layers, D = documents, L = tokens of a document, A = blocks of a step, B = slots of a block.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One configuration. `anchors` [steps][D][A / D] holds rows of their document, ascending, for every step."""

    precision: str
    num_blocks: int
    anchors: list[list[list[int]]]
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 2
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_taps: int = 5
    vocab_size: int = 49_152
    mask_token_id: int = 5
    num_documents: int = 8
    document_tokens: int = 256
    prompt_tokens: int = 32
    """Tokens at the start of each document that carry no loss."""
    block_size: int = 8
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-5
    gamma: float = 4.0
    """Slot k weighs exp(-(k - 1) / gamma)."""
    lr: float = 6e-4
    clip_norm: float = 1.0
    warmup_steps: int = 2
    """Steps before those that are timed."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Problem:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Tensors:
    """Equal bits for every contender."""

    tokens: Tensor
    """int64 [D, L]."""
    loss_mask: Tensor
    """bool [D, L]. The last slots of a document carry no loss: not everybody tells documents apart there."""
    features: Tensor
    """bfloat16 [D, L, F * H]."""
    embedding: Tensor
    """float32 [V, H]."""
    head: Tensor
    """float32 [V, H]; logits of a normed state have a standard deviation of one."""
    weights: dict[str, Tensor]
    """float32, the drafter's, under the names of published checkpoints."""


def make_tensors(problem: Problem) -> Tensors:
    """Draws everything that a step needs from one seed."""
    random = torch.Generator().manual_seed(0)
    documents, length, width = problem.num_documents, problem.document_tokens, problem.hidden_size
    loss_mask = torch.zeros(documents, length, dtype=torch.bool)
    loss_mask[:, problem.prompt_tokens : length - problem.block_size] = True
    tokens = torch.randint(problem.vocab_size, (documents, length), generator=random)
    features = torch.randn(documents, length, problem.num_taps * width, generator=random)
    embedding, head = (
        torch.randn(problem.vocab_size, width, generator=random) * width**-0.5 for _ in ("embedding", "head")
    )
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.02
        for name, shape in _shapes(problem).items()
    }
    return Tensors(tokens, loss_mask, features.bfloat16(), embedding, head, weights)


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    width, inner, head_dim = problem.hidden_size, problem.intermediate_size, problem.head_dim
    queries, keys = problem.num_heads * head_dim, problem.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(problem.num_layers) for name, shape in layer.items()}
    return {
        "fc.weight": (width, problem.num_taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **shapes,
    }


def valid_slots(problem: Problem, step: int) -> Tensor:
    """Bool [A, B]: slots of the step's blocks that carry loss."""
    anchors = torch.tensor(problem.anchors[step]).flatten()
    labels = anchors[:, None] + torch.arange(problem.block_size)
    inside = (labels >= problem.prompt_tokens) & (labels < problem.document_tokens - problem.block_size)
    return inside & (torch.arange(problem.block_size) > 0)


def slot_weights(problem: Problem, step: int) -> Tensor:
    """Float32 [A, B]: exp(-(k - 1) / gamma) at valid slots."""
    slots = torch.arange(problem.block_size)
    return torch.exp(-(slots - 1) / problem.gamma) * valid_slots(problem, step)


def run(prepare: Callable[[Problem, Tensors], Callable[[int], float]]) -> None:
    """Main program of a contender: times its steps and prints one line of JSON.

    `prepare` returns the step, which takes its number and returns the weighted mean cross entropy before the update.
    Usage: PROGRAM problem.json threads
    """
    problem = Problem.load(Path(sys.argv[1]))
    torch.set_num_threads(int(sys.argv[2]))
    step = prepare(problem, make_tensors(problem))
    before = resident("VmRSS")
    losses, seconds, cpu_seconds = [], [], []
    for number in range(len(problem.anchors)):
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(step(number))
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    timed = seconds[problem.warmup_steps :]
    result: dict[str, Any] = {
        "seconds": statistics.median(timed),
        "fastest": min(timed),
        "slowest": max(timed),
        "cpu_seconds": statistics.median(cpu_seconds[problem.warmup_steps :]),
        "peak_bytes": resident("VmHWM"),
        "resting_bytes": before,
        "slots": int(valid_slots(problem, 0).sum()),
        "losses": losses,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


def resident(field: str) -> int:
    """Bytes of memory in use by this process (VmRSS), or the most there ever were (VmHWM); Linux only."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel does not tell {field}")
