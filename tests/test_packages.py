"""Packages that train or change a model of ours, each in a process of its own. Some live apart (Makefile).

Those of peft are in tests/conversion/test_keeps_working.py, those of timm in tests/conversion/test_timm.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

APART = Path(sys.prefix) / "apart"
START = """
import sys

sys.path.append(sys.argv[1])
import torch

import spheret

torch.set_num_threads(1)
torch.manual_seed(0)
gpt = spheret.GPT(spheret.GPTConfig(layers=2, heads=2, width=32, block=8, vocab=11, scheme_options={"alpha": 0.5}))
tokens = torch.randint(11, (4, 8))
norms = [module for module in gpt.modules() if isinstance(module, spheret.SpheretNorm)]
"""
SCRIPTS = {
    # the optimiser moves the step sizes, and its decay leaves them alone
    "lightning": """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = gpt

    def training_step(self, batch, number):
        return self.gpt(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(spheret.parameter_groups(self, 0.1), lr=0.01)

before = [norm.alpha.item() for norm in norms]
quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2))
assert all(norm.alpha.item() != old for norm, old in zip(norms, before, strict=True))
""",
    # it quantises our Linear, a subclass, as it does nn.Linear
    "torchao": """
from torchao.quantization import Int8WeightOnlyConfig, quantize_

truth = gpt.eval()(tokens)
quantize_(gpt, Int8WeightOnlyConfig())
linears = [module for block in gpt.blocks for module in block.modules() if isinstance(module, torch.nn.Linear)]
assert len(linears) == 8
assert all("Int8" in type(linear.weight).__name__ for linear in linears)
assert 0 < float((gpt(tokens) - truth).abs().max()) < 0.05 * float(truth.abs().max())
""",
    # a loop that is saved in its middle and loaded again ends bitwise as the unbroken one
    "accelerate": """
import tempfile

from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from spheret.conversion import Annealing, position

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        branches = [torch.nn.Linear(16, 16) for _ in range(4)]
        self.embed, self.head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)
        self.stack = spheret.residual_stack(branches, alpha=0.5, radius=3.0)

    def forward(self, ids):
        h = self.head(self.stack(self.embed(ids)))
        return torch.nn.functional.cross_entropy(h.flatten(0, 1), ids.flatten())

class Causal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
        spheret.convert(self.llama)

    def forward(self, ids):
        return self.llama(ids, labels=ids).loss

rows = torch.utils.data.TensorDataset(torch.randint(11, (12, 8)))
for kind in (Own, Causal):
    accelerator = Accelerator(cpu=True)
    module = kind()
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(spheret.parameter_groups(module, 0.1), lr=0.01),
        torch.utils.data.DataLoader(rows, batch_size=2),
    )
    schedule = Annealing(model, steps=5) if kind is Causal else None
    if schedule:
        accelerator.register_for_checkpointing(schedule)

    def train(batches):
        for (ids,) in batches:
            accelerator.backward(model(ids))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()

    def state():
        return {name: x.clone() for name, x in accelerator.unwrap_model(model).state_dict().items()}

    with tempfile.TemporaryDirectory() as place:
        first, second = list(loader)[:3], list(loader)[3:]
        start = state()
        train(first)
        accelerator.save_state(place)
        middle = state()
        train(second)
        end = state()
        accelerator.load_state(place)
        assert all(torch.equal(x, middle[name]) for name, x in state().items())
        assert not schedule or (schedule.t, position(model)) == (0.6, float(torch.tensor(0.6)))
        train(second)
    assert all(torch.equal(x, end[name]) for name, x in state().items())
    scalars = [name for name, p in module.named_parameters() if p.numel() == 1]
    assert len(scalars) >= 4 and all(not torch.equal(start[name], end[name]) for name in scalars)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_package(name, tmp_path):
    if name != "accelerate" and not APART.is_dir():
        pytest.skip("make env installs lightning and torchao")
    run = subprocess.run(
        [sys.executable, "-c", START + SCRIPTS[name], str(APART)], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
