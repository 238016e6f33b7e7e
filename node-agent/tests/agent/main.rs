//! Tests of the real `reprise-agent` process: started with a configuration file, driven through its socket with the
//! client library (or raw bytes, where a client would be too polite), killed, restarted.
//!
//! One binary for all of them: linking takes longer than running.

mod admin;
mod blocks;
mod durability;
mod loads;
mod process;
mod random_kill;
mod sessions;
mod start;
mod stop;
