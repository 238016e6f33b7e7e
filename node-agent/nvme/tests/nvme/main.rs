//! The driver against the emulated controller: start, queues, transfers, faults, arbitrary answers.

mod arbitrary;
mod bench_rig;
mod device;
mod faults;
mod lending;
mod queues;
mod raw;
mod relay;
mod start;
mod transfers;
