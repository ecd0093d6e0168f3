"""A converted model that was saved is loaded as it was: every weight, every step size, and nothing else."""

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from saved_decoders import SIZE, build

from spheret import conversion, hub
from spheret.hub.open import quietly

WEIGHTS = "model.safetensors"
IMAGES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def image_model():
    torch.manual_seed(0)
    return t.ViTForImageClassification(t.ViTConfig(**IMAGES)).eval()


# transformers saves the weights, and the step sizes, of the last two under other names than the model has
MODELS = {
    "llama": lambda: build("llama"),
    "gpt2": lambda: build("gpt2"),
    "gpt-neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZE)).eval(),
    "vit": image_model,
}


def save(model, path, **options):
    model, _ = conversion.convert(model)
    conversion.anneal(model, 0.5)
    with torch.no_grad():
        for number, step in enumerate(conversion.steps(model)):
            step.unit.mul_(1 + number / 10)
    with quietly():
        model.save_pretrained(path, **options)
    return model


def output(model):
    torch.manual_seed(1)
    images = hasattr(model.config, "image_size")
    words = {"pixel_values": torch.randn(1, 3, 8, 8)} if images else {"input_ids": torch.arange(12)[None]}
    with torch.no_grad():
        return model(**words).logits


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, tmp_path):
    torch.manual_seed(0)
    model = save(MODELS[name](), tmp_path / "model")
    loaded = hub.load(tmp_path / "model")
    assert type(loaded) is type(model)
    assert conversion.position(loaded) == 0.5
    assert loaded.config.spheret == model.config.spheret
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key
    assert torch.equal(output(loaded), output(model))
    # and once more, from a model that was loaded
    with quietly():
        loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(output(hub.load(tmp_path / "again")), output(model))


def test_in_parts_and_in_another_dtype(tmp_path):
    model = save(build("llama"), tmp_path / "model", max_shard_size="5KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert torch.equal(output(hub.load(tmp_path / "model")), output(model))
    assert next(hub.load(tmp_path / "model", dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize("part", ["down_proj", ".spheret."])
def test_a_tensor_that_is_missing_or_has_another_shape(part, tmp_path):
    save(build("llama"), tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    lost = next(name for name in whole if part in name)
    for changed in ({name: x for name, x in whole.items() if name != lost}, {**whole, lost: torch.zeros(3)}):
        save_file(changed, tmp_path / WEIGHTS, {"format": "pt"})
        with pytest.raises(ValueError, match=lost):
            hub.load(tmp_path)
