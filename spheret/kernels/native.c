// The update on a CPU. The forward is one pass over memory (read h and f, write out), and so is the backward (read g,
// h and f, write dh and df). Each row is read twice, the second time from the first-level cache. native.py builds this
// file with the machine's own compiler, whose vector types become AVX2, AVX-512 or NEON instructions.
//
//   c = <h,f>/<h,h>   z = f - c h   w = alpha^2 <z,z>/<h,h>   out = a(w) h + alpha b(w) z
//
// The normed functions take y = gain f/sqrt(mean f^2 + EPS) for f, in the same pass.
// Rows of extreme size, whose squares leave the range of float, are counted and left to native.py, marked by a first
// scalar of -1.
// This file includes itself once per pair of types H and F, of stream and branch, and each time once more for the
// normed functions. NAME(forward) of float and bfloat16 is forward_f32_bf16.
#ifndef ROWS
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef float f32;
typedef uint16_t bf16;

// rows per partial sum of dalpha and dp: fixed, so that the sums do not depend on the number of threads
enum { CHUNK = 64 };
// elements per partial sum of a dot product: with two levels of sums, long rows round as little as short ones
enum { BLOCK = 256 };
// added to the mean square of a branch's output, as in closed.py
#define EPS 0x1p-23
enum { PROJECTION, CAYLEY, ANGULAR, EXPONENTIAL };
typedef struct { double a, b, da, db, ap, bp; } coefficients;

// cos(sqrt v), sin(sqrt v)/sqrt v and its derivative, analytic at 0
static void root_functions(double v, double *cosine, double *sinc, double *dsinc) {
    if (v < 1e-2) {  // six terms: the next is below 1e-20
        *cosine = 1 + v * (-1. / 2 + v * (1. / 24 + v * (-1. / 720 + v * (1. / 40320 - v / 3628800))));
        *sinc = 1 + v * (-1. / 6 + v * (1. / 120 + v * (-1. / 5040 + v * (1. / 362880 - v / 39916800))));
        *dsinc = -1. / 6 + v * (2. / 120 + v * (-3. / 5040 + v * (4. / 362880 - v * 5 / 39916800)));
    } else {
        double root = sqrt(v);
        *cosine = cos(root);
        *sinc = sin(root) / root;
        *dsinc = (*cosine - *sinc) / (2 * v);
    }
}

// a(w) and b(w) under the cap, with their derivatives in w and p; without a cap, cap is INFINITY
static coefficients evaluate(int kind, double w, double p, double cap, double cos_cap, double sin_cap) {
    coefficients k = {0};
    int over;
    if (kind == PROJECTION) {
        k.a = k.b = 1 / sqrt(1 + w);
        k.da = k.db = -0.5 * k.a * k.a * k.a;
        over = cap < M_PI_2 && k.a < cos_cap;
    } else if (kind == CAYLEY) {
        k.b = 4 / (4 + w);
        k.a = 2 * k.b - 1;
        k.db = -0.25 * k.b * k.b;
        k.da = 2 * k.db;
        over = cap < M_PI && k.a < cos_cap;
    } else {
        double ratio = 1, dratio = 0, u = 0, sinc, dsinc;
        if (kind == ANGULAR) {  // arctan(sqrt u)/sqrt u and its derivative
            u = w / (p * p);
            if (u < 1e-2) {  // eight terms: the next is below 1e-17
                ratio = 1 + u * (-1. / 3 + u * (1. / 5 + u * (-1. / 7 + u * (1. / 9 + u * (-1. / 11 +
                        u * (1. / 13 - u / 15))))));
                dratio = -1. / 3 + u * (2. / 5 + u * (-3. / 7 + u * (4. / 9 + u * (-5. / 11 + u * (6. / 13 -
                         u * 7 / 15)))));
            } else {
                ratio = atan(sqrt(u)) / sqrt(u);
                dratio = (1 / (1 + u) - ratio) / (2 * u);
            }
        }
        double slope = 1 / (1 + u);
        root_functions(w * ratio * ratio, &k.a, &sinc, &dsinc);
        k.b = ratio * sinc;
        k.da = -0.5 * k.b * slope;
        k.db = (kind == ANGULAR ? dratio * sinc / (p * p) : 0) + ratio * ratio * dsinc * slope;
        if (kind == ANGULAR) {
            double turn = -2 * u * dratio / p;
            k.ap = -k.b * w * turn;
            k.bp = k.a * turn;
        }
        over = sqrt(w) * ratio > cap;
    }
    if (over) {  // at the cap the angle does not depend on w
        k.a = cos_cap;
        k.b = sin_cap / sqrt(w);
        k.db = -0.5 * k.b / w;
        k.da = k.ap = k.bp = 0;
    }
    return k;
}

