"""Decoders of many architectures: their states, and every derivative against reverse mode of the model itself."""

import pytest
import torch
from saved_decoders import CONFIGS, build

from spheret import conversion
from spheret.analysis.foreign.arithmetic import Float64
from spheret.analysis.foreign.decoder import ForeignDecoder
from spheret.certificates import certificate
from spheret.certificates.measure import measure_sequence, measure_tokens

KINDS = {
    "gemma2": "norms around", "gemma3": "norms around", "olmo2": "norm behind", "gpt-1": "post-norm",
}  # fmt: skip
PARALLEL = ("gpt-neox", "phi")
# attention that the fast way does not reproduce: sinks, and code of its own
SLOW = ("gpt-oss", "gpt-1")
IDS = torch.randint(256, (1, 7), generator=torch.Generator().manual_seed(1))


def decoder(name):
    return ForeignDecoder(build(name).double())


def jacobian(function, x):
    """By reverse mode, (outputs, inputs)."""
    rows = torch.autograd.functional.jacobian(function, x)
    return rows.reshape(-1, x.numel())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name):
    it = decoder(name)
    assert it.scheme == KINDS.get(name, "pre-norm")
    assert it.kinds == (["parallel"] if name in PARALLEL else ["attention", "mlp"]) * 2
    with Float64():
        logits = it.model(input_ids=IDS, use_cache=False).logits
    positions = torch.tensor([0, 1, 4, 6])
    for number, s in enumerate(it.record(IDS), start=1):
        assert s.number == number
        # the next state is that of the connection, and a branch that is run again gives the same
        torch.testing.assert_close(s.connection.write(s.h, s.f), s.out, rtol=0, atol=1e-12)
        whole = it.whole_sequence(s)
        torch.testing.assert_close(whole(s.h)[0], s.f, rtol=0, atol=1e-12)
        both = it.own_path(s, positions)
        assert ("_slow_path" in both.__qualname__) == (name in SLOW and s.kind != "mlp")
        if number > len(it.kinds) // 2:
            # the first layer alone is differentiated by brute force
            continue
        pushed = torch.vmap(
            lambda v, both=both, s=s: torch.func.jvp(
                lambda x: both(x)[1], (s.h[:, positions],), (v.expand(1, 4, 16),)
            )[1]
        )(torch.eye(16, dtype=torch.float64))
        J = jacobian(lambda x, whole=whole: whole(x)[1][0, 4], s.h).view(16, 7, 16)[:, 4]
        torch.testing.assert_close(pushed[:, 0, 2].T, J, rtol=1e-9, atol=1e-9)
    # whatever was hooked is free again
    with Float64():
        assert torch.equal(it.model(input_ids=IDS, use_cache=False).logits, logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-1"])
def test_a_removed_sublayer_leaves_the_stream(name):
    it = decoder(name)
    whole, seen = it.record(IDS), []
    for number in (1, 2, len(it.kinds)):
        seen.clear()
        with torch.no_grad(), it.removed(number), it.probe(lambda s: seen.append((s.h, s.out))):
            it.run(IDS)
        assert torch.equal(*seen[number - 1])
        assert torch.equal(seen[number - 1][0], whole[number - 1].h)
    assert torch.equal(it.record(IDS)[-1].out, whole[-1].out)


def test_the_weights_of_a_sublayer_are_its_norm_and_its_branch():
    it = decoder("llama")
    names = {id(p): name for name, p in it.model.named_parameters()}
    owned = [sorted(names[id(p)].split(".", 3)[3] for p in branch.parameters) for branch in it.branches[:2]]
    projections = [f"self_attn.{x}_proj.weight" for x in "koqv"]
    assert owned[0] == ["input_layernorm.weight", *projections]
    assert owned[1] == [*(f"mlp.{x}_proj.weight" for x in ("down", "gate", "up")), "post_attention_layernorm.weight"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_whole_stack_against_reverse_mode_of_the_model(name):
    """From the embeddings to the input of the last norm, by the model's own forward."""
    it = decoder(name)
    last = it.model.transformer.ln_f if name == "gpt2" else it.model.model.norm
    caught = []
    last.register_forward_pre_hook(lambda module, args: caught.append(args[0]))

    def final(x):
        with Float64():
            it.model(inputs_embeds=x, use_cache=False)
        return caught.pop()

    embedded = it.model.get_input_embeddings()(IDS).detach()
    G = jacobian(final, embedded).view(7, 16, 7, 16)
    positions = torch.tensor([2, 6])
    own = measure_tokens(it, [(IDS, positions)]).products[-1]
    for place, t in enumerate(positions):
        values = torch.linalg.svdvals(G[t, :, t])
        assert float(own["sigma_max"][place]) == pytest.approx(float(values[0]), rel=1e-8)
        assert float(own["sigma_min"][place]) == pytest.approx(float(values[-1]), rel=1e-6)
    values = torch.linalg.svdvals(G.reshape(112, 112))
    together = measure_sequence(it, IDS).products[-1]
    assert float(together["sigma_max"]) == pytest.approx(float(values[0]), rel=1e-8)
    assert float(together["sigma_min"]) == pytest.approx(float(values[-1]), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt-neox", "olmo2"])
def test_a_converted_model(name):
    model = build(name).double()
    plain = ForeignDecoder(build(name).double())
    loss = float(plain.token_losses(IDS, IDS).mean())
    model, _ = conversion.convert(model, start="exact", example_inputs={"input_ids": IDS, "use_cache": False})
    # at the exact start it is the original, and what is seen is the original's stream
    exact = ForeignDecoder(model)
    assert exact.scheme == plain.scheme
    for a, b in zip(exact.record(IDS), plain.record(IDS), strict=True):
        torch.testing.assert_close(a.out, b.out, rtol=0, atol=1e-12)
    for t in (0.5, 1.0):
        model, _ = conversion.convert(
            build(name).double(), start="exact", example_inputs={"input_ids": IDS, "use_cache": False}
        )
        conversion.anneal(model, t)
        with torch.no_grad(), Float64():
            logits = model(input_ids=IDS, use_cache=False).logits
        it = ForeignDecoder(model)
        with torch.no_grad(), Float64():
            torch.testing.assert_close(it.model(input_ids=IDS, use_cache=False).logits, logits)
        records = it.record(IDS)
        norms = torch.stack([x.norm(dim=-1) for x in (records[0].h, *(s.out for s in records))])
        torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=1e-9, atol=0)
        assert it.scheme.startswith("proj-spheretnorm")
    assert float(it.token_losses(IDS, IDS).mean()) != pytest.approx(loss, rel=1e-6)
    for s in records:
        torch.testing.assert_close(it.whole_sequence(s)(s.h)[1], s.out, rtol=0, atol=1e-9)
    document = certificate.certify(it, IDS, tokens=2, sequence=2)
    # the closed form of the retraction's Jacobian, and the paper's bounds, hold for the model's own derivatives
    assert certificate.verify(document) == []
    for row in document.own_path.sublayers:
        assert row.verdict == "measured only"
        assert row.why.startswith("measured in float64, not proven")
        assert row.alpha > 0
        assert row.sigma_max <= 1 + row.Delta_max
        assert row.error_max < 1e-9
        assert row.paper in ("holds", "does not apply")


def test_a_wrong_fast_way_is_found(monkeypatch):
    """A way that mixes tokens, or has another derivative, is not taken."""
    it = decoder("llama")
    s = it.record(IDS)[0]
    positions = torch.tensor([1, 2, 6])
    honest = it._fast_path(s, positions)
    assert it._agrees(s, honest, positions)
    assert not it._agrees(s, lambda x: (honest(x)[0] + (x - x.detach()).roll(1, 1), x), positions)
    assert not it._agrees(s, lambda x: (honest(x)[0] + (x - x.detach()), x), positions)
    assert not it._agrees(s, lambda x: (honest(x)[0] * 1.0001, x), positions)
    # whole attention mixes them
    assert not it._agrees(s, lambda x: (it._replayed(s, s.h.index_copy(1, positions, x))[:, positions], x), positions)


def test_an_encoder_is_refused():
    import transformers as t
    from saved_decoders import SIZE

    with pytest.raises(ValueError, match="later tokens"):
        ForeignDecoder(t.BertLMHeadModel(t.BertConfig(**SIZE)))


def test_a_certificate_needs_float64():
    with pytest.raises(ValueError, match=r"torch\.float64"):
        certificate.certify(ForeignDecoder(build("llama")), IDS, tokens=2, sequence=0)
