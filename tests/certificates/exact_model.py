"""Sublayers of small models in 60 digits, written from the formulas: the truth that enclosures must contain."""

import mpmath as mp

DIGITS = 60
STEP = mp.mpf(10) ** -22


def numbers(tensor):
    """A tensor of one or two dimensions as mpf, without rounding."""
    if tensor.dim() == 1:
        return [mp.mpf(float(x)) for x in tensor]
    return [numbers(row) for row in tensor]


def dot(a, b):
    return mp.fsum(x * y for x, y in zip(a, b, strict=True))


def affine(layer, x):
    rows = [dot(row, x) for row in numbers(layer.weight)]
    return rows if layer.bias is None else [y + b for y, b in zip(rows, numbers(layer.bias), strict=True)]


def layer_norm(norm, x):
    mean = mp.fsum(x) / len(x)
    variance = mp.fsum((y - mean) ** 2 for y in x) / len(x)
    scale = 1 / mp.sqrt(variance + mp.mpf(norm.eps))
    gains, biases = numbers(norm.weight), numbers(norm.bias)
    return [(y - mean) * scale * g + b for y, g, b in zip(x, gains, biases, strict=True)]


def softplus(x):
    return mp.log(1 + mp.exp(x))


def mlp(branch, x):
    hidden = [y * (1 + mp.erf(y / mp.sqrt(2))) / 2 for y in affine(branch.hidden, x)]
    return affine(branch.output, hidden)


def attention(branch, inputs, x):
    """The output at a token that reads x, after tokens that read `inputs`."""
    width, heads = len(x), branch.heads
    size = width // heads
    projected = [affine(branch.qkv, token) for token in [*inputs, x]]
    mixed = []
    for head in range(heads):
        q, keys, values = (
            [token[part * width + head * size : part * width + (head + 1) * size] for token in projected]
            for part in range(3)
        )
        scores = [dot(q[-1], key) / mp.sqrt(size) for key in keys]
        weights = [mp.exp(score) for score in scores]
        total = mp.fsum(weights)
        mixed += [mp.fsum(w * v[i] for w, v in zip(weights, values, strict=True)) / total for i in range(size)]
    return affine(branch.output, mixed)


def retract(norm, h, f):
    """The paper's update with theta = p arctan(beta/p)."""
    alpha = mp.mpf(norm.factor) * min(softplus(mp.mpf(float(norm.a))), mp.mpf(1))
    p = mp.mpf(norm.p) if norm.raw_p is None else softplus(mp.mpf(float(norm.raw_p)))
    hh = dot(h, h)
    c = dot(h, f) / hh
    z = [y - c * x for x, y in zip(h, f, strict=True)]
    length = mp.sqrt(dot(z, z))
    beta = alpha * length / mp.sqrt(hh)
    theta = beta if p == mp.inf else p * mp.atan(beta / p)
    if norm.max_angle is not None:
        theta = min(theta, mp.mpf(norm.max_angle))
    turned = mp.sqrt(hh) * mp.sin(theta) / length
    return [mp.cos(theta) * x + turned * y for x, y in zip(h, z, strict=True)]


def read(connection, h):
    norm = connection.inner_norm
    return layer_norm(norm, h) if hasattr(norm, "eps") else h


def write(connection, h, f):
    if connection.retraction_step() is not None:
        return retract(connection.norm, h, f)
    if hasattr(connection.output_norm, "eps"):
        f = layer_norm(connection.output_norm, f)
    summed = [mp.mpf(connection.scale) * x + y for x, y in zip(h, f, strict=True)]
    return layer_norm(connection.outer_norm, summed) if hasattr(connection.outer_norm, "eps") else summed


def update(s, position):
    """The next state of the token at `position` as a function of its own state."""
    before = [read(s.connection, numbers(row)) for row in s.h[0, :position]]

    def function(h):
        x = read(s.connection, h)
        f = attention(s.branch, before, x) if hasattr(s.branch, "qkv") else mlp(s.branch, x)
        return write(s.connection, h, f)

    return function


def jacobian(s, position):
    """By central differences: a step of 1e-22 leaves an error of about 1e-38."""
    function, h = update(s, position), numbers(s.h[0, position])
    columns = []
    for i in range(len(h)):
        ahead, behind = (function([x + sign * STEP * (j == i) for j, x in enumerate(h)]) for sign in (1, -1))
        columns.append([(a - b) / (2 * STEP) for a, b in zip(ahead, behind, strict=True)])
    return mp.matrix(columns).T


def extremes(matrix):
    values = mp.svd_r(matrix, compute_uv=False)
    return max(values), min(values)