static inline double total(vec x) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline vec load_f32(const float *x) { vec v; memcpy(&v, x, sizeof v); return v; }
static inline vec load_bf16(const bf16 *x) {
#if defined __AVX2__ && LANES == 8  // two instructions; gcc would make five
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#else
    hvec half; memcpy(&half, x, sizeof half);
    return (vec)(__builtin_convertvector(half, uvec) << 16);
#endif
}
static inline float one_f32(const float *x) { return *x; }
static inline float one_bf16(const bf16 *x) { uint32_t bits = (uint32_t)*x << 16; float v; memcpy(&v, &bits, 4); return v; }

// to the nearest bfloat16, ties to even; NaN stays NaN
static inline hvec narrow(vec v) {
    uvec bits = (uvec)v;
    uvec nan = (uvec)(v != v);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(bits | (nan & 0x7fc0), hvec);
}
// stream: write past the cache, for results that are too large to stay in it
static inline void store_f32(float *x, vec v, int stream) {
#if defined __AVX512F__
    if (stream) { _mm512_stream_ps(x, (__m512)v); return; }
#elif defined __AVX__
    if (stream) { _mm256_stream_ps(x, (__m256)v); return; }
#endif
    memcpy(x, &v, sizeof v);
}
static inline void store_bf16(bf16 *x, vec v, int stream) {
    hvec half = narrow(v);
#if defined __AVX512F__
    if (stream) { _mm256_stream_si256((__m256i *)x, (__m256i)half); return; }
#elif defined __AVX__
    if (stream) { _mm_stream_si128((__m128i *)x, (__m128i)half); return; }
#endif
    memcpy(x, &half, sizeof half);
}
static inline void put_f32(float *x, float v) { *x = v; }
static inline void put_bf16(bf16 *x, float v) { vec wide = {v}; *x = narrow(wide)[0]; }

static inline int aligned(const void *x, int64_t row_bytes) {
    return ((uintptr_t)x % 64 == 0) && (row_bytes % (2 * LANES) == 0) && (row_bytes % 64 == 0);
}
// whether a sum of squares is so small or large that others of its row may be out of range; NaN is, too
static inline int extreme(double squares) { return !(squares > 0x1p-90 && squares < 0x1p110); }
#define DEFINE_ZERO(T) static int zero_##T(const T *x, int64_t d) { \
    for (int64_t i = 0; i < d; i++) if (one_##T(x + i) != 0) return 0; \
    return 1; \
}
DEFINE_ZERO(f32)
DEFINE_ZERO(bf16)

static inline void fence(int stream) {
#ifdef __AVX__
    if (stream) _mm_sfence();
#endif
}

// Many streams: sums of rows with weights of every token, and Sinkhorn and Knopp's loop.

typedef float quad __attribute__((vector_size(16)));
static inline float across(vec x) {
    quad sum, part;
    memcpy(&sum, &x, sizeof sum);
    for (int i = 4; i < LANES; i += 4) { memcpy(&part, (float *)&x + i, sizeof part); sum += part; }
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static float dot(const float *x, const float *y, int64_t d) {
    vec first = {0}, second = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES) {
        first += load_f32(x + i) * load_f32(y + i);
        second += load_f32(x + i + LANES) * load_f32(y + i + LANES);
    }
    float sum = across(first + second);
    for (; i < d; i++) sum += x[i] * y[i];
    return sum;
}

