//! Tests of the engines, with the conformance suite of all of them, of device files and of the bare loops.

mod bare;
mod conformance;
mod device_file;
mod io_uring;
mod shared;
mod simulated;
