//! Tests of rings and kernels on the host build.

mod index;