// out = sum_k weights[step k] rows_k + weight extra; extra may be NULL
static void weighted(const float *weights, int64_t step, const float *rows, int64_t count, float weight,
                     const float *extra, float *out, int64_t d) {
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec sum = {0};
        for (int64_t k = 0; k < count; k++) sum += weights[k * step] * load_f32(rows + k * d + i);
        if (extra) sum += weight * load_f32(extra + i);
        store_f32(out + i, sum, 0);
    }
    for (; i < d; i++) {
        float sum = 0;
        for (int64_t k = 0; k < count; k++) sum += weights[k * step] * rows[k * d + i];
        out[i] = extra ? sum + weight * extra[i] : sum;
    }
}

// out = a x + p (x) f for each token t: a[t, i, j] (m, n), x (n, d), p[t, i] (m), f (d) or NULL.
// strides: of a, p, and of their gradients; 0 for what all tokens share
enum { A_T, A_I, A_J, P_T, P_I, DA_T, DA_I, DA_J, DP_T, DP_I };
void mix_forward(const float *a, const float *x, const float *p, const float *f, float *out, int64_t tokens, int64_t m,
                 int64_t n, int64_t d, const int64_t *s, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < m; i++)
            weighted(a + t * s[A_T] + i * s[A_I], s[A_J], x + t * n * d, n, f ? p[t * s[P_T] + i * s[P_I]] : 0,
                     f ? f + t * d : f, out + (t * m + i) * d, d);
}

// the gradients of every token, also of a and p that tokens share
void mix_backward(const float *g_, const float *a, const float *x_, const float *p, const float *f_, float *da,
                  float *dx, float *dp, float *df, int64_t tokens, int64_t m, int64_t n, int64_t d, const int64_t *s,
                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *g = g_ + t * m * d, *x = x_ + t * n * d;
        for (int64_t j = 0; j < n; j++)
            weighted(a + t * s[A_T] + j * s[A_J], s[A_I], g, m, 0, 0, dx + (t * n + j) * d, d);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                da[t * s[DA_T] + i * s[DA_I] + j * s[DA_J]] = dot(g + i * d, x + j * d, d);
        if (!f_) continue;
        weighted(p + t * s[P_T], s[P_I], g, m, 0, 0, df + t * d, d);
        for (int64_t i = 0; i < m; i++) dp[t * s[DP_T] + i * s[DP_I]] = dot(g + i * d, f_ + t * d, d);
    }
}

// Sinkhorn and Knopp's loop: rows of the start divided by their sums, plus eps; then columns and rows in turn, divided by
// their sums plus eps. out: the result, or with its gradient g the gradient of the start. LANES matrices at once; the strides are those of a
// matrix and of its entries in all three
void sinkhorn(const float *start, const float *g, float *out, int64_t tokens, int n, int64_t matrix, int64_t entry,
              int divisions, float eps, int threads) {
    int size = n * n;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < tokens; first += LANES) {
        // before the first division and after each one
        vec kept[(divisions + 2) * size], inverses[(divisions + 1) * n], d[size];
        int lanes = tokens - first < LANES ? tokens - first : LANES;
        for (int i = 0; i < size; i++)
            for (int lane = 0; lane < LANES; lane++) {
                int64_t place = (first + (lane < lanes ? lane : 0)) * matrix + i * entry;
                kept[i][lane] = start[place];
                d[i][lane] = g ? g[place] : 0;
            }
        for (int step = 0; step <= divisions; step++) {
            const vec *from = kept + step * size;
            vec *to = kept + (step + 1) * size;
            int along = step % 2 ? n : 1, other = step % 2 ? 1 : n;
            for (int i = 0; i < n; i++) {
                vec sum = from[i * other];
                for (int j = 1; j < n; j++) sum += from[i * other + j * along];
                vec inverse = inverses[step * n + i] = 1 / (step ? sum + eps : sum);
                for (int j = 0; j < n; j++) {
                    vec share = from[i * other + j * along] * inverse;
                    to[i * other + j * along] = step ? share : share + eps;
                }
            }
        }
        for (int step = g ? divisions : -1; step >= 0; step--) {
            const vec *y = kept + (step + 1) * size;
            int along = step % 2 ? n : 1, other = step % 2 ? 1 : n;
            for (int i = 0; i < n; i++) {
                vec sum = {0};
                for (int j = 0; j < n; j++) {
                    vec share = y[i * other + j * along];
                    sum += d[i * other + j * along] * (step ? share : share - eps);
                }
                for (int j = 0; j < n; j++)
                    d[i * other + j * along] = (d[i * other + j * along] - sum) * inverses[step * n + i];
            }
        }
        const vec *result = g ? d : kept + (divisions + 1) * size;
        for (int i = 0; i < size; i++)
            for (int lane = 0; lane < lanes; lane++) out[(first + lane) * matrix + i * entry] = result[i][lane];
    }
}

