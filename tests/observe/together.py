"""Watched trainings in several processes. Run by torchrun, it does every job in one launch. Argument: the output."""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import spheret
from spheret.observe import trainer_callback
from spheret.support.sharding import local, whole

VOCAB, ROWS, STEPS = 40, 4, 5
PARALLEL = ("ddp", "fsdp")


def gpt():
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": VOCAB}
    return spheret.GPT(spheret.GPTConfig(**sizes, scheme="proj-spheretnorm", head="untied", head_bias="none"))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


MODELS = {"gpt": gpt, "llama": llama}
# a weight of the MLP of the second layer, and the name of that sublayer
PLANTED = {
    "gpt": ("blocks.1.mlp.hidden.weight", "blocks.1.mlp"),
    "llama": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp"),
}


def tokens(step, rank):
    return torch.randint(VOCAB, (ROWS, 13), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, x):
    if isinstance(getattr(model, "module", model), LlamaForCausalLM):
        return model(input_ids=x, labels=x).loss
    return model(x[:, :-1], x[:, 1:])


def spread(model, parallel):
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for layer in model.blocks if isinstance(model, spheret.GPT) else model.model.layers:
        fully_shard(layer)
    # gathered for every pass anew, which a pass in between must not end
    return fully_shard(model, reshard_after_forward=True)


def train(model, ranks, watched=True, steps=STEPS, spoil=None, wrapped=None, **options):
    """SGD on the batches of these ranks: micro-batches of one process, whose stream is seen in the first of them.

    spoil: a function of step and loss that returns the loss.
    """
    wrapped = model if wrapped is None else wrapped
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with spheret.watch(wrapped, 2, quiet=True, **options) if watched else nullcontext() as watch:
        for step in range(1, steps + 1):
            total = 0.0
            for rank in ranks:
                loss = loss_of(wrapped, tokens(step, rank))
                loss = spoil(step, loss) if spoil else loss
                (loss / len(ranks)).backward()
                total += loss.detach() / len(ranks)
            if watched:
                watch.step(total)
            optimizer.step()
            optimizer.zero_grad()
    return watch


def saw(watch):
    return {
        "observations": [{**asdict(each), "seconds": None} for each in watch.observations],
        "events": [asdict(event) for event in watch.events],
    }


def state(model):
    return {name: whole(x).clone() for name, x in model.state_dict().items()}


def every_number(rank, out):
    for parallel in PARALLEL:
        for name, make in MODELS.items():
            path, ends = out / f"{parallel}-{name}", []
            for watched in (True, False):
                model = make()
                keys = list(model.state_dict())
                options = {"out": path / "watch"} if watched else {}
                watch = train(model, [rank], watched, wrapped=spread(model, parallel), **options)
                if watched:
                    write(path / f"rank-{rank}.json", saw(watch))
                assert list(model.state_dict()) == keys
                ends.append(state(model))
            assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
            if rank == 0:
                torch.save(ends[0], path / "state.pt")


def a_bad_value_of_one_process_is_known_to_all(rank, out):
    """A loss of one process is NaN, or a weight in the shard of one process."""
    for parallel in ("ddp", "fsdp", "weight"):
        for name, make in MODELS.items():
            model = make()
            wrapped = spread(model, "ddp" if parallel == "ddp" else "fsdp")

            def spoil(step, loss, model=model, weight=PLANTED[name][0], parallel=parallel):
                if step != 2 or rank != 1:
                    return loss
                if parallel == "weight":
                    # seen in the next forward pass
                    with torch.no_grad():
                        local(dict(model.named_parameters())[weight]).view(-1)[0] = math.nan
                return loss if parallel == "weight" else loss * math.nan

            watch = train(model, [rank], wrapped=wrapped, spoil=spoil)
            write(out / f"bad-{parallel}-{name}-{rank}.json", saw(watch))


class Rows(Dataset):
    """Sequences of tokens, of which some are shorter, so that a mean over them is not one over their batches."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        labels = x.clone()
        labels[: index % 9] = -100
        return {"input_ids": x, "labels": labels}


def trainer_log(out, average_tokens=True):
    """The losses that transformers' Trainer logs with gradient accumulation, and those that its watch has seen."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.01, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        average_tokens_across_devices=average_tokens,
    )  # fmt: skip
    callback = trainer_callback(every=2, quiet=True)
    trainer = Trainer(llama(), arguments, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return logged, [loss for each in callback.watch.observations for loss in each.losses], callback.watch


def the_trainer_logs_the_same_loss(rank, out):
    for average in (True, False):
        logged, seen, _ = trainer_log(out / f"trainer-{rank}", average)
        write(out / f"trainer-{average}-{rank}.json", {"logged": logged, "seen": seen})


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


JOBS = (every_number, a_bad_value_of_one_process_is_known_to_all, the_trainer_logs_the_same_loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in JOBS:
        job(dist.get_rank(), Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
