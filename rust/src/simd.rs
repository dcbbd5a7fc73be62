//! Eight floats: AVX2 with FMA, NEON, or plain arrays. The target is the build's, as for the C arms.

pub const WIDTH: usize = 8;

#[cfg(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))]
mod lanes {
    use core::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub struct F8(__m256);

    // SAFETY of every block here: this module exists only where the build's target has AVX2 and FMA.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl F8 {
        #[inline(always)]
        pub fn splat(x: f32) -> F8 {
            F8(unsafe { _mm256_set1_ps(x) })
        }
        /// # Safety
        /// `p` is readable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn load(p: *const f32) -> F8 {
            F8(unsafe { _mm256_loadu_ps(p) })
        }
        /// # Safety
        /// `p` is writable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        /// self + a * b, rounded once.
        #[inline(always)]
        pub fn fma(self, a: F8, b: F8) -> F8 {
            F8(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
        }
        #[inline(always)]
        pub fn add(self, b: F8) -> F8 {
            F8(unsafe { _mm256_add_ps(self.0, b.0) })
        }
        #[inline(always)]
        pub fn sub(self, b: F8) -> F8 {
            F8(unsafe { _mm256_sub_ps(self.0, b.0) })
        }
        #[inline(always)]
        pub fn mul(self, b: F8) -> F8 {
            F8(unsafe { _mm256_mul_ps(self.0, b.0) })
        }
        /// The larger; `b` where either is NaN.
        #[inline(always)]
        pub fn max(self, b: F8) -> F8 {
            F8(unsafe { _mm256_max_ps(self.0, b.0) })
        }
        /// The smaller; `b` where either is NaN.
        #[inline(always)]
        pub fn min(self, b: F8) -> F8 {
            F8(unsafe { _mm256_min_ps(self.0, b.0) })
        }
        /// `self` where `x >= floor` or x is NaN, else +0.
        #[inline(always)]
        pub fn zero_below(self, x: F8, floor: F8) -> F8 {
            F8(unsafe { _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, floor.0)) })
        }
        /// Adds the low bits of `shifted` to the exponent.
        #[inline(always)]
        pub fn add_exponent(self, shifted: F8) -> F8 {
            F8(unsafe {
                let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted.0));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(self.0), power))
            })
        }
        /// The first `n` lanes, n < 8, with zeros behind.
        #[inline(always)]
        pub fn first(self, n: usize) -> F8 {
            F8(unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes);
                _mm256_and_ps(self.0, _mm256_castsi256_ps(keep))
            })
        }
        /// Folds each of four vectors; two shuffles and an addition are quicker than `haddps`.
        #[inline(always)]
        fn fold4(v: [F8; 4], join: fn(__m256, __m256) -> __m256) -> [f32; 4] {
            let mut out = [0.0; 4];
            unsafe {
                let pairs = |a, b| {
                    join(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b))
                };
                let quads = pairs(pairs(v[0].0, v[1].0), pairs(v[2].0, v[3].0));
                let both = join(quads, _mm256_permute2f128_ps::<1>(quads, quads));
                _mm_storeu_ps(out.as_mut_ptr(), _mm256_castps256_ps128(both));
            }
            out
        }
        /// The sums of four vectors.
        #[inline(always)]
        pub fn sum4(v: [F8; 4]) -> [f32; 4] {
            F8::fold4(v, |a, b| unsafe { _mm256_add_ps(a, b) })
        }
        /// The largest of each of four vectors; NaN may be left out.
        #[inline(always)]
        pub fn max4(v: [F8; 4]) -> [f32; 4] {
            F8::fold4(v, |a, b| unsafe { _mm256_max_ps(a, b) })
        }
        /// Asks for the cache line at `p`, which need not be readable.
        #[inline(always)]
        pub fn prefetch(p: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }
}

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod lanes {
    use core::arch::aarch64::*;

    #[derive(Clone, Copy)]
    pub struct F8(float32x4_t, float32x4_t);

    // SAFETY of every block here: this module exists only where the build's target has NEON.
    #[allow(clippy::undocumented_unsafe_blocks, unused_unsafe)]
    impl F8 {
        #[inline(always)]
        pub fn splat(x: f32) -> F8 {
            unsafe { F8(vdupq_n_f32(x), vdupq_n_f32(x)) }
        }
        /// # Safety
        /// `p` is readable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn load(p: *const f32) -> F8 {
            unsafe { F8(vld1q_f32(p), vld1q_f32(p.add(4))) }
        }
        /// # Safety
        /// `p` is writable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn store(self, p: *mut f32) {
            unsafe {
                vst1q_f32(p, self.0);
                vst1q_f32(p.add(4), self.1);
            }
        }
        /// self + a * b, rounded once.
        #[inline(always)]
        pub fn fma(self, a: F8, b: F8) -> F8 {
            unsafe { F8(vfmaq_f32(self.0, a.0, b.0), vfmaq_f32(self.1, a.1, b.1)) }
        }
        #[inline(always)]
        pub fn add(self, b: F8) -> F8 {
            unsafe { F8(vaddq_f32(self.0, b.0), vaddq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        pub fn sub(self, b: F8) -> F8 {
            unsafe { F8(vsubq_f32(self.0, b.0), vsubq_f32(self.1, b.1)) }
        }
        #[inline(always)]
        pub fn mul(self, b: F8) -> F8 {
            unsafe { F8(vmulq_f32(self.0, b.0), vmulq_f32(self.1, b.1)) }
        }
        /// The larger; NaN where either is.
        #[inline(always)]
        pub fn max(self, b: F8) -> F8 {
            unsafe { F8(vmaxq_f32(self.0, b.0), vmaxq_f32(self.1, b.1)) }
        }
        /// The smaller; `b` where either is NaN.
        #[inline(always)]
        pub fn min(self, b: F8) -> F8 {
            unsafe {
                let half = |a, b| vbslq_f32(vcltq_f32(a, b), a, b);
                F8(half(self.0, b.0), half(self.1, b.1))
            }
        }
        /// `self` where `x >= floor` or x is NaN, else +0.
        #[inline(always)]
        pub fn zero_below(self, x: F8, floor: F8) -> F8 {
            unsafe {
                let half = |v, x, floor| {
                    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, floor)))
                };
                F8(half(self.0, x.0, floor.0), half(self.1, x.1, floor.1))
            }
        }
        /// Adds the low bits of `shifted` to the exponent.
        #[inline(always)]
        pub fn add_exponent(self, shifted: F8) -> F8 {
            unsafe {
                let half = |v, shifted| {
                    let power = vshlq_n_s32::<23>(vreinterpretq_s32_f32(shifted));
                    vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), power))
                };
                F8(half(self.0, shifted.0), half(self.1, shifted.1))
            }
        }
        /// The first `n` lanes, n < 8, with zeros behind.
        #[inline(always)]
        pub fn first(self, n: usize) -> F8 {
            let mut x = [0.0_f32; 8];
            unsafe {
                self.store(x.as_mut_ptr());
                x[n..].fill(0.0);
                F8::load(x.as_ptr())
            }
        }
        /// The sums of four vectors.
        #[inline(always)]
        pub fn sum4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| unsafe { vaddvq_f32(vaddq_f32(x.0, x.1)) })
        }
        /// The largest of each of four vectors; NaN may be left out.
        #[inline(always)]
        pub fn max4(v: [F8; 4]) -> [f32; 4] {
            v.map(|x| unsafe { vmaxnmvq_f32(vmaxnmq_f32(x.0, x.1)) })
        }
        /// Asks for the cache line at `p`, which need not be readable.
        #[inline(always)]
        pub fn prefetch(p: *const f32) {
            // SAFETY: PRFM never faults and touches neither memory nor flags.
            unsafe {
                core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) p,
                    options(nostack, preserves_flags, readonly));
            }
        }
    }
}