#define ROWS
#define PASTE(a, b) a##b
#define PASTE3(a, b, c) a##_##b##_##c
#define JOIN(a, b) PASTE(a, b)
#define JOIN3(a, b, c) PASTE3(a, b, c)
#define H f32
#define F f32
#define NORM  // norm_forward and norm_backward depend only on H
#include "native.c"
#undef NORM
#undef F
#define F bf16
#include "native.c"
#undef H
#define H bf16
#define NORM
#include "native.c"
#undef NORM
#undef F
#define F f32
#include "native.c"

#else

// what the two kinds of functions differ in: BRANCH is the branch's output as the update takes it, RAW the same before
// its scale 1/sqrt(mean f^2 + EPS) is known, KEPT the number of scalars per row, and PUT_DF writes the gradient of f
#ifdef NORMED
#define NAME(x) JOIN3(normed_##x, H, F)
#define RAW(i) (JOIN(load_, F)(f + i) * load_f32(gain + i))
#define RAW_ONE(i) (JOIN(one_, F)(f + i) * gain[i])
#define BRANCH(i) (scale * JOIN(load_, F)(f + i) * load_f32(gain + i))
#define BRANCH_ONE(i) (scale * JOIN(one_, F)(f + i) * gain[i])
#define KEPT 4
#define IF_NORMED(...) __VA_ARGS__
#define PUT_DF(i, value) do { \
        vec dy = value, v_ = scale * JOIN(load_, F)(f + i), sum; \
        memcpy(&sum, sums + i, sizeof sum); sum += dy * v_; memcpy(sums + i, &sum, sizeof sum); \
        JOIN(store_, F)(df + i, scale * (load_f32(gain + i) * dy - t * v_), stream); \
    } while (0)
#define PUT_DF_ONE(i, value) do { \
        float dy = value, v_ = scale * JOIN(one_, F)(f + i); \
        sums[i] += dy * v_; \
        JOIN(put_, F)(df + i, scale * (gain[i] * dy - t * v_)); \
    } while (0)
#else
#define NAME(x) JOIN3(x, H, F)
#define RAW(i) JOIN(load_, F)(f + i)
#define RAW_ONE(i) JOIN(one_, F)(f + i)
#define BRANCH(i) RAW(i)
#define BRANCH_ONE(i) RAW_ONE(i)
#define KEPT 3
#define IF_NORMED(...)
#define PUT_DF(i, value) JOIN(store_, F)(df + i, value, stream)
#define PUT_DF_ONE(i, value) JOIN(put_, F)(df + i, value)
#endif

