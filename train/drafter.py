"""The DFlash drafter: Qwen3-style layers whose keys and values come from target features and from the block.

Letters: T = context rows, F = tapped target layers, H = hidden size, A = anchors, B = block size, N = query
heads, G = key/value heads, D = head dimension.

Parameters are named as in published DFlash checkpoints: 11 tensors per layer and `fc`, `hidden_norm`, `norm`.
The embedding and the output head are the target's, frozen, and not part of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.attention import BlockLayout, attend, attend_cached
from train.drafter_config import DrafterConfig
from train.rms_norm import RMSNorm

INIT_STD = 0.02


class Rotary:
    """Rotary angles over the whole head. Holds no tensor: casting a drafter leaves them in float32."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta

    def inv_freq(self, device: torch.device) -> Tensor:
        """Float32 [D/2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        return 1.0 / self.theta**exponents

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, D/2] for positions [...], ready for heads [..., heads, D] in `rotate`."""
        angles = (positions.float()[..., None] * self.inv_freq(positions.device))[..., None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [..., heads, D] by the angles of `Rotary.table`: channel i pairs with channel i + D/2."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    turned = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat(turned, dim=-1)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block with the same projections."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.window = config.window(layer)
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def keys_values(self, rows: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows [..., H] at the table's positions -> keys and values [..., G, D]."""
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, table), self.v_proj(rows).unflatten(-1, (-1, self.head_dim))

    def queries(self, rows: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rows [..., H] -> queries [..., N, D]."""
        return rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), table)

    def project(self, output: Tensor) -> Tensor:
        """Heads [..., N, D] -> [..., H]."""
        projected: Tensor = self.o_proj(output.flatten(-2))
        return projected


class SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU. Only the block stream is normed on input; context rows arrive normed."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention: x [..., H], attended [..., N, D] -> [..., H]."""
        x = x + self.self_attn.project(attended)
        finished: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return finished


class ContextCache:
    """Keys and values of the context rows of one sequence, per draft layer, during decoding.

    Grows only by `DFlashDrafter.extend`, row t holding position t.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add keys and values [n, G, D] after row `length` of one layer."""
        needed = self.length + keys.shape[0]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[0] < needed:
            # Doubling keeps the copying linear in the final length.
            grown = (
                keys.new_empty(2 * needed, *keys.shape[1:]),
                values.new_empty(2 * needed, *values.shape[1:]),
            )
            for new, old in zip(grown, buffers or (), strict=False):
                new[: self.length] = old[: self.length]
            self._buffers[layer] = buffers = grown
        buffers[0][self.length : needed] = keys
        buffers[1][self.length : needed] = values

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, G, D]."""
        buffers = self._buffers[layer]
        assert buffers is not None, "draft_block before the first extend"
        return buffers[0][: self.length], buffers[1][: self.length]


class DFlashDrafter(nn.Module):
    """Draft layers over context features. `seed` alone fixes the initial weights."""

    def __init__(self, config: DrafterConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2 and not parameter.is_meta:
                parameter.normal_(std=INIT_STD, generator=generator)

    def draft_layers(self) -> list[DraftLayer]:
        """The layers with their type (nn.ModuleList forgets it)."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def context(self, features: Tensor) -> Tensor:
        """Tapped target features [T, F * H], layers in `target_layer_ids` order -> context rows [T, H]."""
        rows: Tensor = self.hidden_norm(self.fc(features))
        return rows

    def forward(self, block_embeds: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Blocks of a pack: embeddings [A, B, H], context rows [T, H] -> normed final states [A, B, H]."""
        return self.blocks(block_embeds, self.keys_values(context, layout.context_positions()), layout)

    def keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context rows [T, H] at their documents' positions [T] -> keys and values [T, G, D] of each layer."""
        table = self.rotary.table(positions, context.dtype)
        return [layer.self_attn.keys_values(context, table) for layer in self.draft_layers()]

    def blocks(self, block_embeds: Tensor, rows: Sequence[tuple[Tensor, Tensor]], layout: BlockLayout) -> Tensor:
        """Blocks [A, B, H] over the keys and values of the context rows -> normed final states [A, B, H]."""
        x = block_embeds
        block_table = self.rotary.table(layout.block_positions, x.dtype)
        for layer, (keys, values) in zip(self.draft_layers(), rows, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            own_keys, own_values = attention.keys_values(normed, block_table)
            queries = attention.queries(normed, block_table)
            attended = attend(queries, keys, values, own_keys, own_values, layout, attention.window)
            x = layer.finish(x, attended)
        hidden: Tensor = self.norm(x)
        return hidden

    def new_cache(self) -> ContextCache:
        return ContextCache(self.config.num_hidden_layers)

    def extend(self, cache: ContextCache, features: Tensor) -> None:
        """Add the features [n, F * H] of the next n positions of the sequence to the cache."""
        rows = self.context(features)
        positions = torch.arange(cache.length, cache.length + rows.shape[0], device=rows.device)
        table = self.rotary.table(positions, rows.dtype)
        for index, layer in enumerate(self.draft_layers()):
            cache.append(index, *layer.self_attn.keys_values(rows, table))
        cache.length += rows.shape[0]

    def draft_block(self, block_embeds: Tensor, cache: ContextCache) -> Tensor:
        """The block whose anchor follows the cached rows: embeddings [B, H] -> normed final states [B, H]."""
        x = block_embeds
        positions = torch.arange(cache.length, cache.length + x.shape[0], device=x.device)
        table = self.rotary.table(positions, x.dtype)
        for index, layer in enumerate(self.draft_layers()):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            own_keys, own_values = attention.keys_values(normed, table)
            keys, values = cache.rows(index)
            queries = attention.queries(normed, table)
            x = layer.finish(x, attend_cached(queries, keys, values, own_keys, own_values, attention.window))
        hidden: Tensor = self.norm(x)
        return hidden
