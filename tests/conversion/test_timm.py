"""timm's models and torch's ResNets are converted."""

import pytest
import timm_process

# it starts a process that imports timm
pytestmark = pytest.mark.slow

SCRIPT = """
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import ResPostBlock, VisionTransformer

import spheret
from spheret.conversion import anneal, steps

small = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5)
models = {
    "vit": lambda: VisionTransformer(**small),
    "vit with drops": lambda: VisionTransformer(**small, init_values=0.1, drop_path_rate=0.1, proj_drop_rate=0.1),
    "post-norm vit": lambda: VisionTransformer(**small, block_fn=ResPostBlock),
    "resnet": lambda: ResNet(BasicBlock, (2, 1, 1, 2), channels=(64, 16, 16, 16)),
    "bottleneck": lambda: ResNet(Bottleneck, (2, 1, 1, 1), channels=(8, 8, 8, 8)),
}
results = {}
for name, build in models.items():
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 + 2 * torch.rand(())).add_(0.02 * torch.randn_like(parameter))
    model.eval()
    images = torch.randn(2, 3, *((16, 16) if "vit" in name else (32, 32)))
    before = model(images)
    _, report = spheret.convert(model, example_inputs=images)
    gap = float(((model(images) - before).abs().max() / before.abs().max()).detach())
    anneal(model, 0.5)
    model.train()
    # batch norms keep their running means, so that the reverted model can be compared bitwise
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    model(images).square().sum().backward()
    finite = all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.eval()
    anneal(model, 1.0)
    dims = sorted({step.channel_dim for step in steps(model)})
    spheret.revert(model)
    same = torch.equal(model(images), before)
    results[name] = dict(
        gap=gap, finite=finite, same=same, dims=dims, kinds=sorted({row.kind for row in report.converted}),
        number=len(report.converted), left=[why for _, why in report.left],
    )
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results():
    return timm_process.run(SCRIPT)


@pytest.mark.parametrize(
    ("name", "kind", "number", "channel_dim"),
    [
        ("vit", "pre-norm", 4, -1),
        ("vit with drops", "pre-norm", 4, -1),
        ("post-norm vit", "norm behind", 4, -1),
        # blocks that change the width have a shortcut with weights of its own, and are left
        ("resnet", "no norm", 3, 1),
        ("bottleneck", "no norm", 1, 1),
    ],
)
def test_models_of_timm(results, name, kind, number, channel_dim):
    result = results[name]
    assert result["gap"] < 1e-5
    assert result["finite"]
    assert result["same"]
    assert result["dims"] == [channel_dim]
    assert result["kinds"] == [kind]
    assert result["number"] == number
    if channel_dim == 1:
        why = "a sum of two modules' outputs, of which none is a stream that a branch reads"
        assert result["left"] == [why] * {"resnet": 3, "bottleneck": 4}[name]
