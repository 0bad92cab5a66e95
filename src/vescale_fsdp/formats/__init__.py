"""Block formats: what they are, how their blocks lie in shards, and the memory that holds codes and scales.

Reading order: packing tiling block_format block_cuts encoded planes plane_memory
"""

from .block_format import BlockFormat, Encoded, decode, encode
from .encoded import EncodedTensor, TakesEncoded, takes_encoded
from .packing import pack, unpack

__all__ = [
    "BlockFormat",
    "Encoded",
    "EncodedTensor",
    "TakesEncoded",
    "decode",
    "encode",
    "pack",
    "takes_encoded",
    "unpack",
]
