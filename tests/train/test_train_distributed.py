"""Two processes are one with twice the micro-batches: DDP and FSDP, saved on so many, resumed on others."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import distributed_cases as cases
import pytest
import torch
import torchrun
from torchrun import ENVIRONMENT, LAUNCH, free_port
from train_helpers import TINY, losses, metrics

from spheret.connections import SCHEMES
from spheret.data import open_data
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import checkpoint
from spheret.runs.run import open_run
from spheret.train.distributed import PARALLEL
from spheret.train.state import check, restore

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def together(prepared, tmp_path_factory):
    """What one launch of two processes did: the quick case, and every job."""
    out = tmp_path_factory.mktemp("together")
    data = open_data(prepared)
    torch.set_num_threads(1)
    cases.alone(out / "alone", data, cases.QUICK)
    torchrun.run(HERE / "distributed_cases.py", prepared, out, cases.QUICK)
    return out


OTHERS = [name for name in cases.CASES if name != cases.QUICK]


@pytest.fixture(scope="module")
def others(prepared, tmp_path_factory):
    """What a second launch did: all other cases."""
    out = tmp_path_factory.mktemp("others")
    torchrun.run(HERE / "distributed_cases.py", prepared, out, *OTHERS)
    return out


def final(path):
    return dict(checkpoint.newest(path / "checkpoints").model())


def assert_close(ours, theirs, tolerance=1e-6):
    for name, tensor in theirs.items():
        ours_, theirs_ = ours[name], tensor
        if name.endswith("qkv.bias"):
            # softmax does not see a shift of all keys: the exact gradient is 0, and Adam turns rounding into steps
            third = len(tensor) // 3
            ours_, theirs_ = (torch.cat([x[:third], x[2 * third :]]) for x in (ours_, theirs_))
        # of equal streams the exact gradients of the mix are 0, too, and a tenth of it is used
        mixes = "weights_norm.pre_offset", "weights_norm.skew", "weights_norm.base"
        own = 10 * tolerance if name.endswith(mixes) else tolerance
        difference = float((ours_ - theirs_).abs().max())
        assert difference <= own, (name, difference)


@pytest.fixture(scope="module")
def single(prepared, tmp_path_factory):
    """The run of one process for a case, made once for DDP and FSDP."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("single")
            case, changes = cases.CASES[name]
            cases.alone(made[name], open_data(prepared), case, **changes)
        return made[name]

    return of


