"""`spheret.Head`: the head of other people's decoders, tied or untied, with a bias of the token frequencies."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_model, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spheret import GPT, GPTConfig, Head, parameter_groups
from spheret.optim import hidden_matrices

VOCAB, WIDTH = 50, 16
COUNTS = torch.arange(VOCAB)
TIED = pytest.mark.parametrize("tied", [True, False])


class Decoder(nn.Module):
    def __init__(self, tied=True, counts=COUNTS):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.lm_head = Head(self.tokens, counts, tied=tied)

    def forward(self, x):
        return self.lm_head(self.mlp(self.tokens(x)))


def x(seed=0):
    return torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))


def loss(model):
    return F.cross_entropy(model(x()).flatten(0, 1), x(1).flatten())


def is_tied(model):
    return model.lm_head.weight is model.tokens.weight


@pytest.mark.parametrize("head", ["shifted", "untied"])
def test_it_is_the_head_of_a_gpt(head):
    gpt = GPT(GPTConfig(layers=1, heads=2, width=WIDTH, block=8, vocab=VOCAB, head=head, head_bias="unigram"), COUNTS)
    ours = Head(gpt.tokens, COUNTS, tied=head == "shifted")
    if head == "untied":
        ours.linear.load_state_dict({"weight": gpt.head.weight})
    h = torch.randn(2, 8, WIDTH)
    torch.testing.assert_close(ours(h), gpt.logits(h))
    assert torch.equal(ours.bias, gpt.head_bias)


class TestBias:
    @pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
    def test_it_starts_at_the_log_frequencies(self, kind):
        bias = Head(nn.Embedding(5, 4), kind([3, 0, 6])).bias
        shares = torch.tensor([3, 0.5, 6, 0.5, 0.5]) / 10.5
        torch.testing.assert_close(bias.detach(), shares.log())

    def test_without_counts_it_starts_at_0(self):
        assert not Head(nn.Embedding(5, 4)).bias.any()

    @pytest.mark.parametrize("counts", [[1] * 6, [1, -1], [0, 0], [[1, 2]], [math.nan, 1]])
    def test_counts_that_are_none(self, counts):
        with pytest.raises(ValueError, match="counts"):
            Head(nn.Embedding(5, 4), counts)

    def test_an_initialisation_of_linear_layers_does_not_reach_it(self):
        model = Decoder()
        before = model.lm_head.bias.detach().clone()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        assert torch.equal(model.lm_head.bias, before)

    @TIED
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_it_stays_in_float32(self, dtype, tied):
        model = Decoder(tied)
        before = model.lm_head.bias.detach().clone()
        loss(model).backward()
        model = model.to(dtype)
        assert model.lm_head.weight.dtype == model.mlp.weight.dtype == dtype
        assert torch.equal(model.lm_head.bias, before)
        assert model.lm_head.bias.grad.dtype == model(x()).dtype == torch.float32
        loss(model).backward()
        assert Head(nn.Embedding(5, 4, dtype=dtype), [1, 2]).bias.dtype == torch.float32
        assert model.double()(x()).dtype == model.lm_head.bias.dtype == torch.float64

    def test_under_autocast_the_logits_are_float32(self):
        with torch.autocast("cpu", torch.bfloat16):
            assert Decoder()(x()).dtype == torch.float32


class TestTheSharedWeight:
    def test_loads_copies_and_moves_keep_it_shared(self, tmp_path):
        torch.manual_seed(1)
        model, other = Decoder(), Decoder(counts=None)
        assert "lm_head.bias" in model.state_dict()
        assert len(list(model.parameters())) == 4
        for assign in (False, True):
            other.load_state_dict(model.state_dict(), assign=assign)
            assert is_tied(other)
            assert torch.equal(other(x()), model(x()))
        save_model(model, tmp_path / "model.safetensors")
        load_model(other, tmp_path / "model.safetensors")
        twin = copy.deepcopy(other)
        assert is_tied(twin)
        assert twin.tokens.weight is not other.tokens.weight
        with torch.device("meta"):
            empty = Decoder()
        empty.to_empty(device="cpu")
        for module in (empty.tokens, empty.mlp, empty.lm_head):
            module.reset_parameters()
        assert is_tied(empty)
        assert torch.equal(empty.lm_head.bias, model.lm_head.bias)

    def test_functional_call_replaces_it(self):
        model = Decoder()
        weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (x(),))
        assert not logits.any()

    def test_it_gets_the_gradient_of_both_ends(self):
        model = Decoder()
        loss(model).backward()
        # tokens that are not in the batch get one from the head
        assert model.tokens.weight.grad.abs().sum(1).all()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_transformers_may_tie_it_save_it_and_grow_it(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip

    class Model(getattr(transformers, "LlamaForCausalLM" if kind == "Llama" else "GPT2LMHeadModel")):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head = Head(self.get_input_embeddings(), COUNTS)
            self.post_init()

    model = Model(config).eval()
    assert torch.equal(model.lm_head.bias, Head(model.get_input_embeddings(), COUNTS).bias)
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(x()).logits, model(x()).logits)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    loaded.resize_token_embeddings(VOCAB + 2)
    assert loaded(x()).logits.shape[-1] == VOCAB + 2


@TIED
def test_another_weight_is_refused(tied):
    model = Decoder(tied)
    model.lm_head.weight = model.lm_head.weight
    with pytest.raises(ValueError, match="tied"):
        model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, WIDTH))


@TIED
def test_groups(tied):
    model = Decoder(tied)
    decay, keep = parameter_groups(model, 0.1)
    assert any(p is model.lm_head.bias for p in keep["params"])
    assert sum(p is model.tokens.weight for p in decay["params"]) == 1
    assert hidden_matrices(model).keys() == {model.mlp.weight}


@TIED
def test_compiles_into_one_graph(tied):
    model = Decoder(tied)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    parameters, losses = list(model.parameters()), (loss(compiled), loss(model))
    torch.testing.assert_close(*losses)
    for got, truth in zip(*(torch.autograd.grad(each, parameters) for each in losses), strict=True):
        torch.testing.assert_close(got, truth)


@TIED
def test_exports(tied):
    model = Decoder(tied).eval()
    torch.testing.assert_close(torch.export.export(model, (x(),)).module()(x()), model(x()))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@TIED
@pytest.mark.parametrize("alone", [False, True])
def test_fsdp2(mesh, tied, alone):
    """alone: the head, too, is a unit of its own."""
    torch.manual_seed(1)
    plain, model = Decoder(tied), Decoder(tied)
    model.load_state_dict(plain.state_dict())
    if alone:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(parameter_groups(each, 0.1), lr=0.1)
        for _ in range(2):
            loss(each).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), (_, truth) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), truth, msg=name)
    model.lm_head.reset_parameters()
    assert torch.equal(model.lm_head.bias.full_tensor(), Decoder().lm_head.bias)
