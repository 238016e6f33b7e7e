"""Small model for engines, and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512


def model(folder: Path, seed: int = 1, layers: int = 4, heads: int = 4, head_dim: int = 32) -> Path:
    """Writes a small Llama with random weights, large enough that every token of a prompt affects the next tokens."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = heads * head_dim, 2 * heads * head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    source = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * columns**-0.5

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for projection in ("q", "k", "v", "o"):
            weights[f"{name}.self_attn.{projection}_proj.weight"] = matrix(hidden, hidden) * 2
        for projection, (rows, columns) in {
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            weights[f"{name}.mlp.{projection}_proj.weight"] = matrix(rows, columns)
        weights[f"{name}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    return folder


def adapter(folder: Path, seed: int, layers: int = 4, hidden: int = 128, rank: int = 8) -> Path:
    """Writes a LoRA adapter with random weights for a model of :func:`model`, large enough to change answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    targets = ("q_proj", "v_proj")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=source)
            weights[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=source) * hidden**-0.5
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