// All four functions return the number of extreme rows.
// kept: |h|^2, <h,f> and |z|^2 per row, and the scale if f is normed
int64_t NAME(forward)(const H *h_, const F *f_, const float *gain, H *out_, float *kept, int64_t n, int64_t d,
                   double alpha_, const float *alphas, int kind, double p, double cap, int threads, int stream) {
    int64_t whole = d - d % LANES, far = 0;
    double cos_cap = cos(cap), sin_cap = sin(cap);
    stream = stream && aligned(out_, d * sizeof(H));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) reduction(+:far)
        for (int64_t r = 0; r < n; r++) {
            const H *h = h_ + r * d;
            const F *f = f_ + r * d;
            H *out = out_ + r * d;
            vec hh_ = {0}, hf_ = {0}, ff_ = {0};
            double hh = 0, hf = 0, ff = 0;
            IF_NORMED(vec nn_ = {0}; double nn = 0;)
            for (int64_t i = 0; i < whole;) {
                vec shh = {0}, shf = {0}, sff = {0}, thh = {0}, thf = {0}, tff = {0};
                IF_NORMED(vec snn = {0}, tnn = {0};)
                int64_t end = i + BLOCK < whole ? i + BLOCK : whole;
                for (; i + LANES < end; i += 2 * LANES) {
                    vec x = JOIN(load_, H)(h + i), y = RAW(i);
                    shh += x * x; shf += x * y; sff += y * y;
                    x = JOIN(load_, H)(h + i + LANES), y = RAW(i + LANES);
                    thh += x * x; thf += x * y; tff += y * y;
                    IF_NORMED(x = JOIN(load_, F)(f + i); y = JOIN(load_, F)(f + i + LANES); snn += x * x; tnn += y * y;)
                }
                for (; i < end; i += LANES) {
                    vec x = JOIN(load_, H)(h + i), y = RAW(i);
                    shh += x * x; shf += x * y; sff += y * y;
                    IF_NORMED(x = JOIN(load_, F)(f + i); snn += x * x;)
                }
                hh_ += shh + thh; hf_ += shf + thf; ff_ += sff + tff;
                IF_NORMED(nn_ += snn + tnn;)
            }
            for (int64_t i = whole; i < d; i++) {
                float x = JOIN(one_, H)(h + i), y = RAW_ONE(i);
                hh += (double)x * x; hf += (double)x * y; ff += (double)y * y;
                IF_NORMED(x = JOIN(one_, F)(f + i); nn += (double)x * x;)
            }
            hh += total(hh_); hf += total(hf_); ff += total(ff_);
#ifdef NORMED
            nn += total(nn_);
            float scale = 1 / sqrt(nn / d + EPS);
            hf *= scale; ff *= (double)scale * scale;
#endif
            if ((extreme(hh) && !JOIN(zero_, H)(h, d)) ||
                (extreme(ff) && !JOIN(zero_, F)(f, d) IF_NORMED(&& !zero_f32(gain, d)))) {
                kept[KEPT * r] = -1;
                far++;
                continue;
            }
            int live = (float)hh != 0;
            float c = live ? hf / hh : 0;
            double exact = live ? hf / hh : 0, zz = ff - exact * hf;
            // where the difference loses digits, |z|^2 is summed from z; the row is still in the cache
            if (!(zz >= 0.25 * ff)) {
                vec zz_ = {0};
                zz = 0;
                for (int64_t i = 0; i < whole;) {
                    vec sum = {0};
                    for (int64_t end = i + BLOCK < whole ? i + BLOCK : whole; i < end; i += LANES) {
                        vec z = BRANCH(i) - c * JOIN(load_, H)(h + i);
                        sum += z * z;
                    }
                    zz_ += sum;
                }
                for (int64_t i = whole; i < d; i++) {
                    float z = BRANCH_ONE(i) - c * JOIN(one_, H)(h + i);
                    zz += (double)z * z;
                }
                zz += total(zz_);
            }
            float *k_ = kept + KEPT * r;
            k_[0] = hh; k_[1] = hf; k_[2] = zz;
            IF_NORMED(k_[3] = scale;)
            double alpha = alphas ? alphas[r] : alpha_;
            coefficients k = evaluate(kind, live ? alpha * alpha * zz / hh : 0, p, cap, cos_cap, sin_cap);
            double wide = live ? alpha * k.b : 0;
            // the part along h that rounding c left in z is taken out of the coefficient of h
            float q = wide, a = k.a - wide * (exact - c);
            for (int64_t i = 0; i < whole; i += LANES) {
                vec x = JOIN(load_, H)(h + i);
                JOIN(store_, H)(out + i, a * x + q * (BRANCH(i) - c * x), stream);
            }
            for (int64_t i = whole; i < d; i++) {
                float x = JOIN(one_, H)(h + i);
                JOIN(put_, H)(out + i, a * x + q * (BRANCH_ONE(i) - c * x));
            }
        }
        fence(stream);
    }
    return far;
}

