"""Parameter shapes of one transformer group each, written down from public configurations, and small strange ones."""

from __future__ import annotations

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _moe(hidden: int, expert: int, num_experts: int, shared: int, attention: Shapes) -> Shapes:
    experts = tuple(
        pair
        for e in range(num_experts)
        for pair in (
            (f"experts.{e}.gate_proj", (expert, hidden)),
            (f"experts.{e}.up_proj", (expert, hidden)),
            (f"experts.{e}.down_proj", (hidden, expert)),
        )
    )
    common: Shapes = (
        ("input_norm", (hidden,)),
        *attention,
        ("post_norm", (hidden,)),
        ("router", (num_experts, hidden)),
    )
    if not shared:
        return common + experts
    return (
        *common,
        ("shared.gate_proj", (shared, hidden)),
        ("shared.up_proj", (shared, hidden)),
        ("shared.down_proj", (hidden, shared)),
        *experts,
    )


def _gqa(hidden: int, heads: int, kv_heads: int, head: int, *, norms: bool = False) -> Shapes:
    return (
        ("q_proj", (heads * head, hidden)),
        ("k_proj", (kv_heads * head, hidden)),
        ("v_proj", (kv_heads * head, hidden)),
        ("o_proj", (hidden, heads * head)),
        *((("q_norm", (head,)), ("k_norm", (head,))) if norms else ()),
    )


def _mla(hidden: int, heads: int) -> Shapes:
    return (
        ("q_a_proj", (1536, hidden)),
        ("q_a_norm", (1536,)),
        ("q_b_proj", (heads * 192, 1536)),
        ("kv_a_proj", (576, hidden)),
        ("kv_a_norm", (512,)),
        ("kv_b_proj", (heads * 256, 512)),
        ("o_proj", (hidden, heads * 128)),
    )


LAYERS: dict[str, Shapes] = {
    "qwen3-235b-a22b": _moe(4096, 1536, 128, 0, _gqa(4096, 64, 4, 128, norms=True)),
    "qwen3-30b-a3b": _moe(2048, 768, 128, 0, _gqa(2048, 32, 4, 128, norms=True)),
    "kimi-k2": _moe(7168, 2048, 384, 2048, _mla(7168, 64)),
    "glm-4.5-air": _moe(4096, 1408, 128, 1408, _gqa(4096, 96, 8, 128)),
    "llama-4-maverick": (
        ("input_norm", (5120,)),
        *_gqa(5120, 40, 8, 128),
        ("post_norm", (5120,)),
        ("router", (128, 5120)),
        ("experts.gate_up_proj", (128, 5120, 16384)),
        ("experts.down_proj", (128, 8192, 5120)),
        ("shared.gate_proj", (8192, 5120)),
        ("shared.up_proj", (8192, 5120)),
        ("shared.down_proj", (5120, 8192)),
    ),
    "mamba-2.8b": (
        ("norm", (2560,)),
        ("in_proj", (10240, 2560)),
        ("conv1d.weight", (5120, 1, 4)),
        ("conv1d.bias", (5120,)),
        ("x_proj", (192, 5120)),
        ("dt_proj.weight", (5120, 160)),
        ("dt_proj.bias", (5120,)),
        ("A_log", (5120, 16)),
        ("D", (5120,)),
        ("out_proj", (2560, 5120)),
    ),
    "jamba-mini-attention": (
        ("norm", (4096,)),
        *_gqa(4096, 32, 8, 128),
        ("pre_ff_norm", (4096,)),
        ("gate_proj", (14336, 4096)),
        ("up_proj", (14336, 4096)),
        ("down_proj", (4096, 14336)),
    ),
    "t5-11b-decoder": (
        *(
            (f"{name}.{part}", (16384, 1024) if part != "o" else (1024, 16384))
            for name in ("self", "cross")
            for part in "qkvo"
        ),
        ("relative_bias", (32, 128)),
        ("wi", (65536, 1024)),
        ("wo", (1024, 65536)),
        *((f"norm.{i}", (1024,)) for i in range(3)),
    ),
    "gemma-2-27b": (
        *_gqa(4608, 32, 16, 128),
        ("gate_proj", (36864, 4608)),
        ("up_proj", (36864, 4608)),
        ("down_proj", (4608, 36864)),
        *((f"norm.{i}", (4608,)) for i in range(4)),
    ),
    "deepseek-v2-lite": _moe(
        2048,
        1408,
        64,
        2816,
        (
            ("q_proj", (3072, 2048)),
            ("kv_a_proj", (576, 2048)),
            ("kv_a_norm", (512,)),
            ("kv_b_proj", (4096, 512)),
            ("o_proj", (2048, 2048)),
        ),
    ),
    "falcon-40b": (
        ("query_key_value", (9216, 8192)),
        ("dense", (8192, 8192)),
        ("dense_h_to_4h", (32768, 8192)),
        ("dense_4h_to_h", (8192, 32768)),
        *((f"ln.{i}", (8192,)) for i in range(4)),
    ),
    "phi-3-mini": (
        ("qkv_proj", (9216, 3072)),
        ("o_proj", (3072, 3072)),
        ("gate_up_proj", (16384, 3072)),
        ("down_proj", (3072, 8192)),
        *((f"norm.{i}", (3072,)) for i in range(2)),
    ),
    "mamba-2-2.7b": (
        ("in_proj", (10576, 2560)),
        ("conv1d.weight", (5376, 1, 4)),
        ("conv1d.bias", (5376,)),
        *((name, (80,)) for name in ("dt_bias", "A_log", "D")),
        ("gated_norm", (5120,)),
        ("out_proj", (2560, 5120)),
        ("norm", (2560,)),
    ),
    "olmoe-1b-7b": _moe(2048, 1024, 64, 0, _gqa(2048, 16, 16, 128)),
    "t5-vocabulary": (("shared", (32128, 1024)), ("final_norm", (1024,))),
    "odd-vocabulary": (
        ("embed", (50257, 1600)),
        ("positions", (1024, 1600)),
        ("ln_f", (1600,)),
        ("head", (50257, 1600)),
    ),
    "vit-giant-14": (
        *((f"norm{i}.{part}", (1408,)) for i in (1, 2) for part in ("weight", "bias")),
        ("qkv.weight", (4224, 1408)),
        ("qkv.bias", (4224,)),
        ("proj.weight", (1408, 1408)),
        ("proj.bias", (1408,)),
        ("fc1.weight", (6144, 1408)),
        ("fc1.bias", (6144,)),
        ("fc2.weight", (1408, 6144)),
        ("fc2.bias", (1408,)),
    ),
    "convolutions": (
        ("stem", (64, 3, 7, 7)),
        *((f"conv{i}", (c, c, 3, 3)) for i, c in enumerate((64, 128, 256, 512))),
        *((f"bn{i}", (c,)) for i, c in enumerate((64, 128, 256, 512))),
        ("fc", (1000, 512)),
    ),
    "scalars": tuple((f"scale.{i}", ()) for i in range(300)),
    "many-tiny": tuple((f"lora.{i}", ((i % 7) + 1, (i % 5) + 1)) for i in range(400)),
    "one-huge": (("table", (1_000_003, 129)),),
    "primes": tuple((f"p{i}", (p, q)) for i, (p, q) in enumerate(((7919, 13), (104729, 3), (31, 997), (2, 65537)))),
}
