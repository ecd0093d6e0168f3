"""inspect --jacobians: the numbers against reverse mode of the model itself, and against the paper's definitions."""

import math

import pytest
import torch
from saved_decoders import CONFIGS, build
from small_models import TINY, randomize, tokens
from torch import nn

import spheret
from spheret import GPT, SCHEDULES, GPTConfig
from spheret.cli import main
from spheret.data import cached
from spheret.model.probes import probe
from spheret.observe.inspect.command import validation_windows
from spheret.observe.inspect.tables import COLUMNS, STACK_COLUMNS, bound_sentences, stack_rows, sublayer_rows
from spheret.observe.jacobians import (
    differentiable,
    float64_twin,
    measure_jacobians,
    own_path,
    token_jacobians,
    updates,
)
from spheret.runs.run import create_run, open_run

SIZE = {"layers": 2, "heads": 2, "width": 8, "block": 8, "vocab": 257}
MODERN = {"positions": "rope", "mlp": "swiglu", "norm": "rmsnorm", "bias": False}
CASES = {
    "pre-ln": {**MODERN, "qk_norm": True, "kv_heads": 2},
    "proj-spheretnorm": {**MODERN, "kv_heads": 1, "mlp": "relu2"},
    "ngpt": MODERN,
    "beam": {"kv_heads": 2},
}


def printed_tables(text, columns):
    """The cells of every table that was printed, by the row's first cell and the column."""
    cells, heading = {}, []
    for line in text.splitlines():
        if "\u2503" in line:
            heading = [cell.strip() for cell in line.split("\u2503")]
        elif "\u2502" in line and heading == list(columns):
            row = [cell.strip() for cell in line.split("\u2502")]
            cells |= {(int(row[0]), name): cell for name, cell in zip(heading, row, strict=True)}
    return cells


def worst(values, smallest=False):
    return (min if smallest else max)(float(value) for value in values)