// dalpha: one value, or one per row if every row has its own alpha; dp: one value.
// partial: memory for two values per chunk, which are added in order; gains: the same for the gain, a row per chunk.
// df is scale (gain dy - t n) with dy the gradient of y = gain n, n = scale f and t = <n, gain dy>/d = alpha dalpha/d
int64_t NAME(backward)(const H *g_, const H *h_, const F *f_, const float *gain, const float *kept, H *dh_,
                    F *df_, float *dalpha, float *dp, float *dgain, double *partial, float *gains, int64_t n, int64_t d,
                    double alpha_, const float *alphas, int kind, double p, double cap, int threads, int stream) {
    int64_t whole = d - d % LANES, far = 0;
    double cos_cap = cos(cap), sin_cap = sin(cap);
    stream = stream && aligned(dh_, d * sizeof(H)) && aligned(df_, d * sizeof(F));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) reduction(+:far)
        for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++) {
            double sum_alpha = 0, sum_p = 0;
            IF_NORMED(float *sums = gains + chunk * d; memset(sums, 0, d * sizeof *sums);)
            for (int64_t r = chunk * CHUNK; r < n && r < (chunk + 1) * CHUNK; r++) {
                const H *g = g_ + r * d, *h = h_ + r * d;
                const F *f = f_ + r * d;
                H *dh = dh_ + r * d;
                F *df = df_ + r * d;
                const float *k_ = kept + KEPT * r;
                if (k_[0] < 0) { far++; continue; }
                int live = k_[0] != 0;
                double hh = live ? k_[0] : 1, c = k_[1] / hh, eta2 = live ? k_[2] / hh : 0;
                IF_NORMED(float scale = k_[3];)
                double alpha = alphas ? alphas[r] : alpha_, norm = sqrt(hh);
                coefficients k = evaluate(kind, alpha * alpha * eta2, p, cap, cos_cap, sin_cap);
                float c32 = c;
                vec gh_ = {0}, gz_ = {0};
                double gu = 0, gz = 0;
                for (int64_t i = 0; i < whole;) {
                    vec sh = {0}, sz = {0};
                    for (int64_t end = i + BLOCK < whole ? i + BLOCK : whole; i < end; i += LANES) {
                        vec x = JOIN(load_, H)(h + i), y = JOIN(load_, H)(g + i);
                        sh += y * x; sz += y * (BRANCH(i) - c32 * x);
                    }
                    gh_ += sh; gz_ += sz;
                }
                for (int64_t i = whole; i < d; i++) {
                    float x = JOIN(one_, H)(h + i), y = JOIN(one_, H)(g + i), z = BRANCH_ONE(i) - c32 * x;
                    gu += (double)y * x; gz += (double)y * z;
                }
                gu = (gu + total(gh_)) / norm;
                gz = (gz + total(gz_)) / norm;
                double q = live ? alpha * k.b : 0, slope = 2 * (k.da * gu + alpha * k.db * gz);
                double kh = q * gu, kz = live ? alpha * alpha * slope : 0;
                // df = q g + kz/|h| z - kh/|h| h, and dh likewise, collected into coefficients of g, f and h
                double ff = kz / norm, fh = -kh / norm - ff * c;
                double hf = -(kh + c * kz) / norm, hx = (c * kh - kz * eta2) / norm - hf * c, hg = k.a - c * q;
                double row_alpha = live ? norm * (alpha * slope * eta2 + k.b * gz) : 0;
                IF_NORMED(float t = alpha * row_alpha / d;)
                int in_range = fabs(ff) < 1e30 && fabs(fh) < 1e30 && fabs(hf) < 1e30 && fabs(hx) < 1e30;
                if (in_range && eta2 > 0.01 * c * c) {
                    float a1 = q, a2 = ff, a3 = fh, b1 = hg, b2 = hf, b3 = hx;
                    for (int64_t i = 0; i < whole; i += LANES) {
                        vec x = JOIN(load_, H)(h + i), y = JOIN(load_, H)(g + i), z = BRANCH(i);
                        PUT_DF(i, a1 * y + a2 * z + a3 * x);
                        JOIN(store_, H)(dh + i, b1 * y + b2 * z + b3 * x, stream);
                    }
                    for (int64_t i = whole; i < d; i++) {
                        float x = JOIN(one_, H)(h + i), y = JOIN(one_, H)(g + i), z = BRANCH_ONE(i);
                        PUT_DF_ONE(i, a1 * y + a2 * z + a3 * x);
                        JOIN(put_, H)(dh + i, b1 * y + b2 * z + b3 * x);
                    }
                } else {  // f nearly parallel to h, or rows of extreme size: z itself and vectors of norm 1 lose less
                    double stretch = eta2 > 1 ? sqrt(eta2) : 1;
                    float iu = 1 / norm, iv = 1 / (norm * stretch), a1 = q, a2 = kz * stretch, a3 = -kh;
                    float b1 = hg, b2 = -(kh + c * kz) * stretch, b3 = c * kh - kz * eta2;
                    for (int64_t i = 0; i < whole; i += LANES) {
                        vec x = JOIN(load_, H)(h + i), y = JOIN(load_, H)(g + i);
                        vec v = iv * (BRANCH(i) - c32 * x), u = iu * x;
                        PUT_DF(i, a1 * y + a2 * v + a3 * u);
                        JOIN(store_, H)(dh + i, b1 * y + b2 * v + b3 * u, stream);
                    }
                    for (int64_t i = whole; i < d; i++) {
                        float x = JOIN(one_, H)(h + i), y = JOIN(one_, H)(g + i);
                        float v = iv * (BRANCH_ONE(i) - c32 * x), u = iu * x;
                        PUT_DF_ONE(i, a1 * y + a2 * v + a3 * u);
                        JOIN(put_, H)(dh + i, b1 * y + b2 * v + b3 * u);
                    }
                }
                sum_alpha += row_alpha;
                sum_p += live ? norm * (k.ap * gu + alpha * k.bp * gz) : 0;
                if (alphas) dalpha[r] = row_alpha;
            }
            partial[2 * chunk] = sum_alpha;
            partial[2 * chunk + 1] = sum_p;
        }
        fence(stream);
