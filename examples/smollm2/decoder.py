"""A batched greedy decoder for Llama-style models on a CPU, with a static key-value cache per slot.

Finished rows leave their slot at once and waiting prompts take it over; prompts share the keys and values of
their common prefix (here the system prompt). In float32 the tokens equal those of generate() in transformers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer block, with fused projections."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_in: Tensor
    norm_mlp: Tensor


class Decoder:
    """Greedy decoding with continuous refilling of ``slots`` rows."""

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int, max_prompt: int, max_new: int) -> None:
        """Load the model in ``folder``; allocate a cache for ``slots`` rows."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        config, state = model.config, model.state_dict()
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.dim, self.eps = int(config.head_dim), float(config.rms_norm_eps)
        self.end, self.max_new, self.slots = int(config.eos_token_id), max_new, slots
        self.embed, self.norm = state["model.embed_tokens.weight"], state["model.norm.weight"]
        self.layers = []
        for number in range(int(config.num_hidden_layers)):
            part = {
                name.split(f"layers.{number}.")[1]: tensor
                for name, tensor in state.items()
                if f"layers.{number}." in name
            }
            attention = [part[f"self_attn.{name}_proj.weight"] for name in "qkv"]
            mlp = [part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
            self.layers.append(
                Layer(
                    torch.cat(attention),
                    part["self_attn.o_proj.weight"],
                    torch.cat(mlp),
                    part["mlp.down_proj.weight"],
                    part["input_layernorm.weight"],
                    part["post_attention_layernorm.weight"],
                )
            )
        length = max_prompt + max_new
        theta = float(config.rope_parameters["rope_theta"])
        inverse = 1.0 / theta ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim)
        angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        shape = (len(self.layers), slots, self.kv_heads, length, self.dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (..., heads, dim), the first two rotated."""
        both = self.heads + self.kv_heads
        flat = functional.linear(self._rms(x, layer.norm_in), layer.qkv)
        flat = flat.view(*x.shape[:-1], both + self.kv_heads, self.dim)
        turned, value = flat[..., :both, :], flat[..., both:, :]
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos.unsqueeze(-2) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(-2)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], value

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + functional.linear(attended, layer.out)
        gate, up = functional.linear(self._rms(x, layer.norm_mlp), layer.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, layer.down)

    def _top(self, x: Tensor) -> Tensor:
        return functional.linear(self._rms(x, self.norm), self.embed).argmax(-1)

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Tensor, start: int) -> Tensor:
        """Fill ``slots`` with right-padded prompts from position ``start`` on; return their next tokens."""
        width, rows = max(map(len, prompts)), len(prompts)
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])[:, start:]
        span, group = width - start, self.heads // self.kv_heads
        mask = torch.arange(width) <= torch.arange(start, width).unsqueeze(1)
        x = self.embed[ids]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            query, key, value = self._project(layer, x, self.cos[start:width], self.sin[start:width])
            keys[slots, :, start:width], values[slots, :, start:width] = (
                key.transpose(1, 2),
                value.transpose(1, 2),
            )
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys[slots, :, :width].repeat_interleave(group, 1),
                values[slots, :, :width].repeat_interleave(group, 1),
                attn_mask=mask,
            )
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(rows, span, -1))
        last = torch.tensor([len(prompt) - start - 1 for prompt in prompts])
        return self._top(x[torch.arange(rows), last])

    def _step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Decode one token for every slot."""
        rows, width = torch.arange(self.slots), int(positions.max()) + 1
        bias = torch.zeros(self.slots, 1, 1, width, dtype=self.embed.dtype)
        bias.masked_fill_((torch.arange(width) > positions.unsqueeze(1))[:, None, None], float("-inf"))
        cos, sin, x = self.cos[positions], self.sin[positions], self.embed[tokens]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            query, key, value = self._project(layer, x, cos, sin)
            keys[rows, :, positions], values[rows, :, positions] = key, value
            query = query.reshape(self.slots, self.kv_heads, -1, self.dim) * self.dim**-0.5
            scores = query @ keys[:, :, :width].transpose(2, 3) + bias
            weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
            x = self._finish(layer, x, (weights @ values[:, :, :width]).reshape(self.slots, -1))
        return self._top(x)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield (index, new token ids) as rows finish; the end token comes last unless the limit cut the row."""
        waiting = deque(range(len(prompts)))
        shared = 0
        if len(prompts) > 1:
            limit = min(map(len, prompts)) - 1
            while shared < limit and len({prompt[shared] for prompt in prompts}) == 1:
                shared += 1
        if shared:
            self._prefill([prompts[0][:shared]], torch.tensor([0]), 0)
            self.keys[:, :, :, :shared] = self.keys[:, :1, :, :shared].clone()
            self.values[:, :, :, :shared] = self.values[:, :1, :, :shared].clone()
        owner = [-1] * self.slots
        made: list[list[int]] = [[] for _ in owner]
        tokens = torch.zeros(self.slots, dtype=torch.long)
        positions = torch.zeros(self.slots, dtype=torch.long)
        while True:
            free = [slot for slot, index in enumerate(owner) if index < 0]
            fresh: list[int] = []
            if waiting and len(free) >= min(8, self.slots):
                fresh = free[: len(waiting)]
                for slot in fresh:
                    owner[slot], made[slot] = waiting.popleft(), []
                where = torch.tensor(fresh)
                chosen = [prompts[owner[slot]] for slot in fresh]
                tokens[where] = self._prefill(chosen, where, shared)
                positions[where] = torch.tensor([len(prompt) for prompt in chosen])
            elif len(free) < self.slots:
                tokens = self._step(tokens, positions)
                positions = positions + 1
            else:
                return
            touched = fresh or [slot for slot, index in enumerate(owner) if index >= 0]
            for slot in touched:
                made[slot].append(int(tokens[slot]))
                if made[slot][-1] == self.end or len(made[slot]) == self.max_new:
                    yield owner[slot], made[slot]
                    owner[slot] = -1
            idle = torch.tensor([index < 0 for index in owner])
            positions = positions.masked_fill(idle, shared)
