"""One communication group: its buffers, what moves them, its shards and gradients, and the group that uses them.

Reading order:

    buffer streams traffic transfer quantized shards stored_shards extensions kept
    portions gradients reduction full_values places param_group encoded_group extension_group
"""

__all__: list[str] = []
