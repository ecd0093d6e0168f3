"""Every backend x retraction x cap x dtype against the float64 reference, beside the closed form's own error."""

import math

import pytest
import torch
from oracle import rows

from spheret import RETRACTIONS, Retraction, ScaleNorm, angular, retract
from spheret.kernels import BACKENDS, chosen, native, normalize, triton, use
from spheret.kernels import closed as closed_form
from spheret.support import precision

FUSED = ("native", "triton")
EVERY = tuple(BACKENDS)
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
]
CASES = {**RETRACTIONS, "p=0.1": angular(0.1), "p=3.7": angular(3.7), "p=1e6": angular(1e6)}


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan():
    """Memory is NaN until it is written, so that a kernel that skips an element is caught."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def takes(backend, *dtypes):
    return backend != "native" or torch.float16 not in dtypes


def known_to(backend):
    """The rows of the table that a backend has code for."""
    return [name for name, retraction in RETRACTIONS.items() if BACKENDS[backend].knows(retraction)]


def inputs(d, n=16, h_dtype=torch.float32, f_dtype=torch.float32):
    """Rows with steps from 0.003 to 3 radii, partly along h, some nearly parallel to it."""
    h, f, g = (rows(n, d, seed=s) for s in (0, 1, 2))
    f = f * torch.logspace(-2.5, 0.5, n, dtype=torch.float64).view(n, 1)
    f[1::2] += h[1::2]
    return h.to(h_dtype), f.to(f_dtype), g.to(h_dtype)


def gradients(backend, h, f, g, retraction, cap, alpha=0.7, p=None, dtype=None, shape=(1,)):
    """Output, dh, df, dalpha (and dp, if p is learned); alpha and p have this shape."""
    h, f, g = (x.to(dtype or x.dtype) for x in (h, f, g))
    scalar = dtype or torch.float32
    h, f = h.requires_grad_(), f.requires_grad_()
    step = torch.full(shape, alpha, dtype=scalar, requires_grad=True)
    free = None if p is None else torch.full(shape, p, dtype=scalar, requires_grad=True)
    with use(backend):
        out = retract(h, f, step, retraction if free is None else free, cap)
    learned = [x for x in (step, free) if x is not None]
    return [out.detach(), *torch.autograd.grad(out, (h, f, *learned), g)]


def with_shares(backend, h, f, g, retraction, cap, p):
    """`gradients`, and the rows' shares of dalpha and dp, (n, 1) each."""
    seen, reduce_to = [], closed_form.reduce_to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closed_form, "reduce_to", lambda grad, like: (seen.append(grad), reduce_to(grad, like))[1])
        results = gradients(backend, h, f, g, retraction, cap, p=p)
    if backend == "native":
        # C adds the rows up, so each row is a call of its own
        rows = zip(h.split(1), f.split(1), g.split(1), strict=True)
        alone = [gradients(backend, *row_of, retraction, cap, p=p)[3:] for row_of in rows]
        seen = [torch.stack(column) for column in zip(*alone, strict=True)]
    return results, seen


