"""bfloat16 bit patterns, and the bytes of one chunk: little-endian values, Blosc if asked for, then CRC32C."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from cache_tools.files import Json

CRC_BYTES = 4
BF16_MAGNITUDE = np.uint16(0x7FFF)
"""Mask of a bfloat16 bit pattern without its sign; magnitudes compare like the numbers they stand for."""
BF16_INFINITY = np.uint16(0x7F80)
"""The magnitude of infinity; larger ones are NaN."""
# The automatic block size of Blosc splits chunks of hidden states so finely that a third of the gain is lost.
_BLOCK_BYTES = 524288
_LEVEL = 1

# Blosc's own threads put blocks into the output in the order in which they finish: same input, other bytes.
blosc.use_threads = False


class ChunkError(ValueError):
    """A chunk's bytes do not match their checksum."""


@dataclass(frozen=True)
class ChunkCodec:
    """Turns the values of one chunk, integers or floats of `itemsize` bytes, into bytes and back."""

    itemsize: int
    compressed: bool

    def encode(self, values: NDArray[Any]) -> bytes:
        """`values`: one whole chunk, C-contiguous, little-endian."""
        return b"".join(self.encode_parts(values))

    def encode_parts(self, values: NDArray[Any]) -> tuple[bytes | memoryview, bytes]:
        """The same in two parts, content and checksum; the content may be the memory of `values` itself."""
        if self.compressed:
            content = self._compress(values)
            return content, _checksum_bytes(content)
        plain = values.reshape(-1).view(np.uint8)
        return plain.data, _checksum_bytes(plain)

    def decode(self, encoded: NDArray[np.uint8], out: NDArray[Any], *, check: bool = True) -> None:
        """Fills `out`, one whole chunk, C-contiguous. Raises ChunkError when the checksum, if looked at, is wrong."""
        content = _content(encoded, check=check)
        try:
            if self.compressed:
                blosc.decompress(content, out)
            else:
                out.reshape(-1).view(np.uint8)[:] = content
        except (RuntimeError, ValueError) as error:  # right checksum, but not what this codec writes
            raise ChunkError(str(error)) from error

    def view(
        self, encoded: NDArray[np.uint8], shape: tuple[int, ...], dtype: str, *, check: bool = True
    ) -> NDArray[Any]:
        """The values of an uncompressed chunk where they lie. Raises ChunkError as `decode` does."""
        assert not self.compressed
        try:
            return _content(encoded, check=check).view(dtype).reshape(shape)
        except ValueError as error:  # right checksum, but not what this codec writes
            raise ChunkError(str(error)) from error

    def metadata(self) -> list[Json]:
        """The same as a list of Zarr v3 codecs."""
        codecs: list[Json] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.compressed:
            configuration: dict[str, Json] = {
                "cname": "zstd",
                "clevel": _LEVEL,
                "shuffle": "shuffle",
                "typesize": self.itemsize,
                "blocksize": _BLOCK_BYTES,
            }
            codecs.append({"name": "blosc", "configuration": configuration})
        return [*codecs, {"name": "crc32c"}]

    def _compress(self, values: NDArray[Any]) -> bytes:
        return bytes(
            blosc.compress(values, b"zstd", _LEVEL, blosc.SHUFFLE, blocksize=_BLOCK_BYTES, typesize=self.itemsize)
        )


def _checksum_bytes(content: bytes | NDArray[np.uint8]) -> bytes:
    return int(google_crc32c.value(content)).to_bytes(CRC_BYTES, "little")


def _content(encoded: NDArray[np.uint8], *, check: bool) -> NDArray[np.uint8]:
    return checked_content(encoded) if check else encoded[:-CRC_BYTES]


def checked_content(encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`encoded` without the checksum at its end. Raises ChunkError when they do not belong together."""
    if len(encoded) < CRC_BYTES:
        raise ChunkError(f"{len(encoded)} bytes are too few for a checksum")
    content = encoded[:-CRC_BYTES]
    stored = int.from_bytes(encoded[-CRC_BYTES:].tobytes(), "little")
    found = int(google_crc32c.value(content))
    if found != stored:
        raise ChunkError(f"checksum {found:08x}, expected {stored:08x}")
    return content


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bit patterns, exactly; same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 bit patterns, rounded to nearest, ties to even; NaN stays NaN; same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def content_id(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> bytes:
    """16 bytes that name a sample: BLAKE2b of its token ids (little-endian) and loss mask (0/1)."""
    digest = hashlib.blake2b(np.ascontiguousarray(input_ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.digest()