#ifdef NORMED
#pragma omp for schedule(static)
        for (int64_t first = 0; first < d; first += CHUNK) {
            double wide[CHUNK] = {0};
            int64_t width = d - first < CHUNK ? d - first : CHUNK;
            for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++)
                for (int64_t i = 0; i < width; i++) wide[i] += gains[chunk * d + first + i];
            for (int64_t i = 0; i < width; i++) dgain[first + i] = wide[i];
        }
#endif
    }
    double sum_alpha = 0, sum_p = 0;
    for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++) {
        sum_alpha += partial[2 * chunk];
        sum_p += partial[2 * chunk + 1];
    }
    if (!alphas) *dalpha = sum_alpha;
    *dp = sum_p;
    return far;
}

#if defined NORM && !defined NORMED
// where a spherical stream starts: out = radius h/|h|; kept: |h|^2 per row
int64_t JOIN(norm_forward_, H)(const H *h_, H *out_, float *kept, int64_t n, int64_t d, double radius, int threads,
                            int stream) {
    int64_t whole = d - d % LANES, far = 0;
    stream = stream && aligned(out_, d * sizeof(H));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) reduction(+:far)
        for (int64_t r = 0; r < n; r++) {
            const H *h = h_ + r * d;
            H *out = out_ + r * d;
            vec hh_ = {0};
            double hh = 0;
            for (int64_t i = 0; i < whole;) {
                vec sum = {0};
                for (int64_t end = i + BLOCK < whole ? i + BLOCK : whole; i < end; i += LANES) {
                    vec x = JOIN(load_, H)(h + i);
                    sum += x * x;
                }
                hh_ += sum;
            }
            for (int64_t i = whole; i < d; i++) { float x = JOIN(one_, H)(h + i); hh += (double)x * x; }
            hh += total(hh_);
            if (extreme(hh) && !JOIN(zero_, H)(h, d)) { kept[r] = -1; far++; continue; }
            kept[r] = hh;
            float scale = (float)hh != 0 ? radius / sqrt(hh) : 0;
            for (int64_t i = 0; i < whole; i += LANES)
                JOIN(store_, H)(out + i, scale * JOIN(load_, H)(h + i), stream);
            for (int64_t i = whole; i < d; i++) JOIN(put_, H)(out + i, scale * JOIN(one_, H)(h + i));
        }
        fence(stream);
    }
    return far;
}