#[cfg(not(any(
    all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"),
    all(target_arch = "aarch64", target_feature = "neon")
)))]
mod lanes {
    use super::WIDTH;
    use std::array::from_fn;

    #[derive(Clone, Copy)]
    pub struct F8([f32; WIDTH]);

    impl F8 {
        #[inline(always)]
        pub fn splat(x: f32) -> F8 {
            F8([x; WIDTH])
        }
        /// # Safety
        /// `p` is readable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn load(p: *const f32) -> F8 {
            // SAFETY: the caller's promise.
            F8(unsafe { p.cast::<[f32; WIDTH]>().read_unaligned() })
        }
        /// # Safety
        /// `p` is writable for eight floats; any alignment.
        #[inline(always)]
        pub unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { p.cast::<[f32; WIDTH]>().write_unaligned(self.0) }
        }
        /// self + a * b; two roundings, since FMA in software is slow.
        #[inline(always)]
        pub fn fma(self, a: F8, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] + a.0[i] * b.0[i]))
        }
        #[inline(always)]
        pub fn add(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] + b.0[i]))
        }
        #[inline(always)]
        pub fn sub(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] - b.0[i]))
        }
        #[inline(always)]
        pub fn mul(self, b: F8) -> F8 {
            F8(from_fn(|i| self.0[i] * b.0[i]))
        }
        /// The larger; `b` where either is NaN.
        #[inline(always)]
        pub fn max(self, b: F8) -> F8 {
            F8(from_fn(|i| if self.0[i] > b.0[i] { self.0[i] } else { b.0[i] }))
        }
        /// The smaller; `b` where either is NaN.
        #[inline(always)]
        pub fn min(self, b: F8) -> F8 {
            F8(from_fn(|i| if self.0[i] < b.0[i] { self.0[i] } else { b.0[i] }))
        }
        /// `self` where `x >= floor` or x is NaN, else +0.
        #[inline(always)]
        pub fn zero_below(self, x: F8, floor: F8) -> F8 {
            F8(from_fn(|i| if x.0[i] < floor.0[i] { 0.0 } else { self.0[i] }))
        }
        /// Adds the low bits of `shifted` to the exponent.
        #[inline(always)]
        pub fn add_exponent(self, shifted: F8) -> F8 {
            let bits = |x: &F8, i: usize| x.0[i].to_bits();
            F8(from_fn(|i| f32::from_bits(bits(&self, i).wrapping_add(bits(&shifted, i) << 23))))
        }
        /// The first `n` lanes, n < 8, with zeros behind.
        #[inline(always)]
        pub fn first(self, n: usize) -> F8 {
            F8(from_fn(|i| if i < n { self.0[i] } else { 0.0 }))
        }
        /// The sums of four vectors.
        #[inline(always)]
        pub fn sum4(v: [F8; 4]) -> [f32; 4] {
            v.map(|F8(x)| ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])))
        }
        /// The largest of each of four vectors; NaN may be left out.
        #[inline(always)]
        pub fn max4(v: [F8; 4]) -> [f32; 4] {
            v.map(|F8(x)| x.into_iter().fold(f32::NEG_INFINITY, f32::max))
        }
        #[inline(always)]
        pub fn prefetch(_: *const f32) {}
    }
}

