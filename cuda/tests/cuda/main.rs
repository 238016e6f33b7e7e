//! Tests of rings, kernels and driver, without a GPU.

mod copy;
mod driver;
mod ptx;
mod ring;
