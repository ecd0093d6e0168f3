"""The update on a GPU. Each program holds a few rows. The forward moves 3 rows of memory, the backward 5.

    c = <h,f>/<h,h>   z = f - c h   beta = |alpha| |z|/|h|
    a = cos theta   b = sin theta/beta   out = a h + alpha b z

Only `turn` depends on the retraction: it returns a, sin theta, b, the slope theta'(beta), 2 db/dw and
(dtheta/dp)/beta. Everything is float32 in registers. Steps of any length that float32 can hold stay in range, because
the backward uses z/max(|z|, |h|), and rows of extreme size are scaled by powers of two, as in closed.py. Rows wider
than a tile are read in a loop; the second read comes from the cache.

With a gain, y = gain f/sqrt(mean f^2 + EPS) takes the place of f. A program of the backward then goes through STRIP
tiles of rows and adds up the gradient of the gain, so that little of it goes through memory.
"""

import triton
import triton.language as tl

# these functions are written out because Triton's interpreter lacks libdevice's, and the fast approximations are
# less accurate


@triton.jit
def _atan_series(u):
    """arctan(sqrt u)/sqrt u for u <= tan^2(pi/8)."""
    s = -1.0 / 15.0 + u * (1.0 / 17.0)
    s = 1.0 / 13.0 + u * s
    s = -1.0 / 11.0 + u * s
    s = 1.0 / 9.0 + u * s
    s = -1.0 / 7.0 + u * s
    s = 0.2 + u * s
    return 1.0 + u * (-1.0 / 3.0 + u * s)


@triton.jit
def _atan_ratio(u):
    """arctan(sqrt u)/sqrt u for u >= 0: the series; above 0.1 its argument is halved twice first."""
    one = 1.0 + tl.sqrt_rn(1.0 + u)
    half = (u / one) / one
    two = 1.0 + tl.sqrt_rn(1.0 + half)
    far = 4.0 * _atan_series((half / two) / two) / (one * two)
    return tl.where(u < 0.1, _atan_series(tl.minimum(u, 0.1)), far)


@triton.jit
def _atan_ratio_slope(u, ratio):
    """d/du of arctan(sqrt u)/sqrt u."""
    near = tl.minimum(u, 0.1)
    s = -7.0 / 15.0 + near * (8.0 / 17.0)
    s = 6.0 / 13.0 + near * s
    s = -5.0 / 11.0 + near * s
    s = 4.0 / 9.0 + near * s
    s = -3.0 / 7.0 + near * s
    s = 0.4 + near * s
    s = -1.0 / 3.0 + near * s
    return tl.where(u < 0.1, s, (1.0 / (1.0 + u) - ratio) / (2.0 * tl.maximum(u, 0.1)))


@triton.jit
def _sine_cosine(x):
    """sin x and cos x for x >= 0: reduced by multiples of pi/2 in three parts, then Taylor on |r| <= pi/4."""
    k = tl.floor(x * 0.6366197723675814 + 0.5)
    r = ((x - k * 1.5703125) - k * 4.837512969970703e-4) - k * 7.549790126404332e-8
    # beyond about 1e5 radians float32 cannot resolve the angle: any finite value will do; NaN stays NaN
    r = tl.where(r > 0.8, 0.8, tl.where(r < -0.8, -0.8, r))
    v = r * r
    s = r * (1.0 + v * (-1.0 / 6 + v * (1.0 / 120 + v * (-1.0 / 5040 + v * (1.0 / 362880)))))
    c = 1.0 + v * (-0.5 + v * (1.0 / 24 + v * (-1.0 / 720 + v * (1.0 / 40320 - v * (1.0 / 3628800)))))
    quadrant = k - 4.0 * tl.floor(k * 0.25)
    odd = (quadrant == 1.0) | (quadrant == 3.0)
    sine, cosine = tl.where(odd, c, s), tl.where(odd, s, c)
    return tl.where(quadrant >= 2.0, -sine, sine), tl.where((quadrant == 1.0) | (quadrant == 2.0), -cosine, cosine)


