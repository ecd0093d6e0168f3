"""SpheretLM: rolling log-likelihoods, bad input, and lm_eval's own command line."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from spheret import GPT, GPTConfig
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.evaluate.lm import SpheretLM
from spheret.runs.run import create_run

TEXT = "Fellow citizens of the Senate and of the House of Representatives: among the vicissitudes of life"


def small_gpt(block=32, scheme="proj-spheretnorm", scale=0.05):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, block=block, vocab=320, scheme=scheme)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
    return model.eval()


def adapter(model, **options):
    return SpheretLM(model=model, tokenizer=load_tokenizer("bytes"), precision="float64", **options)


def ask(*arguments):
    return SimpleNamespace(args=arguments)


class TestRolling:
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 90])
    def test_every_token_once_with_the_most_context(self, length):
        """Windows of `block` from the end of text on; the last is full and scores only what is left."""
        model, text = small_gpt(), TEXT[:length]
        ids = [256, *text.encode()]
        losses = []
        for start in range(0, length, 32):
            stop = min(start + 32, length)
            first = max(0, stop - 32)
            window = torch.tensor([ids[first : stop + 1]])
            window_losses = model.token_losses(window[:, :-1], window[:, 1:])[0]
            losses.append(window_losses[start - first :].sum())
        (total,) = adapter(model).loglikelihood_rolling([ask(text)])
        assert total == pytest.approx(-float(sum(losses)), rel=1e-9)


class TestBadInput:
    def test_tasks_that_generate(self):
        with pytest.raises(ValueError, match="generated"):
            adapter(small_gpt(block=64)).generate_until([ask("We", {"max_gen_toks": 8})])

    def test_nothing_to_score(self):
        with pytest.raises(ValueError, match="request 1 "):
            adapter(small_gpt()).loglikelihood([ask("We", " the"), ask("We", "")])

    def test_no_context_is_the_end_of_text(self):
        model = small_gpt()
        ((total, _),) = adapter(model).loglikelihood([ask("", "We")])
        window = torch.tensor([[256, *b"We"]])
        assert total == pytest.approx(-float(model.token_losses(window[:, :-1], window[:, 1:]).sum()), rel=1e-9)

    def test_a_tokenizer_of_another_model(self):
        with pytest.raises(ValueError, match=r"gpt2 .*50257 .*320"):
            SpheretLM(model=small_gpt(), tokenizer=load_tokenizer("gpt2"))


def own_task(path):
    """Write rows, and lm_eval's definition of a task on them. Returns the rows."""
    (path / "tasks").mkdir()
    rows = [
        {"q": "We the", "a": [" People", " Senate"], "gold": 0},
        {"q": "Fellow", "a": [" men", " citizens"], "gold": 1},
        {"q": "Mr.", "a": [" Speaker", " President"], "gold": 0},
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "task": "openings", "dataset_path": "json", "dataset_name": None, "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": f"{path}/rows.jsonl"}, "cache_dir": f"{path}/cache"},
        "test_split": "test", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}", "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (path / "tasks" / "openings.yaml").write_text(json.dumps(definition))
    return rows


def evaluated_by_lm_eval(path, model, shots):
    """The scores that lm_eval's own function gives for one of its models, by its name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(path / "tasks"), include_defaults=False)
    results = simple_evaluate(model, f"run={path / 'run'}", ["openings"], shots, task_manager=manager, device="cpu")
    return [float(answer[0]) for line in results["samples"]["openings"] for answer in line["filtered_resps"]]


# lm_eval's command line imports everything once more: 12 s of processor time
@pytest.mark.slow
def test_lm_evals_own_command_line(tmp_path):
    """A task of our own file. Our command line gives the export to lm_eval's own model, and few-shot prompts."""
    from spheret.hub.transfer import export

    run = create_run(tmp_path / "run", small_gpt(block=64).float(), describe(load_tokenizer("bytes")))
    export(run, tmp_path / "hub")
    rows = own_task(tmp_path)
    words = ["run", "--model", "hf", "--model_args", f"pretrained={tmp_path / 'hub'},trust_remote_code=True"]
    words += ["--tasks", "openings", "--include_path", str(tmp_path / "tasks"), "--num_fewshot", "1", "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "spheret.evaluate", *words, "--device", "cpu", "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,), (samples,) = ((tmp_path / "out").rglob(f"{kind}_*") for kind in ("results", "samples"))
    assert json.loads(results.read_text())["n-shot"]["openings"] == 1
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    stock = [float(answer[0]) for line in lines for answer in line["filtered_resps"]]
    zero, one = (evaluated_by_lm_eval(tmp_path, "spheret", shots) for shots in (0, 1))
    lm = SpheretLM(run=str(run.path))
    truth = [lm.loglikelihood([ask(row["q"], " " + answer)])[0][0] for row in rows for answer in row["a"]]
    assert zero == pytest.approx(truth, rel=1e-5)
    assert one == pytest.approx(stock, rel=1e-5)
    assert one != pytest.approx(zero, rel=1e-2)
