"""inspect and certify of saved models, from the command line."""

import msgspec
import numpy as np
import pytest
import torch
from saved_decoders import build, save
from small_models import randomize

from spheret import GPT, GPTConfig, conversion
from spheret.analysis.foreign.text import first_tokens, open_text, with_first_tokens
from spheret.analysis.inspect import inspect_run
from spheret.analysis.inspect_json import INSPECTIONS
from spheret.analysis.saved_models import inspect_saved
from spheret.certificates import certificate
from spheret.certificates.certify import certify_run
from spheret.certificates.saved_models import certify_saved
from spheret.cli import main
from spheret.data import cached, prepare, resolve
from spheret.data.preparation import cache_path
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.open import SavedModel
from spheret.hub.transfer import export
from spheret.runs.run import create_run, open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama, the same converted and annealed to 1/2 and to 1, and a run with its export as GPT-2."""
    folder = tmp_path_factory.mktemp("models")
    save(build("llama"), folder / "llama")
    for name, position in (("half", 0.5), ("turned", 1.0)):
        model, _ = conversion.convert(build("llama"))
        conversion.anneal(model, position)
        save(model, folder / name)
    config = GPTConfig(layers=2, heads=2, width=16, block=32, vocab=257, scheme="pre-ln", head_bias="none")
    create_run(folder / "run", randomize(GPT(config)), cached("sotu", "bytes").manifest.tokenizer)
    export(open_run(folder / "run"), folder / "exported", "gpt2")
    return folder


def numbers(value, path=""):
    """Every number of plain data, by its path."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in numbers(part, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {k: v for index, part in enumerate(value) for k, v in numbers(part, f"{path}.{index}").items()}
    return {path: value} if isinstance(value, int | float | None) else {}


def test_our_gpt_and_its_export_as_gpt2_have_the_same_dynamics(folder):
    ours = numbers(msgspec.to_builtins(inspect_run(open_run(folder / "run"), windows=2, data="sotu")))
    theirs = numbers(msgspec.to_builtins(inspect_saved(SavedModel(folder / "exported"), windows=2)))
    assert ours.pop(".checkpoint") == 0
    assert theirs.pop(".checkpoint") is None
    # the head is ours alone
    assert ours.pop(".own_logit") is not None
    assert ours.keys() == theirs.keys()
    assert sum(value is not None for value in ours.values()) > 80
    for path, value in ours.items():
        assert theirs[path] == (value if value is None else pytest.approx(value, rel=1e-5, abs=1e-5)), path


def test_our_gpt_and_its_export_as_gpt2_have_the_same_certificate(folder, capsys, tmp_path):
    ours = certify_run(open_run(folder / "run"), tokens=4, sequence=3, data="sotu")
    # random weights have learned nothing
    assert (
        main(["certify", str(folder / "exported"), "--tokens", "4", "--sequence", "3", "--out", str(tmp_path)]) == 1
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "exported, GPT2LMHeadModel: 4 tokens on their own paths" in printed
    assert "of which 4 measured only (measured in float64, not proven" in printed
    theirs = certificate.read_certificate(tmp_path)
    assert certificate.verify(theirs) == []
    assert ours.achieves.loss == pytest.approx(theirs.achieves.loss, rel=1e-9)
    for part in ("own_path", "sequence"):
        for rows in ("sublayers", "depth"):
            pairs = (getattr(getattr(record, part), rows) for record in (ours, theirs))
            for a, b in zip(*pairs, strict=True):
                assert a.sigma_max == pytest.approx(b.sigma_max, rel=1e-8)
                assert a.sigma_min == pytest.approx(b.sigma_min, rel=1e-8)
                assert b.proven is None
    assert theirs.own_path.sublayers[1].module == "transformer.h.0.mlp"
    # that of the worst token, which is at most the ratio over all tokens
    for a, b in zip(ours.own_path.sublayers, theirs.own_path.sublayers, strict=True):
        assert b.condition == pytest.approx(a.proven.condition[0], rel=1e-6)
    assert theirs.model == "GPT2LMHeadModel"


def test_inspect_a_model_beside_a_run(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["inspect", str(folder / "llama"), str(folder / "run"), "--windows", "1", "--data", "sotu"]) == 0
    printed = capsys.readouterr().out
    assert "llama, pre-norm, LlamaForCausalLM: loss" in printed
    # nothing is written into someone else's model
    written = tmp_path / "runs" / "inspect-llama"
    assert f"Wrote {written.relative_to(tmp_path)}/inspect.json and inspect.png." in " ".join(printed.split())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert (written / "inspect.png").read_bytes().startswith(b"\x89PNG")
    first, second = INSPECTIONS.read(written / "inspect.json").runs
    assert (first.model, first.checkpoint, second.checkpoint) == ("LlamaForCausalLM", None, 0)
    assert first.sublayers[2].module == "model.layers.1.self_attn"
    assert all(0 < row.sink < 1 and len(row.sink_heads) == 4 for row in first.sublayers[::2])
    assert [row.branch for row in first.sublayers] == ["attention", "mlp"] * 2


def test_converted_models(folder):
    for name in ("half", "turned"):
        record = inspect_saved(SavedModel(folder / name), windows=1)
        assert record.scheme.startswith("proj-spheretnorm")
        norms = [row.norm for row in record.sublayers]
        assert norms == pytest.approx([record.entry_norm] * 4, rel=1e-5)
    with pytest.raises(ValueError, match=r"half .*t = 0\.5"):
        certify_saved(SavedModel(folder / "half"))
    document = certify_saved(SavedModel(folder / "turned"), tokens=2, sequence=0)
    assert document.scheme == "proj-spheretnorm"
    assert document.own_path.bounds == "proven"
    assert certificate.verify(document) == []


def test_text_and_prepared_data(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    saved = SavedModel(folder / "llama")
    prepare(str(text), "bytes", tmp_path / "same")
    # the same ids from a file
    prepare(str(text), str(folder / "llama" / "tokenizer.json"), tmp_path / "alike")
    prepare(str(text), "bpe:300", tmp_path / "other")
    names = ("text.txt", "same", "alike")
    windows = [open_text(saved, str(tmp_path / name)).stream("val").window(0, 99) for name in names]
    assert np.array_equal(windows[0], windows[1])
    assert np.array_equal(windows[0], windows[2])
    with pytest.raises(ValueError, match=r"other .*tokenizer"):
        open_text(saved, str(tmp_path / "other"))


def test_another_tokenizer_at_the_same_path_is_another_corpus(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    corpus, places = resolve("sotu"), set()
    for content in (
        (folder / "llama" / "tokenizer.json").read_bytes(),
        load_tokenizer("bpe:260", ["one two one two"]).file,
    ):
        path.write_bytes(content)
        places.add(cache_path(corpus, str(path), 0.05))
    assert len(places) == 2


def test_the_tokens_in_front_of_a_text(folder, tmp_path):
    """A tokenizer that begins every text with a token begins every window with it."""
    from tokenizers import Tokenizer, processors

    directory = tmp_path / "model"
    directory.mkdir()
    for path in (folder / "llama").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    assert first_tokens(SavedModel(folder / "llama")) == []
    saved = SavedModel(directory)
    assert first_tokens(saved) == [256]
    x, y = torch.arange(8).view(2, 4), torch.arange(1, 9).view(2, 4)
    inputs, targets = with_first_tokens(saved, x, y)
    assert inputs.tolist() == [[256, 0, 1, 2], [256, 4, 5, 6]]
    assert targets.tolist() == x.tolist()
    assert saved.tokenizer.name == "bytes"