int64_t JOIN(norm_backward_, H)(const H *g_, const H *h_, const float *kept, H *dh_, float *dradius, double *partial,
                             int64_t n, int64_t d, double radius, int threads, int stream) {
    int64_t whole = d - d % LANES, far = 0;
    stream = stream && aligned(dh_, d * sizeof(H));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) reduction(+:far)
        for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++) {
            double sum = 0;
            for (int64_t r = chunk * CHUNK; r < n && r < (chunk + 1) * CHUNK; r++) {
                const H *g = g_ + r * d, *h = h_ + r * d;
                H *dh = dh_ + r * d;
                if (kept[r] < 0) { far++; continue; }
                double inverse = kept[r] != 0 ? 1 / sqrt(kept[r]) : 0, gu = 0;
                float iu = inverse;
                vec gu_ = {0};
                for (int64_t i = 0; i < whole;) {
                    vec part = {0};
                    for (int64_t end = i + BLOCK < whole ? i + BLOCK : whole; i < end; i += LANES)
                        part += JOIN(load_, H)(g + i) * (iu * JOIN(load_, H)(h + i));
                    gu_ += part;
                }
                for (int64_t i = whole; i < d; i++) gu += (double)JOIN(one_, H)(g + i) * (iu * JOIN(one_, H)(h + i));
                gu += total(gu_);
                float scale = radius * inverse, along = gu;
                for (int64_t i = 0; i < whole; i += LANES) {
                    vec u = iu * JOIN(load_, H)(h + i);
                    JOIN(store_, H)(dh + i, scale * (JOIN(load_, H)(g + i) - along * u), stream);
                }
                for (int64_t i = whole; i < d; i++) {
                    float u = iu * JOIN(one_, H)(h + i);
                    JOIN(put_, H)(dh + i, scale * (JOIN(one_, H)(g + i) - along * u));
                }
                sum += gu;
            }
            partial[chunk] = sum;
        }
        fence(stream);
    }
    double sum = 0;
    for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++) sum += partial[chunk];
    *dradius = sum;
    return far;
}
#endif
#undef NAME
#undef RAW
#undef RAW_ONE
#undef BRANCH
#undef BRANCH_ONE
#undef KEPT
#undef IF_NORMED
#undef PUT_DF
#undef PUT_DF_ONE
#ifndef NORMED
#define NORMED
#include "native.c"
#undef NORMED
#endif
#endif
