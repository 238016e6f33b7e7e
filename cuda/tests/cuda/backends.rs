//! Backends of blocks: each one that a machine without a GPU can run moves the same bytes, and reports the blocks that it
//! cannot move.

mod choice;
mod conformance;
mod faults;
mod rig;
mod streams;