@pytest.mark.parametrize("scheme", ["proj-spheretnorm", "normed-spheretnorm", "pre-ln"])
def test_the_printed_numbers_against_reverse_mode(scheme, tmp_path, capsys, monkeypatch):
    # a table that is not printed in parts
    monkeypatch.setenv("COLUMNS", "200")
    torch.manual_seed(0)
    model = randomize(GPT(GPTConfig(**SIZE, scheme=scheme)))
    create_run(tmp_path / "run", model, cached("sotu", "bytes").manifest.tokenizer)
    assert main(["inspect", str(tmp_path / "run"), "--windows", "1", "--data", "sotu", "--jacobians"]) == 0
    printed = capsys.readouterr().out
    own, stack = (printed_tables(printed, columns) for columns in (COLUMNS, STACK_COLUMNS))
    ids, _ = validation_windows(cached("sotu", "bytes"), 8, 1)
    twin = float64_twin(open_run(tmp_path / "run").model())
    G = [torch.eye(8, dtype=torch.float64)] * 8
    S, A, product, smallest = [0.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8
    passed = []
    with torch.no_grad(), probe(twin, passed.append):
        twin.stream(ids)
    for s in passed:

        def whole(x, s=s):
            """The branch's outputs and the next states of all tokens."""
            f = s.branch(s.connection.read(x))
            return s.connection.branch_output(f)[0], s.connection.write(x, f)[0]

        with differentiable():
            DF, DH = torch.func.jacrev(whole)(s.h)
        rows = {name: [] for name in ("theta", "eta", "|B|", "Delta", "q", "m", "sigma_min", "sigma_max")}
        for t in range(8):
            h, f, out, J = s.h[0, t], s.connection.branch_output(s.f)[0, t], s.out[0, t], DH[t, :, 0, t]
            G[t] = J @ G[t]
            c = h @ f / (h @ h)
            eta = float((f - c * h).norm() / h.norm())
            B = float(torch.linalg.matrix_norm(DF[t, :, 0, t] - c * torch.eye(8), ord=2))
            theta = math.acos(min(1.0, float(h @ out / (h.norm() * out.norm()))))
            alpha = float(s.connection.alpha) if scheme != "pre-ln" else 0.0
            Delta, q = alpha * (2 * B + eta), abs(math.cos(theta))
            m = max(0.0, q - Delta)
            S[t], A[t], product[t], smallest[t] = S[t] + Delta, A[t] + theta**2, product[t] * m, min(smallest[t], m)
            values = torch.linalg.svdvals(J)
            for name, value in zip(rows, (theta, eta, B, Delta, q, m, values[-1], values[0]), strict=True):
                rows[name].append(value)
        expected = {name: worst(values, name in ("q", "m", "sigma_min")) for name, values in rows.items()}
        total = [torch.linalg.svdvals(x) for x in G]
        together = {"sigma_min": worst((x[-1] for x in total), True), "sigma_max": worst(x[0] for x in total)}
        if scheme == "pre-ln":
            paper = ("alpha", "Delta", "q", "m", "1 + Delta")
            assert all(own[s.number, name] == "-" for name in paper)
            assert all(stack[s.number, name] == "-" for name in ("S", "A", "criterion", "prod m", "exp(S)"))
            expected = {name: value for name, value in expected.items() if name not in paper}
        else:
            expected |= {"alpha": alpha, "1 + Delta": 1 + expected["Delta"]}
            criterion = [math.exp(-(a / 2 + d) / m) if m else 0.0 for d, a, m in zip(S, A, smallest, strict=True)]
            together |= {"S": max(S), "A": max(A), "criterion": min(criterion), "prod m": min(product)}
            together["exp(S)"] = math.exp(max(S))
        for cells, numbers in ((own, expected), (stack, together)):
            for name, value in numbers.items():
                text = cells[s.number, name]
                # a bound that says nothing is called so
                assert text.endswith(" (vacuous)") == (name in ("m", "prod m", "criterion") and value == 0), name
                assert float(text.split()[0]) == pytest.approx(value, rel=6e-4), name
    assert "schedule sqrt: S = " in printed or scheme == "pre-ln"


@pytest.mark.parametrize("scheme", CASES)
def test_a_tokens_own_path(scheme):
    """On every kind of backbone: it goes through the states of the sequence, and its product is that of the model."""
    config = GPTConfig(**{**TINY, "layers": 1, "heads": 4, **CASES[scheme]}, scheme=scheme)
    twin = float64_twin(randomize(GPT(config)))
    positions = torch.tensor([0, 3, 8])
    ids = tokens(1, 9)
    passed = updates(twin, ids)
    for s in passed:
        f, out = own_path(s, positions)(s.h[:, positions])
        torch.testing.assert_close(f, s.branch_output(s.f)[:, positions])
        torch.testing.assert_close(out, s.out[:, positions])

    def stack(x):
        for s in passed:
            x = s.join(x, s.branch(x))
        return x[0, positions]

    with differentiable():
        whole = torch.func.jacrev(stack)(passed[0].h)[:, :, 0]
        jacobians = [token_jacobians(s, own_path(s, positions), s.h[:, positions])[1] for s in passed]
    truth = whole[torch.arange(3), :, positions]
    torch.testing.assert_close(jacobians[1] @ jacobians[0], truth)
    _, measured, _ = measure_jacobians(twin, ids, positions)
    torch.testing.assert_close(measured.stack_max[-1], torch.linalg.svdvals(truth)[:, 0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_bound_holds_and_the_vacuous_ones_are_named(schedule):
    config = GPTConfig(**TINY, scheme="proj-spheretnorm", scheme_options={"schedule": schedule})
    kinds, measured, paper = measure_jacobians(float64_twin(randomize(GPT(config))), tokens(1, 9), torch.arange(9))
    b, total, slack = paper.bounds, paper.sums, 1e-10
    assert (b.m <= measured.sigma_min + slack).all()
    assert (measured.sigma_max <= b.largest + slack).all()
    assert (total.criterion <= total.product_m + slack).all()
    assert (total.product_m <= measured.stack_min + slack).all()
    assert (measured.stack_max.log() <= total.S + slack).all()
    vacuous = (b.m == 0).any(1)
    assert [
        row[COLUMNS.index("m")].endswith("(vacuous)") for row in sublayer_rows(kinds, measured, paper)
    ] == vacuous.tolist()
    products = [row[STACK_COLUMNS.index("prod m")] for row in stack_rows(measured, paper)]
    assert [text.endswith("(vacuous)") for text in products] == vacuous.cummax(0).values.tolist()
    assert ("m = 0 at" in bound_sentences(measured, paper)[0]) == bool(vacuous.any())


def test_a_singular_value_that_rounding_hides():
    """A norm after the sum removes a direction: its smallest singular value is not a number to print."""
    model = float64_twin(randomize(GPT(GPTConfig(**TINY, scheme="post-ln"))))
    kinds, measured, _ = measure_jacobians(model, tokens(1, 9), torch.arange(9))
    own, stack = sublayer_rows(kinds, measured, None), stack_rows(measured, None)
    for rows, columns in ((own, COLUMNS), (stack, STACK_COLUMNS)):
        assert all(row[columns.index("sigma_min")].startswith("<= ") for row in rows)


IDS = torch.randint(256, (1, 7), generator=torch.Generator().manual_seed(1))


# the module that the stream leaves through. The experts of gpt-oss take no float64
LAST = {"gpt2": "transformer.ln_f", "gpt-neox": "gpt_neox.final_layer_norm", "phi": "model.final_layernorm"}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_peoples_models_against_reverse_mode(name):
    """From the embeddings to the input of the last norm, by the model's own forward."""
    model, positions = float64_twin(build(name)), torch.tensor([2, 6])
    if name == "gpt-oss":
        with pytest.raises(ValueError, match="Double"):
            measure_jacobians(model, IDS, positions)
        return
    kinds, measured, paper = measure_jacobians(model, IDS, positions)
    assert paper is None
    assert len(kinds) == len(measured.sigma_max)
    passed, caught = updates(model, IDS), []
    if name == "gpt-1":
        # the norm behind the last sum is the end
        end = model.transformer.h[-1].ln_2.register_forward_hook(lambda module, args, output: caught.append(output))
    else:
        last = model.get_submodule(LAST.get(name, "model.norm"))
        end = last.register_forward_pre_hook(lambda module, args: caught.append(args[0]))

    def final(x):
        model(inputs_embeds=x, use_cache=False)
        return caught[-1][0, positions]

    # what is added to the embeddings, or multiplies them, before the first layer
    embedded = model.get_input_embeddings()(IDS).detach()
    entry = float(passed[0].h.norm() / embedded.norm()) if name.startswith("gemma") else 1.0
    G = torch.autograd.functional.jacobian(final, embedded)[:, :, 0] / entry
    end.remove()
    for place, t in enumerate(positions):
        values = torch.linalg.svdvals(G[place, :, t])
        assert float(measured.stack_max[-1, place]) == pytest.approx(float(values[0]), rel=1e-5)
        if not measured.stack_min[-1, place] < measured.stack_unresolved[-1, place]:
            assert float(measured.stack_min[-1, place]) == pytest.approx(float(values[-1]), rel=1e-2)


def test_a_branch_that_cannot_be_run_again():
    """A SpheretNorm is given what its branch returned, and a step of a converted model, too."""
    converted, _ = spheret.convert(build("llama"), example_inputs={"input_ids": IDS, "use_cache": False})
    branch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.join = branch, spheret.SpheretNorm(8, sublayer=1)

        def forward(self, h):
            return self.join(h, self.branch(h))

    own = nn.Sequential(nn.Embedding(256, 8), Joined(), nn.Linear(8, 256))
    for model in (converted, own):
        with pytest.raises(ValueError, match="again"):
            measure_jacobians(float64_twin(model), IDS, torch.tensor([1]))