def closed_form_errors(h, f, g, retraction, cap, p, exact, scales):
    """The closed form's errors per row, in four orders of the columns: (4, n) for each result.

    The order in which a machine adds up a row decides how lucky its rounding is. The bar is the worst of four orders,
    so that it hardly depends on the machine.
    """
    shuffles = [torch.randperm(h.shape[-1], generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    orders = [torch.arange(h.shape[-1]), torch.arange(h.shape[-1]).flip(0), *shuffles]
    errors = []
    for order in orders:
        (out, dh, df, *_), shares = with_shares("closed", *(x[:, order] for x in (h, f, g)), retraction, cap, p)
        back = order.argsort()
        errors.append(relative_errors([out[:, back], dh[:, back], df[:, back], *shares], exact, scales))
    return [torch.stack(column) for column in zip(*errors, strict=True)]


def relative_errors(results, exact, scales):
    columns = zip(results, exact, scales, strict=True)
    return [(x.double() - truth).norm(dim=-1) / scale for x, truth, scale in columns]


def check_errors(backend, d, retraction, cap, h_dtype, f_dtype, p=None):
    """Hold the backend's errors to twice the closed form's: the worst row, and the typical one."""
    h, f, g = inputs(d, h_dtype=h_dtype, f_dtype=f_dtype)
    # with one alpha and one p per row, the gradients of both are the rows' shares
    exact = gradients("reference", h, f, g, retraction, cap, p=p, dtype=torch.float64, shape=(len(h), 1))
    results, shares = with_shares(backend, h, f, g, retraction, cap, p)
    assert all(x.isfinite().all() for x in (*results, *shares))
    # a gradient may cancel to nearly nothing (g along h, in two dimensions), and its error does not; so may a share,
    # which is the dot product of g with a vector about as long as f
    f_size, g_size = (x.double().norm(dim=-1) for x in (f, g))
    scales = [exact[0].norm(dim=-1), *(torch.maximum(x.norm(dim=-1), 0.1 * g_size) for x in exact[1:3])]
    scales += [f_size * g_size] * len(shares)
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            # its scalars are float32, so it is held to the closed form as a device without float64 computes it
            patch.setattr(precision, "WITHOUT_FLOAT64", {"cpu"})
        bars = closed_form_errors(h, f, g, retraction, cap, p, exact, scales)
    errors = relative_errors([*results[:3], *shares], exact, scales)
    for index, (error, bar, result) in enumerate(zip(errors, bars, [*results[:3], *shares], strict=True)):
        # rounding the result alone may cost an eps
        eps = torch.finfo(result.dtype).eps
        assert error.max() <= 2 * bar.max() + eps, (index, error.max(), bar.max())
        typical = bar.square().mean(-1).sqrt().max()
        assert error.square().mean().sqrt() <= 2 * typical + eps / 4, (index, error, typical)
    for total, share in zip(results[3:], shares, strict=True):
        check_sum(total, share)


def check_sum(total, share):
    """dalpha and dp are the sums of the rows' shares.

    A float32 sum of n numbers, in any order, errs by at most (n - 1) u times the sum of their sizes, with u = eps/2
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Rounding a share that was summed in float64
    adds one more u. No smaller bound holds on every machine: the order of a vectorized sum depends on its vectors.
    """
    share = share.double()
    bound = len(share) * torch.finfo(torch.float32).eps / 2 * share.abs().sum()
    assert (total.double() - share.sum()).abs() <= bound, (total, share.sum(), bound)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("cap", [None, math.pi / 4], ids=["free", "capped"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("h_dtype", "f_dtype"), PAIRS, ids=str)
def test_errors_are_at_most_twice_the_closed_forms(backend, name, cap, h_dtype, f_dtype):
    h, f, _ = inputs(8, h_dtype=h_dtype, f_dtype=f_dtype)
    if not takes(backend, h_dtype, f_dtype):
        with pytest.raises(RuntimeError, match="float32, bfloat16"), use(backend):
            retract(h, f)
    elif not BACKENDS[backend].knows(CASES[name]):
        with pytest.raises(RuntimeError, match=f"'{CASES[name].name}'.*closed"), use(backend):
            retract(h, f, 1.0, CASES[name], cap)
    else:
        check_errors(backend, 100, CASES[name], cap, h_dtype, f_dtype)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("d", [2, 3, 7, 8, 17, 63, 255, 768, 1023, 1280, 4096, 16384])
def test_widths(backend, d):
    check_errors(backend, d, RETRACTIONS["projection"], None, torch.float32, torch.float32)
    check_errors(backend, d, RETRACTIONS["exponential"], math.pi / 4, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("cap", [None, math.pi / 4], ids=["free", "capped"])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 2.0, 3.7, 50.0])
def test_learned_p(backend, p, cap):
    check_errors(backend, 100, None, cap, torch.float32, torch.float32, p=p)


@pytest.mark.parametrize("backend", FUSED)
class TestEdges:
    def test_empty(self, backend):
        h = torch.ones(0, 8, requires_grad=True)
        alpha = torch.ones(1, requires_grad=True)
        with use(backend):
            retract(h, h * 1, alpha).sum().backward()
        assert h.grad.shape == (0, 8)
        assert alpha.grad.tolist() == [0]

    def test_layouts(self, backend):
        h, f, _ = inputs(24)
        with use(backend):
            truth = retract(h, f)
            assert torch.equal(retract(h.t().contiguous().t(), torch.stack([f, f], -1)[..., 1]), truth)
            assert torch.equal(retract(h.view(4, 4, 24), f.view(4, 4, 24)), truth.view(4, 4, 24))
            x = h[:1].expand(5, 24).clone().requires_grad_()
            out = retract(x, f[:1].expand(5, 24))
            assert torch.equal(out, truth[:1].expand(5, 24))
            # an expanded gradient, as sum() makes it
            out.sum().backward()
            torch.testing.assert_close(x.grad[0], x.grad[4])

    def test_misaligned_rows(self, backend):
        h, f, _ = inputs(24)
        shifted = torch.cat([torch.zeros(1), h.flatten()])[1:].view(16, 24)
        assert shifted.data_ptr() % 16
        with use(backend):
            assert torch.equal(retract(shifted, f), retract(h, f))

    def test_double_backward(self, backend):
        h, f, _ = (x.requires_grad_() for x in inputs(6, n=2))
        results = []
        for name in (backend, "closed"):
            with use(name):
                out = retract(h, f, 0.7, 0.5)
            first = torch.autograd.grad(out.pow(3).sum(), (h, f), create_graph=True)
            results.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), (h, f)))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("h", "retraction", "noun"),
        [
            (torch.ones(16, 24), Retraction.from_angle(torch.tanh), "'tanh'.*closed"),
            (torch.ones(16, 24), torch.ones(16, 1), "one p "),
            (torch.ones(2, 4, dtype=torch.float64), "projection", "float32"),
            (torch.ones(2, 4, dtype=torch.float64, device="meta"), "projection", "meta|float32"),
        ],
        ids=["no code", "many ps", "dtype", "device"],
    )
    def test_what_it_cannot_serve_is_refused_when_asked_for(self, backend, h, retraction, noun):
        with pytest.raises(RuntimeError, match=noun), use(backend):
            retract(h, h, 1.0, retraction)
        assert chosen(h, h, retraction) == "closed"

    def test_transforms_are_refused_when_asked_for_and_served_when_not(self, backend):
        h, f, _ = inputs(24)
        with pytest.raises(RuntimeError, match=r"torch\.func"), use(backend):
            torch.func.vmap(retract)(h, f)
        torch.testing.assert_close(torch.func.vmap(retract)(h, f), retract(h, f))


