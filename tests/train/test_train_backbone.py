"""Runs with the options of the backbone and with ProRes, through the command line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import train

from spheret.runs.run import open_run
from spheret.train import drill

BACKBONE = (
    "--positions",
    "rope",
    "--mlp",
    "swiglu",
    "--norm",
    "rmsnorm",
    "--qk-norm",
    "--kv-heads",
    "1",
    "--no-bias",
)
WORDS = (*BACKBONE, "--set", "prores=4", "--checkpoint-every", "3", "--keep", "9", "--dropout", "0.1")


def test_a_stop_and_resume_in_the_middle_of_the_warm_up(prepared, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(unbroken, prepared, *WORDS, scheme="pre-ln", steps=9) == 0
    shutil.copytree(unbroken, broken)
    for step in (6, 9):
        shutil.rmtree(broken / "checkpoints" / f"step-{step}")
    assert train(broken, prepared, *WORDS, "--resume", scheme="pre-ln", steps=9) == 0
    assert drill.differences(unbroken, broken) == []
    # block b is done after 4 b updates
    for step, factors in ((3, (3 / 4, 3 / 8)), (6, (1, 6 / 8)), (9, (1, 1))):
        state = load_file(unbroken / "checkpoints" / f"step-{step}" / "model.safetensors")
        for block, factor in enumerate(factors):
            for part in ("attention", "mlp"):
                assert state[f"blocks.{block}.{part}_connection.warmup.factor"].item() == factor
    run = open_run(unbroken)
    config = json.loads((unbroken / "config.json").read_text())["model"]
    assert (config["positions"], config["kv_heads"], config["scheme_options"]) == ("rope", 1, {"prores": 4})
    assert "rope_base" not in config
    # a model that is loaded computes with the factors of its checkpoint
    early, last = run.model(3), run.model()
    x = torch.arange(8)[None]
    assert early.blocks[1].mlp_connection.warmup.factor.item() == 3 / 8
    last.at_update(1)
    assert not torch.equal(run.model()(x), last(x))


def test_a_document_from_before_reads_as_it_did(prepared, tmp_path):
    assert train(tmp_path / "run", prepared, steps=1) == 0
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert not {"positions", "mlp", "norm", "qk_norm", "kv_heads", "rope_base"} & config["model"].keys()
    assert open_run(tmp_path / "run").model_config.positions == "learned"
    # all other settings must be there
    del config["model"]["activation"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.activation .*config\.json"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "prores=4"), "for 8 updates, beyond --steps 6: take at most 3"),
        (("--kv-heads", "3"), "heads 2 is not divisible by kv_heads 3"),
        (("--mlp", "swish"), "unknown mlp 'swish'"),
        (("--rope-base", "100"), "rope_base 100 is of positions = rope"),
    ],
)
def test_wrong_combinations_are_sentences(words, message, prepared, tmp_path, capsys):
    assert train(tmp_path / "run", prepared, *words, steps=6) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
