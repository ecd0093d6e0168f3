"""The loops of the docs: plain torch, an optimiser's own hooks, transformers' Trainer, accelerate, Lightning."""

import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch
from accelerate import Accelerator

import spheret

APART = Path(sys.prefix) / "apart"
LIGHTNING = """
import sys

sys.path.append(sys.argv[1])
import lightning
import torch

import spheret
from spheret.watching import lightning_callback

torch.set_num_threads(1)
tokens = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0))
seen = []

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt = spheret.GPT(spheret.GPTConfig(layers=2, heads=2, width=32, block=8, vocab=11, head="untied"))

    def training_step(self, batch, number):
        loss = self.gpt(batch[0]).square().mean()
        seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

ends = []
for callbacks in ([], [lightning_callback(every=2, of="gpt", quiet=True)]):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False)
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=callbacks, **quiet)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2))
    ends.append([p.detach().clone() for p in module.parameters()])
assert all(map(torch.equal, *ends))
watch = callbacks[0].watch
assert [each.step for each in watch.observations] == [1, 2, 4]
assert [loss for each in watch.observations for loss in each.losses] == seen[4:]
assert all(each.norm is not None and each.update is not None for each in watch.observations[-1].sublayers)
"""


def batches(steps=4):
    return [together.tokens(step, 0) for step in range(steps)]


def plain(watched, by_hooks=False):
    """A loop as in the docs. by_hooks: the optimiser's step calls the watch."""
    model = together.llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    given = {"optimizer": optimizer} if by_hooks else {}
    watch = spheret.watch(model, every=2, quiet=True, **given) if watched else None
    for x in batches():
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        if watch is not None and not by_hooks:
            watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return model, watch


def with_accelerate(watched, by_hooks=False):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = together.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    given = {"optimizer": optimizer.optimizer} if by_hooks else {}
    watch = spheret.watch(model, every=2, quiet=True, **given) if watched else None
    losses = []
    for x in batches(8):
        with accelerator.accumulate(model):
            loss = model(input_ids=x, labels=x).loss
            losses.append(loss.detach())
            accelerator.backward(loss)
            if watch is not None and not by_hooks and accelerator.sync_gradients:
                watch.step(torch.stack(losses).mean())
                losses = []
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return model, watch


LOOPS = {"plain": plain, "accelerate": with_accelerate}


@pytest.mark.parametrize("by_hooks", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name, by_hooks):
    loop = LOOPS[name]
    (model, watch), (unwatched, _) = loop(True, by_hooks), loop(False)
    assert all(map(torch.equal, model.state_dict().values(), unwatched.state_dict().values()))
    assert watch.steps == 4
    assert [each.step for each in watch.observations] == [1, 2, 4]
    assert all(each.norm and each.grad_norm and each.update for o in watch.observations for each in o.sublayers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", LOOPS)
def test_the_loss_of_hooks_is_that_of_the_update(name):
    one, other = (LOOPS[name](True, by_hooks)[1] for by_hooks in (False, True))
    losses = [[loss for each in watch.observations for loss in each.losses] for watch in (one, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(losses[0]) == 4


def test_the_loss_is_that_of_the_trainer(tmp_path):
    logged, seen, watch = together.trainer_log(tmp_path)
    assert seen == pytest.approx(logged, abs=2e-4)
    assert [each.step for each in watch.observations] == [1, 2, 4]
    assert all(each.norm and each.grad_norm and each.update for each in watch.observations[-1].sublayers)


@pytest.mark.skipif(not APART.is_dir(), reason="make env installs lightning")
def test_lightning(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", LIGHTNING, str(APART)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
