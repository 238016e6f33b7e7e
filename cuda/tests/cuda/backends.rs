//! Backends of blocks: each one that a machine without a GPU can run moves the same bytes, and reports what it does not
//! move.

mod choice;
mod conformance;
mod faults;
mod rig;
