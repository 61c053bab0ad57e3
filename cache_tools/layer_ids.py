"""Which target layers a DFlash drafter reads when nobody chose them."""

from __future__ import annotations

from cache_tools.errors import ConfigError

_FIRST = 1
_LEFT_OUT_AT_END = 3


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The 0-based target layers that published DFlash drafters tap: one per draft layer, spread evenly.

    A single draft layer reads the middle; more of them read from layer 1 to `num_target_layers - 3`, rounded half
    to even. The last two layers are left out on purpose: engines disagree about what the last one's output is.

    Raises ConfigError when the target has too few layers for distinct taps.
    """
    if num_draft_layers < 1:
        raise ConfigError("a drafter needs at least one layer", got=num_draft_layers, expected="1 or more")
    if num_draft_layers == 1:
        ids = [num_target_layers // 2]
    else:
        span = num_target_layers - _LEFT_OUT_AT_END - _FIRST
        ids = [round(_FIRST + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    if num_target_layers < 1 or ids != sorted(set(ids)) or ids[-1] >= num_target_layers:
        raise ConfigError(
            "the target has too few layers to spread the drafter's taps over",
            got=f"{num_target_layers} target layers for {num_draft_layers} draft layers",
            expected="distinct layers between 1 and the target's third from last",
            fix="name the layers yourself (layer ids), or use fewer draft layers",
        )
    return tuple(ids)
