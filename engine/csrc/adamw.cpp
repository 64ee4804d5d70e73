// One pass of AdamW over a block that lives in host memory: gradient in, moments and master updated in
// place, the compute weight written where the next load reads it.
//
// Arithmetic is plain IEEE fp32, one operation after another without contraction, so that the torch
// fallback in optimizer.py gives the same bits. Memory-bound: 2+2+4+4 bytes read and 2+2+4+4 written per
// parameter with the split master (plus the 2-byte gradient read).
//
// Split master: the 32 bits of the fp32 master are (weight << 16) + remainder with a signed remainder, so
// the bf16 weight is the master rounded to nearest and both together are the master exactly.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

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

INLINE float update(float p, float g, float &m, float &v, const Hyper &h) {
  g = g * h.scale;
  p = p * h.decay;
  m = m + (g - m) * h.beta1_rest;
  v = v * h.beta2 + (g * g) * h.beta2_rest;
  return p - h.step_size * (m / (std::sqrt(v) * h.root_bias2 + h.eps));
}

INLINE float gradient(const uint16_t *g, int64_t i) { return bf16(g[i]); }
INLINE float gradient(const float *g, int64_t i) { return g[i]; }

template <typename G>
INLINE void split_loop(int64_t begin, int64_t end, uint16_t *__restrict w, int16_t *__restrict r, float *__restrict m,
                       float *__restrict v, const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    float p = from_bits((static_cast<uint32_t>(w[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(r[i])));
    uint32_t bits = to_bits(update(p, gradient(g, i), m[i], v[i], h));
    uint32_t high = (bits + 0x8000u) >> 16;
    w[i] = static_cast<uint16_t>(high);
    r[i] = static_cast<int16_t>(bits - (high << 16));
  }
}

// bf16 weight beside an fp32 master.
template <typename G>
INLINE void master_loop(int64_t begin, int64_t end, uint16_t *__restrict w, float *__restrict p, float *__restrict m,
                        float *__restrict v, const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) {
    p[i] = update(p[i], gradient(g, i), m[i], v[i], h);
    w[i] = static_cast<uint16_t>((to_bits(p[i]) + 0x8000u) >> 16);
  }
}

// The fp32 weight is the master.
template <typename G>
INLINE void plain_loop(int64_t begin, int64_t end, float *__restrict p, float *__restrict m, float *__restrict v,
                       const G *__restrict g, const Hyper &h) {
  for (int64_t i = begin; i < end; ++i) p[i] = update(p[i], gradient(g, i), m[i], v[i], h);
}

// The clones must be the innermost functions: OpenMP outlines its region, and GCC does not clone that.
CLONES void split_b(int64_t b, int64_t e, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper &h) {
  split_loop(b, e, w, r, m, v, g, h);
}
CLONES void master_b(int64_t b, int64_t e, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper &h) {
  master_loop(b, e, w, p, m, v, g, h);
}
CLONES void plain_f(int64_t b, int64_t e, float *p, float *m, float *v, const float *g, const Hyper &h) {
  plain_loop(b, e, p, m, v, g, h);
}

// Contiguous runs, one a thread, cut at whole cache lines; a team of `threads`.
template <typename Work> static void in_parallel(int64_t n, int threads, Work work) {
  int64_t lines = (n + 63) / 64;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int t = 0; t < threads; ++t) {
    int64_t begin = lines * t / threads * 64, end = lines * (t + 1) / threads * 64;
    if (begin < n) work(begin, end < n ? end : n);
  }
}

extern "C" {
void adamw_split(int64_t n, uint16_t *w, int16_t *r, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { split_b(b, e, w, r, m, v, g, *h); });
}
void adamw_master(int64_t n, uint16_t *w, float *p, float *m, float *v, const uint16_t *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { master_b(b, e, w, p, m, v, g, *h); });
}
void adamw_plain(int64_t n, float *p, float *m, float *v, const float *g, const Hyper *h, int threads) {
  in_parallel(n, threads, [=](int64_t b, int64_t e) { plain_f(b, e, p, m, v, g, *h); });
}
}
