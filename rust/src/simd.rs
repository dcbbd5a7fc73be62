//! Vectors of eight floats: AVX2 with FMA, NEON, or plain arrays, the build's target as for the C arms.

/// What `F8`, a vector of `WIDTH` floats, does in each of its forms.
pub trait Lanes: Copy {
    const WIDTH: usize = 8;

    fn splat(x: f32) -> Self;
    /// # Safety
    /// `p` is readable for `WIDTH` floats; any alignment.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// `p` is writable for `WIDTH` floats; any alignment.
    unsafe fn store(self, p: *mut f32);
    /// self + a * b; two roundings in the plain form, where FMA in software is slow.
    fn fma(self, a: Self, b: Self) -> Self;
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    /// The larger; where either is NaN, `b` or NaN.
    fn max(self, b: Self) -> Self;
    /// The smaller; `b` where either is NaN.
    fn min(self, b: Self) -> Self;
    /// `self` where `x >= floor` or x is NaN, else +0.
    fn zero_below(self, x: Self, floor: Self) -> Self;
    /// Adds the low bits of `shifted` to the exponent.
    fn add_exponent(self, shifted: Self) -> Self;
    /// The first `n` lanes, n < `WIDTH`, with zeros behind.
    fn first(self, n: usize) -> Self;
    /// The sums of four vectors.
    fn sum4(v: [Self; 4]) -> [f32; 4];
    /// The largest of each of four vectors; NaN may be left out.
    fn max4(v: [Self; 4]) -> [f32; 4];

    /// e^x for x <= 0 within 1 ulp; exactly 0 below -87.3, so that no weight is denormal; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        // x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; 1 + r + r^2 g(r) with g of degree 4,
        // whose largest relative error there is the least that its degree allows: 3e-9.
        let bias = Self::splat(12_582_912.0); // 1.5 * 2^23
        let shifted = bias.fma(self, Self::splat(std::f32::consts::LOG2_E));
        let n = shifted.sub(bias);
        let r = self.fma(n, Self::splat(-0.693_145_75)).fma(n, Self::splat(-1.428_606_8e-6));
        let mut p = Self::splat(1.381_454e-3);
        for c in [8.368_745e-3, 4.166_839e-2, 1.666_652e-1, 4.999_999_3e-1, 1.0, 1.0] {
            p = Self::splat(c).fma(p, r);
        }
        // `shifted`, which is at most `bias`, holds n in its low bits. Those of a NaN could make a number
        // of p's: `bias` has none.
        p.add_exponent(shifted.min(bias)).zero_below(self, Self::splat(-87.3))
    }
}

