// AdamW over a block that lives in host memory: gradient in, moments and master updated in place, the compute
// weight written where the next load reads it. In one pass or, with the same bits, in two: the weights from moments
// that are computed and thrown away, and later, when nobody waits, the moments.
//
// Arithmetic is plain IEEE fp32, one operation after another without contraction, so that the torch
// fallback in adamw.py gives the same bits. Memory-bound: with the split master 2+2+4+4 bytes of a parameter
// and its 2-byte gradient are read, and all but the gradient written, in one pass; of two the first writes
// 2+2 and the second reads 2+4+4 and writes 4+4. `python -m sweeps.ceilings` measures how close to the memory they come.
//
// Split master: the 32 bits of the fp32 master are (weight << 16) + remainder with a signed remainder, so
// the bf16 weight is the master rounded to nearest and both together are the master exactly.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINED __attribute__((always_inline))
#define INLINE static inline INLINED

struct Hyper {
  float decay;        // 1 - lr * weight_decay
  float beta1_rest;   // 1 - beta1
  float beta2;
  float beta2_rest;   // 1 - beta2
  float step_size;    // lr / (1 - beta1^t)
  float root_bias2;   // 1 / sqrt(1 - beta2^t)
  float eps;
  float scale;        // gradient scale: clip / (norm + 1e-6), at most 1
};

INLINE float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
INLINE uint32_t to_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }
INLINE float bf16(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

INLINE float first(float m, float g, const Hyper &h) { return m + (g - m) * h.beta1_rest; }
INLINE float second(float v, float g, const Hyper &h) { return v * h.beta2 + (g * g) * h.beta2_rest; }

// The new master; the new moments go where they come from, or nowhere.
template <bool MOMENTS> INLINE float update(float p, float g, float &m, float &v, const Hyper &h) {
  g = g * h.scale;
  p = p * h.decay;
  const float m1 = first(m, g, h), v1 = second(v, g, h);
  if constexpr (MOMENTS) m = m1, v = v1;
  return p - h.step_size * (m1 / (std::sqrt(v1) * h.root_bias2 + h.eps));
}

INLINE float gradient(const uint16_t *g, int64_t i) { return bf16(g[i]); }
INLINE float gradient(const float *g, int64_t i) { return g[i]; }

template <bool MOMENTS, typename G>
INLINE void split_loop(int64_t begin, int64_t end, uint16_t *__restrict w, int16_t *__restrict r, float *__restrict m,
                       float *__restrict v, const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    float p = from_bits((static_cast<uint32_t>(w[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(r[i])));
    uint32_t bits = to_bits(update<MOMENTS>(p, gradient(g, i), m[i], v[i], h));
    uint32_t high = (bits + 0x8000u) >> 16;
    w[i] = static_cast<uint16_t>(high);
    r[i] = static_cast<int16_t>(bits - (high << 16));
  }
}

// bf16 weight beside an fp32 master.
template <bool MOMENTS, typename G>
INLINE void master_loop(int64_t begin, int64_t end, uint16_t *__restrict w, float *__restrict p, float *__restrict m,
                        float *__restrict v, const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    p[i] = update<MOMENTS>(p[i], gradient(g, i), m[i], v[i], h);
    w[i] = static_cast<uint16_t>((to_bits(p[i]) + 0x8000u) >> 16);
  }
}

// The bf16 weight is the master, rounded to nearest even at every step: small updates are lost.
template <bool MOMENTS, typename G>
INLINE void bf16_loop(int64_t begin, int64_t end, uint16_t *__restrict w, float *__restrict m, float *__restrict v,
                      const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = to_bits(update<MOMENTS>(bf16(w[i]), gradient(g, i), m[i], v[i], h));
    w[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// The fp32 weight is the master.
template <bool MOMENTS, typename G>
INLINE void plain_loop(int64_t begin, int64_t end, float *__restrict p, float *__restrict m, float *__restrict v,
                       const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) p[i] = update<MOMENTS>(p[i], gradient(g, i), m[i], v[i], h);
}

// The moments alone.
template <typename G>
INLINE void moments_loop(int64_t begin, int64_t end, float *__restrict m, float *__restrict v, const G *__restrict g,
                         const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    const float scaled = gradient(g, i) * h.scale;
    m[i] = first(m[i], scaled, h);
    v[i] = second(v[i], scaled, h);
  }
}

// AdamW's way through memory with next to no arithmetic.
INLINE void scale_loop(int64_t begin, int64_t end, float *__restrict a, float *__restrict b, float *__restrict c,
                       float *__restrict d, float factor) {
  for (int64_t i = begin; i < end; ++i) a[i] *= factor, b[i] *= factor, c[i] *= factor, d[i] *= factor;
}

constexpr int64_t BLOCK = 64;           // elements: whole cache lines of every array
constexpr int64_t AHEAD = 4 * BLOCK;    // how far before its use a block is asked for
constexpr int64_t CHUNK = 1024 * BLOCK; // the most that a thread takes at a time

template <typename T> INLINE void prefetch(const T *block) {
  for (size_t line = 0; line < BLOCK * sizeof(T) / 64; ++line)
    __builtin_prefetch(reinterpret_cast<const char *>(block) + 64 * line);
}

// Every block while those that follow it are on their way: five arrays are more than the hardware prefetcher keeps
// busy by itself. Asking for an address behind the end of an array is harmless.
template <typename Work, typename... T> INLINE void blockwise(int64_t begin, int64_t end, Work work, const T *...arrays) {
  for (; begin < end; begin += BLOCK) {
    (prefetch(arrays + begin + AHEAD), ...);
    if (end - begin >= BLOCK) work(begin, begin + BLOCK);  // a constant length: no scalar rest
    else work(begin, end);
  }
}

// The clones must be the innermost functions: OpenMP outlines its region, and GCC does not clone that.
CLONES void split(int64_t b, int64_t e, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { split_loop<true>(i, j, w, r, m, v, g, h); }, w, r, m, v, g);
}
CLONES void split_weights(int64_t b, int64_t e, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { split_loop<false>(i, j, w, r, m, v, g, h); }, w, r, m, v, g);
}
CLONES void master(int64_t b, int64_t e, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { master_loop<true>(i, j, w, p, m, v, g, h); }, w, p, m, v, g);
}
CLONES void master_weights(int64_t b, int64_t e, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { master_loop<false>(i, j, w, p, m, v, g, h); }, w, p, m, v, g);
}
CLONES void bf16_alone(int64_t b, int64_t e, uint16_t *w, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { bf16_loop<true>(i, j, w, m, v, g, h); }, w, m, v, g);
}
CLONES void bf16_alone_weights(int64_t b, int64_t e, uint16_t *w, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { bf16_loop<false>(i, j, w, m, v, g, h); }, w, m, v, g);
}
CLONES void plain(int64_t b, int64_t e, float *p, float *m, float *v, const float *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { plain_loop<true>(i, j, p, m, v, g, h); }, p, m, v, g);
}
CLONES void plain_weights(int64_t b, int64_t e, float *p, float *m, float *v, const float *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { plain_loop<false>(i, j, p, m, v, g, h); }, p, m, v, g);
}
CLONES void moments_bf16(int64_t b, int64_t e, float *m, float *v, const uint16_t *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { moments_loop(i, j, m, v, g, h); }, m, v, g);
}
CLONES void moments_fp32(int64_t b, int64_t e, float *m, float *v, const float *g, const Hyper &h) {
  blockwise(b, e, [=, &h](int64_t i, int64_t j) INLINED { moments_loop(i, j, m, v, g, h); }, m, v, g);
}

