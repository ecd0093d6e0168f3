"""Small models of other people, with lengths and gains that are not trivial."""

import torch
import transformers as tf
from torch import nn

# the error paths name themselves; the notes about made-up configs do not matter
tf.logging.set_verbosity_error()

VOCAB, WIDTH, LAYERS = 97, 32, 2
COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = dict(COMMON, num_key_value_heads=2)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


# name: how it is built, how many residuals it has, and where its norms stand
DECODERS = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64, bos_token_id=0,
                      eos_token_id=1)
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**GROUPED, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**GROUPED, head_dim=8)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GROUPED)),
    # parallel branches, in both orders of the sum, and a factor on the branch
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**COMMON)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**GROUPED)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**GROUPED, residual_multiplier=0.22)),
}  # fmt: skip
OTHERS = {
    # the function dropout behind the branch
    "bart": lambda: tf.BartForCausalLM(
        tf.BartConfig(vocab_size=VOCAB, d_model=WIDTH, decoder_layers=LAYERS, decoder_attention_heads=4,
                      decoder_ffn_dim=48, max_position_embeddings=64)
    ),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=48,
                     image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    ),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**COMMON)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=4,
                    decoder_start_token_id=0)
    ),
    "encoder": lambda: encoder(norm_first=True),
    "post-norm encoder": encoder,
    "decoder": lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, 4, 48, batch_first=True, norm_first=True), LAYERS
    ),
    "post-norm decoder layer": lambda: nn.TransformerDecoderLayer(WIDTH, 4, 48),
}  # fmt: skip
MODELS = {**DECODERS, **OTHERS}
KINDS = {
    **dict.fromkeys(("gpt2", "llama", "qwen3", "mistral", "vit", "t5", "encoder", "decoder"), "pre-norm"),
    **dict.fromkeys(("gpt-neox", "cohere", "granite"), "pre-norm"),
    **dict.fromkeys(("gemma2", "gemma3"), "norms around"),
    **dict.fromkeys(("bart", "bert", "post-norm encoder", "post-norm decoder layer"), "post-norm"),
    "olmo2": "norm behind",
}
NUMBERS = {
    "gpt-neox": LAYERS,
    "cohere": LAYERS,
    "t5": 5 * LAYERS,
    "decoder": 3 * LAYERS,
    "post-norm decoder layer": 3,
}


def build(name, dtype=torch.float32, eps=None):
    """A model in eval mode whose weights, gains and biases have been moved from their starts."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 + 2 * torch.rand(())).add_(0.05 * torch.randn_like(parameter))
    if eps is not None:
        for module in model.modules():
            for attribute in ("eps", "variance_epsilon"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, eps)
    return model.to(dtype).eval()


def example(name, model):
    generator = torch.Generator().manual_seed(5)
    dtype = next(model.parameters()).dtype

    def rows(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    if name == "vit":
        return {"pixel_values": rows(2, 3, 16, 16)}
    if name.endswith("encoder"):
        return {"src": rows(2, 7, WIDTH)}
    if "decoder" in name:
        return {"tgt": rows(2, 7, WIDTH), "memory": rows(2, 7, WIDTH)}
    ids = torch.randint(VOCAB, (3, 12), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(0)} if name == "t5" else {"input_ids": ids}


def output(model, inputs):
    out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out.logits