@pytest.mark.parametrize("name", [cases.QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_are_one(parallel, name, single, request):
    alone = single(name)
    path = request.getfixturevalue("together" if name == cases.QUICK else "others") / parallel / name
    if name == "bf16":
        assert losses(path) == pytest.approx(losses(alone), rel=2e-3)
        return
    assert losses(path) == pytest.approx(losses(alone), rel=1e-6)
    ours, theirs = metrics(path)[-1], metrics(alone)[-1]
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)
    assert [row[:2] for row in ours["val_documents"]] == [row[:2] for row in theirs["val_documents"]]
    assert ours["on_bound"] == theirs["on_bound"]
    for a, b in zip(ours["sublayers"], theirs["sublayers"], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    assert_close(final(path), final(alone), 2e-6)
    moments = [dict(checkpoint.newest(p / "checkpoints").optimizer()) for p in (path, alone)]
    assert moments[0].keys() == moments[1].keys()
    assert ("blocks.0.mlp.hidden.weight.momentum_buffer" in moments[0]) == name.startswith("muon")
    for key, tensor in moments[1].items():
        assert torch.allclose(moments[0][key], tensor, atol=1e-6), key


@pytest.mark.parametrize("name", SCHEMES)
def test_every_parameter_has_a_gradient_in_every_step(name):
    # DDP waits for each of them: one that is unused would hang or end the run. So does `state.forms`
    options = {"learnable_p": True} if name == "p-spheretnorm" else {}
    sizes = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": 32}
    model = GPT(GPTConfig(**sizes, scheme=name, scheme_options=options, head_bias="none"))
    x = torch.randint(32, (2, 16))
    for _ in range(2):
        model(x, x).backward()
        assert [key for key, p in model.named_parameters() if p.grad is None] == []
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("job", [job.__name__ for job in cases.JOBS])
def test_the_launch_did_every_job(job, together):
    # each asserts for itself in both processes; a hang would have ended the launch by its timeout
    assert sorted(p.name for p in (together / "done").glob(f"{job}-*")) == [f"{job}-0", f"{job}-1"]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_one_bad_process_stops_all_and_is_named(parallel, together):
    stopped = metrics(together / f"nan-{parallel}")[-1]
    assert stopped["loss"] is None
    assert "sublayer 2 (MLP of block 1)" in stopped["stopped"]
    # asked on one, saved for all
    assert checkpoint.newest(together / f"stop-{parallel}" / "checkpoints").step == 1


@pytest.mark.parametrize("parallel", PARALLEL)
def test_saved_on_one_resumed_on_two(parallel, together):
    resumed = losses(together / f"resumed-{parallel}")
    assert resumed == pytest.approx(losses(together / "alone"), rel=1e-6)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_saved_on_two_resumed_on_one(parallel, together, prepared, tmp_path):
    from spheret.train.distributed import World

    trainer = cases.make(tmp_path, open_data(prepared), "proj-spheretnorm", World(torch.device("cpu")))
    source = together / parallel / "proj-spheretnorm"
    shutil.copy(source / "metrics.jsonl", tmp_path)
    saved = checkpoint.verify(source / "checkpoints" / "step-1")
    check(trainer, saved)
    restore(trainer, saved)
    assert trainer.fit() == 0
    assert losses(tmp_path) == pytest.approx(losses(source), rel=1e-6)


WORDS = (
    "--scheme", "proj-spheretnorm", "--steps", "30", "--set", "train.tokens_per_update=512", "--eval-every", "10",
    "--set", "train.checkpoint_every=3", *TINY,
)  # fmt: skip


# two launchers, twice: 16 s of processor time
@pytest.mark.slow
def test_two_nodes(prepared, tmp_path):
    def nodes(*words):
        port = free_port()
        started = [
            subprocess.Popen(
                [
                    *LAUNCH, "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1",
                    "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}",
                    "--rdzv_id=test", "--local_addr=127.0.0.1", "-m", "spheret", "train", *words,
                ],
                env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
            for node in (0, 1)
        ]  # fmt: skip
        for process in started:
            _, message = process.communicate(timeout=300)
            assert process.returncode == 0, message.decode()[-3000:]

    out = tmp_path / "run"
    words = [*WORDS, "--data", str(prepared), "--parallel", "fsdp", "--out", str(out)]
    words[words.index("--steps") + 1] = "4"
    nodes(*words)
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4]
    before = losses(out)
    step = open_run(out).checkpoint()
    assert step.step == 4
    # the last one is lost: they go on together
    checkpoint.discard(step.path)
    nodes(*words, "--resume")
    assert losses(out) == pytest.approx(before, rel=1e-6)
    assert open_run(out).config.environment.processes == 2


@pytest.mark.slow
def test_a_rendezvous_that_never_completes(prepared, tmp_path):
    environment = {
        **ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    words = [*WORDS, "--data", str(prepared), "--out", str(tmp_path / "run"), "--timeout", "3"]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "spheret", "train", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "process 0 of 2 found no other process at 127.0.0.1" in done.stderr
    assert time.monotonic() - begun < 60
    assert not (tmp_path / "run").exists()


def test_parallel_needs_torchrun(prepared, tmp_path, capsys):
    from spheret.cli import main

    for words, message in ((("ddp",), "torchrun --nproc_per_node=N"), (("ddq",), "Did you mean 'ddp'")):
        command = ["train", *WORDS, "--data", str(prepared), "--out", str(tmp_path / "run"), "--parallel", *words]
        assert main(command) == 2
        assert message in capsys.readouterr().err
