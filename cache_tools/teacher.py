"""What a store keeps of the target's own prediction, for distillation: nothing, its last hidden state, or its top-k.

A row belongs to the position whose output predicts the next token: the teacher of the token at t + 1 is row t.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cache_tools.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORMS = "none, hidden, hidden:all, or topk:K with K from 1 to 1024"


@dataclass(frozen=True)
class Teacher:
    """One way to keep the target's prediction.

    "hidden": the input of the target's final norm; "topk": the k likeliest next tokens and their log-probabilities.
    """

    kind: Literal["none", "hidden", "topk"]
    everywhere: bool = False
    """Every row; otherwise only rows whose next token is supervised, the rest being zeros."""
    k: int = 0

    @classmethod
    def parse(cls, text: str) -> Teacher:
        """From the text that settings and manifest hold. Raises ConfigError."""
        found = re.fullmatch(r"none|hidden(?P<all>:all)?|topk:(?P<k>[1-9]\d{0,3})", text)
        k = int(found["k"] or 0) if found else 0
        if found is None or k > 1024:
            raise ConfigError("unknown kind of teacher", got=text, expected=_FORMS)
        kind: Literal["none", "hidden", "topk"] = "topk" if k else "none" if text == "none" else "hidden"
        return cls(kind, found["all"] is not None, k)

    def rows(self, loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows [length] of a sample are kept."""
        import numpy as np  # settings load this module, and `--help` must not take numpy's time

        if self.everywhere:
            return np.ones(len(loss_mask), dtype=np.bool_)
        return np.append(loss_mask[1:], False).astype(np.bool_)