/// Asks for the cache line at `p`, which need not be readable.
#[inline(always)]
pub fn prefetch(p: *const f32) {
    // SAFETY: a prefetch never faults and touches neither memory nor flags.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

#[cfg(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))]
mod lanes {
    use super::Lanes;
    use core::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub struct F8(__m256);

    /// Folds each of four vectors; two shuffles and an addition are quicker than `haddps`.
    #[inline(always)]
    fn fold4(v: [F8; 4], join: fn(__m256, __m256) -> __m256) -> [f32; 4] {
        let mut out = [0.0; 4];
        // SAFETY: as for the blocks below, and `out` holds four floats.
        unsafe {
            let pairs =
                |a, b| join(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b));
            let quads = pairs(pairs(v[0].0, v[1].0), pairs(v[2].0, v[3].0));
            let both = join(quads, _mm256_permute2f128_ps::<1>(quads, quads));
            _mm_storeu_ps(out.as_mut_ptr(), _mm256_castps256_ps128(both));
        }
        out
    }

    // SAFETY of every block here: this module exists only where the build's target has AVX2 and FMA.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Lanes for F8 {
        #[inline(always)]
        fn splat(x: f32) -> F8 {
            F8(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> F8 {
            F8(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        fn fma(self, a: F8, b: F8) -> F8 {
            F8(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
        }
        #[inline(always)]
        fn add(self, b: F8) -> F8 {
            F8(unsafe { _mm256_add_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn sub(self, b: F8) -> F8 {
            F8(unsafe { _mm256_sub_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn mul(self, b: F8) -> F8 {
            F8(unsafe { _mm256_mul_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn max(self, b: F8) -> F8 {
            F8(unsafe { _mm256_max_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn min(self, b: F8) -> F8 {
            F8(unsafe { _mm256_min_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn zero_below(self, x: F8, floor: F8) -> F8 {
            F8(unsafe { _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, floor.0)) })
        }
        #[inline(always)]
        fn add_exponent(self, shifted: F8) -> F8 {
            F8(unsafe {
                let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted.0));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(self.0), power))
            })
        }
        #[inline(always)]
        fn first(self, n: usize) -> F8 {
            F8(unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes);
                _mm256_and_ps(self.0, _mm256_castsi256_ps(keep))
            })
        }
        #[inline(always)]
        fn sum4(v: [F8; 4]) -> [f32; 4] {
            fold4(v, |a, b| unsafe { _mm256_add_ps(a, b) })
        }
        #[inline(always)]
        fn max4(v: [F8; 4]) -> [f32; 4] {
            fold4(v, |a, b| unsafe { _mm256_max_ps(a, b) })
        }
    }
}

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod lanes {
    use super::Lanes;
    use core::arch::aarch64::*;

    #[derive(Clone, Copy)]
    pub struct F8(float32x4_t, float32x4_t);

    // SAFETY of every block here: this module exists only where the build's target has NEON.
    #[allow(clippy::undocumented_unsafe_blocks, unused_unsafe)]
    impl Lanes for F8 {
        #[inline(always)]
        fn splat(x: f32) -> F8 {
            unsafe { F8(vdupq_n_f32(x), vdupq_n_f32(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> F8 {
            unsafe { F8(vld1q_f32(p), vld1q_f32(p.add(4))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe {
                vst1q_f32(p, self.0);
                vst1q_f32(p.add(4), self.1);
            }
        }
        #[inline(always)]
        fn fma(self, a: F8, b: F8) -> F8 {
            unsafe { F8(vfmaq_f32(self.0, a.0, b.0), vfmaq_f32(self.1, a.1, b.1)) }
        }
        #[inline(always)]
        fn add(self, b: F8) -> F8 {
            unsafe { F8(vaddq_f32(self.0, b.0), vaddq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        fn sub(self, b: F8) -> F8 {
            unsafe { F8(vsubq_f32(self.0, b.0), vsubq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        fn mul(self, b: F8) -> F8 {
            unsafe { F8(vmulq_f32(self.0, b.0), vmulq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        fn max(self, b: F8) -> F8 {
            unsafe { F8(vmaxq_f32(self.0, b.0), vmaxq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        fn min(self, b: F8) -> F8 {
            unsafe {
                let half = |a, b| vbslq_f32(vcltq_f32(a, b), a, b);
                F8(half(self.0, b.0), half(self.1, b.1))
            }
        }
        #[inline(always)]
        fn zero_below(self, x: F8, floor: F8) -> F8 {
            unsafe {
                let half = |v, x, floor| {
                    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, floor)))
                };
                F8(half(self.0, x.0, floor.0), half(self.1, x.1, floor.1))
            }
        }
        #[inline(always)]
        fn add_exponent(self, shifted: F8) -> F8 {
            unsafe {
                let half = |v, shifted| {
                    let power = vshlq_n_s32::<23>(vreinterpretq_s32_f32(shifted));
                    vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), power))
                };
                F8(half(self.0, shifted.0), half(self.1, shifted.1))
            }
        }
        #[inline(always)]
        fn first(self, n: usize) -> F8 {
            let mut x = [0.0_f32; 8];
            unsafe {
                self.store(x.as_mut_ptr());
                x[n..].fill(0.0);
                F8::load(x.as_ptr())
            }
        }
        #[inline(always)]
        fn sum4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| unsafe { vaddvq_f32(vaddq_f32(x.0, x.1)) })
        }
        #[inline(always)]
        fn max4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| unsafe { vmaxnmvq_f32(vmaxnmq_f32(x.0, x.1)) })
        }
    }
}

/// Plain arrays, where there is nothing better.
#[cfg(not(any(
    all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"),
    all(target_arch = "aarch64", target_feature = "neon")
)))]
mod lanes {
    use super::Lanes;
    use std::array::from_fn;

    #[derive(Clone, Copy)]
    pub struct F8([f32; 8]);

    impl F8 {
        /// All lanes joined, halves first.
        #[inline(always)]
        fn fold(mut self, join: fn(f32, f32) -> f32) -> f32 {
            let mut n = F8::WIDTH;
            while n > 1 {
                n /= 2;
                for i in 0..n {
                    self.0[i] = join(self.0[i], self.0[i + n]);
                }
            }
            self.0[0]
        }
    }

    impl Lanes for F8 {
        #[inline(always)]
        fn splat(x: f32) -> F8 {
            F8([x; 8])
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> F8 {
            // SAFETY: the caller's promise.
            F8(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
        }
        #[inline(always)]
        fn fma(self, a: F8, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] + a.0[i] * b.0[i]))
        }
        #[inline(always)]
        fn add(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] + b.0[i]))
        }
        #[inline(always)]
        fn sub(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] - b.0[i]))
        }
        #[inline(always)]
        fn mul(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] * b.0[i]))
        }
        #[inline(always)]
        fn max(self, b: F8) -> F8 {
            F8(from_fn(|i| if self.0[i] > b.0[i] { self.0[i] } else { b.0[i] }))
        }
        #[inline(always)]
        fn min(self, b: F8) -> F8 {
            F8(from_fn(|i| if self.0[i] < b.0[i] { self.0[i] } else { b.0[i] }))
        }
        #[inline(always)]
        fn zero_below(self, x: F8, floor: F8) -> F8 {
            F8(from_fn(|i| if x.0[i] < floor.0[i] { 0.0 } else { self.0[i] }))
        }
        #[inline(always)]
        fn add_exponent(self, shifted: F8) -> F8 {
            let bits = |x: &F8, i: usize| x.0[i].to_bits();
            let sum = |i| bits(&self, i).wrapping_add(bits(&shifted, i) << 23);
            F8(from_fn(|i| f32::from_bits(sum(i))))
        }
        #[inline(always)]
        fn first(self, n: usize) -> F8 {
            F8(from_fn(|i| if i < n { self.0[i] } else { 0.0 }))
        }
        #[inline(always)]
        fn sum4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| x.fold(|a, b| a + b))
        }
        #[inline(always)]
        fn max4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| x.fold(f32::max))
        }
    }
}

pub use lanes::F8;

#[cfg(test)]
mod tests {
    use super::*;

    fn exp(x: f32) -> f32 {
        let mut out = [0.0; F8::WIDTH];
        // SAFETY: `out` holds eight floats.
        unsafe { F8::splat(x).exp().store(out.as_mut_ptr()) };
        out[F8::WIDTH - 1]
    }

    #[test]
    fn exp_is_within_an_ulp_of_double() {
        let mut x = -87.29_f32;
        while x <= 0.0 {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * exact;
            let got = exp(x);
            assert!((f64::from(got) - exact).abs() <= ulp, "exp({x}) = {got}");
            x += 0.0137;
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn exp_of_what_is_masked_is_zero_and_nan_stays() {
        assert_eq!(exp(-87.5).to_bits(), 0);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        for bits in [0x7FC0_0000, 0x7FC0_0001, 0x7FC1_2345, 0xFFFF_FFFF] {
            assert!(exp(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn sums_keep_their_places() {
        let v = [1.0, 2.0, 3.0, 4.0].map(F8::splat);
        assert_eq!(F8::sum4(v), [8.0, 16.0, 24.0, 32.0]);
        assert_eq!(F8::max4(v), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_fold_sees_every_lane() {
        for lane in 0..F8::WIDTH {
            let mut x = [-1.0; F8::WIDTH];
            x[lane] = 9.0;
            // SAFETY: `x` holds eight floats.
            let v = unsafe { F8::load(x.as_ptr()) };
            assert_eq!(F8::max4([v; 4]), [9.0; 4]);
            assert_eq!(F8::sum4([v; 4]), [2.0; 4]);
        }
    }

    #[test]
    fn the_first_lanes_stay() {
        for n in 0..F8::WIDTH {
            let mut out = [1.0; F8::WIDTH];
            // SAFETY: `out` holds eight floats.
            unsafe { F8::splat(2.0).first(n).store(out.as_mut_ptr()) };
            assert!(out[..n].iter().all(|&x| x == 2.0));
            assert!(out[n..].iter().all(|&x| x == 0.0));
        }
    }
}
