"""Run by torchrun. Arguments: the data, the output and the cases to train; with QUICK also the other jobs."""

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from spheret import connections
from spheret.connections import PAPER_SCHEMES, Bounded
from spheret.data import open_data
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.head import HEADS
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.support.sharding import local, whole
from spheret.train.distributed import PARALLEL, TorchrunWorld, World
from spheret.train.loop import Trainer
from spheret.train.state import check, restore

SCHEMES = {name: (name, {}) for name in PAPER_SCHEMES} | {
    "learned p": ("p-spheretnorm", {"learnable_p": True}),
    "normed": ("normed-spheretnorm", {}),
    # its weights are normalised after each step, and its branches hold gains
    "ngpt": ("ngpt", {}),
    # the sublayers of a block share a scalar
    "rezero": ("rezero", {}),
    "modern": ("pre-ln", {}),
    **{head: ("proj-spheretnorm", {}) for head in HEADS[1:]},
    "untied ngpt": ("ngpt", {}),
    # states of several tensors pass the hooks of blocks
    **{name: (name, {}) for name in connections.SCHEMES if not connections.scheme(name).one_stream},
}
# heads; rotary positions, gated and grouped matrices, norms of queries and keys
BACKBONES = {
    "modern": {
        "positions": "rope",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "qk_norm": True,
        "kv_heads": 1,
        "bias": False,
    },
    **{head: {"head": head} for head in HEADS[1:]},
    "untied ngpt": {"head": "untied"},
}
# Newton-Schulz needs whole matrices, and the rules start from whole weights
MUON = {
    "proj-spheretnorm": {
        "optimizer": "muon", "lr_schedule": "wsd", "decay_steps": 2, "parametrization": "completep", "base_width": 8,
        "base_layers": 1, "base_heads": 2,
    },
    "modern": {"optimizer": "muon"},
    "untied": {"optimizer": "muon"},
}  # fmt: skip
# the case that two processes train in the quick suite; it resumes from one process, and one from it
QUICK = "proj-spheretnorm"
# every case with its scheme and what it changes
CASES = {
    **{name: (name, {}) for name in SCHEMES},
    "bf16": (QUICK, {"precision": "bf16"}),
    **{f"muon {name}": (name, words) for name, words in MUON.items()},
}


def config(**changes):
    return TrainConfig(**{
        "steps": 3, "batch_size": 2, "tokens_per_update": 2 * 4 * 16, "lr": 1e-3, "min_lr": 1e-4,
        "warmup": 0, "checkpoint_every": 3, "keep": 9, **changes,
    })  # fmt: skip


def build(case):
    name, options = SCHEMES[case]
    torch.manual_seed(1337)
    backbone = BACKBONES.get(case, {})
    sizes = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": 320, "head_bias": "none"}
    return GPT(GPTConfig(**sizes, scheme=name, scheme_options=options, **backbone))


def make(path, data, case, world, **changes):
    path.mkdir(parents=True, exist_ok=True)
    if case == "proj-spheretnorm":
        # resumed after its first update
        changes = {"checkpoint_every": 1, **changes}
    return Trainer(path, build(case), config(**changes), EvaluationConfig(3, 5), data, world, 3.0, quiet=True)


def loader(data, world):
    """The training windows of this process: two micro-batches per update."""
    return data.loader(16, 2, rank=world.rank, world_size=world.size, accumulation=2)


def validation_batch(data):
    x, y, _ = next(iter(data.validation(16, 2, windows=5)))
    return x, y


def every_scheme(data, out, world):
    for world.parallel in PARALLEL:
        for name in sys.argv[3:]:
            case, words = CASES[name]
            assert make(out / world.parallel / name, data, case, world, **words).fit() == 0


def one_sided(data, out, world):
    """Only one rank sees a bad number, or is asked to stop: all of them must end alike, and none wait for ever."""
    from spheret.model.gpt import MLP

    real = MLP.forward
    for world.parallel in PARALLEL:
        trainer = make(out / f"nan-{world.parallel}", data, "proj-spheretnorm", world)
        if world.rank == 1:
            MLP.forward = lambda self, x: real(self, x) * float("nan")
        assert trainer.fit() == 3
        MLP.forward = real
        trainer = make(out / f"stop-{world.parallel}", data, "proj-spheretnorm", world, steps=50)
        if world.rank == 1:
            trainer.request_stop(15)
        assert trainer.fit() == 143