@pytest.mark.parametrize("backend", EVERY)
def test_zero_nan_and_infinite_rows(backend):
    h, f, g = inputs(24)
    h[3], h[5, 2], f[7, 2], h[9, 2], f[11, 2] = 0, math.nan, math.nan, math.inf, -math.inf
    h.requires_grad_(), f.requires_grad_()
    for name in known_to(backend):
        with use(backend):
            out = retract(h, f, 0.7, name, math.pi / 4)
        dh, df = torch.autograd.grad(out, (h, f), g)
        assert (out[3] == 0).all()
        assert torch.equal(dh[3], g[3])
        assert (df[3] == 0).all()
        assert out[[5, 7, 9, 11]].isnan().all()
        good = [i for i in range(16) if i not in (3, 5, 7, 9, 11)]
        assert all(x[good].isfinite().all() for x in (out, dh, df))


@pytest.mark.parametrize("backend", FUSED)
class TestOperators:
    def arguments(self, normed=False):
        h, f, g = inputs(24, n=5)
        alpha = torch.tensor([0.7], requires_grad=True)
        p = torch.tensor([0.5], requires_grad=True)
        gain = torch.full((24,), 0.3, requires_grad=True) if normed else None
        return (h.requires_grad_(), f.requires_grad_(), alpha, p, gain, "angular", 0.7), g

    @pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
    def test_opcheck(self, backend, normed):
        torch.use_deterministic_algorithms(False)
        kernel = {"native": native, "triton": triton}[backend].KERNEL
        (h, f, alpha, *rest), g = self.arguments(normed)
        torch.library.opcheck(kernel.forward_op, (h, f, alpha, *rest))
        half = (h, f.detach().bfloat16(), alpha.detach(), torch.ones(1), rest[1], "projection", None)
        torch.library.opcheck(kernel.forward_op, half)
        _, kept = kernel.forward_op(h, f, alpha, *rest)
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in (g, h, f, alpha, *rest)]
        torch.library.opcheck(kernel.backward_op, (*detached, kept.detach()))

    def test_an_explicit_choice_is_one_op_under_compile(self, backend):
        torch.use_deterministic_algorithms(False)
        h, f, g = (x.requires_grad_() for x in inputs(24))
        alpha = torch.tensor([0.7], requires_grad=True)

        def update(h, f, alpha):
            return retract(2 * h, f, alpha, "cayley", 0.5) + 1

        with use(backend):
            torch.compiler.reset()
            out = torch.compile(update, backend="aot_eager", fullgraph=True)(h, f, alpha)
            got = torch.autograd.grad(out, (h, f, alpha), g.detach())
        truth = torch.autograd.grad(update(h, f, alpha), (h, f, alpha), g.detach())
        torch.testing.assert_close(out, update(h, f, alpha))
        for x, y in zip(got, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [2, 63, 768, 9000])
