"""The experts that the engine's routers chose, as text: base64 of a .npy file, [tokens, layers, k] whole numbers.

The text is what vLLM answers with --enable-return-routed-experts (entrypoints/scale_out/token_in_token_out/protocol.py). A token that was
sampled last has not been through the model, so a reply covers all tokens but that one.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt

from vime.errors import DataError

__all__ = ["decoded", "encoded", "joined"]


def encoded(chosen: npt.NDArray[np.integer]) -> str:
    """`chosen` [tokens, layers, k] as an entry of Sample.rollout_routed_experts."""
    out = io.BytesIO()
    np.save(out, chosen, allow_pickle=False)
    return base64.b64encode(out.getvalue()).decode("ascii")


def decoded(text: str) -> npt.NDArray[np.int16]:
    """[tokens, layers, k]. Raises DataError when `text` is not what `encoded` makes."""
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"routed_experts is no base64 of a .npy file ({error}).") from error
    if not isinstance(found, np.ndarray) or found.ndim != 3 or found.dtype.kind not in "iu":
        raise DataError(f"routed_experts has shape {getattr(found, 'shape', None)}; expected whole numbers [tokens, layers, k].")
    return found.astype(np.int16)


def joined(texts: list[str]) -> npt.NDArray[np.int16]:
    """What several replies said of one sequence, each of the tokens behind those that the ones before covered."""
    parts = [decoded(text) for text in texts]
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError(f"routed_experts is of several models: layers and k are {sorted({part.shape[1:] for part in parts})}.")
    return np.concatenate(parts)
