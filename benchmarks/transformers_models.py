"""Train transformers' own GPT-2 or Llama on State of the Union addresses, for measurements of `spheret convert`.

    python benchmarks/transformers_models.py llama --seed 0 --out DIR

8 layers, width 96, bytes, 1,000 steps of 8 sequences of 128 tokens: some minutes on one core. The directory is what
`save_pretrained` writes, with a tokenizer, so that anything that reads transformers' models reads it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from spheret.data import cached
from spheret.hub.tokenizer_files import write_tokenizer
from spheret.optim import parameter_groups

LAYERS, HEADS, WIDTH, BLOCK, BATCH, PEAK, WARMUP = 8, 4, 96, 128, 8, 3e-3, 100


def model_of(shape: str, vocabulary: int, end: int) -> Any:
    """The untrained model. Dropout is off, as in today's pretraining."""
    words = {"vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    if shape == "gpt2":
        # the same function as GPT-2's gelu_new, in one kernel
        words |= {
            "activation_function": "gelu_pytorch_tanh",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
        return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=BLOCK, **words))
    sizes = {"hidden_size": WIDTH, "intermediate_size": 256, "max_position_embeddings": BLOCK}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, **sizes, **words))


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))))


@torch.no_grad()
def validation_loss(model: Any, data: Any) -> float:
    """The mean loss of 64 windows of the validation split."""
    losses = [_loss(model, x, y) for x, y, _ in data.validation(BLOCK, 16, windows=64)]
    return float(torch.stack(losses).mean())


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1).float(), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=["gpt2", "llama"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    torch.set_num_threads(1)
    data = cached("sotu", "bytes")
    described = data.manifest.tokenizer
    torch.manual_seed(words.seed)
    model = model_of(words.shape, described.vocab_size, described.end_of_text)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), betas=(0.9, 0.95))
    loader = data.loader(block=BLOCK, batch_size=BATCH, seed=words.seed)
    for step in range(words.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, words.steps)
        loss = _loss(model, *loader.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(
                f"step {step + 1}: train {loss.item():.3f}, val {validation_loss(model.eval(), data):.4f}", flush=True
            )
            model.train()
    words.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(words.out)
    write_tokenizer(words.out, described, None, BLOCK)


if __name__ == "__main__":
    main()