CLONES void scale_f(int64_t b, int64_t e, float *p, float *q, float *r, float *s, float factor) {
  blockwise(b, e, [=](int64_t i, int64_t j) INLINED { scale_loop(i, j, p, q, r, s, factor); }, p, q, r, s);
}

// A team of `threads`; each takes the next run of whole blocks when it is done with its last, so that a thread that
// lost its core for a while holds up nobody.
template <typename Work> static void in_parallel(int64_t n, int threads, Work work) {
  const int64_t run = std::min(CHUNK, (n / threads / BLOCK + 1) * BLOCK);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t begin = 0; begin < n; begin += run) work(begin, std::min(begin + run, n));
}

extern "C" {
void adamw_split(int64_t n, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { split(b, e, w, r, m, v, g, *h); });
}
void adamw_split_weights(int64_t n, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { split_weights(b, e, w, r, m, v, g, *h); });
}
void adamw_master(int64_t n, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { master(b, e, w, p, m, v, g, *h); });
}
void adamw_master_weights(int64_t n, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { master_weights(b, e, w, p, m, v, g, *h); });
}
void adamw_bf16(int64_t n, uint16_t *w, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { bf16_alone(b, e, w, m, v, g, *h); });
}
void adamw_bf16_weights(int64_t n, uint16_t *w, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { bf16_alone_weights(b, e, w, m, v, g, *h); });
}
void adamw_plain(int64_t n, float *p, float *m, float *v, const float *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { plain(b, e, p, m, v, g, *h); });
}
void adamw_plain_weights(int64_t n, float *p, float *m, float *v, const float *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { plain_weights(b, e, p, m, v, g, *h); });
}
void adamw_moments_bf16(int64_t n, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { moments_bf16(b, e, m, v, g, *h); });
}
void adamw_moments_fp32(int64_t n, float *m, float *v, const float *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { moments_fp32(b, e, m, v, g, *h); });
}
// No optimizer: four arrays times a factor, in place. The speed of the memory itself, for sweeps/host_memory.py.
void scale_four(int64_t n, float *p, float *q, float *r, float *s, float factor, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { scale_f(b, e, p, q, r, s, factor); });
}
}
