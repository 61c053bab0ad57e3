"""Names of the codecs, for settings that must load without numpy."""

from __future__ import annotations

from typing import Literal

Codec = Literal["bf16", "raw", "int8", "fp8", "int4"]
"""How hidden states are stored: "bf16" = lossless, compressed; "raw" = the bit patterns as they are; the others are
quantised, see `quantise`."""
