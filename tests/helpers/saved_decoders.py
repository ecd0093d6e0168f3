"""Small saved models of several architectures, with the tokenizer `bytes`."""

import torch
import transformers as t

from spheret.data.tokenizers import describe, load
from spheret.hub.open import quietly
from spheret.hub.tokenizer_files import write_tokenizer

SIZE = {
    "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
GROUPED = {**SIZE, "num_key_value_heads": 2}
OLD = {
    "vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 256,
    "eos_token_id": 256,
}  # fmt: skip
# what they differ in: norms before, behind, around and after the sum, parallel branches, local attention, soft caps,
# sinks, experts, and attention outside of transformers' interface
CONFIGS = {
    "gpt2": lambda: t.GPT2Config(**OLD),
    "llama": lambda: t.LlamaConfig(**GROUPED),
    "qwen3": lambda: t.Qwen3Config(**GROUPED, head_dim=4),
    "mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=3),
    "gemma2": lambda: t.Gemma2Config(**GROUPED, head_dim=4, sliding_window=3, attn_logit_softcapping=2.0),
    "gemma3": lambda: t.Gemma3TextConfig(**GROUPED, head_dim=4, sliding_window=3),
    "olmo2": lambda: t.Olmo2Config(**GROUPED),
    "gpt-neox": lambda: t.GPTNeoXConfig(**SIZE),
    "phi": lambda: t.PhiConfig(**SIZE),
    "gpt-oss": lambda: t.GptOssConfig(
        **GROUPED, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "granite": lambda: t.GraniteConfig(**GROUPED, residual_multiplier=0.3),
    "gpt-1": lambda: t.OpenAIGPTConfig(**OLD),
}  # fmt: skip


def build(name):
    """A model whose weights are far from their start, so that no gain, bias or length is trivial."""
    torch.manual_seed(0)
    with quietly():
        model = t.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(4)
    return model.eval()


def save(model, directory):
    """Write a model with its tokenizer."""
    with quietly():
        model.save_pretrained(directory)
    write_tokenizer(directory, describe(load("bytes")), None, 32)
    return directory