def test_normalize(backend, dtype, d):
    h, _, g = inputs(d, h_dtype=dtype)
    h[3] = 0
    results = []
    for name, wide in ((backend, dtype), ("closed", torch.float64)):
        x = h.to(wide).requires_grad_()
        radius = torch.tensor([3.0], dtype=torch.float32 if wide == dtype else wide, requires_grad=True)
        with use(name):
            out = normalize(x, radius)
        results.append((out, *torch.autograd.grad(out, (x, radius), g.to(wide))))
    eps = torch.finfo(dtype).eps
    (out, dh, dradius), (true_out, true_dh, true_dradius) = results
    torch.testing.assert_close(out.double(), true_out, rtol=4 * eps, atol=8 * eps)
    torch.testing.assert_close(dh.double(), true_dh, rtol=4 * eps, atol=8 * eps)
    # the rows' shares cancel in the sum
    share = (g.double() * true_out).sum(-1).abs().sum().item() / 3
    torch.testing.assert_close(
        dradius.double(), true_dradius, rtol=0, atol=8 * torch.finfo(torch.float32).eps * share
    )
    assert (out[3] == 0).all()
    assert (dh[3] == 0).all()


@pytest.mark.parametrize("backend", EVERY)
def test_second_order_of_normalize(backend):
    with use(backend):
        entry = ScaleNorm(6)
        x = rows(2, 6).float().requires_grad_()
        (first,) = torch.autograd.grad(entry(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    x64 = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(entry.double()(x64).pow(3).sum(), x64, create_graph=True)
    (truth,) = torch.autograd.grad(first.pow(2).sum(), x64)
    torch.testing.assert_close(second.double(), truth, rtol=1e-3, atol=1e-2)


class TestMemory:
    """The bytes that autograd keeps between forward and backward, counted with saved-tensor hooks."""

    def kept_bytes(self, update, n=64, d=256):
        h, f = (torch.randn(n, d, requires_grad=True) for _ in range(2))
        alpha = torch.tensor([0.5], requires_grad=True)
        seen = {}

        def pack(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = update(h, f, alpha)
        assert out.shape == h.shape
        return sum(seen.values()), 2 * 4 * n * d, 4 * n

    @pytest.mark.parametrize(
        ("backend", "name"), [(backend, name) for backend in ("closed", *FUSED) for name in known_to(backend)]
    )
    def test_rows_and_at_most_8_numbers_per_row(self, backend, name):
        with use(backend):
            kept, two_rows, number = self.kept_bytes(lambda h, f, alpha: retract(h, f, alpha, name, 0.5))
        assert two_rows <= kept <= two_rows + 8 * number


def test_automatic_choice():
    h = torch.ones(2, 4)
    assert chosen(h, h) == "native"
    assert chosen(h.double(), h) == "closed"
    assert chosen(h.half(), h) == "closed"
    assert chosen(h.to("meta"), h.to("meta")) == "closed"


@pytest.mark.parametrize("backend", FUSED)
class TestSurroundings:
    """A kernel that writes through pointers must not depend on torch's defaults and modes."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
    def test_default_dtype(self, backend, dtype):
        # so many that native takes several threads
        h, f, g = inputs(64, n=512 if backend == "native" else 16)
        truth = gradients(backend, h, f, g, RETRACTIONS["angular"], 0.5)
        torch.set_default_dtype(dtype)
        try:
            got = gradients(backend, h, f, g, RETRACTIONS["angular"], 0.5)
            with use(backend):
                x = h.clone().requires_grad_()
                normalize(x, torch.tensor([3.0], dtype=torch.float32)).backward(g)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))

    def test_default_device(self, backend):
        h, f, _ = inputs(64)
        with use(backend), torch.device("meta"):
            out = retract(h, f, 0.5)
        assert out.device.type == "cpu"

    def test_a_batch_of_gradients(self, backend):
        h, f, _ = inputs(6, n=2)
        for update in (lambda h: retract(h, f, 0.5), lambda h: normalize(h, 2.0)):
            with use(backend):
                out = torch.autograd.functional.jacobian(update, h, vectorize=True)
                one_by_one = torch.autograd.functional.jacobian(update, h)
            torch.testing.assert_close(out, one_by_one, rtol=1e-4, atol=1e-5)

    def test_a_forced_choice_that_cannot_be_is_an_error_under_compile_too(self, backend):
        torch.compiler.reset()
        compiled = torch.compile(lambda h, f: retract(h, f, 0.5), backend="aot_eager")
        h = torch.ones(2, 4, dtype=torch.float64)
        with use(backend), pytest.raises(Exception, match="float32"):
            compiled(h, h)


def test_use_can_be_entered_again():
    h = torch.ones(2, 4)
    choice = use("reference")
    with choice, use(None):
        assert chosen(h, h) == "native"
    assert chosen(h, h) == "native"
    with choice:
        assert chosen(h, h) == "reference"
    assert chosen(h, h) == "native"
