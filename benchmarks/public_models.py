"""Shapes of more public models, from their published configurations; writes benchmarks/models/*.json.

    python benchmarks/public_models.py

They were added after the planner was written, to see whether it holds for models that it was not tuned on. Parameter
totals are checked against the published ones, to the digits given there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vescale_fsdp.shapes import ModelShapes, ShapeGroup, to_json
from vescale_fsdp.spec import ParamSpec

MODELS = Path(__file__).parent / "models"
Params = dict[str, tuple[int, ...]]


def model(name: str, root: Params, *blocks: tuple[str, Iterable[int], Params]) -> ModelShapes:
    """A model of a root and repeated blocks (container, numbers, parameters)."""
    groups = [_group((), root)]
    groups += [_group(tuple(f"{container}.{at}" for at in numbers), params) for container, numbers, params in blocks]
    return ModelShapes(name, name, tuple(groups))


def _group(prefixes: tuple[str, ...], params: Params) -> ShapeGroup:
    head = f"{prefixes[0]}." if prefixes else ""
    specs = tuple(ParamSpec(head + name, shape, "bfloat16") for name, shape in params.items())
    return ShapeGroup(prefixes or ("root",), specs)


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Params:
    return {
        "attn.q_proj": (heads * head_dim, hidden),
        "attn.k_proj": (kv_heads * head_dim, hidden),
        "attn.v_proj": (kv_heads * head_dim, hidden),
        "attn.o_proj": (hidden, heads * head_dim),
    }


def latent_attention(hidden: int, heads: int) -> Params:
    """DeepSeek's: low-rank queries (1536) and keys and values (512), 64 rotary and 128 plain dims per head."""
    return {
        "attn.q_a_proj": (1536, hidden),
        "attn.q_a_norm": (1536,),
        "attn.q_b_proj": (heads * 192, 1536),
        "attn.kv_a_proj": (576, hidden),
        "attn.kv_a_norm": (512,),
        "attn.kv_b_proj": (heads * 256, 512),
        "attn.o_proj": (hidden, heads * 128),
    }


def gated(prefix: str, hidden: int, inner: int) -> Params:
    return {
        f"{prefix}.gate_proj": (inner, hidden),
        f"{prefix}.up_proj": (inner, hidden),
        f"{prefix}.down_proj": (hidden, inner),
    }


def norms(hidden: int) -> Params:
    return {"attn_norm": (hidden,), "ffn_norm": (hidden,)}