@triton.jit
def turn(beta, p, cap, cos_cap, sin_cap, KIND: tl.constexpr, CAPPED: tl.constexpr):
    """a, sin theta, b, theta'(beta), 2 db/dw for steps below 1, and (dtheta/dp)/beta."""
    w = beta * beta
    by_p = tl.zeros_like(beta)
    if KIND == "projection":
        a = tl.where(beta > 1e9, 1.0 / tl.maximum(beta, 1.0), 1.0 / tl.sqrt_rn(1.0 + w))
        b = a
        sine = beta * a
        slope = a * a
        db2 = -a * a * a
        over = a < cos_cap
    elif KIND == "cayley":
        b = 4.0 / (4.0 + w)
        a = 2.0 * b - 1.0
        sine = beta * b
        slope = b
        db2 = -0.5 * b * b
        over = a < cos_cap
    else:
        ratio = tl.full(beta.shape, 1.0, tl.float32)
        slope = ratio
        bend = tl.zeros_like(beta)
        if KIND == "angular":
            # beyond 1e8 the arctangent is pi/2 in float32
            x = tl.minimum(beta / p, 1e8)
            u = x * x
            ratio = _atan_ratio(u)
            slope = 1.0 / (1.0 + (beta / p) * (beta / p))
            rise = _atan_ratio_slope(u, ratio)
            bend = rise / (p * p)
            by_p = -2.0 * u * rise / p
            theta = tl.where(beta / p > 1e8, p * x, beta) * ratio
        else:
            theta = beta
        sine, a = _sine_cosine(theta)
        v = tl.minimum(theta * theta, 1.0)
        sinc = 1.0 + v * (-1.0 / 6 + v * (1.0 / 120 + v * (-1.0 / 5040 + v * (1.0 / 362880 - v * (1.0 / 39916800)))))
        dsinc = -1.0 / 6 + v * (1.0 / 60 + v * (-1.0 / 1680 + v * (1.0 / 90720 - v * (1.0 / 7983360))))
        short = (theta < 1.0) & (beta < 1.0)
        b = tl.where(short, ratio * sinc, sine / tl.maximum(beta, 1e-30))
        near = 2.0 * (bend * sinc + ratio * ratio * dsinc * slope)
        db2 = tl.where(short, near, (slope * a - b) / tl.maximum(w, 1e-30))
        over = theta > cap
    if CAPPED:
        a = tl.where(over, cos_cap, a)
        sine = tl.where(over, sin_cap, sine)
        b = tl.where(over, sin_cap / tl.maximum(beta, 1e-30), b)
        slope = tl.where(over, 0.0, slope)
        db2 = tl.where(over, -b / tl.maximum(w, 1e-30), db2)
        by_p = tl.where(over, 0.0, by_p)
    return a, sine, b, slope, db2, by_p


@triton.jit
def _ratio(zz, hh):
    """|z|/|h| with as few roundings as the range of float32 allows."""
    square = tl.div_rn(zz, hh)
    in_range = (square > 1e-30) & (square < 1e30)
    return tl.where(in_range, tl.sqrt_rn(square), tl.div_rn(tl.sqrt_rn(zz), tl.sqrt_rn(hh)))