def resume_from_one(data, out, world):
    """What one process saved goes on here, both ways."""
    from spheret.runs import checkpoint

    for world.parallel in PARALLEL:
        trainer = make(out / f"resumed-{world.parallel}", data, "proj-spheretnorm", world)
        if world.is_main:
            shutil.copy(out / "alone" / "metrics.jsonl", trainer.path)
        saved = checkpoint.verify(out / "alone" / "checkpoints" / "step-1")
        check(trainer, saved)
        restore(trainer, saved)
        assert trainer.fit() == 0


def precision(data, out, world):
    """Under FSDP in bf16 the stream and all scalars and gains stay float32, and branches compute in bf16."""
    from spheret.model.probes import probe

    world.parallel = "fsdp"
    trainer = make(out / "precision", data, "ngpt", world, precision="bf16")
    seen, gains, linears, scaled = [], [], [], []
    for block in trainer.model.blocks:
        for gain in (block.attention.qkv_norm, block.mlp.hidden_norm):
            gain.register_forward_hook(lambda gain, *_: gains.append(gain.weight.dtype))
        block.mlp.hidden.register_forward_hook(lambda linear, *_: linears.append(linear.weight.dtype))
        block.mlp.hidden_norm.register_forward_hook(lambda gain, _, y: scaled.append(y.dtype))
    with probe(trainer.model, seen.append), torch.autocast("cpu", torch.bfloat16):
        trainer.model.token_losses(*validation_batch(data))
    assert {s.h.dtype for s in seen} == set(gains) == {torch.float32}
    assert {s.f.dtype for s in seen} == set(linears) == set(scaled) == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def gradients_are_shared_once(data, out, world):
    """Micro-batches before the last send nothing, around forward and backward both; the last one shares the sum."""
    for world.parallel in PARALLEL:
        model, sent = build("proj-spheretnorm"), []
        loss = world.wrap(model, bf16=False)
        for micro in (0, 1):
            x, y = loader(data, world).batch(0, micro)
            with world.syncing(micro == 1), watch_sent(sent):
                loss(x, y).backward()
            if micro == 0:
                assert not sent
        assert sent
        weight = whole(model.blocks[0].mlp.output.weight.grad)
        first, second = world.gather(weight)
        assert torch.equal(first, second)


def steps_end_in_the_interval(data, out, world):
    """Scalars far beyond their bound are back on it after a step, in every process and in shards."""
    for world.parallel in PARALLEL:
        trainer = make(out / f"interval-{world.parallel}", data, "proj-spheretnorm", world)
        modules = [module for module in trainer.model.modules() if isinstance(module, Bounded)]
        start = [whole(s.parameter).item() for m in modules for s in m.bounded_scalars()]
        with torch.no_grad():
            for module in modules:
                for scalar in module.bounded_scalars():
                    local(scalar.parameter).add_(5.0)
        trainer.update(loader(data, world).batches(0, 1))
        assert [whole(s.parameter).item() for m in modules for s in m.bounded_scalars()] == start


@contextmanager
def watch_sent(sent):
    """The reductions that run within the block, by the profiler's names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    sent += [event.key for event in profile.key_averages() if "c10d::" in event.key and "reduce" in event.key]


def main_alone_may_evaluate(data, out, world):
    """Under DDP the main process may evaluate alone: it waits for no other, and training goes on after it."""
    world.parallel = "ddp"
    trainer = make(out / "alone-evaluates", data, "pre-ln", world)
    if world.is_main:
        trainer.model.token_losses(*validation_batch(data))
    assert trainer.fit() == 0


JOBS = (
    gradients_are_shared_once,
    steps_end_in_the_interval,
    main_alone_may_evaluate,
    every_scheme,
    one_sided,
    resume_from_one,
    precision,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    group = TorchrunWorld(torch.device("cpu"), "ddp", 60)
    for job in JOBS if QUICK in sys.argv else (every_scheme,):
        job(open_data(Path(sys.argv[1])), Path(sys.argv[2]), group)
        (Path(sys.argv[2]) / "done").mkdir(exist_ok=True)
        (Path(sys.argv[2]) / "done" / f"{job.__name__}-{group.rank}").touch()
    group.close()


def alone(path, data, case, **changes):
    """The same in one process."""
    assert make(path, data, case, World(torch.device("cpu")), **changes).fit() == 0