def ends(hidden: int, vocabulary: int) -> Params:
    return {"embed.weight": (vocabulary, hidden), "norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def experts(hidden: int, inner: int, count: int) -> Params:
    return {name: shape for at in range(count) for name, shape in gated(f"experts.{at}", hidden, inner).items()}


def qwen3_235b() -> ModelShapes:
    block = attention(4096, 64, 4, 128) | {"attn.q_norm": (128,), "attn.k_norm": (128,)} | norms(4096)
    block |= {"router.weight": (128, 4096)} | experts(4096, 1536, 128)
    return model("qwen3-235b-a22b", ends(4096, 151936), ("layers", range(94), block))


def kimi_k2() -> ModelShapes:
    base = latent_attention(7168, 64) | norms(7168)
    dense = base | gated("mlp", 7168, 18432)
    sparse = base | {"router.weight": (384, 7168), "router.bias": (384,)}
    sparse |= experts(7168, 2048, 384) | gated("shared", 7168, 2048)
    return model("kimi-k2", ends(7168, 163840), ("layers", [0], dense), ("layers", range(1, 61), sparse))


def llama4_maverick() -> ModelShapes:
    base = attention(5120, 40, 8, 128) | norms(5120)
    dense = base | gated("mlp", 5120, 16384)
    sparse = base | {
        "router.weight": (128, 5120),
        "experts.gate_up_proj": (128, 5120, 16384),
        "experts.down_proj": (128, 8192, 5120),
    }
    sparse |= gated("shared", 5120, 8192)
    blocks = (("layers", range(0, 48, 2), dense), ("layers", range(1, 48, 2), sparse))
    return model("llama4-maverick", ends(5120, 202048), *blocks)


def llama31_405b() -> ModelShapes:
    block = attention(16384, 128, 8, 128) | norms(16384) | gated("mlp", 16384, 53248)
    return model("llama3.1-405b", ends(16384, 128256), ("layers", range(126), block))


def falcon_mamba() -> ModelShapes:
    block: Params = {
        "norm": (4096,),
        "mixer.in_proj": (16384, 4096),
        "mixer.conv1d.weight": (8192, 1, 4),
        "mixer.conv1d.bias": (8192,),
        "mixer.x_proj": (288, 8192),
        "mixer.dt_proj.weight": (8192, 256),
        "mixer.dt_proj.bias": (8192,),
        "mixer.A_log": (8192, 16),
        "mixer.D": (8192,),
        "mixer.out_proj": (4096, 8192),
    }
    return model("falcon-mamba-7b", ends(4096, 65024), ("layers", range(64), block))


def t5_xxl() -> ModelShapes:
    def heads(name: str) -> Params:
        return {f"{name}.{part}": (4096, 4096) for part in "qkvo"} | {f"{name}_norm": (4096,)}

    ffn: Params = {"wi_0": (10240, 4096), "wi_1": (10240, 4096), "wo": (4096, 10240), "ffn_norm": (4096,)}
    bias: Params = {"self.relative_bias": (32, 64)}
    encoder, decoder = heads("self") | ffn, heads("self") | heads("cross") | ffn
    root: Params = {"embed.weight": (32128, 4096), "lm_head.weight": (32128, 4096)}
    root |= {"encoder_norm": (4096,), "decoder_norm": (4096,)}
    return model(
        "t5-v1.1-xxl",
        root,
        ("encoder", [0], encoder | bias),
        ("encoder", range(1, 24), encoder),
        ("decoder", [0], decoder | bias),
        ("decoder", range(1, 24), decoder),
    )


def sd3_medium() -> ModelShapes:
    def linear(name: str, out: int, into: int) -> Params:
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def stream(name: str) -> Params:
        return (
            linear(f"{name}.adaln", 9216, 1536)
            | linear(f"{name}.qkv", 4608, 1536)
            | linear(f"{name}.proj", 1536, 1536)
            | linear(f"{name}.fc1", 6144, 1536)
            | linear(f"{name}.fc2", 1536, 6144)
        )

    last = stream("x") | linear("context.adaln", 3072, 1536) | linear("context.qkv", 4608, 1536)
    root: Params = {"patch.weight": (1536, 16, 2, 2), "patch.bias": (1536,)}
    root |= linear("time.0", 1536, 256) | linear("time.2", 1536, 1536)
    root |= linear("pooled.0", 1536, 2048) | linear("pooled.2", 1536, 1536) | linear("context", 1536, 4096)
    root |= linear("final.adaln", 3072, 1536) | linear("final.linear", 64, 1536)
    blocks = (("blocks", range(23), stream("x") | stream("context")), ("blocks", [23], last))
    return model("sd3-medium", root, *blocks)


def whisper_large_v3() -> ModelShapes:
    def heads(name: str) -> Params:
        square = {f"{name}.{part}.weight": (1280, 1280) for part in "qkvo"}
        return square | {f"{name}.{part}.bias": (1280,) for part in "qvo"} | norm(f"{name}_norm")

    def norm(name: str) -> Params:
        return {f"{name}.weight": (1280,), f"{name}.bias": (1280,)}

    ffn: Params = {"fc1.weight": (5120, 1280), "fc1.bias": (5120,), "fc2.weight": (1280, 5120), "fc2.bias": (1280,)}
    ffn |= norm("ffn_norm")
    root: Params = {"conv1.weight": (1280, 128, 3), "conv1.bias": (1280,)}
    root |= {"conv2.weight": (1280, 1280, 3), "conv2.bias": (1280,), "positions.encoder": (1500, 1280)}
    root |= {"embed.weight": (51866, 1280), "positions.decoder": (448, 1280)}
    root |= norm("encoder_norm") | norm("decoder_norm")
    encoder, decoder = heads("self") | ffn, heads("self") | heads("cross") | ffn
    return model("whisper-large-v3", root, ("encoder", range(32), encoder), ("decoder", range(32), decoder))


PUBLISHED = {
    qwen3_235b: 235e9,
    kimi_k2: 1.03e12,
    llama4_maverick: 401e9,
    llama31_405b: 406e9,
    falcon_mamba: 7.27e9,
    t5_xxl: 11.1e9,
    sd3_medium: 2.03e9,
    whisper_large_v3: 1.54e9,
}
"""Builders and the parameters that their authors state."""

if __name__ == "__main__":
    for build, published in PUBLISHED.items():
        shapes = build()
        if abs(shapes.numel / published - 1) > 0.006:
            raise SystemExit(f"{shapes.model}: {shapes.numel:,} parameters, published are {published:.3g}")
        (MODELS / f"{shapes.model}.json").write_text(to_json(shapes))
        print(f"{shapes.model}: {shapes.numel:,}")
