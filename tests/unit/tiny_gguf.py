"""A small llama with random weights as a GGUF file, and what it computes, written down plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP, CONTEXT = 2, 32, 4, 2, 64, 32
SIZE = HIDDEN // HEADS
LETTERS = [chr(number) for number in range(97, 97 + 26)]
TOKENS = ["<|end|>", "<|user|>", *LETTERS, "Ġ", "ab", "Ġc", "abĠ", "Ċ"]
MERGES = ["a b", "Ġ c", "ab Ġ"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
)
Weights = dict[str, NDArray[np.float32]]


def weights(seed: int = 0) -> Weights:
    """By GGUF's names."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * SIZE, HIDDEN),
            "attn_v": (KV_HEADS * SIZE, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    found = {name: random.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
    return {f"{name}.weight": value + (1 if "norm" in name else 0) for name, value in found.items()}


def write(path: Path, values: Weights, kind: str = "F32", **changes: Any) -> Weights:
    """Write the file; the weights as they can be read back. ``changes`` of the header, by key with _ for ."""
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if "experts" in changes:
        writer.add_expert_count(changes["experts"])
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changes["scaling"]))
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(changes.get("tokens", TOKENS))
    writer.add_token_types(changes.get("types", [3, 3] + [1] * (len(TOKENS) - 2)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(changes.get("template", TEMPLATE))
    quantised = GGMLQuantizationType[kind]
    stored: Weights = {}
    for name, value in values.items():
        plain = value.ndim == 1 or kind == "F32"
        packed = value if plain else quantize(value, quantised)
        writer.add_tensor(name, packed, raw_dtype=None if plain else quantised)
        stored[name] = value if plain else dequantize(packed, quantised).reshape(value.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def reference(values: Weights, tokens: list[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits (s, vocabulary) and attention (layers, heads, s, s), in float64, the whole sequence at once."""
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in values.items()}
    x = w["token_embd"][tokens]
    length = len(tokens)
    maps = np.zeros((LAYERS, HEADS, length, length))
    for layer in range(LAYERS):
        of = f"blk.{layer}."
        normed = _norm(x, w[of + "attn_norm"])
        q, k, v = (
            (normed @ w[of + f"attn_{name}"].T).reshape(length, -1, SIZE).transpose(1, 0, 2) for name in ("q", "k", "v")
        )
        q, k = _turn(q), _turn(k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = q[head] @ k[group].T / np.sqrt(SIZE)
            scores[np.triu_indices(length, 1)] = -np.inf
            maps[layer, head] = _softmax(scores)
            mixed.append(maps[layer, head] @ v[group])
        x = x + np.concatenate(mixed, -1) @ w[of + "attn_output"].T
        normed = _norm(x, w[of + "ffn_norm"])
        gate = normed @ w[of + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[of + "ffn_up"].T)) @ w[of + "ffn_down"].T
    return _norm(x, w["output_norm"]) @ w["token_embd"].T, maps


def _norm(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def _softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _turn(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each pair of neighbours as a complex number, turned by its position's angle."""
    angles = np.outer(np.arange(x.shape[1]), 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape)
