//! Tests of rings, kernels and driver, without a GPU.

mod backends;
mod copy;
mod driver;
mod index;
mod ptx;
mod ring;
mod toolkit;
