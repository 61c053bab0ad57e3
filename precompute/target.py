"""The target model: loading it, running it up to the last needed layer, and the parts of it that training needs.

Shapes: B = samples in a batch, T = tokens of its longest sample, N = tokens of the batch without padding,
F = kept layers, H = hidden size, V = rows of the embedding.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cache_tools.errors import TargetError

KEPT_DTYPE = torch.bfloat16
_EMBEDDING_SLICE_ROWS = 8192
_LOGITS_SLICE_ELEMENTS = 2**26
_NORM_TOLERANCE = 1e-3


class _LastLayerReached(Exception):
    """Not an error: leaves the decoder's forward behind the last layer that anybody asked for."""


@dataclass(frozen=True)
class TargetParts:
    """Weights that training needs: uint16 bfloat16 bit patterns, or float32 if the target runs in float32."""

    embed_tokens: NDArray[Any]  # [V, H], what the embedding module returns for each token
    lm_head: NDArray[Any] | None  # [V, H]; None when it is the same as embed_tokens
    final_norm: NDArray[Any]  # [H]
    norm_kind: Literal["plain", "one_plus_weight"]
    norm_eps: float


class Target:
    """A loaded target with hooks on the layers to keep. Not thread-safe."""

    def __init__(self, model: Any, layer_ids: Sequence[int], device: torch.device) -> None:
        self._model, self._device = model, device
        num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._decoder, self._layers = _find_decoder(model, num_layers)
        self._rows: Tensor | None = None  # positions of real tokens in the flattened [B * T]
        self._kept: list[Tensor] = []
        for layer_id in layer_ids:
            self._layers[layer_id].register_forward_hook(self._hook(last=layer_id == layer_ids[-1]))

    @classmethod
    def load(
        cls, folder: Path, *, layer_ids: Sequence[int], dtype: str, attention: str, device: torch.device
    ) -> Target:
        """Loads the weights. Raises TargetError when they are missing, incomplete or of an unknown kind."""
        if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
            raise TargetError(
                "flash_attention_2 was asked for, but the package flash-attn is not installed",
                fix="install the extra `gpu`, or pass --attention sdpa",
            )
        options: dict[str, Any] = {
            "dtype": getattr(torch, dtype),
            "attn_implementation": attention,
            "local_files_only": True,
            "output_loading_info": True,
        }
        if device.type == "cuda" and importlib.util.find_spec("accelerate") is not None:
            options["device_map"] = {"": str(device)}  # straight to the GPU, without a copy in host memory
        model, info = _from_pretrained(folder, options)
        missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        if missing:
            raise TargetError(
                "the weights do not fit the model in config.json",
                where=folder,
                got=f"{len(missing)} weights missing or of the wrong shape, for example {missing[0]}",
                fix="check that config.json and the weight files belong together",
            )
        return cls(model.to(device).eval(), layer_ids, device)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @torch.inference_mode()
    def hidden_states(self, batch: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Outputs of the F kept layers, bfloat16 [N, H] each, on the device, samples one after the other.

        `batch`: token ids [L] of each sample. They run together, padded on the right: every layer of a causal
        target, linear attention included, then sees exactly what it sees for the sample alone.
        """
        lengths = [len(ids) for ids in batch]
        longest = max(lengths)
        input_ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask = torch.zeros((len(batch), longest), dtype=torch.int64)
        for index, ids in enumerate(batch):
            input_ids[index, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            mask[index, : len(ids)] = 1
        padded = min(lengths) < longest
        self._rows = mask.flatten().nonzero().squeeze(1).to(self._device) if padded else None
        self._kept = []
        with suppress(_LastLayerReached):
            self._decoder(
                input_ids=input_ids.to(self._device),
                attention_mask=mask.to(self._device) if padded else None,
                use_cache=False,
            )
        kept, self._kept = self._kept, []
        return kept

    @torch.inference_mode()
    def top_tokens(self, last: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens, int32 [N, k], and their natural log-probabilities, float32 [N, k].

        `last` [N, H]: outputs of the last layer. Sorted, the likeliest first.
        """
        norm, head = self._final_norm(), self._model.get_output_embeddings()
        rows = max(1, _LOGITS_SLICE_ELEMENTS // head.weight.shape[0])
        slices = []
        for first in range(0, len(last), rows):
            part = last[first : first + rows]
            logits = head(norm(part.to(head.weight.dtype))).float()
            values, ids = torch.log_softmax(logits, dim=-1).topk(k, dim=-1)
            slices.append((ids.int(), values))
        if not slices:
            return last.new_empty((0, k), dtype=torch.int32), last.new_empty((0, k), dtype=torch.float32)
        return torch.cat([ids for ids, _ in slices]), torch.cat([values for _, values in slices])

    def parts(self) -> TargetParts:
        """Embedding, output head and final norm, found by what they do. Raises TargetError for unknown kinds."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise TargetError(
                "the target's output head cannot be stored",
                got="no output head" if head is None else "a head with a bias",
                expected="a linear head without bias",
            )
        embedded = _embedding_rows(embedding, self._device)
        norm = self._final_norm()
        kind, eps = _norm_kind(norm)
        same = head.weight.data_ptr() == embedding.weight.data_ptr() and np.array_equal(
            embedded, _to_numpy(embedding.weight)
        )
        return TargetParts(
            embed_tokens=embedded,
            lm_head=None if same else _to_numpy(head.weight),
            final_norm=_to_numpy(norm.weight),
            norm_kind=kind,
            norm_eps=eps,
        )

    def _hook(self, *, last: bool) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            flat = hidden.flatten(0, 1)
            # A copy in any case: a later layer may work in place.
            self._kept.append(flat.to(KEPT_DTYPE, copy=True) if self._rows is None else flat[self._rows].to(KEPT_DTYPE))
            if last:
                raise _LastLayerReached

        return keep

    def _final_norm(self) -> Any:
        """The module behind the layers that holds one vector: a child of the decoder with a weight [H]."""
        hidden_size = self._model.get_input_embeddings().weight.shape[1]
        candidates = [
            child
            for child in self._decoder.children()
            if isinstance(getattr(child, "weight", None), Tensor) and child.weight.shape == (hidden_size,)
        ]
        if len(candidates) != 1:
            raise TargetError(
                "cannot tell which module is the target's final norm",
                where=type(self._decoder).__name__,
                got=f"{len(candidates)} modules with a weight of {hidden_size} values beside the layers",
                expected="exactly one",
            )
        return candidates[0]


def _from_pretrained(folder: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    transformers_logging: Any = logging
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # its redrawn lines fill a log file
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text_only = type(config) in AutoModelForCausalLM._model_mapping
        auto: Any = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(folder, **options)
    except Exception as error:  # damaged files make this library raise anything
        raise TargetError("transformers cannot load the target", where=folder, got=error) from error
    return loaded


def _find_decoder(model: Any, num_layers: int) -> tuple[Any, nn.ModuleList]:
    """The module that owns both the token embedding and a list of `num_layers` layers, whatever they are called."""
    embedding = model.get_input_embeddings()
    found = [
        (module, child)
        for module in model.modules()
        if any(part is embedding for part in module.children())
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise TargetError(
            "cannot find the target's decoder layers",
            where=type(model).__name__,
            got=f"{len(found)} modules that hold the token embedding and {num_layers} layers",
            expected="exactly one",
        )
    return found[0]


def _embedding_rows(embedding: Any, device: torch.device) -> NDArray[Any]:
    """[V, H]: what the module returns, which is not its weight where a target scales its embeddings."""
    num_rows = embedding.weight.shape[0]
    with torch.inference_mode():
        slices = [
            _to_numpy(embedding(torch.arange(first, min(first + _EMBEDDING_SLICE_ROWS, num_rows), device=device)))
            for first in range(0, num_rows, _EMBEDDING_SLICE_ROWS)
        ]
    return np.concatenate(slices)


def _norm_kind(norm: Any) -> tuple[Literal["plain", "one_plus_weight"], float]:
    """Which formula an RMS norm computes, and its epsilon: x / rms(x) * w, or x / rms(x) * (1 + w).

    Asked of the module itself, in float32: names of classes do not tell. The second probe is so small that a wrong
    epsilon shows.
    """
    module = copy.deepcopy(norm).float().cpu()
    weight = module.weight.detach()
    eps = next((float(getattr(module, n)) for n in ("variance_epsilon", "eps") if hasattr(module, n)), 0.0)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((2, len(weight)), generator=generator)
    probe[1] *= max(eps, 1e-12) ** 0.5
    with torch.inference_mode():
        got = module(probe)
    normed = probe * torch.rsqrt(probe.pow(2).mean(-1, keepdim=True) + eps)
    kinds: tuple[tuple[Literal["plain", "one_plus_weight"], Tensor], ...] = (
        ("plain", normed * weight),
        ("one_plus_weight", normed * (1 + weight)),
    )
    for kind, expected in kinds:
        if torch.allclose(got, expected, rtol=_NORM_TOLERANCE, atol=_NORM_TOLERANCE * float(expected.abs().mean())):
            return kind, eps
    raise TargetError(
        "the target's final norm is of an unknown kind",
        where=type(norm).__name__,
        expected="an RMS norm that multiplies by its weight, or by one plus its weight",
    )


def _to_numpy(values: Tensor) -> NDArray[Any]:
    """bfloat16 as uint16 bit patterns, float32 as it is."""
    values = values.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    assert values.dtype == torch.float32, values.dtype
    return values.numpy()