@triton.jit
def _scalar(pointer, value, rows, mask, MODE: tl.constexpr):
    """An alpha or a p: a number (mode 0), one element in memory (1), or one element per row (2)."""
    if MODE == 0:
        return tl.full(rows.shape, 1.0, tl.float32) * value
    elif MODE == 1:
        return tl.full(rows.shape, 1.0, tl.float32) * tl.load(pointer).to(tl.float32)
    else:
        return tl.load(pointer + rows, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scaled_square(f):
    """(2^-70 f)^2, which does not overflow."""
    small = f * 8.470329472543003e-22
    return small * small


@triton.jit
def _inverse_rms(squares, scaled, d):
    """1/sqrt(mean f^2 + EPS), from the sum of squares, or from `_scaled_square` where the sum overflows."""
    one = tl.full(squares.shape, 1.0, tl.float32)
    near = tl.div_rn(one, tl.sqrt_rn(squares / d + 1.1920928955078125e-07))
    far = tl.div_rn(one * 8.470329472543003e-22, tl.sqrt_rn(scaled / d))
    return tl.where(squares < 1e38, near, far)


@triton.jit
def _branch(f, gain, rms):
    """The branch's output as the update takes it."""
    return gain * (f * rms)


@triton.jit
def _scaled_rows(h_ptr, f_ptr, gain_ptr, base, columns, ok, d, rms, s, t, GAIN: tl.constexpr):
    """A tile of s h and of t f, where f is the branch's output as the update takes it."""
    h = tl.load(h_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
    if GAIN:
        f = _branch(f, tl.load(gain_ptr + columns, mask=columns < d, other=0.0), rms)
    return h * s, f * t


@triton.jit
def _power_of_two(largest):
    """What brings the largest entry of a row near 1 if it is extreme, else 1. The exponent of a float is its bits."""
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    extreme = (largest > 4294967296.0) | ((largest > 0.0) & (largest < 2.3283064365386963e-10))
    return tl.where(extreme, power, 1.0)


@triton.jit
def _scales(h_largest, f_largest):
    """s and t for h and f: t is not too far above s."""
    s = _power_of_two(h_largest)
    return s, tl.minimum(_power_of_two(f_largest), s * 1152921504606846976.0)


@triton.jit
def forward_rows(
    h_ptr, f_ptr, gain_ptr, out_ptr, kept_ptr, n, d, alpha_ptr, alpha_value, p_ptr, p_value, cap, cos_cap, sin_cap,
    KIND: tl.constexpr, CAPPED: tl.constexpr, ALPHA: tl.constexpr, P: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_ok = rows < n
    columns = tl.arange(0, BLOCK)[None, :]
    base = rows * d
    alpha = _scalar(alpha_ptr, alpha_value, rows, row_ok, ALPHA)
    p = _scalar(p_ptr, p_value, rows, row_ok, P)
    rms = tl.full(rows.shape, 1.0, tl.float32)

    if LOOP:
        if GAIN:
            squares_sum = tl.zeros((ROWS, BLOCK), tl.float32)
            scaled_sum = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, d, BLOCK):
                ok = row_ok & (start + columns < d)
                f = tl.load(f_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                squares_sum += f * f
                scaled_sum += _scaled_square(f)
            squares = tl.sum(squares_sum, axis=1, keep_dims=True)
            rms = _inverse_rms(squares, tl.sum(scaled_sum, axis=1, keep_dims=True), d)
        h_largest = tl.zeros((ROWS, BLOCK), tl.float32)
        f_largest = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, d, BLOCK):
            ok = row_ok & (start + columns < d)
            h, f = _scaled_rows(h_ptr, f_ptr, gain_ptr, base, start + columns, ok, d, rms, 1.0, 1.0, GAIN)
            h_largest = tl.maximum(h_largest, tl.abs(h))
            f_largest = tl.maximum(f_largest, tl.abs(f))
        s, t = _scales(tl.max(h_largest, axis=1, keep_dims=True), tl.max(f_largest, axis=1, keep_dims=True))
        hh_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        hf_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, d, BLOCK):
            ok = row_ok & (start + columns < d)
            h, f = _scaled_rows(h_ptr, f_ptr, gain_ptr, base, start + columns, ok, d, rms, s, t, GAIN)
            hh_sum += h * h
            hf_sum += h * f
        hh = tl.sum(hh_sum, axis=1, keep_dims=True)
        hf = tl.sum(hf_sum, axis=1, keep_dims=True)
        live = hh != 0.0
        c = tl.where(live, tl.div_rn(hf, tl.where(live, hh, 1.0)), 0.0)
        zz_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        hz_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, d, BLOCK):
            ok = row_ok & (start + columns < d)
            h, f = _scaled_rows(h_ptr, f_ptr, gain_ptr, base, start + columns, ok, d, rms, s, t, GAIN)
            z = f - c * h
            zz_sum += z * z
            hz_sum += h * z
        zz = tl.sum(zz_sum, axis=1, keep_dims=True)
        hz = tl.sum(hz_sum, axis=1, keep_dims=True)
    else:
        ok = row_ok & (columns < d)
        h = tl.load(h_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
        if GAIN:
            squares = tl.sum(f * f, axis=1, keep_dims=True)
            rms = _inverse_rms(squares, tl.sum(_scaled_square(f), axis=1, keep_dims=True), d)
            f = _branch(f, tl.load(gain_ptr + columns, mask=columns < d, other=0.0), rms)
        s, t = _scales(tl.max(tl.abs(h), axis=1, keep_dims=True), tl.max(tl.abs(f), axis=1, keep_dims=True))
        h, f = h * s, f * t
        hh = tl.sum(h * h, axis=1, keep_dims=True)
        hf = tl.sum(h * f, axis=1, keep_dims=True)
        live = hh != 0.0
        c = tl.where(live, tl.div_rn(hf, tl.where(live, hh, 1.0)), 0.0)
        z = f - c * h
        zz = tl.sum(z * z, axis=1, keep_dims=True)
        hz = tl.sum(h * z, axis=1, keep_dims=True)

    safe = tl.where(live, hh, 1.0)
    ratio = tl.minimum(tl.div_rn(s, t), 1152921504606846976.0)
    eta = tl.where(live, _ratio(zz, safe), 0.0) * ratio
    a, _, b, _, _, _ = turn(tl.abs(alpha) * eta, p, cap, cos_cap, sin_cap, KIND, CAPPED)
    q = tl.where(live, alpha * b, 0.0) * ratio
    # the part along h that rounding left in z is taken out of the coefficient of h
    a = a - q * (hz / safe)
    back = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)

    if LOOP:
        for start in range(0, d, BLOCK):
            ok = row_ok & (start + columns < d)
            h, f = _scaled_rows(h_ptr, f_ptr, gain_ptr, base, start + columns, ok, d, rms, s, t, GAIN)
            out = back * (a * h + q * (f - c * h))
            tl.store(out_ptr + base + start + columns, out.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        out = back * (a * h + q * z)
        tl.store(out_ptr + base + columns, out.to(out_ptr.dtype.element_ty), mask=row_ok & (columns < d))
    kept = kept_ptr + (6 if GAIN else 5) * rows
    tl.store(kept, s, mask=row_ok)
    tl.store(kept + 1, t, mask=row_ok)
    tl.store(kept + 2, hh, mask=row_ok)
    tl.store(kept + 3, hf, mask=row_ok)
    tl.store(kept + 4, zz, mask=row_ok)
    if GAIN:
        tl.store(kept + 5, rms, mask=row_ok)


@triton.jit
def backward_rows(
    g_ptr, h_ptr, f_ptr, gain_ptr, kept_ptr, dh_ptr, df_ptr, sums_ptr, gains_ptr, n, d, alpha_ptr, alpha_value,
    p_ptr, p_value, cap, cos_cap, sin_cap, KIND: tl.constexpr, CAPPED: tl.constexpr, ALPHA: tl.constexpr,
    P: tl.constexpr, GAIN: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    if GAIN and not LOOP:
        gain = tl.load(gain_ptr + columns, mask=columns < d, other=0.0)
        gains = tl.zeros((1, BLOCK), tl.float32)
    for tile in range(STRIP):
        rows = (program * STRIP + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        row_ok = rows < n
        base = rows * d
        alpha = _scalar(alpha_ptr, alpha_value, rows, row_ok, ALPHA)
        p = _scalar(p_ptr, p_value, rows, row_ok, P)
        kept = kept_ptr + (6 if GAIN else 5) * rows
        s = tl.load(kept, mask=row_ok, other=1.0)
        t = tl.load(kept + 1, mask=row_ok, other=1.0)
        hh = tl.load(kept + 2, mask=row_ok, other=1.0)
        hf = tl.load(kept + 3, mask=row_ok, other=0.0)
        zz = tl.load(kept + 4, mask=row_ok, other=0.0)
        rms = tl.load(kept + 5, mask=row_ok, other=0.0) if GAIN else alpha
        live = hh != 0.0
        safe = tl.where(live, hh, 1.0)
        c = tl.where(live, tl.div_rn(hf, safe), 0.0)
        norm = tl.sqrt_rn(safe)
        ratio = tl.minimum(tl.div_rn(s, t), 1152921504606846976.0)
        eta = tl.where(live, _ratio(zz, safe), 0.0) * ratio
        stretch = tl.maximum(eta, 1.0)
        to_u = 1.0 / norm
        to_v = to_u / stretch * ratio

        if LOOP:
            gu_sum = tl.zeros((ROWS, BLOCK), tl.float32)
            gv_sum = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, d, BLOCK):
                ok = row_ok & (start + columns < d)
                g = tl.load(g_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                h = tl.load(h_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                f = tl.load(f_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                if GAIN:
                    gain = tl.load(gain_ptr + start + columns, mask=start + columns < d, other=0.0)
                    f = _branch(f, gain, rms)
                h, f = h * s, f * t
                gu_sum += g * (h * to_u)
                gv_sum += g * ((f - c * h) * to_v)
            gu = tl.sum(gu_sum, axis=1, keep_dims=True)
            gv = tl.sum(gv_sum, axis=1, keep_dims=True)
        else:
            ok = row_ok & (columns < d)
            g = tl.load(g_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
            h = tl.load(h_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
            f = tl.load(f_ptr + base + columns, mask=ok, other=0.0).to(tl.float32)
            if GAIN:
                unit = f * rms
                f = gain * unit
            h, f = h * s, f * t
            u = h * to_u
            v = (f - c * h) * to_v
            gu = tl.sum(g * u, axis=1, keep_dims=True)
            gv = tl.sum(g * v, axis=1, keep_dims=True)

        # of h and f themselves
        scaled_c = c
        c = c * ratio
        norm = tl.div_rn(norm, s)
        beta = tl.abs(alpha) * eta
        a, sine, b, slope, db2, by_p = turn(beta, p, cap, cos_cap, sin_cap, KIND, CAPPED)
        sign = tl.where(alpha < 0.0, -1.0, 1.0)
        q = tl.where(live, alpha * b, 0.0)
        kh = q * gu
        # w 2db/dw = theta' cos theta - b: the analytic form for steps below 1, the difference above
        spread = slope * a - b
        long = eta > 1.0
        cross = tl.where(long, -alpha * sign * sine * slope, -alpha * alpha * b * slope)
        kv = cross * gu + tl.where(long, alpha * spread, alpha * alpha * alpha * db2) * gv
        kv = tl.where(live, kv, 0.0)
        # kz |z|^2/|h|^2, with kz = kv/stretch
        radial = tl.where(live, -beta * sine * slope * gu + alpha * spread * stretch * gv, 0.0)
        # df is smaller by what the limit of the ratio left out
        excess = tl.minimum(tl.div_rn(t, s) * 1152921504606846976.0, 1.0)
        fg, fv, fu = excess * q, excess * kv, -excess * kh
        hg, hv, hu = a - c * q, -(kh * stretch + c * kv), c * kh - radial

        # one value per row, summed afterwards in a fixed order: no atomics, so every run gives the same bits
        gz = gv * stretch
        dalpha = tl.where(live, norm * slope * (a * gz - sign * eta * sine * gu), 0.0)
        dp = norm * by_p * (alpha * a * gz - beta * sine * gu)
        tl.store(sums_ptr + 2 * rows, dalpha, mask=row_ok)
        tl.store(sums_ptr + 2 * rows + 1, tl.where(live, dp, 0.0), mask=row_ok)
        # <y, dy>/d
        mean = alpha * dalpha / d

        if LOOP:
            for start in range(0, d, BLOCK):
                ok = row_ok & (start + columns < d)
                g = tl.load(g_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                h = tl.load(h_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                f = tl.load(f_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
                if GAIN:
                    gain = tl.load(gain_ptr + start + columns, mask=start + columns < d, other=0.0)
                    unit = f * rms
                    f = gain * unit
                h, f = h * s, f * t
                u = h * to_u
                v = (f - scaled_c * h) * to_v
                df = fg * g + fv * v + fu * u
                dh = hg * g + hv * v + hu * u
                if GAIN:
                    # a wide row is a tile of its own; the first one of a program starts the sums
                    place = gains_ptr + program * d + start + columns
                    within = start + columns < d
                    total = tl.load(place, mask=within & (tile > 0), other=0.0) + df * unit
                    tl.store(place, total, mask=within)
                    df = rms * (gain * df - mean * unit)
                tl.store(df_ptr + base + start + columns, df.to(df_ptr.dtype.element_ty), mask=ok)
                tl.store(dh_ptr + base + start + columns, dh.to(dh_ptr.dtype.element_ty), mask=ok)
        else:
            ok = row_ok & (columns < d)
            df = fg * g + fv * v + fu * u
            if GAIN:
                gains += tl.sum(df * unit, axis=0, keep_dims=True)
                df = rms * (gain * df - mean * unit)
            tl.store(df_ptr + base + columns, df.to(df_ptr.dtype.element_ty), mask=ok)
            tl.store(dh_ptr + base + columns, (hg * g + hv * v + hu * u).to(dh_ptr.dtype.element_ty), mask=ok)
    if GAIN and not LOOP:
        tl.store(gains_ptr + program * d + columns, gains, mask=columns < d)


@triton.jit
def norm_forward_rows(
    h_ptr, out_ptr, kept_ptr, n, d, radius_ptr, radius_value,
    RADIUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = radius h/|h|. What is read again comes from the cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_ok = rows < n
    columns = tl.arange(0, BLOCK)[None, :]
    base = rows * d
    radius = _scalar(radius_ptr, radius_value, rows, row_ok, RADIUS)
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, d, BLOCK):
        h = tl.load(h_ptr + base + start + columns, mask=row_ok & (start + columns < d), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(h))
    s = _power_of_two(tl.max(largest, axis=1, keep_dims=True))
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, d, BLOCK):
        h = s * tl.load(h_ptr + base + start + columns, mask=row_ok & (start + columns < d), other=0.0).to(tl.float32)
        total += h * h
    hh = tl.sum(total, axis=1, keep_dims=True)
    live = hh != 0.0
    scale = tl.where(live, tl.div_rn(radius, tl.sqrt_rn(tl.where(live, hh, 1.0))), 0.0)
    for start in range(0, d, BLOCK):
        ok = row_ok & (start + columns < d)
        h = s * tl.load(h_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
        tl.store(out_ptr + base + start + columns, (scale * h).to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(kept_ptr + 2 * rows, hh, mask=row_ok)
    tl.store(kept_ptr + 2 * rows + 1, s, mask=row_ok)


@triton.jit
def norm_backward_rows(
    g_ptr, h_ptr, kept_ptr, dh_ptr, sums_ptr, n, d, radius_ptr, radius_value,
    RADIUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dh = radius/|h| (g - <g,u> u) with u = h/|h|, and <g,u> of each row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_ok = rows < n
    columns = tl.arange(0, BLOCK)[None, :]
    base = rows * d
    radius = _scalar(radius_ptr, radius_value, rows, row_ok, RADIUS)
    hh = tl.load(kept_ptr + 2 * rows, mask=row_ok, other=1.0)
    s = tl.load(kept_ptr + 2 * rows + 1, mask=row_ok, other=1.0)
    live = hh != 0.0
    inverse = tl.where(live, tl.div_rn(1.0, tl.sqrt_rn(tl.where(live, hh, 1.0))), 0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, d, BLOCK):
        ok = row_ok & (start + columns < d)
        g = tl.load(g_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
        u = s * tl.load(h_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32) * inverse
        total += g * u
    gu = tl.sum(total, axis=1, keep_dims=True)
    for start in range(0, d, BLOCK):
        ok = row_ok & (start + columns < d)
        g = tl.load(g_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32)
        u = s * tl.load(h_ptr + base + start + columns, mask=ok, other=0.0).to(tl.float32) * inverse
        dh = s * (radius * inverse * (g - gu * u))
        tl.store(dh_ptr + base + start + columns, dh.to(dh_ptr.dtype.element_ty), mask=ok)
    tl.store(sums_ptr + rows, gu, mask=row_ok)