pub use lanes::F8;

impl F8 {
    /// e^x for x <= 0 within 1 ulp; exactly 0 below -87.3, so that no weight is denormal; NaN stays NaN.
    #[inline(always)]
    pub fn exp(self) -> F8 {
        // x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; 1 + r + r^2 g(r) with g of degree 4,
        // whose largest relative error there is the least that its degree allows: 3e-9.
        let bias = F8::splat(12_582_912.0); // 1.5 * 2^23
        let shifted = bias.fma(self, F8::splat(std::f32::consts::LOG2_E));
        let n = shifted.sub(bias);
        let r = self.fma(n, F8::splat(-0.693_145_75)).fma(n, F8::splat(-1.428_606_8e-6));
        let mut p = F8::splat(1.381_454e-3);
        for c in [8.368_745e-3, 4.166_839e-2, 1.666_652e-1, 4.999_999_3e-1, 1.0, 1.0] {
            p = F8::splat(c).fma(p, r);
        }
        // `shifted`, which is at most `bias`, holds n in its low bits. Those of a NaN could make a number
        // of p's: `bias` has none.
        p.add_exponent(shifted.min(bias)).zero_below(self, F8::splat(-87.3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exp(x: f32) -> f32 {
        let mut out = [0.0; WIDTH];
        // SAFETY: `out` holds eight floats.
        unsafe { F8::splat(x).exp().store(out.as_mut_ptr()) };
        out[WIDTH - 1]
    }

    #[test]
    fn exp_is_within_an_ulp_of_double() {
        let mut x = -87.29_f32;
        while x <= 0.0 {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * exact;
            assert!((f64::from(exp(x)) - exact).abs() <= ulp, "exp({x}) = {}", exp(x));
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
        for lane in 0..WIDTH {
            let mut x = [-1.0; WIDTH];
            x[lane] = 9.0;
            // SAFETY: `x` holds eight floats.
            let v = unsafe { F8::load(x.as_ptr()) };
            assert_eq!(F8::max4([v; 4]), [9.0; 4]);
            assert_eq!(F8::sum4([v; 4]), [2.0; 4]);
        }
    }
}
