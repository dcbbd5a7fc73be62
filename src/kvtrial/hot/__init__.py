"""Hot KV stores: pages in memory and the attention over them, in Cython and in Rust.

Five layers, top down; each knows only the one below:

==========================  ========================================================================
**the arms**                `paged` (A2, K1, K1C, K2, K5, K1T, K2T, K5T, K6, K6N, K7), `flat` (K0, A1),
                            `native` (K3, K3T, K4), `rocks` (C0): what each is made of, as `Candidate`
                            records; `formats`: how rows are stored, and their kernels
**stores and sessions**     ``_paged``, ``_flat``, ``_rust``, ``_rocks``: the verbs of the contract;
                            ``_gapless`` is what stores without holes share, ``_door`` checks arguments,
                            ``_native`` declares the Rust library
**pages**                   ``_pages``: who owns a page, and the copy on the first write to a shared one;
                            ``_tables``: page tables; ``_rows``: a format's rows in a page; ``_memory``: aligned
                            memory and its ledger
**attention**               ``_attend``: spans, threads, the causal block; ``_kernel.pxd``: what a kernel
                            is called with (``native/kv_kernel.h``)
**kernels**                 ``_flat_scalar`` (K0, A1), ``_kernels_scalar`` (A2), ``_kernels_simd`` (rows),
                            ``_kernels_panel_simd`` (K transposed), ``_kernels_int_panel_simd`` (integer
                            products); ``_tile.pxd`` is their walk with masks and softmax, ``_panels.pxd``
                            where a code lies, ``_rotation.pxd`` the Hadamard transform; ``_simd.pxd``,
                            ``_quants.pxd`` and ``_scalar_dot.pxd`` the arithmetic; ``_kernels_clang`` is the
                            text of ``_kernels_simd``, built by another compiler
==========================  ========================================================================

A row format is a file of ``formats``: its record, and its ``_NAME.pyx`` that moves rows in and out.
Another kernel or format over these pages is `paged.open_paged` and an entry point, as
``docs/candidates/`` shows. Read `paged`, then ``_paged.pyx``, then ``_kernels_simd.pyx``.
"""
