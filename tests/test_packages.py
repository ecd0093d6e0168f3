"""Packages that train or change a model of ours, each in a process of its own: they live apart (Makefile)."""

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
}


@pytest.mark.skipif(not APART.is_dir(), reason="make env installs lightning and torchao")
@pytest.mark.parametrize("name", SCRIPTS)
def test_package(name, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", START + SCRIPTS[name], str(APART)], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
