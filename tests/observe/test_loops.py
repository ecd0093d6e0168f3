"""The loops of the docs: plain torch, an optimiser's own hooks, transformers' Trainer."""

import pytest
import together
import torch

import spheret


def trained(watched, by_hooks=False):
    """A loop as in the docs, with two micro-batches per update. by_hooks: the optimiser's step calls the watch."""
    model = together.llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    given = {"optimizer": optimizer} if by_hooks else {}
    watch = spheret.watch(model, every=2, quiet=True, **given) if watched else None
    for step in range(4):
        losses = []
        for rank in (0, 1):
            x = together.tokens(step, rank)
            loss = model(input_ids=x, labels=x).loss
            losses.append(loss.detach())
            (loss / 2).backward()
        if watch is not None and not by_hooks:
            watch.step(torch.stack(losses).mean())
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return model, watch


def test_a_loop_and_an_optimiser_that_calls_the_watch():
    unwatched, _ = trained(False)
    losses = []
    for by_hooks in (False, True):
        model, watch = trained(True, by_hooks)
        assert all(map(torch.equal, model.state_dict().values(), unwatched.state_dict().values()))
        assert watch.steps == 4
        assert [each.step for each in watch.observations] == [1, 2, 4]
        assert all(each.norm and each.grad_norm and each.update for o in watch.observations for each in o.sublayers)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        losses.append([loss for each in watch.observations for loss in each.losses])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(losses[0]) == 4


def test_the_loss_is_that_of_the_trainer(tmp_path):
    logged, seen, watch = together.trainer_log(tmp_path)
    assert seen == pytest.approx(logged, abs=2e-4)
    assert [each.step for each in watch.observations] == [1, 2, 4]
    assert all(each.norm and each.grad_norm and each.update for each in watch.observations[-1].sublayers)
