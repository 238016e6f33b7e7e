//! The host build of the rings against the emulated controller.

mod arbitrary;
mod commands;
mod contents;
mod faults;
mod limits;
mod rig;
mod transfers;
