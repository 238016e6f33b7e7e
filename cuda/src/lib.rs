//! Rings and kernels of GPUs, and their host build.
//!
//! Native sources are in `native/`: one source for GPUs (CUDA C++) and for the host (C++17, threads in place of warps).
//! The host build is part of the library; device code only if `nvcc` was there when the crate was built.

pub mod copy;
pub mod gpu;
pub mod gpu_bench;
pub mod index;
pub mod kernels;
pub mod ring;
pub mod slack;
pub mod staged;
pub mod store;

/// True if the library has code for GPUs.
pub const HAS_DEVICE_CODE: bool = cfg!(device_code);
